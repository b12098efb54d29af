"""Real engines with tiers of several sizes: the tokens that are predicted by source are those that vLLM counts."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.engine import BLOCK_TOKENS, SERVED_NAME, EngineOptions, running
from tests.vllm.replicas import replicas
from tests.vllm.tier_talk import BLOCK_BYTES, BLOCKS, Talk, held, host_tier

from warmfleet.fleet import Fleet
from warmfleet.fleet.client import connect
from warmfleet.protocol.wire import Scheme, chain_hashes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.vllm.engine import VllmEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=8,
        shows=(
            "real vLLM with tiers in CPU memory of half, twice, four and ten times the cache, flooded and reset: of "
            "1,000 requests the tokens that are predicted by source are those that vLLM counts"
        ),
    ),
    pytest.mark.timeout(1_500),
]

REQUESTS = 250  # to each engine
EVERY = 40  # requests between two resets


@pytest.mark.parametrize("size", [0.5, 2, 4, 10])
async def test_what_is_predicted_by_source_is_what_vllm_counts(size: float) -> None:
    chunks = int(size * BLOCKS)
    with server(valkey_binary()) as redis_url:
        options = EngineOptions(redis_url=redis_url, blocks=BLOCKS, arguments=host_tier(chunks))
        with running(options) as [engine], replicas(redis_url, 1, engines=1) as [url]:
            fleet = Fleet(connect(redis_url, timeout_s=5), SERVED_NAME)
            async with httpx.AsyncClient(timeout=120) as client:
                talk = Talk(engine, url, fleet, client, random.Random(int(size * 10)))
                for number in range(1, REQUESTS + 1):
                    await talk.ask()
                    if number % EVERY == 0:
                        await talk.reset(external=number % (3 * EVERY) == 0)
            [view] = await fleet.workers.read()
            await fleet.close()
    print(f"\ntier {size}: {dict(talk.seen)}, {len(talk.differ)} differ: {talk.differ}")
    assert view.record["sets"]["cpu"]["capacity_blocks"] == chunks
    assert talk.seen["hits"] > REQUESTS // 4
    assert talk.most == chunks or size > 4
    assert not talk.differ


@pytest.fixture
def shared_memory() -> Iterator[None]:
    """Remove what engines leave in shared memory when they are killed."""
    folder, pattern = Path("/dev/shm"), "vllm_offload_*.mmap"
    before = set(folder.glob(pattern))
    yield
    for path in set(folder.glob(pattern)) - before:
        path.unlink(missing_ok=True)


async def test_engines_that_read_one_folder_hold_it_once(tmp_path: Path, shared_memory: None) -> None:
    folder = tmp_path / "store"
    more = {"spec_name": "HostTierBeforeOthers", "spec_module_path": "host_tier", "cpu_bytes_to_use": 80 * BLOCK_BYTES}
    more |= {"secondary_tiers": [{"type": "fs", "root_dir": str(folder)}]}
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": more}
    with server(valkey_binary()) as redis_url:
        options = [
            EngineOptions(
                redis_url=redis_url,
                worker_id=name,
                blocks=BLOCKS,
                arguments=("--kv-transfer-config", json.dumps(config)),
                environment={"WARMFLEET_LABELS": f"name={name}"},
            )
            for name in ("one", "two")
        ]
        with running(*options) as engines, replicas(redis_url, 1, engines=2) as [url]:
            fleet = Fleet(connect(redis_url, timeout_s=5), SERVED_NAME)
            async with httpx.AsyncClient(timeout=120) as client:
                store = Store(folder, dict(zip(("one", "two"), engines, strict=True)), url, fleet, client)
                await store.shared()
                await store.lost()
            await fleet.close()


@dataclass
class Store:
    """Two engines, by the value of their label ``name``, that read one folder."""

    folder: Path
    engines: dict[str, VllmEngine]
    url: str
    fleet: Fleet
    client: httpx.AsyncClient
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def files(self) -> set[bytes]:
        return {bytes.fromhex(path.stem)[-8:] for path in self.folder.rglob("*.bin")}

    async def indexed(self) -> bool:
        """Whether nothing is booked, and the index has the blocks of both GPUs, and once those of the folder."""
        views = await self.fleet.workers.read()
        stores = {view.record["sets"]["disk"]["slot"] for view in views}
        assert len(stores) == 1, "both engines read one store"
        same = await held(self.fleet, stores.pop()) == self.files()
        for view in views:
            table = await asyncio.to_thread(self.engines[view.worker_id[:-2]].table)
            same = same and await held(self.fleet, view.record["slot"]) == {key[-12:-4] for key in table}
        return same and not any(view.load.in_flight for view in views)

    async def ask(self, name: str, prompt: list[int]) -> tuple[Counter[str], Counter[str], str]:
        """Send a prompt to this engine; return what was predicted and what was counted by source, and the tier."""
        before = await asyncio.to_thread(self.engines[name].cached_by_source)
        answer = await self.client.post(
            f"{self.url}/v1/completions",
            json={"model": SERVED_NAME, "prompt": prompt, "max_tokens": 2, "temperature": 0},
            headers={"X-Warmfleet-Explain": "1", "X-Warmfleet-Labels": f"name={name}"},
        )
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-warmfleet-worker"] == f"{name}.0"
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        told = next(
            row
            for row in json.loads(answer.headers["x-warmfleet-explain"])["candidates"]
            if row["worker"] == f"{name}.0"
        )
        loaded = told.get("tier_tokens", 0)
        predicted = Counter({"device": int(answer.headers["x-warmfleet-matched-tokens"]) - loaded, "loaded": loaded})
        counted: Counter[str] = Counter()

        async def all_counted() -> bool:
            counted.clear()
            counted.update(await asyncio.to_thread(self.engines[name].cached_by_source) - before)
            return bool(counted.total() == cached)

        await poll(all_counted, 30, "the engine has counted the tokens by source")
        return predicted, counted, told.get("tier", "")

    def made(self, blocks: int = 20) -> list[int]:
        """Make a prompt of so many whole blocks and a part of one."""
        return [self.rng.randrange(1_000) for _ in range(blocks * BLOCK_TOKENS + self.rng.randrange(1, BLOCK_TOKENS))]

    async def shared(self) -> None:
        """What one engine has computed is predicted for the other as loaded from the folder, and is."""
        for number in range(40):
            here, there = ("one", "two") if self.rng.random() < 0.5 else ("two", "one")
            prompt = self.made(self.rng.randrange(2, 30))
            await poll(self.indexed, 120, "index == folder")
            assert (await self.ask(here, prompt))[0] == Counter({"device": 0, "loaded": 0})
            await poll(self.indexed, 120, "index == folder")
            predicted, counted, tier = await self.ask(there, prompt)
            assert tier == "disk", number
            assert counted == Counter({"disk": predicted["loaded"]})
            assert predicted["device"] == 0
            assert predicted["loaded"] == len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
        measured = [(await self.fleet.workers.read())[k].record["sets"]["disk"]["ps_per_byte"] for k in (0, 1)]
        assert all(0 < ps < 10**6 for ps in measured), "each has measured its loads"

    async def lost(self) -> None:
        """A file that somebody deletes is promised until a request misses it, and again once it is there again."""
        prompt = self.made()
        await self.ask("one", prompt)
        await poll(self.indexed, 120, "index == folder")
        chain = await self.chain(prompt)
        [path] = self.folder.rglob(f"*{chain[5].hex()}.bin")
        path.unlink()
        short = prompt[: 5 * BLOCK_TOKENS + 40]  # its last whole block is the deleted one
        predicted, counted, _ = await self.ask("two", short)
        assert (predicted.total(), counted.total()) == (6 * BLOCK_TOKENS, 5 * BLOCK_TOKENS), "nobody knew"
        await poll(self.indexed, 120, "engine two has computed the block again, so it is in the folder, and known")
        other = [*short, *self.made(1)]
        predicted, counted, _ = await self.ask("two", other)
        assert predicted.total() == counted.total() >= 6 * BLOCK_TOKENS

    async def chain(self, prompt: list[int]) -> list[bytes]:
        """The hashes of the prompt's blocks, as the fleet's own functions make them."""
        [view, *_] = await self.fleet.workers.read()
        scheme = Scheme.from_dict(view.record["scheme"])
        return [digest[-8:] for digest in chain_hashes(scheme, prompt)]
