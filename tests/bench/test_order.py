"""The fleet beside choosers that look into its engines: who is better than whom, and what the bench prints."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.bench.bench_order import CASES, OURS, Row, bounds, main, over
from tests.bench.virtual_fleet import Plan, play
from tests.bench.virtual_idle import IdleGaps
from tests.bench.virtual_plans import WORKLOADS, engine
from tests.bench.virtual_rivals import opened, play_rival, rotated
from tests.bench.virtual_starve import bounds_s, starve, tenants

from warmfleet.fleet import QueueLimits
from warmfleet_loadtest.simulator.choosers.perfect_knowledge import Backlog, Outlook
from warmfleet_loadtest.traces.trace import Arrival, Trace, generate

if TYPE_CHECKING:
    from warmfleet_loadtest.simulator.virtual_clock import Answered

FOUR = (engine(WORKLOADS["generated"].costs, 512),) * 4
HOT = 3.0  # at this speed the engines are busy for two thirds of the time


def mean_s(served: list[Answered]) -> float:
    return statistics.fmean(request.ttft_s for request in served)


async def rivals(trace: Trace) -> dict[str, float]:
    return {name: mean_s((await play_rival(name, trace, FOUR, HOT)).served) for name in ("oracle", "sticky", "central")}


async def test_the_oracle_is_better_than_rules_that_know_less(url: str) -> None:
    trace = generate(200, 1)
    found = await rivals(trace)
    loaded = await play(url, trace, Plan(FOUR, "least_loaded", speed=HOT))
    assert found["oracle"] < 0.95 * mean_s(loaded.served)
    assert found["oracle"] < found["sticky"]
    assert found["central"] < 0.9 * found["oracle"]


async def test_an_oracle_that_does_not_see_waits_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = generate(200, 1)
    found = await rivals(trace)

    def blind(self: Backlog, request: Any) -> Outlook:
        own_s = 0.001 * self.uncached(request)
        return Outlook(own_s, own_s)

    monkeypatch.setattr(Backlog, "outlook", blind)
    assert mean_s((await play_rival("oracle", trace, FOUR, HOT)).served) > 1.2 * found["oracle"]


async def test_a_run_without_a_router_serves_every_request_once() -> None:
    trace = generate(60, 2)
    for name in ("oracle", "sticky", "central"):
        told = await play_rival(name, trace, FOUR, HOT)
        assert sorted(request.session for request in told.served) == sorted(
            arrival.session for arrival in trace.arrivals
        )
        assert 0 < told.busy < 1
        assert not any(engine.scheduler.busy for engine in told.engines)


def test_a_rotated_trace_has_the_same_requests_at_other_times() -> None:
    trace = generate(100)
    half = rotated(trace, 0.5)
    assert sorted(tuple(arrival.prompt) for arrival in half.arrivals) == sorted(
        tuple(arrival.prompt) for arrival in trace.arrivals
    )
    assert (
        half.arrivals[0].prompt
        == next(arrival for arrival in trace.arrivals if arrival.at_s >= trace.arrivals[-1].at_s / 2).prompt
    )
    times = [arrival.at_s for arrival in half.arrivals]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] < 1.1 * trace.arrivals[-1].at_s


def test_sessions_of_a_closed_loop_stay_whole() -> None:
    steps = [
        Arrival(float(10 * session + step), session, [step], 1, 1.0 if step else None)
        for session in range(4)
        for step in range(15)
    ]
    half = rotated(Trace("t", tuple(sorted(steps, key=lambda arrival: arrival.at_s)), closed=True), 0.5)
    for session in range(4):
        assert [list(arrival.prompt) for arrival in half.arrivals if arrival.session == session] == [
            [step] for step in range(15)
        ]
    assert half.arrivals[0].session == 2
    assert all(arrival.think_s is None for arrival in opened(half).arrivals)


def test_a_bound_is_the_worst_of_its_loads() -> None:
    def row(case: str, load: float, fleet: str, mean: float, p99: float) -> Row:
        return Row(case, load, fleet, 1.0, {"mean": mean, "p99": p99})

    rows = [
        *(row("conversation", load, "oracle", 2.0, 10.0) for load in (0.5, 0.83, 0.95)),
        row("conversation", 0.5, "ours", 2.2, 5.0),
        row("conversation", 0.83, "ours", 1.0, 12.0),
        row("conversation", 0.95, "ours", 1.5, 9.0),
        row("agents-tight", 0.6, "oracle", 4.0, 10.0),
        row("agents-tight", 0.6, "sticky", 2.0, 20.0),
        row("agents-tight", 0.6, "ours", 3.0, 10.0),
    ]
    assert bounds(rows) == {
        "hot_mean_over_oracle": 0.75,
        "hot_p99_over_oracle": 1.2,
        "mid_mean_over_oracle": 1.1,
        "agents_mean_over_best": 1.5,
        "agents_p99_over_best": 1.0,
    }
    assert over(rows, "mean", "ours", ["sticky"]) == {("agents-tight", 0.6): 1.5}
    assert bounds(rows[:1]) == {}


QUEUE = QueueLimits(OURS["max_engine_wait_s"], 4_096, OURS["patience"])


async def test_nobody_starves(url: str) -> None:
    """More work than the engines can do: without ageing the long prompts would wait until the short ones end."""
    fair = await starve(url, QUEUE, long=20_000, busy=1.8, seconds=10.0)
    assert fair["starved_worst_over_bound"] < 1


async def test_tenants_get_the_same(url: str) -> None:
    assert 0.9 < (await tenants(url, QUEUE, seconds=8.0))["tenants_work_ratio"] < 1.1


@pytest.mark.long(minutes=1, shows="two tenants of unequal demand get the same work from a model of two pools")
async def test_tenants_get_the_same_from_two_pools(url: str) -> None:
    """A pool in which the tenant with less demand has no line would serve only the other."""
    assert 0.8 < (await tenants(url, QUEUE, pools=2, seconds=7.0))["tenants_work_ratio"] < 1.25


def test_a_bound_follows_from_those_who_may_overtake() -> None:
    """At an engine with patience 1 the second request comes before the first has waited for its own size."""
    came = [(0.0, 10.0), (1.0, 4.0), (2.0, 1.0), (7.0, 3.0)]
    first_come, bound = bounds_s(came, 1.0, 1)
    assert first_come == [0.0, 9.0, 12.0, 8.0]
    assert bound == [10.0 + 0.0, 4.0 + 6.0, 1.0 + 11.0, 3.0 + 5.0]


async def test_an_engine_that_gets_its_requests_late_is_found_idle(url: str) -> None:
    trace, told = generate(100, 1), {}
    queue = QueueLimits(OURS["max_engine_wait_s"], 1_024, OURS["patience"])
    for dispatch_s in (0.0, 0.4):
        gaps = IdleGaps()
        plan = Plan(FOUR, speed=1.5 * HOT, queue=queue, dispatch_s=dispatch_s, watch=gaps, watch_s=0.01)
        await play(url, trace, plan)
        told[dispatch_s] = gaps.figures()["idle_while_waiting"]
    assert told[0.0] < 0.01
    assert told[0.4] > 0.05


def test_the_command_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--case", "generated", "--rows", "60", "--loads", "0.83", "--seeds", "1", "--jobs", "1"]
    fleets = ["--fleets", "oracle,sticky", "--rule", "rule2:kappa=0", "--rule", "half:stock=4", "--policies", "session"]
    assert main([*options, *fleets]) == 0
    printed = capsys.readouterr()
    told: dict[str, Any] = json.loads(printed.out)
    assert [(row["load"], row["fleet"]) for row in told["rows"]] == [
        (0.83, name) for name in ("oracle", "sticky", "rule2", "half", "policy-session")
    ]
    assert all(row["requests"] == 60 and row["mean"] > 0 for row in told["rows"])
    assert "| generated | 0.83 |" in printed.err


def test_prompts_delay_answers_where_tokens_are_real(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, "decodes", replace(CASES["decodes"], workload="generated"))
    options = ["--case", "decodes", "--rows", "60", "--seeds", "1", "--jobs", "1"]
    assert main([*options, "--loads", "0.2,0.8", "--fleets", "ours,undecoded"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    few, _, many, _ = told["rows"]
    assert 0.0075 < few["tpot"] < many["tpot"], "a step reads the weights, in 5.5 ms, and 2 ms come to that"
    assert many["end"] > many["mean"] + 100 * few["tpot"]
    assert {f"decoding_{figure}" for figure in ("mean", "p99", "end")} <= told.keys()


def test_wrong_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--fleets", "nosuch"],
        ["--rule", "oracle:kappa=1"],
        ["--rule", "x:nosuch=1"],
        ["--policies", "nosuch"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
    assert "nosuch" in capsys.readouterr().err
