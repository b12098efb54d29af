"""Real engines behind two real replicas: vLLM reports exactly the cached tokens that the decision predicted."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.support.polling import poll
from tests.vllm.conftest import BLOCKS, Reported
from tests.vllm.engine import SERVED_NAME, SLEEPS, EngineOptions, VllmEngine
from tests.vllm.replicas import BY_MATCH, replicas

from warmfleet.fleet import Fleet, Spans
from warmfleet.fleet.client import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.vllm
#: A tombstone of a cancelled booking stays in Redis this long, if Redis answered late on a busy machine.
SETTLED_S = Spans().tombstone_ms / 1000 + 30


@dataclass(frozen=True)
class Real:
    """The base URLs of the replicas, the engines by worker_id, and the address of Redis."""

    replicas: list[str]
    engines: dict[str, VllmEngine]
    redis_url: str

    def user(self, words: int, seed: int) -> dict[str, str]:
        """A message that no engine has seen with another number of engines."""
        return user(words, 1_000 * len(self.engines) + seed)


@dataclass(frozen=True)
class Turn:
    """An answer: its worker, the predicted tokens, and the tokens that vLLM found cached."""

    worker_id: str
    predicted: int
    cached: int
    prompt_tokens: int
    reservation: str
    text: str


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, id="one engine"),
        pytest.param(
            2,
            id="two engines",
            marks=pytest.mark.long(minutes=2, shows="exact predictions where a decision chooses between real engines"),
        ),
    ],
)
def real(vllm_store: str, reported: Reported, request: pytest.FixtureRequest) -> Iterator[Real]:
    """The engine of the session, with a second one in the long run, which takes half a minute to start."""
    engines = [reported.engine]
    more = VllmEngine(EngineOptions(vllm_store, "vllm-b", blocks=BLOCKS, environment=SLEEPS))
    try:
        if request.param == 2:
            more.start()
            more.wait()
            engines.append(more)
        with replicas(vllm_store, engines=len(engines), policy=BY_MATCH) as urls:
            yield Real(urls, {engine.worker_id: engine for engine in engines}, vllm_store)
    finally:
        more.remove()
        if request.param == 2:
            asyncio.run(_forget(vllm_store, more.worker_id))


async def _forget(redis_url: str, worker_id: str) -> None:
    fleet = Fleet(connect(redis_url, timeout_s=5), SERVED_NAME)
    await fleet.upkeep.forget(worker_id)
    await fleet.close()


@pytest.fixture
async def index(real: Real) -> AsyncIterator[Fleet]:
    """A fleet that only reads. The replicas do the upkeep."""
    fleet = Fleet(connect(real.redis_url, timeout_s=5), SERVED_NAME)
    yield fleet
    await fleet.close()


async def ask(url: str, messages: list[dict[str, str]]) -> Turn:
    body = {"model": SERVED_NAME, "messages": messages, "max_tokens": 8, "temperature": 0}
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert int(answer.headers["x-warmfleet-prompt-tokens"]) == usage["prompt_tokens"]
    return Turn(
        answer.headers["x-warmfleet-worker"],
        int(answer.headers["x-warmfleet-matched-tokens"]),
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["prompt_tokens"],
        answer.headers["x-warmfleet-reservation"],
        answer.json()["choices"][0]["message"]["content"],
    )


def user(words: int, seed: int) -> dict[str, str]:
    choose = random.Random(seed)
    vocabulary = ["import", "return", "while", "class", "value", "index", "error", "string", "buffer", "module"]
    return {"role": "user", "content": " ".join(choose.choice(vocabulary) for _ in range(words))}


async def settled(real: Real, fleet: Fleet) -> dict[str, set[bytes]]:
    """Wait until nothing is booked and every engine's own table equals its Redis sets, entry by entry."""
    told: set[str] = set()

    def not_yet(why: str) -> None:
        if why not in told:
            told.add(why)
            print(why)  # shown if the test fails

    async def equal() -> dict[str, set[bytes]] | None:
        views = await fleet.workers.read()
        if loads := [str(v.load) for v in views if v.load.in_flight or v.load.prefill_tokens or v.load.decode_tokens]:
            not_yet(f"booked: {loads}")
            return None
        now_ms = (await fleet.redis.time())[0] * 1000
        if leases := await fleet.redis.zrangebyscore(fleet.keys.leases, now_ms, "+inf"):
            not_yet(f"leases: {leases}")  # a finished request's credit lingers until its blocks are reported
            return None
        tables: dict[str, set[bytes]] = {}
        for view in views:
            table = {key[-12:-4] for key in await asyncio.to_thread(real.engines[view.worker_id].table)}
            held: Any = await fleet.redis.smembers(fleet.keys.slot(view.record["slot"]))
            if held != table:
                not_yet(f"{view.worker_id}: {len(held - table)} too many, {len(table - held)} missing")
                return None
            tables[view.worker_id] = table
        for view in views:
            slot = str(view.record["slot"]).encode()
            for block_hash in tables[view.worker_id]:
                assert slot in await fleet.redis.smembers(fleet.keys.block(block_hash))
        return tables

    found = await poll(equal, SETTLED_S, "index == the engines' tables, no load")
    assert isinstance(found, dict)
    return found


async def test_the_second_turn_through_the_other_replica_and_again_after_eviction(real: Real, index: Fleet) -> None:
    first_replica, second_replica = real.replicas
    messages = [real.user(1_900, 1)]
    first = await ask(first_replica, messages)
    assert first.prompt_tokens > 1_900
    assert (first.predicted, first.cached) == (0, 0)
    await settled(real, index)

    messages += [{"role": "assistant", "content": first.text}, real.user(40, 2)]
    second = await ask(second_replica, messages)
    assert second.worker_id == first.worker_id
    assert second.predicted == second.cached >= 1_888
    await settled(real, index)

    engine = real.engines[first.worker_id]
    for seed in range(10, 13):  # straight to the engine, past the fleet
        await asyncio.to_thread(engine.complete, real.user(1_500, seed)["content"])
    await settled(real, index)
    messages += [{"role": "assistant", "content": second.text}, real.user(40, 3)]
    third = await ask(first_replica, messages)
    assert third.predicted == third.cached < second.cached, "part of it, at least, was evicted"
    await settled(real, index)


async def test_prediction_is_exact_over_many_conversations(real: Real, index: Fleet) -> None:
    """Six conversations, three at a time, over caches that hold four. The first ones return at the end."""
    before, words = await index.index.counts(), 150 * len(real.engines)
    talks: dict[int, list[dict[str, str]]] = {number: [] for number in range(6)}
    turns = [number for start in range(-2, 6) for number in range(start, start + 3) if number in talks] + [0, 1, 2]
    hits = 0
    for turn, number in enumerate(turns):
        messages = talks[number]
        messages.append(real.user(words if messages else 3 * words, turn))
        got = await ask(real.replicas[turn % 2], messages)
        assert got.predicted == got.cached
        hits += got.cached > 0
        messages.append({"role": "assistant", "content": got.text})
        await settled(real, index)
    assert hits > 6, "most second and third turns; the caches had room for them"
    after = await index.index.counts()
    counts = {name: after.get(name, 0) - before.get(name, 0) for name in ("exact", "over", "short", "mismatch")}
    assert counts.pop("exact") > 0
    assert set(counts.values()) == {0}
