"""Agents against simulated engines over HTTP: their chats, the times at which they begin, and their figures."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import pytest
from tests.support.engines.simulated import config, running

from warmfleet_loadtest.agents import Load, Played, Player, Sent, figures, main, medians, open_closed, work
from warmfleet_loadtest.measuring.client import Reply
from warmfleet_loadtest.replay import Target
from warmfleet_loadtest.simulator.step_costs import StepCosts
from warmfleet_loadtest.traces.agents import TOOLS, chats, generated
from warmfleet_loadtest.traces.trace import BLOCK_TOKENS, Arrival, Trace, block

if TYPE_CHECKING:
    from collections.abc import Sequence

SYSTEM = block(0) + block(1)
FIRST = SYSTEM + block(2)[:10]
STEPS = (
    Arrival(0.0, 0, FIRST, 4),
    Arrival(9.0, 0, FIRST + block(3)[:12], 4, 5.0),
    Arrival(1.0, 1, SYSTEM + block(4), 4),
)


def words(ids: Sequence[int]) -> str:
    return "".join(f" w{token}" for token in ids)


def test_a_trace_becomes_chats_with_answers_of_the_engine() -> None:
    agents = chats(Trace("t", STEPS, closed=True), words)
    (first, second), (other,) = agents.sessions
    assert agents.system == words(SYSTEM)
    assert first.text == words(block(2)[:10])
    assert second.text == words(block(3)[4:12]), "behind the answer, which has 4 tokens"
    assert (second.gap_s, second.answer_tokens, other.text) == (5.0, 4, words(block(4)))
    sizes = [14, 26, 20]
    assert agents.context_tokens == statistics.fmean(sizes)
    assert agents.at_once(1.5, 4, 100) == round(1.5 * 4 * (1_600 - 32) / statistics.fmean(sizes))


def test_sessions_never_end_and_each_has_its_own_text() -> None:
    agents = chats(Trace("t", STEPS, closed=True), words)
    taken = list(islice(agents.endless(7), 6))
    assert taken == list(islice(agents.endless(7), 6))
    assert len({session[0].text for session in taken}) == 6
    assert sorted(map(len, taken)) == [1, 1, 1, 2, 2, 2]


def test_generated_agents_have_the_statistics_of_the_trace() -> None:
    trace = generated(200, seed=1)
    firsts = [arrival for arrival in trace.arrivals if arrival.think_s is None]
    gaps = sorted(arrival.think_s for arrival in trace.arrivals if arrival.think_s is not None)
    assert len(trace.arrivals) / len(firsts) == pytest.approx(10.7, rel=0.1)
    assert statistics.fmean(len(first.prompt) for first in firsts) == pytest.approx(560, rel=0.1)
    assert statistics.fmean(len(arrival.prompt) for arrival in trace.arrivals) == pytest.approx(1_400, rel=0.2)
    assert gaps[len(gaps) // 2] == pytest.approx(2.46, rel=0.1)
    assert chats(trace, words).system_tokens == 17 * BLOCK_TOKENS


def test_sessions_begin_at_random_times_and_some_together() -> None:
    begins = Load(100.0, rate=1.0, burst=5, burst_at_s=50.0).begins(0)
    assert begins == sorted(begins)
    assert begins.count(50.0) == 5
    assert len(begins) == pytest.approx(105, abs=30)
    assert len(Load(100.0, at_once=7).begins(0)) == 7
    with pytest.raises(ValueError, match="no sessions whose steps wait"):
        open_closed("conversation")


async def test_a_closed_loop_of_agents_uses_the_cache() -> None:
    text = [token for number in range(12) for token in block(number)]
    steps = [Arrival(0.0, 0, text[: 64 * (1 + step)], 4, 1.0 if step else None) for step in range(3)]
    agents = chats(Trace("t", (*steps, Arrival(0.0, 1, SYSTEM + block(99), 4)), closed=True), words)
    target = Target(("",), "demo", speed=60.0)
    async with running(config(StepCosts(base_s=0.001, prefill_token_s=1e-6), blocks=4_096)) as up:
        player = Player(agents, Load(300.0, at_once=3, skip=0.0), replace(target, urls=(up.url,)))
        told: list[Sent] = []
        await player.run(told.append)
    found = figures(player.played, player.load, 0.0, 300.0)
    assert len(told) > 4
    assert found["failed"] == 0
    assert found["sessions"] == sum(ended_at < 300.0 for ended_at, _ in player.played.ended) > 0
    assert -0.2 < found["recomputed"] < 0.2, "all contexts fit"
    assert 0 < found["p50_ttft"] <= found["p99_ttft"]
    assert player.played.open_sessions == 3


async def test_a_session_that_fails_is_counted_and_the_next_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmfleet_loadtest.agents.FAILED_S", 0.01)
    player = Player(chats(generated(5), words), Load(600.0, at_once=1), Target(("http://127.0.0.1:9",), "demo", 200.0))
    await player.run()
    assert len(player.played.steps) > 1
    assert player.played.ended == []


def sent(at_s: float, known: int, waited_s: float, tokens: tuple[int, int] | None = None) -> Sent:
    reply = None if tokens is None else Reply(0.1, 0.2, prompt_tokens=tokens[0], cached_tokens=tokens[1])
    return Sent(at_s, known, waited_s, reply)


def test_work_beyond_the_necessary_was_done_again() -> None:
    first, cold = sent(0.0, -1, 1.0, (100, 0)), sent(1.0, -1, 3.0, (100, 32))
    again, under_way = sent(2.0, 96, 5.0, (140, 32)), sent(3.0, 128, 9.0)
    steps = [first, cold, again, under_way]
    assert work(steps, steps) == (100 + 68 + 108, 68 + 68 + 44)
    played = Played(steps, ended=[(2.5, 2.5)])
    found = figures(played, Load(12.0), 0.0, 12.0)
    assert found["recomputed"] == round(276 / 180 - 1, 3)
    assert (found["sessions_per_hour"], found["session_p50"], found["p50_ttft"]) == (300.0, 2.5, 5.0)
    assert medians(played, 12.0)[:7] == [1.0, 0.0, 3.0, 0.0, 5.0, 0.0, 9.0]


async def test_clients_name_sessions_and_their_ends_where_asked() -> None:
    plain, named = (
        Player(chats(generated(2), words), Load(1.0), Target((), "demo"), named=is_) for is_ in (False, True)
    )
    assert plain._headers("a", last=True) == {}
    assert named._headers("a", last=False) == {"X-Session-ID": "a"}
    assert named._headers("a", last=True) == {"X-Session-ID": "a", "X-Warmfleet-Conversation": "ended"}
    assert TOOLS[0]["function"]["parameters"], "routers of others refuse a tool without parameters"


def test_the_command_prints_lines_of_figures(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--base-url", "http://127.0.0.1:9", "--speed", "5", "--seconds", "6", "--rate", "1"]
    assert main(options) == 1
    *lines, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0].keys() <= last.keys()
    assert last["failed"] > 0
    assert len(last["medians"]) == 24
    assert main(["--base-url", "http://127.0.0.1:9", "--trace", "/nowhere"]) == 2
