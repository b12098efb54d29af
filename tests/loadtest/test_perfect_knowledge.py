"""Choosers that look into engines: what they see is what the engines then do, and each keeps to its own rule."""

from __future__ import annotations

import pytest
from tests.support.engines.simulated import config

from warmfleet_loadtest.simulator.choosers.perfect_knowledge import Backlog, Central, Oracle, Sticky
from warmfleet_loadtest.simulator.scheduler import Request, Scheduler, hash_blocks
from warmfleet_loadtest.simulator.step_costs import StepCosts
from warmfleet_loadtest.simulator.virtual_clock import VirtualEngine

COSTS = StepCosts(base_s=0.0, prefill_token_s=0.001)


def engines(count: int, mode: str = "fcfs", costs: StepCosts = COSTS) -> list[VirtualEngine]:
    return [VirtualEngine(config(costs, mode=mode).scheduler(), costs) for _ in range(count)]


def prompt(scheduler: Scheduler, first: int, tokens: int) -> Request:
    """A request whose tokens count from ``first`` on."""
    request = Request("", range(first, first + tokens), 2, [1, 2])
    hash_blocks(scheduler.scheme, request)
    return request


def test_an_outlook_is_what_the_engine_then_does() -> None:
    (engine,) = engines(1)
    scheduler = engine.scheduler
    for first, tokens in ((0, 320), (10_000, 160), (10_000, 320)):
        scheduler.add(prompt(scheduler, first, tokens))
    assert engine.begin(0.0) == pytest.approx(0.32)
    late = prompt(scheduler, 10_000, 336)  # of its 21 blocks 20 will be there: the last prompt's
    outlook = Backlog(engine, 0.1).outlook(late)
    assert outlook.own_s == pytest.approx(0.016)
    assert outlook.ready_s == pytest.approx(0.22 + 0.16 + 0.16 + 0.016)
    scheduler.add(late)
    now = 0.32
    for _ in range(3):
        engine.end(now)
        now += engine.begin(now) or 0.0
    assert now == pytest.approx(0.1 + outlook.ready_s)


def test_steps_that_decode_as_well_take_longer() -> None:
    costs = StepCosts(base_s=0.01, prefill_token_s=0.001, decode_request_s=0.002)
    (engine,) = engines(1, "step", costs)
    engine.scheduler.add(prompt(engine.scheduler, 0, 32))
    engine.begin(0.0)
    engine.end(0.042)
    engine.begin(0.042)  # decodes for 12 ms
    assert Backlog(engine, 0.042).outlook(prompt(engine.scheduler, 9_000, 100)).ready_s == pytest.approx(0.012 + 0.112)


def test_the_oracle_weighs_a_wait_against_a_hit() -> None:
    fleet = engines(2)
    warm = fleet[0]
    warm.scheduler.add(prompt(warm.scheduler, 0, 320))
    warm.begin(0.0)
    oracle, again = Oracle(fleet), prompt(warm.scheduler, 0, 321)
    assert oracle.choose(again, 0, 0.1) == 0  # 0.22 s of wait, then one token
    warm.end(0.32)
    warm.scheduler.add(prompt(warm.scheduler, 10_000, 480))
    warm.begin(0.32)
    assert oracle.choose(again, 0, 0.33) == 1  # 0.47 s of wait


def test_a_session_stays_where_it_is() -> None:
    fleet = engines(4)
    sticky = Sticky(fleet)
    homes = {session: sticky.choose(prompt(fleet[0].scheduler, 0, 320), session, 0.0) for session in range(40)}
    assert set(homes.values()) == {0, 1, 2, 3}
    for engine in fleet[:2]:
        engine.scheduler.add(prompt(engine.scheduler, 0, 320))
        engine.begin(0.0)
    again = {session: sticky.choose(prompt(fleet[0].scheduler, 9_000, 16), session, 9.0) for session in homes}
    assert again == homes


def test_requests_wait_centrally_and_the_shortest_goes_first() -> None:
    (engine,) = fleet = engines(1)
    sent: list[int] = []

    def send(request: Request, number: int) -> None:
        sent.append(request.prompt_tokens)
        fleet[number].scheduler.add(request)

    central = Central(fleet, send)
    for first, tokens in ((0, 320), (10_000, 480), (20_000, 160), (0, 400)):
        assert central.choose(prompt(engine.scheduler, first, tokens), 0, 0.0) is None
        engine.begin(0.0)
    gone = prompt(engine.scheduler, 30_000, 16)
    central.choose(gone, 0, 0.0)
    central.gone(gone)
    assert sent == [320]
    now = 0.0
    while engine.step is not None:
        now = engine.step_ends
        engine.end(now)
        central.room_made(now)
        engine.begin(now)
    assert sent == [320, 400, 160, 480]  # 80 tokens of the 400 are left to compute


def test_a_request_waits_for_its_cache_if_that_is_sooner() -> None:
    fleet = engines(2)
    sent: list[int] = []

    def send(request: Request, number: int) -> None:
        sent.append(number)
        fleet[number].scheduler.add(request)
        fleet[number].begin(0.0)

    central = Central(fleet, send)
    central.choose(prompt(fleet[0].scheduler, 0, 320), 0, 0.0)
    central.choose(prompt(fleet[0].scheduler, 0, 330), 0, 0.1)  # 0.22 + 0.01 s there, 0.33 on the free engine
    assert sent == [0]
    central.choose(prompt(fleet[0].scheduler, 50_000, 330), 0, 0.1)
    assert sent == [0, 1]
