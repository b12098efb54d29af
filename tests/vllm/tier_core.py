"""vLLM's own manager of a tier in CPU memory under random work, followed by the plugin: no model, no server, no Redis.

It runs in the interpreter of ``.venv-vllm`` (see ``trees.py``), and prints a JSON object: the number of steps after
which the plugin's set was compared with the manager's table, of differences, and of what happened.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

CHUNKS, STEPS, KEYS = 40, 3_000, 150


def table_of(policy: Any) -> set[bytes]:
    """The hashes that may be loaded, from whatever the policy keeps them in."""
    kept: dict[bytes, Any] = {}
    for name in ("chunks", "blocks", "t1", "t2"):
        kept |= getattr(policy, name, {})
    return {bytes(key)[-12:-4] for key, chunk in kept.items() if chunk.is_ready}


def scheduler_of(manager: Any, blocks_per_chunk: int = 1, groups: int = 1) -> Any:
    """A scheduler with a connector to this manager."""
    half = SimpleNamespace(manager=manager, config=SimpleNamespace(blocks_per_chunk=blocks_per_chunk))
    tensors = [SimpleNamespace(size=64_000)]
    config = SimpleNamespace(kv_cache_groups=[None] * groups, kv_cache_tensors=tensors, num_blocks=10)
    connector = SimpleNamespace(connector_scheduler=half)
    return SimpleNamespace(connector=connector, kv_cache_manager=SimpleNamespace(kv_cache_config=config))


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM may print
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    from warmfleet_worker.vllm_hooks.cpu_tier import CpuTiers

    tiers = CpuTiers()
    tiers.hook(SimpleNamespace(kv_transfer_config=object()))
    rng, found = random.Random(7), Counter[str]()
    for policy in ("lru", "arc"):
        manager = CPUOffloadingManager(CHUNKS, cache_policy=policy)
        tier = tiers.find(scheduler_of(manager), 16)
        assert tier is not None
        assert tier.announced() == {"capacity_blocks": CHUNKS, "bytes_per_token": 400, "loads_last": 1}
        keys = [make_offload_key(rng.randbytes(32), 0) for _ in range(KEYS)]
        under_way: list[tuple[list[Any], Any]] = []
        for number in range(STEPS):
            context = ReqContext(req_id=str(number))
            manager.on_new_request(context)
            begin = rng.randrange(KEYS)
            chain, action = keys[begin : begin + rng.randrange(1, 12)], rng.random()
            if action < 0.5:
                prepared = manager.prepare_store(chain, context)
                found["refused"] += prepared is None
                if prepared is not None and prepared.keys_to_store:
                    found["evicted"] += len(prepared.evicted_keys)
                    under_way.append((list(prepared.keys_to_store), context))
            elif action < 0.95 and under_way:
                stored, context = under_way.pop(rng.randrange(len(under_way)))
                success = rng.random() < 0.9
                manager.complete_store(stored, context, success)
                found["failed"] += not success
            elif action < 0.99:
                ready = [key for key in chain if bytes(key)[-12:-4] in tier.tracker.table]
                manager.touch(ready, context)
                manager.prepare_load(ready, context)
                manager.complete_load(ready, context)
                found["loaded"] += len(ready)
            elif action > 0.997:
                manager.reset_cache()
                under_way.clear()
                found["reset"] += 1
            found["steps"] += 1
            found["differences"] += set(tier.tracker.table) != table_of(manager._policy)
    for shape in ({"blocks_per_chunk": 2}, {"groups": 2}):
        manager = CPUOffloadingManager(CHUNKS)
        found["left out"] += tiers.find(scheduler_of(manager, **shape), 16) is None
        context = ReqContext(req_id="0")
        manager.on_new_request(context)
        manager.prepare_store(keys[:1], context)
        manager.complete_store(keys[:1], context)
    print(json.dumps(found), file=answers)


main()
