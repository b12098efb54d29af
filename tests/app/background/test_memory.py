"""The replica reads how full Redis is, and passes the share on to the next tick, the metrics and the log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.constants_alone import ConstantsAlone
from tests.support.redis.servers import server as server_of
from tests.support.redis.servers import valkey_binary

from warmfleet.background.redis_memory import MemoryWatch
from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import Fleet, Tick, connect
from warmfleet.fleet.upkeep import Pace
from warmfleet.metrics import Metrics
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.pool import Pool
from warmfleet.pools.served_models import Pools, ServedModel

if TYPE_CHECKING:
    from warmfleet.fleet import Memory


async def test_memory_figures_reach_the_next_tick_the_metrics_and_the_log(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    with server_of(valkey_binary()) as url:
        async with connect(url, timeout_s=5) as client:
            fleet, metrics = Fleet(client, model), Metrics()
            fleet.upkeep.pace = Pace(min_gap_ms=0, short_ms=0)
            pool = Pool(model, fleet, DegradedMode(1.0))
            watch = MemoryWatch(Pools([pool]), metrics)
            await client.config_set("maxmemory", (await fleet.index.memory()).used + 100_000)
            await client.config_set("maxmemory-policy", "allkeys-lru")
            for _ in range(2):
                await watch.look()
                await fleet.upkeep.tick(used_permille=pool.used_permille)
            assert fleet.upkeep.last_tick.short
            assert metrics.memory_used_ratio._value.get() > 0.85
            assert metrics.memory_short._value.get() == 1
            await client.config_set("maxmemory", 0)
            await watch.look()
            await fleet.upkeep.tick(used_permille=pool.used_permille)
            await watch.look()
            assert metrics.memory_short._value.get() == 0
            assert len([line for line in caplog.messages if "maxmemory-policy is allkeys-lru" in line]) == 1
            assert len([line for line in caplog.messages if "memory" in line or "room" in line]) == 3
        pool = Pool(model, Fleet(connect("unix:///nowhere/s"), model), DegradedMode(1.0))
        pool.used_permille = 900
        with pytest.raises(FleetUnavailable):
            await MemoryWatch(Pools([pool]), metrics).look()
        assert pool.used_permille == -1


class Told(ConstantsAlone):
    """A fleet whose Redis reports these figures. memory: None while Redis is away."""

    def __init__(self, memory: Memory | None, *, short: bool = False) -> None:
        super().__init__()
        self.memory_told, self.line = memory, self
        self.scripts = self.index = self
        self.upkeep = SimpleNamespace(last_tick=Tick(ran=True, grace=False, short=short))

    async def memory(self) -> Memory:
        if self.memory_told is None:
            raise FleetUnavailable("away")
        return self.memory_told


async def test_metrics_tell_of_the_pools_whose_redis_answers() -> None:
    full = cast("Memory", SimpleNamespace(used_permille=800, used=8_000, policy="noeviction"))
    here, away, metrics = Told(full, short=True), Told(None), Metrics()
    one, two = (Pool(tag, cast("Any", told), DegradedMode(1.0)) for tag, told in (("m#1", here), ("m#2", away)))
    pools = Pools([one, two])
    watch = MemoryWatch(pools, metrics)
    with pytest.raises(FleetUnavailable):
        await watch.look()
    told = (metrics.memory_used_ratio, metrics.memory_used_bytes, metrics.memory_short)
    assert [gauge._value.get() for gauge in told] == [0.8, 8_000, 1]
    pools.change(ServedModel("m", [two]))
    pools.forget(one)
    with pytest.raises(FleetUnavailable):
        await watch.look()
    assert metrics.memory_short._value.get() == 0, "the short pool was removed"
