"""Engines without the plugin join, restart and leave; several replicas look after one engine."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.engines.scripted import Engine, answer_well
from tests.support.engines.scripted import engine as stock
from tests.support.polling import poll
from tests.support.replicas.stock_checks import Checks, asked, metrics, sent

from warmfleet.background.stock import checks as stock_engines
from warmfleet.background.stock.checks import MAX_MIRROR_BLOCKS, StockEngines, worker_id
from warmfleet.background.stock.engine_list import EngineList
from warmfleet.engines.allowed_addresses import Addresses
from warmfleet.errors import BadArgument
from warmfleet.fleet import Fleet, connect
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.pool import Pool
from warmfleet.pools.served_models import Pools
from warmfleet.settings import Settings
from warmfleet.timing import Timing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


@asynccontextmanager
async def engines(model: str, count: int) -> AsyncIterator[list[Engine]]:
    """Engines whose pages a test may replace through ``pages``."""
    async with stock(model) as one, stock(model) as two:
        yield [one, two][:count]


PAGE = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="500"} 1.0\nprocess_start_time_seconds %d\n'


async def test_a_listed_engine_is_a_worker_with_the_cache_that_it_announces(
    replica: Callable[..., Checks], model: str
) -> None:
    async with engines(model, 2) as (one, two):
        metrics(two, b"nothing\n")
        checks = replica(one.url, f"{two.url}#cache_tokens=4096")
        await checks.round()
        known = await checks.workers()
        assert {view.state for view in known.values()} == {"approximate"}
        assert (known[one.url].load.capacity_blocks, known[two.url].load.capacity_blocks) == (8_000, 256)
        metrics(one, b"nothing\n")
        other = replica(one.url)
        await other.round()
        assert (await other.workers())[one.url].load.capacity_blocks == MAX_MIRROR_BLOCKS, "it announces nothing"


async def test_a_new_process_has_an_empty_mirror_even_if_no_check_failed(
    replica: Callable[..., Checks], model: str
) -> None:
    async with engines(model, 1) as (engine,):
        metrics(engine, PAGE % 1_763_000_000)
        checks = replica(engine.url, facts_interval_s=0.0)
        await checks.round()
        await checks.fleet.upkeep.step()
        assert [await sent(checks, engine.url), await sent(checks, engine.url)] == [0, 31]
        metrics(engine, None)
        await checks.round()
        assert await sent(checks, engine.url) == 31, "its page was not read: nothing has changed"
        metrics(engine, PAGE % 1_763_000_020)
        await checks.round()
        assert await sent(checks, engine.url) == 0
        assert (await checks.workers())[engine.url].load.capacity_blocks == 500


async def test_an_engine_that_is_not_read_at_first_is_not_taken_for_another(
    replica: Callable[..., Checks], model: str
) -> None:
    """Otherwise two replicas would register the engine in turn with different blocks and empty its mirror each time."""
    async with engines(model, 1) as (engine,):
        metrics(engine, None)
        checks = replica(engine.url)
        await checks.round()
        assert await checks.workers() == {}
        metrics(engine, PAGE % 1)
        await checks.round()
        assert (await checks.workers())[engine.url].load.capacity_blocks == 500


async def test_an_engine_that_a_file_no_longer_lists_leaves_when_nothing_runs_there(
    replica: Callable[..., Checks], model: str, tmp_path: Path
) -> None:
    path = tmp_path / "engines"
    async with engines(model, 2) as (one, two):
        path.write_text(f"{one.url}\n")
        checks = replica(f"file://{path}")
        await checks.round()
        await checks.fleet.upkeep.step()
        await sent(checks, one.url)
        ask = asked(b"another " * 100)
        await checks.fleet.bookings.decide(ask)
        path.write_text(f"{two.url}\n")
        await checks.round()
        assert (await checks.workers())[one.url].state == "approximate", "another replica may list it"
        await checks.round()
        known = await checks.workers()
        assert (known[one.url].state, known[two.url].state) == ("draining", "approximate")
        await checks.round()
        assert (await checks.workers())[one.url].load.in_flight == 1, "it may end what it has"
        await checks.fleet.bookings.settle(ask.reservation, "finished")
        await checks.round()
        assert set(await checks.workers()) == {two.url}
        while (await checks.fleet.upkeep.collect())[1]:
            pass
        left = [key async for key in checks.fleet.redis.scan_iter(f"{checks.fleet.keys.prefix}[xl]*:*")]
        assert left == [], "what it was sent is forgotten"
        path.write_text(f"{one.url}\n{two.url}\n")
        await checks.round()
        assert (await checks.workers())[one.url].state == "approximate", "it may come back"


async def test_an_engine_that_died_before_it_left_is_forgotten(
    replica: Callable[..., Checks], model: str, tmp_path: Path
) -> None:
    path = tmp_path / "engines"
    async with engines(model, 1) as (engine,):
        path.write_text(engine.url)
        checks = replica(f"file://{path}")
        await checks.round()
        path.write_text("")
        await engine.die()
        await checks.round()
        await checks.round()
        assert await checks.workers() == {}


async def test_replicas_with_other_lists_share_all_engines(
    replica: Callable[..., Checks], model: str, tmp_path: Path
) -> None:
    """The fleet has the engines of all lists. An engine leaves when the last list with it is gone."""
    path = tmp_path / "engines"
    async with engines(model, 2) as (one, two):
        path.write_text(f"{one.url}\n{two.url}\n")
        a, b = replica(f"file://{path}"), replica(one.url)
        for checks in (a, b, a, b):
            await checks.round()
        known = await b.workers()
        assert set(known) == {one.url, two.url}
        slots = {url: view.load.slot for url, view in known.items()}
        path.write_text("")
        for checks in (a, b, a, b, a, b):
            await checks.round()
            assert (await b.workers())[one.url].state == "approximate", "it is never drained"
        assert {url: view.load.slot for url, view in (await b.workers()).items()} == {one.url: slots[one.url]}
        assert (await b.workers())[one.url].state == "approximate", "the other replica still lists it"
        assert not a.engines._checked, "who lists it no longer leaves it to the others"


async def test_a_replica_that_cannot_reach_an_engine_leaves_it_to_the_others(
    replica: Callable[..., Checks], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engines(model, 1) as (engine,):
        a, b = replica(engine.url), replica(engine.url)
        for checks in (a, b, a):
            await checks.round()
        slot = await a.slot(engine.url)
        monkeypatch.setattr(b.addresses, "name", lambda _urls: None)
        b.addresses._named = set()
        for checks in (b, a, b, a, b):
            await asyncio.sleep(0.1)  # checks are apart by more than a call to Redis takes, as in a fleet
            await checks.round()
            assert await a.slot(engine.url) == slot
            assert (await a.workers())[engine.url].state == "approximate"
        await engine.die()
        for checks in (b, a):
            await checks.round()
        assert (await a.workers())[engine.url].state == "silent"


async def test_a_list_that_cannot_be_read_stops_no_check(
    replica: Callable[..., Checks], model: str, tmp_path: Path
) -> None:
    path = tmp_path / "engines"
    async with engines(model, 1) as (engine,):
        path.write_text(engine.url)
        checks = replica(f"file://{path}")
        await checks.round()
        path.write_text("nonsense")
        await checks.fleet.redis.zadd(checks.fleet.keys.alive, {worker_id(engine.url): 1})
        with pytest.raises(BadArgument, match="line 1"):
            await checks.round()
        assert (await checks.workers())[engine.url].state == "approximate", "it was checked all the same"


async def test_engines_that_fail_are_asked_in_turn_and_keep_no_other_waiting(
    replica: Callable[..., Checks], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock_engines, "FAILED_IN_A_ROUND", 1)
    monkeypatch.setattr(stock_engines, "CHECKS_AT_ONCE", 1)
    monkeypatch.setattr(stock_engines, "ROUND_S", 60.0)
    dead = [f"http://127.0.0.1:{port}" for port in (7, 9, 11)]
    async with engines(model, 1) as (engine,):
        checks = replica(*dead, engine.url)
        look, asked, healthy = checks.engines._look, [], asyncio.Event()

        async def looked(listed: Any, last: Any) -> Any:
            asked.append(listed.url)
            if listed.url in dead and len(asked) > 4:
                await healthy.wait()
            found = await look(listed, last)
            healthy.set()
            return found

        monkeypatch.setattr(checks.engines, "_look", looked)
        await checks.round()
        assert sorted(asked) == sorted([*dead, engine.url]), "all are asked at first"
        for url in dead:
            asked.clear()
            asked += [""] * 4
            healthy.clear()
            await asyncio.wait_for(checks.round(), 20)
            assert sorted(asked[4:]) == sorted([url, engine.url])
        asked.clear()
        checks.client.get = answered_by(checks.client.get, dead[0], engine.url)  # type: ignore[method-assign]
        await checks.round()
        assert set(await checks.workers()) == {dead[0], engine.url}, "one that came back is in with its turn"
        asked.clear()
        await checks.round()
        assert sorted(asked) == sorted([dead[0], dead[1], engine.url]), "and is asked in every round"


async def test_so_many_engines_are_asked_at_once_that_all_may_die_at_once(
    replica: Callable[..., Checks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock_engines, "CHECKS_AT_ONCE", 1)
    checks = replica(*[f"http://127.0.0.1:{port}" for port in range(1, 13)])
    asked, times_out = [], asyncio.Event()

    async def looked(listed: Any, _last: Any) -> Any:
        asked.append(listed.url)
        await times_out.wait()
        raise ValueError("dead")

    monkeypatch.setattr(checks.engines, "_look", looked)
    round_ = asyncio.create_task(checks.round())
    await poll(lambda: len(asked) == 4, what="a third: three time-outs of 3 s are 9 s, and engines live for 15")
    await asyncio.sleep(0)
    assert len(asked) == 4
    times_out.set()
    await round_
    assert len(asked) == 12


def answered_by(get: Callable[..., Any], url: str, other: str) -> Callable[..., Any]:
    """Send the requests to ``url`` to the engine ``other``."""

    async def instead(base: str, *more: Any) -> Any:
        return await get(other if base == url else base, *more)

    return instead


async def test_engines_that_leave_are_asked_a_few_at_a_time(
    replica: Callable[..., Checks], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock_engines, "CHECKS_AT_ONCE", 1)
    path = tmp_path / "engines"
    async with engines(model, 2) as (one, two):
        path.write_text(f"{one.url}\n{two.url}\n")
        checks = replica(f"file://{path}")
        await checks.round()
        path.write_text("")
        under_way, most = 0, 0

        async def healthy(*_: Any) -> bool:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0)
            under_way -= 1
            return True

        monkeypatch.setattr(checks.client, "healthy", healthy)
        await checks.round()
        assert most == 1


@pytest.mark.parametrize(
    ("broken", "cause", "reason"),
    [
        ({"late": {"/v1/models"}}, "late", "The worker does not answer: TimeoutError"),
        ({"statuses": {"/v1/models": "401 x"}}, "locked", "/v1/models answered 401"),
        ({"statuses": {"/v1/models": "500 x"}}, "ill", "/v1/models answered 500"),
        ({"_page": lambda _path: b"{}"}, "ill", "/v1/models answers otherwise than OpenAI's API"),
        ({"hangs": True}, "late", "The worker does not answer: TimeoutError"),
    ],
)
async def test_a_worker_tells_why_its_check_failed_until_one_passes(
    replica: Callable[..., Checks],
    model: str,
    broken: dict[str, Any],
    cause: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The page names the cause, because starting an engine helps neither against a changed key nor against a hang."""
    async with engines(model, 1) as (engine,):
        checks = replica(engine.url, check_timeout_s=0.3)
        await checks.round()
        with monkeypatch.context() as patched:
            for name, value in broken.items():
                patched.setattr(engine, name, value)
            await checks.round()
            worker = (await checks.workers())[engine.url]
            assert (worker.heard, worker.record["cause"], worker.record["reason"]) == (False, cause, reason)
        await checks.round()
        worker = (await checks.workers())[engine.url]
        assert worker.heard
        assert not {"cause", "reason"} & worker.record.keys()


