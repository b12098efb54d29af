"""The table of large fleets: its sums, and unit costs that agree with the measured work of a Redis core."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from tests.contract.sizing import LOADS, Load, UnitCosts, main, need

UNIT = UnitCosts()


def test_one_pool_decides_once_and_pools_twice() -> None:
    idle = replace(UNIT, follow_us=0.0, block_us=0.0)
    one, two = need(Load(64, 1_000), idle), need(Load(65, 1_000), idle)
    assert (one.pools, two.pools) == (1, 2)
    assert one.redis_cores == pytest.approx(1_000 * 207e-6)
    assert two.redis_cores == pytest.approx(2 * one.redis_cores)


def test_a_core_does_as_many_decisions_as_were_measured() -> None:
    """5,214 decisions with settlement a second (bench `decide`, a quiet machine); the unit cost is an upper bound."""
    rate = 1e6 / UNIT.decide_us
    assert 0.85 * 5_214 < rate <= 5_214


def test_the_formula_gives_the_page_s_own_example() -> None:
    """64 engines that compute 4,000 tokens a second each, 200 requests a second: .17 of a core."""
    example = replace(Load(64, 200.0), new_tokens=64 * 4_000 // 200)
    assert need(example, UNIT).redis_cores == pytest.approx(0.166, abs=0.002)


def test_more_load_needs_no_less() -> None:
    needs = [need(load, UNIT) for load in LOADS]
    for less, more in pairwise(needs):
        assert (less.pools, less.masters, less.replicas) <= (more.pools, more.masters, more.replicas)
        assert less.redis_gb < more.redis_gb


def test_the_command_prints_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--engines", "1000", "--requests", "10000"]) == 0
    assert "| 1,000 | 10,000 | 16 | 7.96 | 16 |" in capsys.readouterr().out
