"""Sessions in a closed loop on the virtual clock: the records add up, and the bench prints them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.bench import virtual_sessions
from tests.bench.bench_sessions import VARIANTS, Cell, Row, main, ratios
from tests.bench.virtual_sessions import (
    CHATS,
    ENGINE,
    ENGINE_BLOCK,
    Agents,
    Features,
    Load,
    Stretched,
    agents,
    figures,
    run,
)

from warmfleet_loadtest.traces.trace import Arrival
from warmfleet_worker.protocol.wire import conversation_ended

#: Nine sessions need 1.2 times its cache.
SMALL = replace(ENGINE, blocks=513)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_sessions, "ENGINE", SMALL)


def load(number: int, at_once: int) -> Load:
    return Load(agents("generated", number).sessions, at_once, skip=1, ends=number)


def test_a_stretched_prompt_is_a_sequence() -> None:
    prompt = Stretched([1, 2, 3], 4)
    whole = [token for token in (1, 2, 3) for _ in range(4)]
    assert (len(prompt), list(prompt), prompt[5]) == (12, whole, 2)
    assert all(prompt[start:end] == whole[start:end] for start in range(13) for end in range(start, 14))


def test_generated_sessions_are_as_long_as_those_of_the_trace() -> None:
    found = agents("generated", 200)
    assert found.prefix_tokens == 17 * ENGINE_BLOCK
    assert found.context_tokens == pytest.approx(18_100, rel=0.1)
    assert sum(map(len, found.sessions)) / 200 == pytest.approx(10.7, rel=0.1)
    steps = found.sessions[0]
    assert list(steps[1].prompt[: len(steps[0].prompt)]) == list(steps[0].prompt)
    assert found.at_once(1.5, 4) == pytest.approx(130, rel=0.1)


def test_prompts_that_share_nothing_have_no_common_prefix() -> None:
    assert Agents.of([[Arrival(0.0, number, [number] * 600, 8)] for number in range(2)]).prefix_tokens == 0


async def test_every_step_is_served_once_and_computes_at_least_what_it_must(url: str) -> None:
    wanted = load(12, 9)
    found = await run(url, wanted, Features(), engines=1, replicas=2)
    assert sorted((step.session, step.number) for step in found.steps) == [
        (session, number) for session, steps in enumerate(wanted.sessions) for number in range(len(steps))
    ]
    assert all(step.ttft_s > 0 and (step.computed >= step.necessary or not step.number) for step in found.steps)
    engine = found.workers[0].engine
    assert 1 <= engine.work_tokens / sum(step.computed for step in found.steps) < 1.001, "preemptions lose few tokens"
    assert len(found.ended) == 12
    assert sum(record.began_s < 60.0 for record in found.records.values()) >= 9
    told = figures(found, wanted)
    assert told["recomputed"] > 0.5, "the cache is too small"
    assert told["session_p50_s"] > told["ttft_mean_s"] > 0


async def test_a_cache_with_room_computes_little_again(url: str) -> None:
    wanted = load(4, 2)
    found = await run(url, wanted, Features(header=True, ended=True, forgets=True), engines=1)
    assert figures(found, wanted)["recomputed"] < 0.05
    last = {request.request_id for _, _, request in found.routed if conversation_ended(request.request_id)}
    assert len(last) == 4


async def test_chats_beside_are_told_apart(url: str) -> None:
    beside = tuple(Arrival(2.0 * at, CHATS + at, [at + 1] * 3_000, 20) for at in range(50))
    wanted = replace(load(3, 2), beside=beside)
    told = figures(await run(url, wanted, Features(), engines=1), wanted)
    assert told["sessions"] == 2
    assert 0 < told["chats"] < 50
    alone = Load((), beside=beside[:10])
    assert figures(await run(url, alone, Features(), engines=1), alone)["chats"] == 10


def test_ratios_are_of_the_cells_that_were_played() -> None:
    rows = [
        Row("agents-x1-0.7", "before", {"sessions_per_hour": 2_400.0}),
        Row("agents-x1-0.7", "bare", {"sessions_per_hour": 2_280.0}),
        Row("agents-x1-0.7", "on", {"sessions_per_hour": 2_520.0}),
        Row("agents-x1-1.5", "before", {"sessions_per_hour": 1_200.0}),
        Row("agents-x1-1.5", "bare", {"sessions_per_hour": 2_400.0}),
    ]
    assert ratios(rows) == {"before_at_07": 0.95, "sessions_per_hour_bare": 2.0}


@pytest.mark.parametrize(
    ("number", "at_once", "skip", "ends"),
    [
        (16, 10, 4, 10),
        pytest.param(
            32, 12, 8, 20, marks=pytest.mark.long(minutes=1, shows="agents with the ledger beside agents without it")
        ),
    ],
)
async def test_the_ledger_computes_less_and_serves_more(
    url: str, number: int, at_once: int, skip: int, ends: int
) -> None:
    wanted = Load(agents("generated", number).sessions, at_once, skip=skip, ends=ends)
    before = figures(await run(url, wanted, VARIANTS["before"], engines=1), wanted)
    told = figures(await run(url, wanted, VARIANTS["on"], engines=1, replicas=2), wanted)
    assert told["sessions_per_hour"] > 1.2 * before["sessions_per_hour"]
    assert told["recomputed"] < before["recomputed"] / 2
    assert told["longest_pause_s"] < 63
    assert told["over_limit"] == 0


def test_the_command_prints_one_object(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cell, "load", lambda _cell, _seed, counted: load(counted, 1))
    assert main(["--quick", "--ends", "2", "--jobs", "1", "--variants", "before"]) == 0
    printed = capsys.readouterr()
    told: dict[str, Any] = json.loads(printed.out)
    assert [(row["cell"], row["variant"]) for row in told["rows"]] == [
        ("generated-x1-0.7", "before"),
        ("generated-x1-1.5", "before"),
    ]
    assert all(row["sessions_per_hour"] > 0 for row in told["rows"])
    assert "| generated-x1-0.7 | before |" in printed.err
    assert main(["--cells", "nosuch"]) == 1
