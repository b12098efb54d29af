"""The bench ``rest``: what it sums up, and that its engines live as real ones do."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.bench import waking_cost
from tests.bench.bench_rest import Shape, totals
from tests.bench.resting_engines import Announced, Engine, join

from warmfleet.fleet import Fleet, connect
from warmfleet_worker.protocol import wire
from warmfleet_worker.stream import connect as plugin_connect

if TYPE_CHECKING:
    import pytest


def test_the_worst_shape_of_a_size_counts_and_only_with_one_replica() -> None:
    one = {"replica": 0.01, "redis": 0.03, "work": 0.004}
    other = {"replica": 0.02, "redis": 0.02, "work": 0.003}
    found = {"1x8": one, "16x64": other, "64x16": one, "64x16_4_replicas": {"replica": 9.0}}
    assert Shape.of("64x16").engines == 1024
    assert totals(found) == {
        "idle_core_share_8": 0.01,
        "idle_work_share_8": 0.004,
        "idle_redis_share_8": 0.03,
        "idle_core_share_1000": 0.02,
        "idle_work_share_1000": 0.004,
        "idle_redis_share_1000": 0.03,
    }


def test_work_after_a_rest_is_compared_with_the_same_work_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(waking_cost, "time", clock)
    assert waking_cost.waking_cost() == {"work_us": 100.0, "rested_work_us": 250.0, "waking_cost": 2.5}


class Clock:
    """A machine on which a piece of work takes 100 us of CPU, and 250 us after a rest."""

    def __init__(self) -> None:
        self.now, self.work_s = 0.0, 100e-6

    def sleep(self, _seconds: float) -> None:
        self.work_s = 250e-6

    def thread_time(self) -> float:
        self.now += self.work_s
        return self.now


async def test_resting_engines_are_proven_and_heard(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = plugin_connect(valkey_url)
    engines = [Engine(valkey_url, plugin, "rest-bench", number, Announced({}, {})) for number in range(2)]
    await join(valkey_url, "rest-bench", engines)
    async with connect(valkey_url) as client:
        fleet = Fleet(client, "rest-bench")
        before = {worker.worker_id: worker for worker in await fleet.workers.read()}
        assert [worker.state for worker in before.values()] == ["proven", "proven"]
        later = time.monotonic() + wire.HEARTBEAT_SECONDS
        monkeypatch.setattr("time.monotonic", lambda: later)
        for engine in engines:
            assert engine.core(time.monotonic()) > time.monotonic()
            engine.server(time.monotonic())
        for engine in engines:
            assert (await fleet.upkeep.apply(engine.worker_id)).entries == 1
            assert (await fleet.upkeep.apply_server(engine.worker_id.removesuffix(".0"))).entries == 1
    plugin.close()
