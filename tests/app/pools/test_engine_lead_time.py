"""Replicas measure the time that requests take to reach engines, and give engines as much prefill in advance."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
from tests.support.fleet.constants_alone import ConstantsAlone

from warmfleet.fleet import Decision, QueueLimits
from warmfleet.pools.engine_lead_time import LOOK_EACH, MOST_S, EngineLeadTime

if TYPE_CHECKING:
    from warmfleet.fleet import Fleet

SPEED_TPS = 10_000


def decision(prefill_tokens: int = 1_000, *, wait: int = 0, flagged: bool = False, stock: bool = False) -> Decision:
    return Decision(
        "wf-0a", "booked", "w.0", "w", "http://w", 0, 10, False, flagged, 0.1, wait, stock, prefill_tokens, 0
    )


def begun(limit_s: float = 0.05, objective_s: float = 0.0) -> tuple[EngineLeadTime, ConstantsAlone]:
    fleet = ConstantsAlone(limits=QueueLimits(limit_s, 7, 1.0))
    return EngineLeadTime(cast("Fleet", fleet), objective_s), fleet


def told(way: EngineLeadTime, way_s: float, made: Decision | None = None, speed_tps: int = SPEED_TPS) -> None:
    """Report LOOK_EACH requests whose first byte came ``way_s`` seconds after the prefill."""
    made = made or decision()
    for _ in range(LOOK_EACH):
        way.first_byte(made, speed_tps, made.prefill_tokens / SPEED_TPS + way_s)


def test_engines_get_as_much_ahead_as_lasts_for_twice_the_way() -> None:
    way, fleet = begun()
    told(way, 0.005)
    assert fleet.constants.limits == QueueLimits(0.05, 7, 1.0), "the way is short"
    for _ in range(4):
        told(way, 0.112)
    assert fleet.constants.limits.max_engine_wait_s == pytest.approx(0.24)
    for _ in range(4):
        told(way, 0.005)
    assert fleet.constants.limits.max_engine_wait_s == 0.05, "as it was set"


def test_engines_get_as_much_ahead_as_makes_a_step_worth_its_time() -> None:
    way, fleet = begun()
    way.steps(0.002)
    assert fleet.constants.limits == QueueLimits(0.05, 7, 1.0), "steps are short"
    way.steps(0.01)
    assert fleet.constants.limits.max_engine_wait_s == pytest.approx(0.16)
    told(way, 0.005)
    assert fleet.constants.limits.max_engine_wait_s == pytest.approx(0.16), "the way is short"
    told(way, 9.0)
    told(way, 9.0)
    assert fleet.constants.limits.max_engine_wait_s == MOST_S
    for _ in range(4):
        told(way, 0.005)
    way.steps(0.0)
    assert fleet.constants.limits.max_engine_wait_s == 0.05, "as it was set"


def test_the_more_waits_the_more_may_be_in_a_step() -> None:
    way, fleet = begun()
    way.waiting(9.0)
    assert fleet.constants.limits.max_engine_wait_s == 0.05, "no engine tells how long its steps take"
    way.steps(0.005)
    for waiting_s, expected in ((0.1, 0.08), (0.4, 0.2), (9.0, 0.32), (0.0, 0.08)):
        way.waiting(waiting_s)
        assert fleet.constants.limits.max_engine_wait_s == pytest.approx(expected)


@pytest.mark.parametrize(("slow", "expected"), [(1 / 3, 0.05), (2 / 3, 0.12)], ids=["a third", "two thirds"])
def test_the_median_counts(slow: float, expected: float) -> None:
    """A few slow answers do not change the lead; a few quick answers do not hide that most answers are slow."""
    way, fleet = begun()
    for number in range(66):
        way.first_byte(decision(), SPEED_TPS, 0.1 + (0.052 if number % 3 < 3 * slow else 0.01))
    assert fleet.constants.limits.max_engine_wait_s == pytest.approx(expected)


@pytest.mark.parametrize(
    ("limit_s", "objective_s", "expected"), [(0.0, 0.0, 0.0), (2.0, 0.0, 2.0), (0.05, 0.0, MOST_S), (0.05, 0.2, 0.2)]
)
def test_bounds(limit_s: float, objective_s: float, expected: float) -> None:
    """A disabled queue and a larger limit stay, the objective is kept, and a slow engine does not raise the lead."""
    way, fleet = begun(limit_s, objective_s)
    told(way, 9.0)
    assert fleet.constants.limits.max_engine_wait_s == expected


@pytest.mark.parametrize(
    ("made", "speed_tps"),
    [
        (decision(wait=500), SPEED_TPS),
        (decision(prefill_tokens=5_000), SPEED_TPS),
        (decision(flagged=True), SPEED_TPS),
        (decision(stock=True), SPEED_TPS),
        (decision(), 0),
    ],
    ids=["others are before it", "long prefill", "its match is a guess", "its speed is a guess", "no speed"],
)
def test_requests_that_do_not_show_the_way(made: Decision, speed_tps: int) -> None:
    way, fleet = begun()
    told(way, 0.2, made, speed_tps)
    assert fleet.constants.limits.max_engine_wait_s == 0.05
