"""The plugin's order of eviction in real vLLM: its core with every invariant of the free queue, and whole servers."""

from __future__ import annotations

import json
import os
import random
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.polling import poll
from tests.vllm import trees
from tests.vllm.engine import BLOCK_TOKENS, ROOT, TRUTH, VENV, EngineOptions, running
from tests.vllm.test_plugin import reservation

from warmfleet.fleet import Fleet
from warmfleet.fleet.client import connect
from warmfleet.fleet.rows import Flag
from warmfleet_worker.eviction.objective import EVERY_REQUESTS
from warmfleet_worker.vllm_hooks.eviction import ENDED, XARG

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.vllm.engine import VllmEngine

    from warmfleet.fleet.rows import LoadRow

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.long(
        minutes=4,
        shows="the order of eviction in the real cores of vLLM 0.28 to 0.33 (wheels are downloaded) keeps every"
        " invariant of the free queue in 6,000 random steps each, and T-LRU lowers P90; a real server gives up ended"
        " and paused sessions first, and with T-LRU keeps the begin of a conversation that LRU loses",
    ),
]

CORE = Path(__file__).parent / "eviction" / "core_run.py"
BLOCKS = 64  # 63 of them for requests, of 32 tokens


@pytest.fixture(scope="module", params=trees.VERSIONS)
def core(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The run of a core of one version of vLLM, which checks itself after every step."""
    environment = trees.environment(trees.tree(request.param))
    done = subprocess.run(
        [VENV / "bin/python", CORE, "1"], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    print(done.stdout.splitlines()[-1])
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("life", ["random", "random lru"])
def test_the_free_queue_of_the_real_core_is_right_after_every_step(core: dict[str, Any], life: str) -> None:
    happened = core[life]
    assert min(happened[name] for name in ("finished", "preempted", "resets", "given_up")) > 20
    assert happened["tagged_by_preemption"] == 0
    assert happened["given_up"] < happened["evicted"]


def test_after_an_error_the_functions_are_vllms_own(core: dict[str, Any]) -> None:
    assert core["failing"] == {"free": True}


def test_the_tail_is_shorter_than_with_lru(core: dict[str, Any]) -> None:
    lru, tail = core["turns"]["lru"], core["turns"]["t_lru"]
    assert tail["p90_uncached"] < 0.8 * lru["p90_uncached"]
    assert core["turns"]["target 0"] == lru


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 1_000) for _ in range(tokens)]


class Conversations:
    """Requests to one engine, as a router would send them."""

    def __init__(self, engine: VllmEngine, fleet: Fleet) -> None:
        self.engine, self.fleet = engine, fleet
        self._number = 0

    def cached(self, ids: list[int], *, mark: str = "", **more: Any) -> int:
        """Send a prompt; returns how many of its tokens were cached."""
        self._number += 1
        answer = self.engine.complete(ids, request_id=f"{reservation(self._number)}.{mark}x", **more)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)

    async def row(self) -> LoadRow | None:
        while (await self.fleet.upkeep.step()).blocks:
            pass
        views = await self.fleet.workers.read()
        return views[0].load if views else None

    def first_again(self) -> int:
        """Four conversations that do not fit; returns how many tokens of the first are still cached.

        Prompts of 800 tokens come before them, so that ``auto`` means an objective of 480 tokens on any machine.
        """
        for seed in range(100, 100 + EVERY_REQUESTS):
            self.cached(prompt(seed, 800))
        self.engine.reset_prefix_cache()
        a = prompt(1, 640)
        for ids in (a, prompt(2, 640), prompt(3, 960), prompt(4, 640)):
            assert self.cached(ids) == 0
        return self.cached(a)

    def ended(self, **hint: Any) -> int:
        """The second of two conversations ends, and a third needs room; returns the first's cached tokens."""
        self.engine.reset_prefix_cache()
        a = prompt(1, 640)
        self.cached(a)
        self.cached(prompt(2, 640), **hint)
        self.cached(prompt(3, 960))
        return self.cached(a)

    async def paused(self) -> int:
        """The second of two conversations is paused, and a third needs room; returns the first's cached tokens."""
        self.engine.reset_prefix_cache()
        a, key = prompt(1, 640), self.fleet.keys.yields(self.engine.worker_id)
        self.cached(a)
        self.cached(prompt(2, 640))
        await self.fleet.redis.rpush(key, reservation(self._number))
        self.cached(prompt(4, 64))  # the blocks that it stores are reported, and then the list is read

        async def read() -> bool:
            return not await self.fleet.redis.exists(key)

        await poll(read, 30, "the plugin has read which sessions yield")
        self.cached(prompt(3, 960))
        return self.cached(a)


@asynccontextmanager
async def conversations(store: str, name: str, target: str | None) -> AsyncIterator[Conversations]:
    """An engine with a fleet of its own. Its plugin is that of this working tree."""
    environment = {"PYTHONPATH": f"{TRUTH}{os.pathsep}{ROOT / 'worker_plugin'}"}
    environment |= {} if target is None else {"WARMFLEET_TTFT_TARGET_S": target}
    tag = f"tail-{name}"
    options = EngineOptions(store, name, tag, BLOCKS, max_model_len=1_024, environment=environment)
    with running(options) as [engine]:
        fleet = Fleet(connect(store, timeout_s=5), tag)
        try:
            yield Conversations(engine, fleet)
        finally:
            await fleet.close()


async def test_a_real_server_keeps_what_lru_would_lose(vllm_store: str) -> None:
    async with conversations(vllm_store, "lru", None) as lru:
        assert lru.first_again() == 0
        row = await lru.row()
        assert row is not None
        assert row.flags & Flag.CLOSED
        assert lru.ended() < 640 - BLOCK_TOKENS
        assert lru.ended(mark="~") == 640 - BLOCK_TOKENS, "the ended conversation's blocks went first"
        assert await lru.paused() == 640 - BLOCK_TOKENS
    async with conversations(vllm_store, "tail", "auto") as tail:
        left = tail.first_again()
        print(f"left of the first conversation: {left} tokens with T-LRU, 0 with LRU")
        assert 4 * BLOCK_TOKENS <= left <= 640 + 200 - 480 + BLOCK_TOKENS
        row = await tail.row()
        assert row is not None
        assert not row.flags & Flag.CLOSED
        assert tail.ended(mark="~") == 640 - BLOCK_TOKENS, "the ended conversation's blocks went first"
        assert tail.ended(vllm_xargs={XARG: ENDED}) == 640 - BLOCK_TOKENS
        assert await tail.paused() == 640 - BLOCK_TOKENS

        async def same() -> bool:
            await tail.row()
            view = (await tail.fleet.workers.read())[0]
            held = await tail.fleet.redis.smembers(tail.fleet.keys.slot(view.record["slot"]))
            return held == {key[-12:-4] for key in tail.engine.table()}

        await poll(same, 60, "the index equals the engine's table")
