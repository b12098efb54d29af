"""Quantiles of clients' waits in the last minute are exact to half a bucket and need fixed memory."""

from __future__ import annotations

import math
import random
import sys
from typing import TYPE_CHECKING

import pytest

from warmfleet.errors import BadArgument
from warmfleet.main import create_app
from warmfleet.pools.ttft_window import BUCKETS, ENOUGH, LEAST_S, PER_OCTAVE, SLICES, WINDOW_S, TtftWindow
from warmfleet.settings import PerModel, Settings

if TYPE_CHECKING:
    from collections.abc import Callable

ERROR = 2 ** (0.5 / PER_OCTAVE) - 1  # the error of half a bucket


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


SHAPES: dict[str, Callable[[random.Random], float]] = {
    "lognormal": lambda rng: rng.lognormvariate(-2, 1.5),
    "uniform": lambda rng: rng.uniform(0.001, 3),
    "two humps": lambda rng: rng.choice((0.02, 4.0)) * rng.uniform(0.9, 1.1),
    "heavy tail": lambda rng: 0.01 * rng.paretovariate(0.8),
    "constant": lambda _rng: 0.25,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 7, 5_000])
def test_quantiles_are_right_to_half_a_bucket(shape: str, count: int) -> None:
    rng, found = random.Random(f"{shape} {count}"), TtftWindow(clock=Clock())
    waits = sorted(SHAPES[shape](rng) for _ in range(count))
    for wait in rng.sample(waits, count):
        found.observe(wait)
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = waits[max(1, math.ceil(share * count)) - 1]
        if exact < LEAST_S * 2 ** (BUCKETS / PER_OCTAVE):
            assert found.quantile(share) == pytest.approx(exact, rel=ERROR * 1.001), share


@pytest.mark.parametrize("wait", [0.0, -1.0, 1e-9, LEAST_S, 1e3, 1e9])
def test_any_wait_is_counted_somewhere(wait: float) -> None:
    found = TtftWindow(clock=Clock())
    found.observe(wait)
    assert found.count == 1
    assert LEAST_S <= found.quantile(0.5) < 2_000


def test_waits_older_than_the_window_are_forgotten() -> None:
    """The window equals a list of all waits with times, over quiet and busy spells, some longer than the window."""
    rng, clock, slice_s = random.Random(3), Clock(), WINDOW_S / SLICES
    found, told = TtftWindow(clock=clock), list[tuple[float, float]]()
    for _ in range(3_000):
        clock.now += rng.choice((0.0, 0.01, 0.5, 6.0, 6.0, 70.0)) if rng.random() < 0.1 else 0.0
        wait = rng.lognormvariate(-2, 1)
        found.observe(wait)
        told.append((clock.now, wait))
        begin = (int(clock.now / slice_s) - SLICES + 1) * slice_s
        recent = sorted(wait for at, wait in told if at >= begin)
        assert found.count == len(recent)
        exact = recent[max(1, math.ceil(0.9 * len(recent))) - 1]
        assert found.quantile(0.9) == pytest.approx(exact, rel=ERROR * 1.001)
    clock.now += WINDOW_S
    assert (found.quantile(0.9), found.count) == (0.0, 0)


def test_its_size_does_not_grow() -> None:
    def size() -> int:
        return sum(sys.getsizeof(part) for part in (found._total, *found._slices)) + len(vars(found))

    clock = Clock()
    found = TtftWindow(clock=clock)
    before = size()
    for number in range(20_000):
        clock.now += 0.05
        found.observe(random.expovariate(1 + number % 7))
    assert size() == before < 25_000


def test_off_by_default_and_without_knowledge() -> None:
    assert Settings.from_environment({}).ttft_objective_s.of("any") == 0
    none, some = TtftWindow(clock=Clock()), TtftWindow(0.5, Clock())
    for _ in range(ENOUGH - 1):
        none.observe(2.0)
        some.observe(2.0)
    assert (none.in_force_s, some.in_force_s) == (0, 0)
    none.observe(2.0)
    assert none.in_force_s == 0


def test_the_objective_in_force_follows_the_waits() -> None:
    """No objective is in force while nine of ten waits meet it; otherwise the median is, up to the objective."""
    clock = Clock()
    found = TtftWindow(0.5, clock)
    seen = []
    for quick, slow in ((0.1, 0.4), (0.1, 2.0), (0.2, 2.0), (2.0, 9.0), (0.1, 0.1)):
        clock.now += WINDOW_S
        for number in range(2 * ENOUGH):
            found.observe(slow if number % 5 == 0 else quick)
        clock.now += WINDOW_S / SLICES
        seen.append(found.in_force_s)
    assert seen == pytest.approx([0, 0.1, 0.2, 0.5, 0], rel=ERROR * 1.001)
    assert seen[3] == 0.5
    clock.now += WINDOW_S
    assert found.in_force_s == 0, "nobody came: nothing is known"


def test_it_is_computed_once_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, walks = Clock(), list[float]()
    found = TtftWindow(0.5, clock)
    quantile = found.quantile

    def counted(share: float) -> float:
        walks.append(share)
        return quantile(share)

    monkeypatch.setattr(found, "quantile", counted)
    for _ in range(20):
        clock.now += WINDOW_S / SLICES
        for _ in range(ENOUGH):
            found.observe(1.0)
            assert found.in_force_s in (0, 0.5)
    assert 20 <= len(walks) <= 2 * 20


# ---------------------------------------------------------------- the setting


def test_an_objective_for_each_model() -> None:
    given = {"WARMFLEET_MODELS": "a,b#x,b#y,c", "WARMFLEET_TTFT_OBJECTIVE_S": " 0.5, b=2 ,b#y=1"}
    objective = Settings.from_environment(given).ttft_objective_s
    assert [objective.of(tag) for tag in ("a", "b#x", "b#y", "c")] == [0.5, 2, 1, 0.5]
    assert str(objective) == "0.5,b=2.0,b#y=1.0"
    waits = [Settings(ttft_objective_s=objective, max_engine_wait_s=most) for most in (1.5, 0.0)]
    assert [waits[0].engine_wait_s(tag) for tag in ("a", "b#x", "b#y")] == [0.5, 1.5, 1.0]
    assert waits[1].engine_wait_s("a") == 0, "no queue"
    with pytest.raises(BadArgument, match="WARMFLEET_TTFT_OBJECTIVE_S names 'd'"):
        create_app(Settings(models=("a", "b#x"), ttft_objective_s=PerModel(0.0, {"b": 1.0, "d": 1.0})))
    assert PerModel("cost").read("a=sticky", str) == PerModel("cost", {"a": "sticky"})
    assert PerModel("cost").read("", str) == PerModel("cost")


@pytest.mark.parametrize("text", ["x", "a=", "=1", "0.1,0.2", "a=1,a=2", "-1", "a=-1", "nan", "inf", "a=inf"])
def test_an_objective_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(BadArgument, match="WARMFLEET_TTFT_OBJECTIVE_S"):
        Settings.from_environment({"WARMFLEET_MODELS": "a", "WARMFLEET_TTFT_OBJECTIVE_S": text})
