"""Tasks of a replica wake at the same moments, whenever they began."""

from __future__ import annotations

import asyncio

import pytest

from warmfleet.background import upkeep
from warmfleet.background.beats import EARLY, Beats


class Clock:
    """Stands for the time of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.3
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)


async def test_tasks_that_began_at_different_moments_wake_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    beats, moments = Beats(), set[float]()
    for late_s in (0.0, 0.2, 0.55, 0.9):
        clock.now = 1_000.3 + late_s
        moments.add(round(clock.now + beats.until(1.0), 6))
        moments.add(round(clock.now + beats.until(5.0), 6) - 4.0)
    assert moments == {1_001.3}


@pytest.mark.parametrize("period_s", [0.001, 0.1, 1.0, 30.0])
async def test_each_beat_comes_once_even_if_a_timer_is_early(monkeypatch: pytest.MonkeyPatch, period_s: float) -> None:
    clock = Clock(monkeypatch)
    beats = Beats()
    for early in (0.0, 0.001, EARLY / 2):
        clock.now = 1_000.3 + 7 * period_s - early * period_s
        assert period_s * EARLY < beats.until(period_s) <= period_s * (1 + EARLY)
        assert clock.now + beats.until(period_s) == pytest.approx(1_000.3 + 8 * period_s)


async def test_pools_share_a_few_moments_and_none_is_left_without_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    beats, shares = Beats(), upkeep.REST_SHARES
    waits = [beats.until(upkeep.REST_STEP_S, number / shares) for number in range(shares)]
    assert [round(wait / upkeep.REST_STEP_S, 6) for wait in waits] == [1.0, *(n / shares for n in range(1, shares))]
    assert upkeep.REST_STEP_S * (1 + EARLY) < 2.5, "then the fleet would be taken for deaf (lua/tick.lua)"
    assert clock.now == 1_000.3
