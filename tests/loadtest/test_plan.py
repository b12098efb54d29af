"""The plan of a run from Locust's options; wrong ones are told with the remedy."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import TYPE_CHECKING

import pytest
from tests.loadtest.test_trace import write

from warmfleet_loadtest.users.plan import DEFAULT_MIX, Plan, mix_of, plan_of
from warmfleet_loadtest.users.sessions import SESSIONS

if TYPE_CHECKING:
    from pathlib import Path


def options(**more: object) -> Namespace:
    options = {"rate": 8.0, "arrivals": "constant", "seconds": 100.0, "mix": DEFAULT_MIX, "seed": "1", "trace": ""}
    return Namespace(**options | {"speed": 6.0} | more)


def rate(plan: Plan, kind: str) -> float:
    return plan.arrivals(kind, "0").rate


def test_the_rate_is_spread_over_kinds_and_processes() -> None:
    plan = plan_of(options(mix="chat=3,rag=1"), sources=2)

    assert (rate(plan, "chat"), rate(plan, "rag")) == (3.0, 1.0)
    assert 2 * sum(rate(plan, kind) for kind in plan.mix) == 8.0


def test_by_default_there_are_all_kinds_but_the_trace() -> None:
    assert set(plan_of(options()).mix) == set(SESSIONS)


def test_users_chosen_on_the_command_line_share_the_whole_rate() -> None:
    plan = plan_of(options(), {"chat"})

    assert rate(plan, "chat") == 8.0


def test_a_trace_is_played_instead(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl.xz", [{"t": 0.0, "s": 0, "in": 32, "out": 3, "k": 0, "new": [1, 2]}], block=16)
    assert set(plan_of(options(trace=str(trace)), {"chat", "trace"}).mix) == {"trace"}


def test_no_seconds_mean_until_stopped() -> None:
    assert plan_of(options(seconds=0.0)).seconds == math.inf


def test_long_runs_are_kept_in_few_slots() -> None:
    assert plan_of(options(seconds=60.0)).slot_s == 1.0
    assert plan_of(options(seconds=36_000.0)).slot_s == 60.0


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"mix": "chat=two"}, "KIND=PARTS"),
        ({"mix": "cat=2"}, "kinds: chat, rag, agent, one-off"),
        ({"mix": "chat=0"}, "no kind with a part above 0"),
        ({"rate": 0.0}, "above 0"),
        ({"rate": math.nan}, "above 0"),
        ({"arrivals": "wave"}, "constant, poisson, burst"),
        ({"seconds": -1.0}, "--seconds from 0"),
    ],
)
def test_wrong_options_are_told_with_the_remedy(wrong: dict[str, object], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        plan_of(options(**wrong))


def test_users_without_a_share_are_told() -> None:
    with pytest.raises(ValueError, match="none of the chosen users"):
        plan_of(options(mix="rag=1"), {"chat"})


def test_parts_need_no_number() -> None:
    assert mix_of("chat, rag=2") == {"chat": 1.0, "rag": 2.0}
