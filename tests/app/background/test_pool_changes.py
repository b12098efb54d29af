"""Pools that are added to the registry are served, and those that are removed end when nothing is left in them."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.constants_alone import ConstantsAlone

from warmfleet import main
from warmfleet.background import pool_changes
from warmfleet.background.pool_changes import PoolChanges
from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import Renewal
from warmfleet.fleet.pool_registry import PoolEntry
from warmfleet.metrics import Metrics
from warmfleet.pools import open_reservations
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.fleet_view import View
from warmfleet.pools.pool import Pool
from warmfleet.pools.served_models import Pools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.background.stock.checks import StockEngines
    from warmfleet.fleet import Fleet, WorkerView
    from warmfleet.fleet.pool_registry import PoolRegistry


def worker() -> WorkerView:
    told = SimpleNamespace(worker_id="m.w", url="http://w", routable=True, server=None, record={}, approximate=False)
    return cast("WorkerView", told)


class Registry:
    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: tuple[PoolEntry, ...] = ()
        self.away = False

    def ask(self) -> asyncio.Future[dict[bytes, bytes]]:
        future: asyncio.Future[dict[bytes, bytes]] = asyncio.get_running_loop().create_future()
        if self.away:
            future.set_exception(FleetUnavailable("away"))
        else:
            future.set_result({})
        return future

    async def told(self, _: dict[bytes, bytes]) -> tuple[PoolEntry, ...]:
        return self.entries


class Fixture:
    def __init__(self, leave_s: float = 30.0) -> None:
        self.closed: list[str] = []
        self.waiting: set[str] = set()
        self.metrics = Metrics(["m", "other"])
        self.registries = [Registry("m"), Registry("other")]
        self.pools = Pools([self.pool("m"), self.pool("other")])
        registries = cast("Sequence[PoolRegistry]", self.registries)
        waits_in = lambda pool: pool.tag in self.waiting  # noqa: E731
        self.changes = PoolChanges(self.pools, registries, self.pool, self.tasks, waits_in, self.metrics, leave_s)
        self.running: dict[str, asyncio.Task[None]]

    def pool(self, tag: str) -> Pool:
        fleet: Any = ConstantsAlone()

        async def close() -> None:
            self.closed.append(tag)

        fleet.close = close
        return Pool(tag, fleet, DegradedMode(1.0))

    def tasks(self, pool: Pool) -> list[asyncio.Task[None]]:
        task = asyncio.create_task(asyncio.sleep(60), name=pool.tag)
        self.running = {**getattr(self, "running", {}), pool.tag: task}
        return [task]

    async def follow(self, *entries: PoolEntry) -> list[str]:
        """The tags of the model's pools after a round."""
        self.registries[0].entries = entries
        await self.changes.round()
        return [pool.tag for pool in self.pools.served["m"].pools]


async def test_the_registry_decides_where_it_names_pools() -> None:
    fixture = Fixture()
    assert await fixture.follow() == ["m"], "without a registry as the settings say"
    first = fixture.pools.tagged("m")
    assert await fixture.follow(PoolEntry("m"), PoolEntry("m#1")) == ["m", "m#1"]
    assert fixture.pools.tagged("m") is first
    assert {*fixture.running} == {"m", "other", "m#1"}
    assert await fixture.follow(PoolEntry("m", draining=True), PoolEntry("m#1")) == ["m", "m#1"]
    assert fixture.pools.served["m"].draining == {"m"}
    await fixture.follow(PoolEntry("m", draining=True, moving=True), PoolEntry("m#1"))
    assert fixture.pools.served["m"].draining == frozenset(), "it serves with the workers that have not moved yet"
    assert fixture.pools.served["m"].moving == {"m"}, "stock engines are to leave it"
    await fixture.follow(PoolEntry("m", draining=True, moving=True))
    assert fixture.pools.served["m"].moving == {"m"}, "another pool went meanwhile"
    await fixture.follow(PoolEntry("m", draining=True), PoolEntry("m#1"))
    assert fixture.pools.served["m"].moving == frozenset()
    fixture.registries[1].away = True
    with pytest.raises(FleetUnavailable):
        await fixture.follow(PoolEntry("m#1"))
    assert [pool.tag for pool in fixture.pools.served["m"].pools] == ["m#1"], "another model's Redis is away"
    assert [pool.tag for pool in fixture.pools.all] == ["m#1", "other", "m"]
    await fixture.changes.close()
    assert all(task.done() for task in fixture.running.values())


