"""The virtual clock: time adds up, closed loops wait, and the sweep's rule routes as it should."""

from __future__ import annotations

import json

import pytest
from tests.loadtest.engines import config

from warmfleet_loadtest.costs import StepCosts
from warmfleet_loadtest.scheduler import Request
from warmfleet_loadtest.sim_fleet import FleetPlan, Rule, RuleRouter, main, play
from warmfleet_loadtest.trace import Arrival, Trace, generate
from warmfleet_loadtest.virtual import VirtualEngine, VirtualFleet

COSTS = StepCosts(base_s=0.01, prefill_token_s=0.001)


class Always:
    def __init__(self, engine: int = 0) -> None:
        self.engine = engine
        self.told: list[str] = []

    def choose(self, request: Request, now: float) -> int:
        self.told.append(f"choose {now:.2f}")
        return self.engine

    def started(self, request: Request, engine: int) -> None:
        self.told.append("started")

    def finished(self, request: Request, engine: int) -> None:
        self.told.append("finished")


def engines(count: int = 1, costs: StepCosts = COSTS, mode: str = "step") -> list[VirtualEngine]:
    return [VirtualEngine(config(costs, mode=mode).scheduler(), costs) for _ in range(count)]


def test_a_requests_time_is_its_steps() -> None:
    router = Always()
    fleet = VirtualFleet(engines(), router)
    (served,) = fleet.run(Trace("t", (Arrival(2.0, 0, list(range(100)), 3),)))
    assert served.ttft_s == pytest.approx(0.01 + 0.1)
    assert fleet.engines[0].busy_s == pytest.approx(0.11 + 2 * 0.01)
    assert router.told == ["choose 2.00", "started", "finished"]


def test_overheads_of_the_api_server_count_but_block_no_step() -> None:
    costs = StepCosts(0.01, 0.001, request_s=0.2, request_token_s=0.001, first_token_s=0.05)
    arrivals = (Arrival(0.0, 0, [1] * 50, 1), Arrival(0.0, 1, [2] * 50, 1))
    first, second = VirtualFleet(engines(costs=costs), Always()).run(Trace("t", arrivals))
    assert first.ttft_s == pytest.approx(0.25 + 0.06 + 0.05)
    assert second.ttft_s == pytest.approx(0.25 + first.ttft_s)


def test_a_closed_session_waits_for_its_answer() -> None:
    router = Always()
    arrivals = (Arrival(0.0, 0, list(range(100)), 3), Arrival(0.1, 0, list(range(100)), 1, think_s=4.0))
    VirtualFleet(engines(), router, speed=2.0).run(Trace("t", arrivals, closed=True))
    assert router.told[0] == "choose 0.00"
    assert router.told[3] == f"choose {0.11 + 0.02 + 2.0:.2f}"


def test_fcfs_engines_run_on_the_same_clock() -> None:
    arrivals = tuple(Arrival(0.0, k, [k] * 100, 5) for k in range(3))
    served = VirtualFleet(engines(mode="fcfs"), Always()).run(Trace("t", arrivals))
    assert [round(one.ttft_s, 3) for one in served] == [0.11, 0.22, 0.33]


def test_the_cost_rule_goes_to_the_holder_until_it_is_busy() -> None:
    fleet = engines(4)
    router = RuleRouter(fleet, Rule(), speed_tps=1_000)
    chosen = []
    for _ in range(30):
        request = Request("", [9] * 320, 1, [1])
        request.hashes = [bytes([k]) * 8 for k in range(20)]
        chosen.append(router.choose(request, 0.0))
    assert len(set(chosen[:8])) == 1  # 16 new tokens each are cheaper than 320
    assert len(set(chosen)) > 1


def test_cost_beats_the_blind_policies() -> None:
    """Where half of all tokens can be shared and the fleet is two thirds busy."""
    trace = generate(600, 2)
    plan = FleetPlan(config(StepCosts(0.002, 8e-4), blocks=1_024), engines=4, speed=4.0)
    results = {policy: play(trace, plan, Rule(policy)) for policy in ("cost", "least_loaded", "round_robin")}
    assert results["cost"]["ttft_mean_s"] < 0.9 * results["least_loaded"]["ttft_mean_s"]
    assert results["least_loaded"]["ttft_mean_s"] < results["round_robin"]["ttft_mean_s"]
    assert results["cost"]["hit_ratio"] > 1.3 * results["least_loaded"]["hit_ratio"]


def test_a_run_is_reproducible() -> None:
    plan = FleetPlan(config(COSTS, blocks=512), engines=3, speed=2.0)
    assert play(generate(60), plan, Rule()) == play(generate(60), plan, Rule())


def test_the_sweep_prints_every_combination(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmfleet_loadtest.trace.SHARED", "nowhere")
    monkeypatch.delenv("TRACE", raising=False)
    assert main(["--rows", "40", "--engines", "2", "--kappa", "0,1", "--pressure", "0,1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 + 4
    assert json.loads(lines[-1][50:])["ttft_mean_s"] > 0