async def test_a_worker_whose_engine_is_gone_says_so(replica: Callable[..., Checks], model: str) -> None:
    async with engines(model, 1) as (engine,):
        checks = replica(engine.url)
        await checks.round()
    await checks.round()
    worker = (await checks.workers())[engine.url]
    assert (worker.heard, worker.record["cause"]) == (False, "away")


async def test_an_engine_that_moves_to_another_pool_takes_no_more_requests_in_the_one_before(
    replica: Callable[..., Checks], model: str, valkey_url: str
) -> None:
    """Otherwise both pools would choose the engine for one TTL after its last check, each without the other's load."""
    async with engines(model, 1) as (engine,):
        checks = [replica(engine.url), replica(engine.url)]
        fleets = {tag: Fleet(connect(valkey_url, timeout_s=5), tag) for tag in (f"{model}#1", f"{model}#2")}
        for check in checks:
            check.engines._pools = Pools([Pool(tag, fleet, DegradedMode(1.0)) for tag, fleet in fleets.items()])

        async def routable() -> list[str]:
            return [
                tag for tag, fleet in fleets.items() if any(worker.routable for worker in await fleet.workers.read())
            ]

        for check in checks:
            await check.round()
        (before,) = await routable()
        (after,) = fleets.keys() - {before}
        ask = asked(b"word " * 400)
        assert (await fleets[before].bookings.decide(ask)).url == engine.url
        for check in checks:
            check.engines._pools.served[model].drain(frozenset({before}))
        await checks[0].round()
        await checks[1].round()
        assert await routable() == [after]
        await fleets[before].bookings.settle(ask.reservation, "finished")
        assert [worker.load.in_flight for worker in await fleets[before].workers.read()] == [0], (
            "what it had begun is given back"
        )
        for fleet in fleets.values():
            await fleet.close()


