"""Real engines of unusual shapes: their own tables, the predictions, and the chosen engines."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.conftest import TAG
from tests.vllm.engine import ROOT, SERVED_NAME, EngineOptions, VllmEngine, running
from tests.vllm.replicas import BY_MATCH, replicas

from warmfleet.fleet import Fleet, WorkerState
from warmfleet.fleet.client import connect
from warmfleet.protocol.wire import Scheme, chain_hashes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from warmfleet.fleet import WorkerView

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=5,
        shows=(
            "real engines of other shapes: two data-parallel ranks behind two processes of one API server, sliding "
            "windows with hashes finer than blocks, prefix caching off, paused, asleep and resumed"
        ),
    ),
    pytest.mark.timeout(1_500),
]

WORDS = ("import", "return", "while", "class", "value", "index", "error", "string", "buffer", "module")
WINDOWS = ROOT / "models" / "tiny-windows"
BLOCK_TOKENS, HASH_TOKENS = 64, 32


class Shown(NamedTuple):
    """The facts in an answer: its worker, the predicted and the cached tokens, and the ids whose KV the engine has."""

    worker_id: str
    predicted: int
    cached: int
    ids: list[int]


class Stack(NamedTuple):
    engines: dict[str, VllmEngine]
    replicas: list[str]
    redis_url: str


def prompt(seed: int, words: int = 600) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


async def ask(url: str, text: str, **headers: str) -> Shown:
    body = {"model": SERVED_NAME, "prompt": text, "max_tokens": 2, "temperature": 0, "return_token_ids": True}
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(f"{url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    usage, (choice,), told = answer.json()["usage"], answer.json()["choices"], answer.headers
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]][:-1]  # the last token has no KV yet
    return Shown(told["x-warmfleet-worker"], int(told["x-warmfleet-matched-tokens"]), cached, ids)


@asynccontextmanager
async def fleet_of(stack: Stack) -> AsyncIterator[Fleet]:
    """A fleet that only reads: the replicas do the upkeep."""
    fleet = Fleet(connect(stack.redis_url, timeout_s=5), TAG)
    try:
        yield fleet
    finally:
        await fleet.close()


async def quiet(fleet: Fleet) -> dict[str, WorkerView]:
    """Wait until nothing is booked, and no block is credited that the engines have not reported."""

    async def settled() -> dict[str, WorkerView] | None:
        views = {view.worker_id: view for view in await fleet.workers.read()}
        busy = any(view.load.in_flight for view in views.values()) or await fleet.redis.exists(fleet.keys.leases)
        return None if busy else views

    found: Any = await poll(settled, 30, "everything is settled")
    return dict(found)


async def held(fleet: Fleet, view: WorkerView) -> set[bytes]:
    found: Any = await fleet.redis.smembers(fleet.keys.slot(view.record["slot"]))
    return set(found)


async def state(fleet: Fleet, worker_id: str, wanted: WorkerState, seconds: float = 20) -> None:
    async def reached() -> bool:
        return any(view.worker_id == worker_id and view.state is wanted for view in await fleet.workers.read())

    await poll(reached, seconds, f"{worker_id} is {wanted}")


async def post(engine: VllmEngine, path: str) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        (await client.post(engine.url + path)).raise_for_status()


# ---------------------------------------------------------------- ranks


RANKS = ("vllm-a.0", "vllm-a.1")


@pytest.fixture
def ranks() -> Iterator[Stack]:
    """Two ranks behind one server, which is of two processes by vLLM's default."""
    with server(valkey_binary()) as redis_url:
        options = EngineOptions(redis_url=redis_url, arguments=("--data-parallel-size", "2"))
        with running(options) as [engine], replicas(redis_url, policy=BY_MATCH) as urls:
            yield Stack(dict.fromkeys(RANKS, engine), urls, redis_url)


async def test_requests_reach_the_rank_that_holds_their_prefix(ranks: Stack) -> None:
    """Two replicas ignore the rank that a client asks for; each rank's index equals its own table."""
    urls, engine = ranks.replicas, ranks.engines[RANKS[0]]
    async with fleet_of(ranks) as fleet:
        workers = await fleet.workers.read()
        assert tuple(view.worker_id for view in workers) == RANKS
        assert {(view.url, (view.server or {})["facts"]["ranks"]) for view in workers} == {(engine.url, 2)}
        first = await asyncio.gather(*[ask(urls[seed % 2], prompt(seed)) for seed in range(8)])
        assert [(shown.predicted, shown.cached) for shown in first] == [(0, 0)] * 8
        assert {shown.worker_id for shown in first} == set(RANKS)
        views = await quiet(fleet)
        for rank, name in enumerate(RANKS):
            table = {key[-12:-4] for key in await asyncio.to_thread(engine.table, rank)}
            assert await held(fleet, views[name]) == table
            chains = [chain_hashes(Scheme.from_dict(views[name].record["scheme"]), answer.ids) for answer in first]
            own = [digest[-8:] in table for chain in chains for digest in chain]
            assert own == [answer.worker_id == name for answer, chain in zip(first, chains, strict=True) for _ in chain]
        for seed, before in enumerate(first):
            wish = {"X-data-parallel-rank": str(seed % 3)}  # the rank is ignored, even a number that no rank has
            again = await ask(urls[1 - seed % 2], prompt(seed) + prompt(100 + seed, 20), **wish)
            assert again.worker_id == before.worker_id
            assert again.predicted == again.cached >= len(before.ids) - 64
            await quiet(fleet)
        counts = await fleet.index.counts()
        assert (counts.get("over", 0), counts.get("short", 0)) == (0, 0)
    said = engine.log.read_text(errors="replace")
    assert said.count("warmfleet: server vllm-a joined") == 1, "of the processes of the API server one joins"
    assert "another process has joined" not in said


