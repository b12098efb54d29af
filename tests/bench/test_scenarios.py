"""Scenarios on a virtual clock: decisions while the load or the members of a fleet change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.bench.virtual_figures import figures
from tests.bench.virtual_fleet import Plan, play
from tests.bench.virtual_plans import WORKLOADS, engine
from tests.bench.virtual_scenarios import ONE, foreign, hot, join, speeds

from warmfleet_loadtest.traces.trace import generate

EIGHT = Plan((ONE,) * 8)


async def test_a_hot_prefix_does_not_stay_on_one_engine(url: str) -> None:
    told = await hot(url, Plan((ONE,) * 4), 24.0)
    assert told["holders"] >= 2
    assert told["spread_s"] < 3
    assert told["share_of_busiest"] < 0.6


@pytest.mark.long(
    minutes=1,
    shows=(
        "on the virtual clock, a prefix that gets 60 % of the traffic spreads over engines, and contracts afterwards"
    ),
)
@pytest.mark.parametrize("seed", range(3))
async def test_a_hot_prefix_spreads_and_contracts(url: str, seed: int) -> None:
    told = await hot(url, replace(EIGHT, seed=seed))
    assert 2 <= told["holders"] <= 8
    assert told["spread_s"] < 5
    assert told["ttft_p99_during_s"] < 1.5 * told["ttft_p99_before_s"]
    assert told["contracted_to_half_s"] < 60
    assert told["holders_end"] <= told["holders"] / 2


@pytest.mark.long(minutes=1, shows="on the virtual clock, engines with speeds 1:1:2:4 get work in these proportions")
@pytest.mark.parametrize("seed", range(3))
async def test_speeds_are_learned_and_work_follows_them(url: str, seed: int) -> None:
    told = await speeds(url, replace(EIGHT, seed=seed))
    for number, factor in enumerate((1, 1, 2, 4)):
        assert told[f"learned_{number}_over_slowest"] == pytest.approx(factor, rel=0.05)
        assert told[f"work_share_{number}"] == pytest.approx(told[f"fair_share_{number}"], abs=0.12)
    assert told["busy_max_over_mean"] < 1.4  # fast engines finish sooner, and so get more than their share


@pytest.mark.long(
    minutes=1,
    shows="on the virtual clock, load that other clients put on engines is taken into account",
)
async def test_load_past_the_fleet_is_as_good_as_known(url: str) -> None:
    """Takes several seeds together, because ten requests make the P99 of one run."""
    runs = [await foreign(url, replace(EIGHT, seed=seed)) for seed in range(3)]
    p99 = {known: sum(run[f"ttft_p99_s_{known}"] for run in runs) for known in ("reported", "booked", "no")}
    assert p99["reported"] <= 1.15 * p99["booked"]
    assert p99["no"] > 1.15 * p99["booked"], "else nothing was to be known"


@pytest.mark.long(minutes=1, shows="on the virtual clock, an engine that joins is not overrun")
async def test_an_engine_joins_without_a_stampede(url: str) -> None:
    """Takes several seeds together, because four requests make the P99 of twenty seconds."""
    runs = [await join(url, replace(EIGHT, seed=seed)) for seed in range(3)]
    mean = {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}
    assert all(run["share_first_10s"] < 2 * run["fair_share"] for run in runs)
    assert mean["share_last"] == pytest.approx(mean["fair_share"], abs=0.04)
    assert mean["ttft_p99_after_s"] < 1.25 * mean["ttft_p99_before_s"]


@pytest.mark.long(minutes=1, shows="on the virtual clock, work and evictions are even over the engines at every load")
@pytest.mark.parametrize("utilisation", [0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95])
async def test_work_and_evictions_are_even_at_every_load(url: str, utilisation: float) -> None:
    small = engine(WORKLOADS["generated"].costs, 512)
    plan = Plan((small,) * 8, speed=utilisation / WORKLOADS["generated"].busy)
    told = figures(await play(url, generate(1_200), plan), skip=0.0)
    assert told["evicted"] > 500
    assert told["work_max_over_mean"] <= 1.3
    assert told["evicted_max_over_mean"] <= 1.5
