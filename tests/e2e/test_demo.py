"""The demo's four states pass on a running stack, and its table compares two policies."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from warmfleet.cli import demo
from warmfleet.cli.local.chat import Answer
from warmfleet.cli.terminal.progress import Progress

if TYPE_CHECKING:
    import pytest

    from warmfleet.cli.local.stack import Stack


def test_the_four_states_pass(new_stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    passed = asyncio.run(demo.four_states(new_stack, Progress()))
    printed = capsys.readouterr().out
    assert passed, printed
    assert printed.count("pass  ") == 4
    assert [state for state in ("cold start", "stickiness", "eviction", "recovery") if state not in printed] == []


def test_conversations_find_their_earlier_turns(stack: Stack) -> None:
    answers = asyncio.run(demo.converse(stack, demo.Work(conversations=4, turns=3), Progress()))
    assert len(answers) == 12
    assert demo.computed(answers) < 0.6 * sum(answer.prompt_tokens for answer in answers)


def test_the_table_shows_both_policies() -> None:
    warm = [Answer("a.0", 90, 90, 100, 0.1, "")] * 10
    cold = [Answer("a.0", 0, 0, 100, 0.3, "")] * 10
    lines = str(demo.compare({"cost": warm, "round_robin": cold})).splitlines()
    assert lines[1].split() == ["cost", "10", "90.0%", "100", "100", "ms", "100", "ms"]
    assert lines[2].split() == ["round_robin", "10", "0.0%", "1000", "300", "ms", "300", "ms"]
