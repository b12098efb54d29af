"""Requests that wait for a frozen worker are tried elsewhere or ended. A Redis outage or a slow client ends none."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.engines.scripted import (
    STREAM_HEAD,
    Answer,
    Engine,
    Seen,
    answer_well,
    chunk,
    engine,
    event,
    freezing,
    hang_up,
)
from tests.support.engines.simulated import simulated
from tests.support.polling import poll
from tests.support.replicas.replica import Replica, replica

from warmfleet.background.stock.checks import worker_id
from warmfleet.engines.engine_connection import EngineResponse
from warmfleet.errors import EngineTimeout, UpstreamGone
from warmfleet.fleet import Flag, Fleet, LoadRow, WorkerView, connect
from warmfleet.fleet.pool_registry import PoolEntry, PoolRegistry
from warmfleet.fleet.worker.state import state_of
from warmfleet.pools.stalled_requests import GAP_S, STILL_S, Tries, Try
from warmfleet.protocol.pools import weight
from warmfleet.timing import Timing
from warmfleet_worker import load
from warmfleet_worker.pool_assignment import ASK_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

BODY = {"prompt": "a prompt with blocks of its own " * 20, "stream": True}
GRACE_S, QUIET_S = Timing.grace_s, Timing.quiet_s
FROZEN, LEFT, WELL = 20.0, None, 1.0  # seconds since the last heartbeat

impatient = partial(replica, grace_s=0.3, parted_s=0.0, quiet_s=0.3)


def worker(name: str, age_s: float | None, flags: int = Flag.SERVER) -> WorkerView:
    state = state_of(flags, {}, f"http://{name}", age_s, 0.0)
    return WorkerView(name, {}, None, LoadRow(flags=flags), age_s, state, "proven", f"http://{name}", [])


def waiting_at(tries: Tries, worker_id: str) -> tuple[EngineResponse, asyncio.Task[None]]:
    """A request that was sent to a worker and waits for the headers of the answer."""
    response = EngineResponse(asyncio.get_running_loop())
    tries.begin("wf-1", Try(worker_id, response))
    return response, asyncio.create_task(response.head())


async def looks(
    tries: Tries, workers: list[WorkerView], begin_s: float, seconds: float, *others: list[WorkerView]
) -> int:
    """Look once a second, and return how many requests were given up. others: the workers of each other pool."""
    given_up = 0
    for second in range(int(seconds) + 1):
        given_up += tries.look(workers, begin_s + second, others)
        for _ in range(3):
            await asyncio.sleep(0)  # lets requests that were given up end
    return given_up


@pytest.mark.parametrize(
    ("workers", "needed_s"),
    [
        ([worker("a", FROZEN), worker("b", WELL)], QUIET_S),
        ([worker("a", LEFT), worker("b", WELL)], GRACE_S + 1),
        ([worker("a", WELL, flags=0), worker("b", WELL)], GRACE_S + 1),
        ([worker("a", FROZEN), worker("b", FROZEN)], None),
        ([worker("a", WELL), worker("b", FROZEN)], None),
        ([worker("b", WELL)], None),
    ],
    ids=["frozen", "left", "server gone", "all of them", "another", "forgotten"],
)
async def test_requests_to_a_lost_worker_are_given_up(workers: list[WorkerView], needed_s: float | None) -> None:
    tries = Tries()
    await looks(tries, [worker("a", WELL), worker("b", WELL)], 0, GRACE_S)
    _, waiting = waiting_at(tries, "a")
    await asyncio.sleep(0)
    began = GRACE_S + 1
    if needed_s is None:
        assert await looks(tries, workers, began, 3 * GRACE_S) == 0
        waiting.cancel()
        return
    assert await looks(tries, workers, began, needed_s - 1) == 0
    assert await looks(tries, workers, began + needed_s, QUIET_S) == 1
    with pytest.raises(UpstreamGone):
        await waiting
    tries.end("wf-1")
    assert await looks(tries, workers, began + 30, 60) == 0


@pytest.mark.parametrize("here", [worker("a", LEFT), worker("a", FROZEN)], ids=["with the plugin", "stock engine"])
async def test_a_worker_that_moved_to_another_pool_is_not_lost(here: WorkerView) -> None:
    tries, well = Tries(), worker("b", WELL)
    await looks(tries, [worker("a", WELL), well], 0, GRACE_S, [])
    _, waiting = waiting_at(tries, "a")
    await asyncio.sleep(0)
    assert await looks(tries, [here, well], 20, 3 * GRACE_S, [], [worker("a", WELL)]) == 0
    assert await looks(tries, [here, well], 70, QUIET_S, [], [worker("a", FROZEN)]) == 1, "it died there"
    with pytest.raises(UpstreamGone):
        await waiting


@pytest.mark.parametrize(
    ("here", "there"),
    [([worker("a", LEFT)], [worker("a", WELL, flags=0)]), ([worker("a", WELL, flags=0)], [])],
    ids=["core first", "server first"],
)
async def test_the_halves_of_a_worker_that_moves_may_part(here: list[WorkerView], there: list[WorkerView]) -> None:
    tries, well, began = Tries(), worker("b", WELL), GRACE_S + 1
    await looks(tries, [worker("a", WELL), well], 0, GRACE_S, [])
    _, waiting = waiting_at(tries, "a")
    await asyncio.sleep(0)
    assert await looks(tries, [*here, well], began, ASK_SECONDS + GRACE_S, there) == 0
    assert await looks(tries, [*here, well], began + ASK_SECONDS + GRACE_S + 1, QUIET_S, there) == 1, "one half is dead"
    with pytest.raises(UpstreamGone):
        await waiting


async def test_a_failed_try_that_is_not_settled_yet_has_nothing_to_give_up() -> None:
    tries = Tries()
    frozen = [worker("a", FROZEN), worker("b", WELL)]
    await looks(tries, [worker("a", WELL), worker("b", WELL)], 0, GRACE_S)
    response, waiting = waiting_at(tries, "a")
    response.fail(UpstreamGone("no connection", refused=True))
    with pytest.raises(UpstreamGone):
        await waiting
    assert await looks(tries, frozen, GRACE_S + 1, 2 * QUIET_S) == 0


async def test_an_outage_of_redis_begins_a_grace() -> None:
    tries = Tries()
    well, frozen = [worker("a", WELL), worker("b", WELL)], [worker("a", FROZEN), worker("b", WELL)]
    await looks(tries, well, 0, GRACE_S)
    _, waiting = waiting_at(tries, "a")
    await asyncio.sleep(0)
    back = GRACE_S + GAP_S + 1  # b's heartbeat comes back before a's
    assert await looks(tries, frozen, back, GRACE_S - 1) == 0
    assert await looks(tries, well, back + GRACE_S, 5) == 0
    waiting.cancel()


async def let_expire(fleet: Fleet, one: Engine) -> None:
    """Make the engine's last heartbeat a minute old."""
    (seconds, _) = await fleet.redis.time()
    await fleet.redis.zadd(fleet.keys.alive, {worker_id(one.url): (seconds - 60) * 1000})