async def test_the_models_of_an_engine_must_be_the_fleets(valkey_url: str, model: str) -> None:
    async with stock("another", answer_well) as engine:
        checks = Checks(valkey_url, model, [engine.url])
        second = Pool(f"{model}-2", checks.fleet, DegradedMode(1.0))
        checks.engines._pools = Pools([*checks.engines._pools.all, second])
        await checks.round()
        assert await checks.workers() == {}
        cast("Any", engine)._page = lambda _path: json.dumps({"data": [{"id": model}, {"id": "lora"}]}).encode()
        await checks.round()
        assert (await checks.workers())[engine.url].models == [model, "lora"]
        await checks.client.close()
        await checks.fleet.close()


def test_engines_known_by_their_url_are_spread_over_the_pools_that_serve() -> None:
    """All replicas choose the same pool for an engine. A drained pool's engines go to pools that are not drained."""
    tags = ["m#1", "m#2", "m#3"]

    def pools_with(*draining: str, moving: str = "") -> dict[str, str]:
        made = [Pool(tag, cast("Fleet", None), DegradedMode(1.0)) for tag in tags]
        pools = Pools(made)
        pools.served["m"].drain(frozenset(draining), frozenset({moving}))
        settings = Settings(models=tuple(tags))
        checks = StockEngines(pools, cast("Any", None), EngineList([]), Addresses(()), settings, Timing())
        return {url: checks._pool_of(url, ["m"], None).tag for url in (f"http://gpu{n}:8000" for n in range(60))}

    before, after = pools_with(), pools_with("m#2")
    assert all(10 <= list(before.values()).count(tag) <= 30 for tag in tags)
    assert {url for url, tag in before.items() if after[url] != tag} == {url for url in before if before[url] == "m#2"}
    assert pools_with(moving="m#2") == after
    assert set(pools_with(*tags).values()) == set(tags), "when all are drained, they stay"
