"""The demo's four states pass on a running stack, and its table compares two policies."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

import httpx
import pytest

from warmfleet.cli import demo
from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local.chat import Answer, Chat
from warmfleet.cli.terminal.progress import Progress

if TYPE_CHECKING:
    from warmfleet.cli.local.stack import Stack


def test_the_four_states_pass(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    passed = asyncio.run(demo.four_states(stack, Progress()))
    printed = capsys.readouterr().out
    assert passed, printed
    assert printed.count("pass  ") == 4
    assert [state for state in ("cold start", "stickiness", "eviction", "recovery") if state not in printed] == []


def test_conversations_find_their_earlier_turns(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "START_SPREAD_SECONDS", 0.5)
    monkeypatch.setattr(demo, "THINK_SECONDS", 0.25)
    answers = asyncio.run(demo.converse(stack, demo.Work(conversations=4, turns=3), Progress()))
    assert len(answers) == 12
    assert demo.computed(answers) < 0.6 * sum(answer.prompt_tokens for answer in answers)


def test_the_verdict_says_which_half_failed() -> None:
    warm = [Answer("a.0", 90, 90, 100, 0.1, "")]
    cold, late = [Answer("a.0", 0, 0, 100, 0.3, "")], [Answer("a.0", 90, 90, 100, 0.9, "")]
    assert demo.verdict({"cost": warm, "round_robin": cold}) == (
        True,
        "prefix-aware routing computed 90 tokens less and answered sooner",
    )
    passed, told = demo.verdict({"cost": late, "round_robin": cold})
    assert not passed
    assert told.startswith("prefix-aware routing computed 90 tokens less, but answered later")
    passed, told = demo.verdict({"cost": cold, "round_robin": warm})
    assert not passed
    assert told.startswith("prefix-aware routing computed 90 tokens more, but answered later")


async def test_a_replica_that_is_unavailable_for_a_moment_ends_no_demo() -> None:
    answers = [httpx.Response(503), httpx.Response(503), httpx.Response(200, json={"models": []})]
    chat = Chat("m")
    await chat.close()
    chat._http = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answers.pop(0)))
    assert await chat.get("http://replica/workers") == {"models": []}
    await chat.close()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (httpx.ReadError(""), "a request of the demo failed: ReadError"),
        (None, "http://replica/workers answered 503: Redis is away"),
    ],
)
def test_a_request_that_fails_ends_the_demo_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, error: httpx.HTTPError | None, told: str
) -> None:
    def failing(_: object) -> int:
        request = httpx.Request("GET", "http://replica/workers")
        if error:
            raise error
        return httpx.Response(503, text="Redis is away", request=request).raise_for_status().status_code

    monkeypatch.setattr(demo, "_show", failing)
    with pytest.raises(CommandError) as caught:
        demo.run(argparse.Namespace(agents=False))
    assert str(caught.value) == told


def test_the_table_shows_both_policies() -> None:
    warm = [Answer("a.0", 90, 90, 100, 0.1, "")] * 10
    cold = [Answer("a.0", 0, 0, 100, 0.3, "")] * 10
    lines = str(demo.compare({"cost": warm, "round_robin": cold})).splitlines()
    assert lines[1].split() == ["cost", "10", "90.0%", "100", "100", "ms", "100", "ms"]
    assert lines[2].split() == ["round_robin", "10", "0.0%", "1000", "300", "ms", "300", "ms"]
