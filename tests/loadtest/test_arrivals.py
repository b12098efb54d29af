"""Open-loop arrivals: every shape keeps the mean rate, and has the form that its name says."""

from __future__ import annotations

import math
from itertools import islice, pairwise

import pytest

from warmfleet_loadtest.users.arrivals import BURST_FACTOR, BURST_PERIOD_S, BURST_S, SHAPES, Arrivals

RATE, SECONDS = 20.0, 600.0


def times(shape: str, seed: str = "s") -> list[float]:
    return list(Arrivals(shape, RATE, SECONDS, seed).times())


def rate(found: list[float], since: float, until: float) -> float:
    return sum(since <= at < until for at in found) / (until - since)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_keeps_the_mean_rate_and_ends_with_the_run(shape: str) -> None:
    found = times(shape)

    assert found == sorted(found)
    assert found[0] >= 0
    assert found[-1] < SECONDS
    assert len(found) == pytest.approx(RATE * SECONDS, abs=4 * math.sqrt(RATE * SECONDS))


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_seeds_give_equal_times_and_others_do_not(shape: str) -> None:
    assert times(shape) == times(shape)
    assert times(shape) != times(shape, "another")


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert {round(later - at, 6) for at, later in pairwise(times("constant"))} == {1 / RATE}


def test_poisson_arrivals_are_not() -> None:
    gaps = sorted(later - at for at, later in pairwise(times("poisson")))

    assert gaps[len(gaps) // 2] == pytest.approx(math.log(2) / RATE, rel=0.1)  # the median of an exponential


def test_a_burst_comes_every_minute() -> None:
    begin = (BURST_PERIOD_S - BURST_S) / 2
    bursts = [rate(times("burst"), at + begin, at + begin + BURST_S) for at in range(0, 600, 60)]

    assert sum(bursts) / len(bursts) == pytest.approx(BURST_FACTOR * RATE, rel=0.1)
    assert rate(times("burst"), 0, begin) < RATE


def test_a_ramp_rises() -> None:
    quarters = [rate(times("ramp"), at, at + 150) for at in range(0, 600, 150)]

    assert quarters == sorted(quarters)
    assert quarters[3] / quarters[0] == pytest.approx(1.6 / 0.4, rel=0.2)


def test_a_day_has_its_peak_in_the_middle() -> None:
    found = times("diurnal")

    assert rate(found, 250, 350) > 1.5 * RATE
    assert rate(found, 0, 50) < 0.5 * RATE > rate(found, 550, 600)


def test_a_run_without_an_end_goes_on() -> None:
    for shape in SHAPES:
        assert len(list(islice(Arrivals(shape, RATE, math.inf).times(), 100))) == 100
