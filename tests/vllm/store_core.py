"""vLLM's own manager of a folder behind a tier in CPU memory, followed by the plugin: no model, no server, no Redis.

It runs in the interpreter of ``.venv-vllm`` (see ``trees.py``) with the folder as its argument, and prints a JSON
object: how many requests there were, how many blocks they loaded, and how many requests were promised less or more.
"""

from __future__ import annotations

import json
import mmap
import random
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

CHUNKS, PAGE, REQUESTS, CHAINS, BLOCK_TOKENS = 24, 4_096, 400, 12, 16


def region() -> Any:
    """The memory of the tier before the folder."""
    memory = memoryview(mmap.mmap(-1, CHUNKS * PAGE)).cast("B", (CHUNKS, PAGE))
    return SimpleNamespace(create_kv_memoryview=lambda: memory, cleanup=lambda: None)


def spec_of_the_engine() -> Any:
    """What the folder's names depend on; MagicMock, because versions read further fields of the spec."""
    spec = MagicMock(blocks_per_chunk=1)
    spec.kv_events_config.enable_kv_cache_events = False
    config = spec.config
    config.groups, config.canonical_layout, config.replicated_layout = [], False, False
    config.model.name, config.model.dtype, config.cache.tokens_per_hash = "tiny", "float32", BLOCK_TOKENS
    parallel = config.parallel
    parallel.tp_size = parallel.pp_size = parallel.pcp_size = parallel.dcp_size = 1
    parallel.rank, parallel.is_parallelism_agnostic = 0, True
    return spec


class Engine:
    """The scheduler's half of an engine that offloads to the folder."""

    def __init__(self, folder: Path) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
        from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

        from warmfleet_worker.vllm_hooks.cpu_tier import CpuTiers

        tiers = CpuTiers()
        tiers.hook(SimpleNamespace(kv_transfer_config=object()))
        primary = CPUPrimaryTierOffloadingManager(CHUNKS, region())
        view = primary.get_kv_memoryview()
        tier = FileSystemTierManager(spec_of_the_engine(), view, "fs", str(folder))
        self.manager = TieringOffloadingManager(primary, [tier])
        self._ended = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
        half = SimpleNamespace(manager=self.manager, config=SimpleNamespace(blocks_per_chunk=1))
        config = SimpleNamespace(kv_cache_groups=[None], kv_cache_tensors=[SimpleNamespace(size=64_000)], num_blocks=10)
        scheduler = SimpleNamespace(
            connector=SimpleNamespace(connector_scheduler=half),
            kv_cache_manager=SimpleNamespace(kv_cache_config=config),
        )
        found = tiers.find(scheduler, BLOCK_TOKENS)
        assert found is not None
        assert found.store is not None
        self.cpu, self.store = found, found.store

    def step(self) -> None:
        self.manager.on_schedule_end(self._ended)

    def looked_up(self, chain: list[Any], context: Any) -> int:
        """Look for the blocks as vLLM's scheduler does, step by step; return how many come first."""
        from vllm.v1.kv_offload.base import LookupResult

        for _ in range(10_000):
            hits, again = 0, False
            for key in chain:
                result = self.manager.lookup(key, context)
                if result is LookupResult.MISS:
                    break
                again |= result is not LookupResult.HIT
                hits += result is LookupResult.HIT
            if not again:
                return hits
            self.step()
            time.sleep(0.0005)
        raise AssertionError("the folder never answers")

    def serve(self, name: str, chain: list[Any]) -> int:
        """Let a request load what is there, and store the rest; return how many blocks it loaded."""
        from vllm.v1.kv_offload.base import ReqContext

        context = ReqContext(req_id=name)
        self.manager.on_new_request(context)
        hits = self.looked_up(chain, context)
        if hits:
            self.manager.prepare_load(chain[:hits], context)
            self.manager.complete_load(chain[:hits], context)
        prepared = self.manager.prepare_store(chain, context)
        if prepared is not None and prepared.keys_to_store:
            self.manager.complete_store(list(prepared.keys_to_store), context)
        self.manager.on_request_finished(context)
        for _ in range(10_000):
            self.step()
            if not self.manager.has_pending_work():
                return hits
            time.sleep(0.0005)
        raise AssertionError("the work never ends")


def files(folder: Path) -> set[bytes]:
    return {bytes.fromhex(path.stem)[-8:] for path in folder.rglob("*.bin")}


def apply(known: set[bytes], store: Any) -> None:
    """Change ``known`` by the reports that wait, as the index does."""
    for run in store.findings.drain(1_000_000):
        hashes = {run.packed[at : at + 8] for at in range(0, len(run.packed), 8)}
        known.difference_update(hashes) if run.operation == "removed" else known.update(hashes)


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM may print
    from vllm.v1.kv_offload.base import make_offload_key

    folder, rng, found, known = Path(sys.argv[1]), random.Random(7), Counter[str](), set[bytes]()
    engines = [Engine(folder) for _ in range(2)]
    names = {engine.store.announced(1)["store"] for engine in engines}
    chains = [[make_offload_key(rng.randbytes(32), 0) for _ in range(rng.randrange(3, 12))] for _ in range(CHAINS)]
    for number in range(REQUESTS):
        engine, chain = rng.choice(engines), rng.choice(chains)[: rng.randrange(1, 12)]
        hashes = [bytes(key)[-12:-4] for key in chain]
        in_memory = {*engine.cpu.tracker.table}
        promised = next((at for at, block in enumerate(hashes) if block not in in_memory | known), len(chain))
        hits = engine.serve(str(number), chain)
        apply(known, engine.store)
        found["loaded"] += hits
        found["promised less"] += hits > promised
        found["promised more"] += hits < promised
        missed = set(hashes[hits : hits + 1])
        found["still promised"] += bool(missed & known - files(folder))
        if number % 20 == 19:  # somebody deletes
            gone = rng.sample(sorted(folder.rglob("*.bin")), 2)
            for path in gone:
                path.unlink()
            found["deleted"] += len(gone)
        if number % 50 == 49:
            engine.manager.reset_cache()
            getattr(engine.manager, "on_reset_flushed", lambda: None)()  # of 0.33, which promotes nothing until then
        found["requests"] += 1
    found["never told"] = len(files(folder) - known)
    found["stores"] = len(names)
    found["measured"] = sum(engine.store.meter.ps_per_byte > 0 for engine in engines)
    print(json.dumps(found), file=answers)
    answers.flush()
    for engine in engines:
        engine.manager.shutdown()


main()
