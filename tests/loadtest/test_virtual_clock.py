"""The virtual clock: times add up, closed loops wait, and repeated duties do not keep a run from ending."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.engines.simulated import config

from warmfleet_loadtest.simulator.step_costs import StepCosts
from warmfleet_loadtest.simulator.virtual_clock import VirtualEngine, VirtualFleet
from warmfleet_loadtest.traces.trace import Arrival, Trace

if TYPE_CHECKING:
    from warmfleet_loadtest.simulator.scheduler import Request

COSTS = StepCosts(base_s=0.01, prefill_token_s=0.001)


class Always:
    def __init__(self, engine: int = 0) -> None:
        self.engine = engine
        self.calls: list[str] = []

    async def choose(self, request: Request, arrival: Arrival, now: float) -> int:
        self.calls.append(f"choose {now:.2f}")
        return self.engine

    async def started(self, request: Request, engine: int, now: float) -> None:
        self.calls.append("started")

    async def finished(self, request: Request, engine: int, now: float) -> None:
        self.calls.append("finished")


def engines(count: int = 1, costs: StepCosts = COSTS, mode: str = "step") -> list[VirtualEngine]:
    return [VirtualEngine(config(costs, mode=mode).scheduler(), costs) for _ in range(count)]


async def test_a_requests_time_is_its_steps() -> None:
    router = Always()
    fleet = VirtualFleet(engines(), router)
    (served,) = await fleet.run(Trace("t", (Arrival(2.0, 0, list(range(100)), 3),)))
    assert served.ttft_s == pytest.approx(0.01 + 0.1)
    assert fleet.engines[0].busy_s == pytest.approx(0.11 + 2 * 0.01)
    assert router.calls == ["choose 2.00", "started", "finished"]


async def test_a_step_that_reads_the_weights_longer_than_it_computes_lasts_so_long() -> None:
    costs = StepCosts(0.01, 0.001, decode_request_s=0.002, weights_s=0.05)
    fleet = VirtualFleet(engines(costs=costs), Always())
    (served,) = await fleet.run(Trace("t", (Arrival(2.0, 0, list(range(100)), 3),)))
    assert served.ttft_s == pytest.approx(0.01 + 0.1)
    assert fleet.engines[0].busy_s == pytest.approx(0.11 + 2 * (0.01 + 0.05))


async def test_a_run_ends_when_it_is_stopped() -> None:
    class Stops(Always):
        async def started(self, request: Request, engine: int, now: float) -> None:
            fleet.stop()

    fleet = VirtualFleet(engines(), Stops())
    arrivals = tuple(Arrival(float(k), k, [k] * 100, 5) for k in range(3))
    assert len(await fleet.run(Trace("t", arrivals))) == 1


async def test_overheads_of_the_api_server_count_but_block_no_step() -> None:
    costs = StepCosts(0.01, 0.001, request_s=0.2, request_token_s=0.001, first_token_s=0.05)
    arrivals = (Arrival(0.0, 0, [1] * 50, 1), Arrival(0.0, 1, [2] * 50, 1))
    first, second = await VirtualFleet(engines(costs=costs), Always()).run(Trace("t", arrivals))
    assert first.ttft_s == pytest.approx(0.25 + 0.06 + 0.05)
    assert second.ttft_s == pytest.approx(0.25 + first.ttft_s)


async def test_a_closed_session_waits_for_its_answer() -> None:
    router = Always()
    arrivals = (Arrival(0.0, 0, list(range(100)), 3), Arrival(0.1, 0, list(range(100)), 1, think_s=4.0))
    await VirtualFleet(engines(), router, speed=2.0).run(Trace("t", arrivals, closed=True))
    assert router.calls[0] == "choose 0.00"
    assert router.calls[3] == f"choose {0.11 + 0.02 + 2.0:.2f}"


async def test_fcfs_engines_run_on_the_same_clock() -> None:
    arrivals = tuple(Arrival(0.0, k, [k] * 100, 5) for k in range(3))
    served = await VirtualFleet(engines(mode="fcfs"), Always()).run(Trace("t", arrivals))
    assert [round(answered.ttft_s, 3) for answered in served] == [0.11, 0.22, 0.33]


async def test_fcfs_answers_end_in_time_though_no_step_follows() -> None:
    class Ends(Always):
        async def finished(self, request: Request, engine: int, now: float) -> None:
            self.calls.append(f"{request.max_tokens} tokens: {now:.2f}")

    router, lengths = Ends(), (801, 401, 901, 601)
    arrivals = tuple(Arrival(0.0, k, [k] * 100, tokens) for k, tokens in enumerate(lengths))
    await VirtualFleet(engines(mode="fcfs"), router).run(Trace("t", arrivals))  # 0.11 s of prefill, 1 ms a token
    ended = ["401 tokens: 0.62", "801 tokens: 0.91", "601 tokens: 1.04", "901 tokens: 1.23"]
    assert [line for line in router.calls if "tokens" in line] == ended


async def test_a_duty_does_not_keep_a_run_from_ending() -> None:
    fleet, done = VirtualFleet(engines(), Always()), []

    async def duty(now: float) -> None:
        done.append(round(now, 3))
        fleet.at(now + 0.05, duty, duty=True)

    fleet.at(0.0, duty, duty=True)
    await fleet.run(Trace("t", (Arrival(0.0, 0, list(range(100)), 1),)))
    assert done == [0.0, 0.05, 0.1]
    assert fleet.clock.now == pytest.approx(0.11)


async def test_an_engine_measures_its_prefill_speed() -> None:
    fleet = VirtualFleet(engines(), Always())
    await fleet.run(Trace("t", tuple(Arrival(float(k), k, [k] * 300, 1) for k in range(4))))
    assert fleet.engines[0].meter.speed_tps == pytest.approx(300 / 0.31, rel=0.01)
    assert fleet.engines[0].work_tokens == 1_200


async def test_a_request_that_is_kept_back_is_sent_later_and_its_wait_counts() -> None:
    class Patient(Always):
        async def choose(self, request: Request, arrival: Arrival, now: float) -> None:  # type: ignore[override]
            async def send(later: float) -> None:
                fleet.send(request, 0, later)

            fleet.at(now + 5.0, send, duty=True)

    fleet = VirtualFleet(engines(), Patient())
    (served,) = await fleet.run(Trace("t", (Arrival(2.0, 0, list(range(100)), 1),)))
    assert served.ttft_s == pytest.approx(5.0 + 0.11)