@asynccontextmanager
async def two_asked(valkey_url: str, model: str, answer: Answer) -> AsyncIterator[tuple[Replica, Engine, list[bytes]]]:
    """A replica, its good engine, and the answers of two requests; one of them was first sent to a frozen engine."""
    async with (
        engine(model, answer) as frozen,
        engine(model) as good,
        impatient(valkey_url, model, frozen.url, good.url, policy="round_robin", health_interval_s=60.0) as router,
    ):
        asked = [asyncio.create_task(router.post(BODY | {"model": model})) for _ in range(2)]
        await poll(lambda: frozen.seen, what="one of two goes to the frozen engine")
        await let_expire(router.fleet, frozen)
        async with asyncio.timeout(10):
            answers = await asyncio.gather(*asked)
        assert [status for status, _, _ in answers] == [200, 200]
        assert await router.metric("warmfleet_given_up_requests_total") == 1
        yield router, good, [body for _, _, body in answers]
        await router.unloaded()


@pytest.mark.parametrize("head", [b"", STREAM_HEAD], ids=["nothing", "headers only"])
async def test_frozen_before_the_first_byte_is_tried_elsewhere(valkey_url: str, model: str, head: bytes) -> None:
    async with two_asked(valkey_url, model, freezing(head)) as (router, good, bodies):
        assert all(body.endswith(b"[DONE]\n\n") for body in bodies)
        assert len(good.seen) == 2
        assert await router.metric('warmfleet_retries_total{where="another"}') == 1


