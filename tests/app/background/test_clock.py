"""Tasks of a replica wake at the same moments, whenever they began."""

from __future__ import annotations

import asyncio

import pytest

from warmfleet.background import upkeep
from warmfleet.background.clock import Clock
from warmfleet.fleet.layout import LAYOUT
from warmfleet.fleet.upkeep import Pace


class LoopTime:
    """A stand-in for the event loop's time, which the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.3
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)


async def test_tasks_that_began_at_different_moments_wake_together(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = LoopTime(monkeypatch)
    clock, moments = Clock(), set[float]()
    for late_s in (0.0, 0.2, 0.55, 0.9):
        loop.now = 1_000.3 + late_s
        moments.add(round(loop.now + clock.until(1.0), 6))
        moments.add(round(loop.now + clock.until(5.0), 6) - 4.0)
    assert moments == {1_001.3}


@pytest.mark.parametrize("period_s", [0.001, 0.1, 1.0, 30.0])
async def test_each_beat_comes_once_even_if_a_timer_is_early(monkeypatch: pytest.MonkeyPatch, period_s: float) -> None:
    loop = LoopTime(monkeypatch)
    clock = Clock()
    for early_s in (0.0, 0.000_02, min(0.002, period_s / 32)):
        loop.now = 1_000.3 + 7 * period_s - early_s
        assert loop.now + clock.until(period_s) == pytest.approx(1_000.3 + 8 * period_s)


async def test_a_round_that_takes_nearly_its_whole_period_has_the_next_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = LoopTime(monkeypatch)
    clock = Clock()
    loop.now += 1.98
    assert clock.until(2.0) == pytest.approx(0.02)


async def test_pools_share_a_few_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    LoopTime(monkeypatch)
    clock, shares = Clock(), upkeep.REST_SHARES
    waits = [clock.until(upkeep.REST_STEP_S, number / shares) for number in range(shares)]
    assert [round(wait / upkeep.REST_STEP_S, 6) for wait in waits] == [1.0, *(n / shares for n in range(1, shares))]


def test_a_fleet_at_rest_is_never_taken_for_deaf() -> None:
    """Ticks at rest come more often than GRACE_AFTER_MS, after which `tick` and decisions would begin grace."""
    after_ms, step_ms = int(LAYOUT["GRACE_AFTER_MS"]), 1_000 * upkeep.REST_STEP_S
    assert step_ms + Pace().rest_gap_ms < after_ms, "the replica that ticked ends, and the others had left it the tick"
    assert 2 * step_ms < after_ms, "a step comes so late that its replica misses a beat"