# ---------------------------------------------------------------- windows, no cache, paused


@pytest.fixture(scope="module")
def mixed() -> Iterator[Stack]:
    """An engine with sliding windows, hashes of 32 tokens and blocks of 64; and an engine without prefix caching."""
    sizes = ("--block-size", str(BLOCK_TOKENS), "--prefix-match-unit", str(HASH_TOKENS))
    with server(valkey_binary()) as redis_url:
        options = [
            EngineOptions(redis_url=redis_url, worker_id="windows", model=WINDOWS, blocks=512, arguments=sizes),
            EngineOptions(
                redis_url=redis_url,
                worker_id="plain",
                model=WINDOWS,
                arguments=("--no-enable-prefix-caching",),
            ),
        ]
        with running(*options) as engines, replicas(redis_url, engines=1) as urls:
            yield Stack({engine.worker_id: engine for engine in engines}, urls, redis_url)


async def test_hashes_finer_than_blocks_are_matched(mixed: Stack) -> None:
    """Only the full-attention group is in the index, and what it predicts is cached."""
    async with fleet_of(mixed) as fleet:
        await state(fleet, "plain.0", WorkerState.LOAD_ONLY)
        views = await quiet(fleet)
        scheme = views["windows.0"].record["scheme"]
        assert (scheme["block_tokens"], scheme["hash_block_tokens"]) == (BLOCK_TOKENS, HASH_TOKENS)
        assert views["plain.0"].record["scheme"]["algorithm"] == "none"
        assert "prefix caching is off" in views["plain.0"].record["reason"]
        hits, expected, finer = 0, set[bytes](), set[bytes]()
        coarse = Scheme.from_dict(scheme)
        fine = replace(coarse, block_tokens=HASH_TOKENS, hash_block_tokens=HASH_TOKENS)
        for seed in range(6):
            text = prompt(seed, 300)
            for turn in range(3):
                shown = await ask(mixed.replicas[turn % 2], text)
                assert shown.predicted == shown.cached
                assert shown.predicted % BLOCK_TOKENS == 0
                hits += shown.cached > 0
                if shown.worker_id == "windows.0":
                    expected.update(digest[-8:] for digest in chain_hashes(coarse, shown.ids))
                    finer.update(digest[-8:] for digest in chain_hashes(fine, shown.ids))
                text += prompt(1_000 + 10 * seed + turn, 150)
                await quiet(fleet)
        assert hits >= 6
        views = await quiet(fleet)
        table = await asyncio.to_thread(mixed.engines["windows.0"].table)
        assert len({key[-4:] for key in table}) == 2, "a group with full attention, and one with windows"
        found = await held(fleet, views["windows.0"])
        assert expected <= found <= {key[-12:-4] for key in table}
        assert not (finer - expected) & found, "no entry for a part of a block"


@pytest.mark.parametrize(
    ("stop", "go_on"),
    [
        ("/pause?mode=keep&clear_cache=false", "/resume"),
        ("/pause?mode=wait&clear_cache=false", "/resume"),
        ("/sleep?level=0", "/wake_up?tags=scheduling"),
    ],
)
async def test_a_paused_engine_gets_no_requests_until_it_goes_on(mixed: Stack, stop: str, go_on: str) -> None:
    """A paused engine gets not even a prompt that only it holds."""
    engine, (url, _), text = mixed.engines["windows.0"], mixed.replicas, prompt(random.randrange(2**30))
    async with fleet_of(mixed) as fleet:
        await asyncio.to_thread(engine.complete, text)

        async def known() -> bool:
            return (await ask(url, text)).predicted > 0

        await poll(known, 20, "the prompt's blocks in the index")
        await post(engine, stop)
        await state(fleet, "windows.0", WorkerState.PAUSED, 5)
        for _ in range(3):
            assert (await ask(url, text))[:3] == ("plain.0", 0, 0)
        await post(engine, go_on)
        await state(fleet, "windows.0", WorkerState.PROVEN, 5)
        await quiet(fleet)
        again = await ask(url, text)
        assert again.worker_id == "windows.0"
        assert again.predicted == again.cached > 0


async def test_the_index_of_an_engine_whose_cache_is_reset_is_empty_at_once(mixed: Stack) -> None:
    """A pause that clears the cache, and a reset alone, of an idle engine: no request follows."""
    engine = mixed.engines["windows.0"]
    async with fleet_of(mixed) as fleet:
        for verb in ("/reset_prefix_cache", "/pause?clear_cache=true"):
            await asyncio.to_thread(engine.complete, prompt(900))
            view = (await quiet(fleet))["windows.0"]
            await poll(partial(held, fleet, view), 5, "blocks in the index")

            async def empty() -> bool:
                return not await held(fleet, (await quiet(fleet))["windows.0"])

            await post(engine, verb)
            await poll(empty, 2, "an empty index")
            await post(engine, "/resume")
        await state(fleet, "windows.0", WorkerState.PROVEN, 5)
