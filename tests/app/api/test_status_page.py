"""The status page's data: access to them, how often they are made, and their values for a real fleet."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from starlette.requests import Request
from tests.support.engines.scripted import engine
from tests.support.polling import poll
from tests.support.replicas.replica import replica

from warmfleet.api.access.operators import Operators
from warmfleet.api.service_routes import Health
from warmfleet.api.status_page import routes, snapshot
from warmfleet.api.status_page.history import EVERY_S, POINTS, SPAN_S, History, Point, columns
from warmfleet.api.status_page.routes import FILES, HEADERS, StatusPage
from warmfleet.errors import BadArgument, BadRequest, FleetUnavailable, NoWorker, Unauthorized, WarmfleetError
from warmfleet.fleet import Decision, LedgerView, Line, Memory, Seen, Terms, Tick, Truth, WorkerState, WorkerView
from warmfleet.fleet.rows import LoadRow
from warmfleet.metrics import Metrics
from warmfleet.pools.reasons import FALLBACK
from warmfleet.pools.recent_decisions import KEPT, TOLD, RecentDecisions
from warmfleet.settings import Settings
from warmfleet.tracing.last_requests import LastRequests

if TYPE_CHECKING:
    from tests.support.replicas.replica import Replica

    from warmfleet.pools.pool import Pool

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
SECRET = "the word that nobody may keep"


async def data(router: Replica) -> dict[str, Any]:
    status, body = await router.get("/status.json")
    assert status == 200
    found: dict[str, Any] = json.loads(body)
    return found


async def test_a_fleet_as_the_page_shows_it(valkey_url: str, model: str) -> None:
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url, admin_port=1) as router:
        assert (await router.post({"model": model, "prompt": SECRET + PROMPT}))[0] == 200
        [first] = (await data(router))["models"]
        assert (first["model"], first["decided"]) == (model, 1)
        assert first["rung"] in ("asked", "redis")  # a Redis that was empty a moment ago has no heartbeat yet
        [worker] = first["workers"]
        assert worker["routable"]
        assert worker["reason"].startswith("takes requests")
        assert first["decisions"][0]["reason"]
        assert first["decisions"][0]["candidates"] is None  # the page was not read before

        status, headers, _ = await router.post({"model": model, "prompt": SECRET + PROMPT}, **{"x-request-id": "mine"})
        assert status == 200

        async def explained() -> Any:
            told = (await data(router))["models"][0]["decisions"][0]
            return told if told["request_id"] == "mine" else None

        newest: Any = await poll(explained, 10, "the next snapshot")
        assert newest["worker_id"] == headers["x-warmfleet-worker"]
        assert newest["matched_tokens"] == int(headers["x-warmfleet-matched-tokens"]) > 0
        assert [row["worker_id"] for row in newest["candidates"]] == [worker["worker_id"]]
        assert SECRET not in json.dumps(await data(router))


async def test_the_page_tells_nothing_and_the_data_need_the_key(valkey_url: str, model: str) -> None:
    async with replica(valkey_url, model, admin_port=1, admin_key="boss") as router:
        assert (await router.get("/status.json"))[0] == 401
        for path, (name, kind) in FILES.items():
            async with router.client.get(router.operators + path) as answer:
                assert (answer.status, answer.headers["content-type"]) == (200, kind)
                assert await answer.read() == (routes.FOLDER / name).read_bytes()
                assert {header: answer.headers[header] for header in HEADERS} == HEADERS
            async with router.client.get(router.url + path) as answer:
                assert answer.status == 404, "the clients' port has no such page"


def pages(pools: Any, clock: list[float]) -> StatusPage:
    history = History(pools, Metrics(), lambda: clock[0])
    may_ask = Operators(Settings(models=("m",)))
    return StatusPage(pools, history, LastRequests(), may_ask, Health(), 1.0, lambda: clock[0])


def request(**headers: str) -> Request:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "GET", "path": "/status.json", "headers": raw})


async def test_one_snapshot_a_second_however_many_look(monkeypatch: pytest.MonkeyPatch) -> None:
    made, gate, clock = [], asyncio.Event(), [0.0]
    page = pages(SimpleNamespace(all=()), clock)

    async def make() -> None:
        made.append(clock[0])
        await gate.wait()
        await StatusPage._make(page)

    monkeypatch.setattr(page, "_make", make)
    looks = [asyncio.create_task(page.data(request())) for _ in range(20)]
    await asyncio.sleep(0)
    looks[0].cancel()  # a client that hangs up does not disturb the others
    gate.set()
    answers = await asyncio.gather(*looks[1:])
    assert len({bytes(answer.body) for answer in answers}) == len(made) == 1
    clock[0] = 0.9
    await page.data(request())
    assert made == [0.0]
    clock[0] = 1.0
    await page.data(request())
    assert made == [0.0, 1.0]


async def test_a_wrong_key_makes_no_snapshot() -> None:
    page = pages(SimpleNamespace(all=()), [0.0])
    page._operators = Operators(Settings(models=("m",), admin_key="boss"))
    for headers in ({}, {"authorization": "Bearer wrong"}):
        with pytest.raises(Unauthorized):
            await page.data(request(**headers))
    assert page._making is None


def decision(matched: int = 0, prompt: int = 100) -> Decision:
    return Decision("r", "booked", "w", "w", "u", matched, prompt, False, False, 0.0, 0, False, 0, 0)


def test_recent_decisions_are_bounded_and_summed() -> None:
    recent = RecentDecisions()
    for number in range(KEPT + 7):
        recent.note(f"id-{number}", "chat", "exact", "cost", decision(40), "away" if number % 2 else "")
    assert len(recent.newest()) == KEPT
    assert [noted.number for noted in recent.newest()][:2] == [KEPT + 7, KEPT + 6]
    assert (recent.decided, recent.fallbacks) == (KEPT + 7, (KEPT + 7) // 2)
    assert recent.matched_tokens == 40 * (recent.decided - recent.fallbacks)


def told() -> Decision:
    row = [b"w", 16, 0, LoadRow().pack("w"), b"0.5", b",".join([b"0"] * len(fields(Terms))), 0, b"0", 0]
    return replace(decision(), seen=Seen((1_000, 16, 0, 0), [row], waits=False, tie_s=0.005))


def test_a_decision_that_told_what_it_saw_stays_while_others_come() -> None:
    recent = RecentDecisions()
    for _ in range(TOLD + 3):  # each reading of the page samples one decision; many follow until the next
        recent.note("told", "chat", "exact", "cost", told())
        for _ in range(KEPT + 7):
            recent.note("other", "chat", "exact", "cost", decision())
    newest = recent.newest()
    assert [noted.request_id for noted in newest] == ["other"] * KEPT + ["told"] * TOLD
    assert [noted.number for noted in newest] == sorted({noted.number for noted in newest}, reverse=True)
    recent.note("told", "chat", "exact", "cost", told())
    assert len(recent.newest()) == KEPT + TOLD - 1, "this one is among the last and the told ones, and comes once"


async def test_a_row_is_made_once_however_often_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    row = snapshot.decision_row

    def counted(one: Any) -> dict[str, Any]:
        made.append(one.number)
        return row(one)

    monkeypatch.setattr(snapshot, "decision_row", counted)
    monkeypatch.setattr(snapshot, "read", lambda _pool: asyncio.sleep(0))
    monkeypatch.setattr(snapshot, "figures", lambda _pool, _pools, _found: {})
    clock, recent = [0.0], RecentDecisions()
    pool = SimpleNamespace(tag="m", recent=recent, ttft=SimpleNamespace(quantile=lambda _share: 0.0))
    page = pages(SimpleNamespace(all=(pool,)), clock)
    for last in (1, 2, KEPT + 9):
        while recent.decided < last:
            recent.note("id", "chat", "exact", "cost", decision() if recent.decided else told())
        clock[0] += 1
        [shown] = json.loads(bytes((await page.data(request())).body))["models"]
        assert shown["decisions"][0]["number"] == last
        assert shown["decisions"][-1]["candidates"][0]["cost_s"] == 0.5
    assert made == [1, 2, *range(KEPT + 9, 9, -1)]
    assert len(page._rows["m"]) == KEPT + 1


def point(at: float, decided: int = 0, matched: int = 0, prompt: int = 0) -> Point:
    return Point(at, decided, 0, prompt, matched, None, 0.1234567, None, 2)


def test_the_plots_show_rates_and_gaps() -> None:
    found = columns([point(0), point(5, 10, 30, 40), point(10, 10, 30, 40), point(20, 20, 40, 80)])
    assert found["age_s"] == [15, 10, 0]
    assert found["decisions_per_s"] == [2, 0, 1]
    assert found["hit_ratio"] == [0.75, None, 0.25]
    assert found["p90_s"] == [0.1235] * 3
    assert found["p50_s"] == [None] * 3
    assert columns([point(3)])["age_s"] == []


async def test_the_history_is_bounded_and_short_rates_need_no_long_past() -> None:
    clock, metrics = [0.0], Metrics()
    pool: Any = SimpleNamespace(tag="m", recent=RecentDecisions(), ttft=SimpleNamespace(quantile=lambda _share: 0.0))
    history = History(SimpleNamespace(all=(pool,)), metrics, lambda: clock[0])  # type: ignore[arg-type]
    for _ in range(POINTS + 20):
        clock[0] += EVERY_S
        for _ in range(10):
            pool.recent.note("id", "chat", "exact", "cost", decision(50))
        await history.look()
    clock[0] += 0.001  # one request in the millisecond after a point must not show as a thousand requests a second
    pool.recent.note("id", "chat", "exact", "cost", decision(50))
    found, lately = history.columns(pool), history.lately(pool)
    assert len(found["age_s"]) == POINTS - 1
    assert set(found["decisions_per_s"]) == {2.0}
    assert max(age for age in found["age_s"] if age is not None) <= SPAN_S
    assert lately == {"decisions_per_s": 2.1, "fallbacks_per_s": 0.0, "hit_ratio": 0.5}


@pytest.mark.parametrize(
    ("reached", "seen", "last", "grace", "unread", "rung"),
    [
        (True, ["proven"], ["proven"], False, False, "redis"),
        (True, [], [], False, False, "redis"),
        (True, ["proven"], ["proven"], True, False, "asked"),
        (True, ["proven", "unheard"], ["proven"], False, False, "asked"),
        (True, [], ["proven"], False, False, "last_known"),
        (False, ["proven"], ["proven"], False, False, "last_known"),
        (True, ["proven"], ["proven"], False, True, "last_known"),
        (False, [], [], False, True, "nothing"),
    ],
)
def test_what_decides_now(
    reached: bool, seen: list[str], last: list[str], grace: bool, unread: bool, rung: str
) -> None:
    def workers(states: list[str]) -> list[Any]:
        return [SimpleNamespace(routable=True, state=WorkerState(state)) for state in states]

    pool: Any = SimpleNamespace(
        view=SimpleNamespace(workers=workers(seen)),
        last_known=SimpleNamespace(workers=workers(last)),
        degraded=SimpleNamespace(asks_redis=True),
        fleet=SimpleNamespace(upkeep=SimpleNamespace(last_tick=Tick(ran=True, grace=grace))),
        unread=unread,
    )
    assert snapshot.rung_of(pool, reached=reached) == rung
    assert rung in snapshot.RUNGS
    assert snapshot.rung_in_words(pool, rung, reached=reached).endswith(".")
    alone, beside = (snapshot.rung_in_words(pool, rung, reached=reached, others=others) for others in (False, True))
    assert ("503" in alone, "503" in beside) == (rung == "nothing", False), "other pools serve what this one cannot"


def test_words_about_a_worker() -> None:
    proven = WorkerView("w.0", {}, None, LoadRow(), 1.0, WorkerState.PROVEN, "proven", "http://w", [])
    drained = replace(proven, state=WorkerState.DRAINING)
    told = [
        snapshot.worker_row(view, None, "m", known_last=last) for view in (proven, drained) for last in (False, True)
    ]
    assert [row["reason"] for row in told] == [
        *("takes requests; its blocks are matched", "took requests when last read"),
        *["nothing runs there any more: it can be stopped"] * 2,
    ]
    assert [row["remedy"].partition(": ")[2] for row in told] == ["", "", *["warmfleet drain w.0 --model m --undo"] * 2]


async def test_while_no_worker_takes_requests_the_page_tells_why(valkey_url: str, model: str) -> None:
    """For some seconds requests go to the last known workers; Redis answers, and knows why each worker takes none."""
    async with (
        engine(model) as first,
        engine("another") as second,
        replica(
            valkey_url, model, admin_port=1, static_workers=(first.url, second.url), blocks_timeout_s=0.3
        ) as router,
    ):
        await router.routable(1)
        await first.close()

        async def lost() -> Any:
            [found] = (await data(router))["models"]
            return found if found["rung"] == "last_known" else None

        found: Any = await poll(lost, 15, "the last worker that took requests is silent")
        assert {worker["state"] for worker in found["workers"]} == {"silent", "misnamed"}
        assert all(worker["remedy"] for worker in found["workers"])
        assert found["rung_reason"].startswith("No worker takes requests. ")
        assert not found["away"]


async def test_a_redis_that_does_not_answer_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "READ_S", 0.01)

    async def never(_workers: object) -> Truth:
        await asyncio.sleep(5)
        return Truth()

    pool: Any = SimpleNamespace(
        view=SimpleNamespace(workers=()), fleet=SimpleNamespace(index=SimpleNamespace(truth=never))
    )
    assert await snapshot.read(pool) == snapshot.Reading(
        False, Truth(), Memory(0, 0, ""), Line(0, 0.0, {}), LedgerView()
    )


async def test_nobody_looks_so_no_decision_tells_more(valkey_url: str, model: str) -> None:
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url, admin_port=1) as router:
        for _ in range(3):
            await router.post({"model": model, "prompt": PROMPT})
        told = (await data(router))["models"][0]["decisions"]
        assert [row["candidates"] for row in told] == [None] * 3
        for _ in range(3):  # in one reading a single one of these decisions is sampled
            await router.post({"model": model, "prompt": PROMPT})
        pool: Pool = _pool(router)
        assert [noted.decision.seen is not None for noted in pool.recent.newest()] == [False, False, True] + [False] * 3


async def test_every_decision_without_redis_has_a_sentence(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = (FleetUnavailable("away"), NoWorker("none"), BadArgument("no"), BadRequest("no"), FleetUnavailable("away"))
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url, admin_port=1) as router:
        pool = _pool(router)
        for error in (*errors, None):

            async def refuse(_question: object, *, explain: bool, error: WarmfleetError | None = error) -> None:
                assert error is not None, f"Redis failed twice, so it is not asked (explain={explain})"
                raise error

            monkeypatch.setattr(type(pool.degraded), "asks_redis", error is not None)
            monkeypatch.setattr(type(pool.fleet.queue), "decide_in_turn", staticmethod(refuse))
            assert (await router.post({"model": model, "prompt": PROMPT}))[0] == 200
        rows = (await data(router))["models"][0]["decisions"]
    reasons = {row["why"]: row["reason"].partition(":")[0] for row in rows}
    refused = {code: f"Redis refused the decision ({code}; the log tells more)" for code in BAD}
    assert reasons == {**FALLBACK, **refused}


BAD = ("bad_argument", "bad_request")


def _pool(router: Replica) -> Pool:
    server: Any = router.server
    page = next(
        route.endpoint.__self__
        for route in server._doors.operators.connections.application.starlette.routes
        if getattr(route, "path", "") == routes.DATA
    )
    pool: Pool = page._pools.all[0]
    return pool