async def test_a_pool_that_leaves_ends_when_nothing_is_left_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[tuple[str, bool]] = []

    async def clear(fleet: Fleet, *, shared: bool) -> None:
        assert fleet is pool.fleet
        cleared.append((pool.tag, shared))
        raise FleetUnavailable("away")

    monkeypatch.setattr(pool_changes, "clear", clear)
    fixture = Fixture(0.0)
    pool = fixture.pools.served["m"].pools[0]
    pool.reservations.add(Renewal("wf-1", "w", 1, 1))
    fixture.metrics.queued.labels("m").set(3)
    fixture.metrics.workers.labels("proven", "m").set(4)
    await fixture.follow(PoolEntry("m#1"))
    assert (fixture.closed, [*fixture.pools.leaving]) == ([], [pool])
    assert await fixture.follow(PoolEntry("m#1"), PoolEntry("m")) == ["m#1", "m"]
    assert fixture.pools.served["m"].pools[1] is pool, "it comes back as it was"
    pool.reservations.remove("wf-1")
    fixture.waiting.add("m")
    await fixture.follow(PoolEntry("m#1"))
    assert [*fixture.pools.leaving] == [pool], "a request waits in its queue"
    assert cleared == []
    fixture.waiting.clear()
    await fixture.follow(PoolEntry("m#1"))
    assert (fixture.closed, [*fixture.pools.leaving]) == (["m"], [])
    assert fixture.running["m"].cancelled()
    assert cleared == [("m", True)], "its keys are deleted, but for those of the model as a whole"
    told = [line for line in fixture.metrics.render().decode().splitlines() if 'model="m"' in line]
    assert [line for line in told if "queued" in line or "warmfleet_workers" in line] == []
    assert any("warmfleet_stream_errors_total" in line for line in told), "counters never go back"
    await fixture.changes.close()


async def test_outcomes_that_no_redis_takes_hold_a_removed_pool_as_long_as_a_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def clear(fleet: Fleet, *, shared: bool) -> None: ...

    monkeypatch.setattr(pool_changes, "clear", clear)
    fixture = Fixture(0.0)
    pool = fixture.pools.served["m"].pools[0]
    pool.reservations.keep_outcome("wf-1", "finished")
    await fixture.follow(PoolEntry("m#1"))
    assert [*fixture.pools.leaving] == [pool]
    now = time.monotonic()
    monkeypatch.setattr(open_reservations, "time", SimpleNamespace(monotonic=lambda: now + 31))
    await fixture.follow(PoolEntry("m#1"))
    assert ([*fixture.pools.leaving], fixture.closed) == ([], ["m"])
    await fixture.changes.close()


async def test_engines_are_registered_in_the_pools_of_the_registry_from_the_first_check_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixture, seen = Fixture(), list[list[str]]()

    async def check() -> bool:
        seen.append([pool.tag for pool in fixture.pools.served["m"].pools])
        return False

    def checking() -> asyncio.Task[None]:
        static = cast("StockEngines", SimpleNamespace(round=check))
        none = cast("Any", None)
        return asyncio.create_task(main._check(static, none, none, fixture.changes))

    first = checking()
    await asyncio.sleep(0)
    fixture.registries[1].away = True
    with pytest.raises(FleetUnavailable):
        await fixture.follow(PoolEntry("m#1"))
    await asyncio.sleep(0)
    assert seen == [], "one registry is still to be read"
    fixture.registries[1].away = False
    await fixture.follow(PoolEntry("m#1"))
    await first
    assert seen == [["m#1"]]
    await fixture.changes.close()

    fixture = Fixture()
    monkeypatch.setattr(pool_changes, "FIRST_READING_S", 0.01)
    await checking()
    assert seen == [["m#1"], ["m"]], "engines of other models wait no longer for a registry that cannot be read"
    monkeypatch.setattr(pool_changes, "FIRST_READING_S", 60.0)
    await checking()
    assert len(seen) == 3, "and only once"
    await fixture.changes.close()


async def test_a_pool_that_a_first_registry_forgot_is_served_while_it_has_workers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fixture = Fixture()
    pool = fixture.pools.served["m"].pools[0]
    assert await fixture.follow(PoolEntry("m#1")) == ["m#1"], "it was not read yet"
    pool.show(View((worker(),), read_at=1.0))
    for _ in range(2):
        assert await fixture.follow(PoolEntry("m#1")) == ["m#1", "m"]
    assert fixture.pools.served["m"].pools[1] is pool
    assert [*fixture.pools.leaving] == []
    assert caplog.text.count("call `warmfleet pools add m`") == 1
    assert await fixture.follow(PoolEntry("m#1"), PoolEntry("m")) == ["m#1", "m"]
    assert await fixture.follow(PoolEntry("m#1")) == ["m#1"], "now it was removed"
    await fixture.changes.close()