@pytest.mark.parametrize("second", ["freezes", "dies"])
async def test_a_request_that_froze_one_worker_is_sent_to_one_more_at_most(
    valkey_url: str, model: str, second: str
) -> None:
    asked: list[Engine] = []

    async def poisoned(one: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        asked.append(one)
        if one is not asked[0] and second == "dies":
            hang_up(writer)
        else:
            await freezing(b"")(one, seen, writer)

    async with (
        engine(model, poisoned) as one,
        engine(model, poisoned) as two,
        engine(model, poisoned) as three,
        impatient(valkey_url, model, one.url, two.url, three.url, health_interval_s=60.0) as router,
    ):
        request = asyncio.create_task(router.post(BODY | {"model": model}))
        for number in range(1 if second == "dies" else 2):
            await poll(lambda number=number: len(asked) > number, what="it is sent")  # type: ignore[misc]
            await let_expire(router.fleet, asked[number])
        async with asyncio.timeout(10):
            status, _, answer = await request
        assert (status, json.loads(answer)["error"]["code"]) == (502, "upstream_gone")
        assert len({upstream.url for upstream in asked}) == 2
        assert await router.metric("warmfleet_given_up_requests_total") == (1 if second == "dies" else 2)
        await router.unloaded()


async def test_frozen_within_a_stream_ends_it_with_an_error(valkey_url: str, model: str) -> None:
    async with two_asked(valkey_url, model, freezing(STREAM_HEAD, event(" one"))) as (_, good, bodies):
        (cut,) = [body for body in bodies if b"[DONE]" not in body]
        error = json.loads(cut.strip().rsplit(b"\n\n", 1)[1].removeprefix(b"data: "))["error"]
        assert error["code"] == "upstream_gone"
        assert len(good.seen) == 1


async def test_a_worker_that_lost_only_redis_streams_on(valkey_url: str, model: str) -> None:
    async def streams(_: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for number in range(40):
            chunk(writer, event(str(number)))
            await writer.drain()
            await asyncio.sleep(0.05)
        chunk(writer, b"data: [DONE]\n\n")
        chunk(writer, b"")

    async with (
        engine(model, streams) as one,
        engine(model, streams) as two,
        impatient(valkey_url, model, one.url, two.url, policy="round_robin", health_interval_s=60.0) as router,
    ):
        asked = [asyncio.create_task(router.post(BODY | {"model": model})) for _ in range(2)]
        await poll(lambda: one.seen, what="each has a request")
        await let_expire(router.fleet, one)
        assert all(body.endswith(b"[DONE]\n\n") for _, _, body in await asyncio.gather(*asked))
        assert await router.metric("warmfleet_given_up_requests_total") == 0


async def test_stock_engines_that_move_to_a_new_pool_end_their_plain_requests(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = PoolRegistry(connect(valkey_url, model, timeout_s=5), model)
    first, second = f"{model}#1", f"{model}#2"
    await registry.write([PoolEntry(first)])
    seen_lost: list[float] = []  # times at which the first pool's view shows a silent engine
    look, answer_now = Tries.look, asyncio.Event()

    def noting(tries: Tries, workers: Sequence[WorkerView], now: float, *others: Any) -> int:
        if tries._open and any(not worker.state.alive for worker in workers):
            seen_lost.append(now)
        return look(tries, workers, now, *others)

    async def slow(one: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        await answer_now.wait()
        await answer_well(one, seen, writer)

    monkeypatch.setattr(Tries, "look", noting)
    async with AsyncExitStack() as stack:
        moves: list[Engine] = []
        stays: list[Engine] = []
        while not (moves and stays):
            one = await stack.enter_async_context(engine(model, slow))
            (moves if weight(second, one.url) > weight(first, one.url) else stays).append(one)
        engines = [upstream.url for upstream in (*moves, *stays)]
        settings: dict[str, Any] = {"models": (first,), "policy": "round_robin", "pools_interval_s": 0.1}
        router = await stack.enter_async_context(impatient(valkey_url, model, *engines, **settings))
        asked = [asyncio.create_task(router.post({"model": model, "prompt": "x", "stream": False})) for _ in engines]
        await poll(lambda: all(upstream.seen for upstream in (*moves, *stays)), 20, "each has a request")
        await registry.write([PoolEntry(second)])
        fleets = [Fleet(connect(valkey_url, timeout_s=5), tag) for tag in (first, second)]
        for fleet in fleets:
            stack.push_async_callback(fleet.close)

        async def moved() -> bool:
            return len(await fleets[1].workers.read()) == len(moves)

        await poll(moved, 20, "the new pool has its engines")
        for upstream in moves:
            await let_expire(fleets[0], upstream)
        await poll(lambda: seen_lost and seen_lost[-1] - seen_lost[0] > 1.0, 20, "they are silent in the first pool")
        answer_now.set()
        assert [status for status, _, _ in await asyncio.gather(*asked)] == [200] * len(engines)
        assert await router.metric("warmfleet_given_up_requests_total") == 0
        assert sum(len(upstream.seen) for upstream in (*moves, *stays)) == len(engines)
    await registry.close()


async def test_a_slow_client_is_not_taken_for_a_frozen_worker(valkey_url: str, model: str) -> None:
    whole = 8_000_000  # more than all buffers on the path hold

    async def long(_: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        chunk(writer, b"x" * whole)
        chunk(writer, b"")

    async with (
        engine(model, long) as one,
        engine(model, long) as two,
        impatient(valkey_url, model, one.url, two.url, health_interval_s=60.0) as router,
    ):
        async with router.client.post(f"{router.url}/v1/completions", json=BODY | {"model": model}) as answer:
            await let_expire(router.fleet, one if one.seen else two)
            await asyncio.sleep(1.5)
            assert len(await answer.read()) == whole
        assert await router.metric("warmfleet_given_up_requests_total") == 0


# ------------------------------------------------ a worker that sends heartbeats, but hangs


def response_of(tries: Tries, reservation: str, worker_id: str, *, began: bool) -> EngineResponse:
    response = EngineResponse(asyncio.get_running_loop())
    response.began = began
    tries.begin(reservation, Try(worker_id, response, received_at=0.0))
    return response


async def reading(*responses: EngineResponse) -> list[asyncio.Task[bytes]]:
    readers = [asyncio.create_task(response.read_any()) for response in responses]
    await asyncio.sleep(0)
    return readers


async def test_a_worker_that_sends_nothing_though_it_had_begun_stands_still() -> None:
    tries = Tries()
    stream, waits = (response_of(tries, f"wf-{began}", "a", began=began) for began in (True, False))
    slow = response_of(tries, "wf-slow", "b", began=True)  # the client reads nothing
    only = response_of(tries, "wf-only", "c", began=False)  # a long prompt, or a plain answer
    readers = await reading(stream, waits, only)
    assert tries.standing_still(0.0) == set()
    assert tries.standing_still(STILL_S - 1) == set()
    assert tries.standing_still(STILL_S) == {"a"}
    assert tries.give_up({"a"}, STILL_S) == 1
    with pytest.raises(UpstreamGone):
        await readers[1]
    waits = response_of(tries, "wf-more", "a", began=True)
    waits.received = 1
    assert tries.standing_still(STILL_S + 1) == set(), "another request of the same worker gets bytes"
    for reader in (readers[0], readers[2]):
        reader.cancel()
    assert not slow.complete


async def test_a_slow_client_is_not_over_the_limit_of_silence() -> None:
    tries = Tries()
    stream, slow = response_of(tries, "wf-1", "a", began=True), response_of(tries, "wf-2", "a", began=True)
    silent = response_of(tries, "wf-3", "a", began=False)
    [reader, waits] = await reading(stream, silent)
    assert tries.expire(0.0, 300.0, 0.0) == {}
    assert tries.expire(299.0, 300.0, 0.0) == {}
    assert tries.expire(300.0, 300.0, 0.0) == {"stream_idle": 1}
    with pytest.raises(EngineTimeout):
        await reader
    assert tries.expire(310.0, 0.0, 310.0) == {"request_max": 2}
    with pytest.raises(EngineTimeout):
        await waits
    with pytest.raises(EngineTimeout):
        await slow.read_any()


async def test_an_engine_that_hangs_with_heartbeats_is_given_up(valkey_url: str, model: str) -> None:
    async with (
        engine(model) as hung,
        engine(model) as good,
        impatient(
            valkey_url,
            model,
            hung.url,
            good.url,
            policy="round_robin",
            health_interval_s=60.0,
            hung_after_s=0.2,
            hung_interval_s=0.1,
            hung_timeout_s=0.2,
        ) as router,
    ):
        hung.hangs = True
        plain = BODY | {"model": model, "stream": False}
        async with asyncio.timeout(15):
            answers = await asyncio.gather(*(router.post(plain) for _ in range(4)))
            assert [status for status, _, _ in answers] == [200] * 4
            assert await router.metric("warmfleet_given_up_requests_total") >= 1
            given_up = await router.metric("warmfleet_given_up_requests_total")
            for _ in range(4):
                assert (await router.post(plain))[0] == 200
        assert await router.metric("warmfleet_given_up_requests_total") == given_up, (
            "it is avoided until it answers again"
        )
        hung.hangs = False
        await router.unloaded()


async def test_an_engine_that_only_takes_long_is_waited_for(valkey_url: str, model: str) -> None:
    async def slow(one: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(1.5)
        await answer_well(one, seen, writer)

    async with (
        engine(model, slow) as one,
        engine(model, slow) as two,
        impatient(valkey_url, model, one.url, two.url, hung_after_s=0.1, hung_interval_s=0.1) as router,
    ):
        assert (await router.post(BODY | {"model": model, "stream": False}))[0] == 200
        assert await router.metric("warmfleet_given_up_requests_total") == 0


class Held:
    """Costs of steps that never end, as if a device or a lock held the engine's core."""

    def seconds(self, _work: object) -> float:
        return 1e6

    def arrival_seconds(self, _prompt_tokens: int) -> float:
        return 0.0


async def test_a_core_that_hangs_behind_a_live_api_server_is_given_up(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A plain request to the hanging core gets no byte, while ``/health`` answers and the plugin's thread runs."""
    monkeypatch.setattr(load, "STANDSTILL_SECONDS", 0.5)
    async with (
        simulated(valkey_url, model, "a") as hung,
        simulated(valkey_url, model, "b"),
        replica(valkey_url, model, policy="round_robin", view_interval_s=0.2, grace_s=0.5, quiet_s=0.2) as router,
    ):
        await router.routable(2)
        monkeypatch.setattr(hung.engine.core, "costs", Held())
        plain = BODY | {"model": model, "stream": False}
        asking = asyncio.gather(*(router.post(plain) for _ in range(4)))

        await poll(lambda: f"{hung.worker_id} stands still" in caplog.text, 20, "the plugin notices")

        async def answered() -> bool:
            await router.fleet.redis.zadd(router.fleet.keys.alive, {hung.worker_id: 1.0})  # a TTL without heartbeats
            return asking.done()

        await poll(answered, 20, "all are answered")
        assert [status for status, _, _ in await asking] == [200] * 4
        assert await router.metric("warmfleet_given_up_requests_total") >= 1


# ------------------------------------------------ time limits of the settings


async def test_a_stream_that_falls_silent_ends_with_an_error(valkey_url: str, model: str) -> None:
    async with (
        engine(model, freezing(STREAM_HEAD, event(" one"))) as one,
        replica(valkey_url, model, one.url, stream_idle_s=0.3, limit_interval_s=0.05) as router,
    ):
        async with asyncio.timeout(10):
            status, _, answer = await router.post(BODY | {"model": model})
        first, *_, last = answer.strip().split(b"\n\n")
        assert (status, first) == (200, event(" one").strip())
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_timeout"
        assert await router.metric('warmfleet_time_limits_total{limit="stream_idle"}') == 1
        await router.unloaded()


@pytest.mark.parametrize("head", [b"", STREAM_HEAD], ids=["nothing", "headers only"])
async def test_a_request_that_takes_too_long_is_ended(valkey_url: str, model: str, head: bytes) -> None:
    async with (
        engine(model, freezing(head)) as one,
        engine(model, freezing(head)) as two,
        replica(valkey_url, model, one.url, two.url, request_max_s=0.3, limit_interval_s=0.05) as router,
    ):
        async with asyncio.timeout(10):
            status, _, answer = await router.post(BODY | {"model": model})
        assert (status, json.loads(answer)["error"]["code"]) == (504, "engine_timeout")
        assert len(one.seen) + len(two.seen) == 1, "another worker would have no time left either"
        assert await router.metric('warmfleet_time_limits_total{limit="request_max"}') == 1
        await router.unloaded()
