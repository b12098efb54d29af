"""Which session a request belongs to, and how it ended."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from tests.support.engines.scripted import STREAM_HEAD, Engine, Seen, chunk, event, reply
from tests.support.polling import poll

from warmfleet.engines.reported_usage import AnswerTail, ResponsesTail
from warmfleet.fleet import Decision
from warmfleet.fleet.bookings import Bookings
from warmfleet.pools.identified_prompt import IdentifiedPrompt
from warmfleet.prompt.dialects import bodies
from warmfleet.prompt.engine_paths import KNOWN
from warmfleet.routing.booking import end_of
from warmfleet.routing.call import NO_HINTS, Hints
from warmfleet.routing.sessions import ENDS, NAMED, TOOLS, session_of

if TYPE_CHECKING:
    from tests.support.engines.scripted import Answer
    from tests.support.replicas.replica import Replica

    from warmfleet.fleet import Question, SessionEnd, Shortfall
    from warmfleet.fleet.bookings import Outcome
    from warmfleet.fleet.handovers import Moved

USER = [{"role": "user", "content": "text"}]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
FUNCTION = {"type": "function", "function": {"name": "look"}}
ANTHROPIC = {"name": "look", "input_schema": {"type": "object"}}
RESPONSE = {"type": "function", "name": "look", "parameters": {}}


def session(path: str, hints: Hints = NO_HINTS, flow: bytes = b"tenant-1", prompts: int = 1, **body: Any) -> bytes:
    request = bodies.parse(KNOWN[path], json.dumps({"model": "m"} | body).encode())
    return session_of(KNOWN[path].form, flow, hints, request, IdentifiedPrompt((), 1, 1, "load", prompt_count=prompts))


@pytest.mark.parametrize(
    ("path", "body", "flags"),
    [
        (CHAT, {"messages": USER}, 0),
        (CHAT, {"messages": USER, "tools": []}, 0),
        (CHAT, {"messages": USER, "tools": [FUNCTION]}, TOOLS),
        (CHAT, {"messages": USER, "tools": [FUNCTION], "tool_choice": "none"}, 0),
        (MESSAGES, {"messages": USER, "max_tokens": 1, "tools": [ANTHROPIC]}, TOOLS),
        (MESSAGES, {"messages": USER, "max_tokens": 1, "tools": [ANTHROPIC], "tool_choice": {"type": "none"}}, 0),
        (RESPONSES, {"input": "text", "tools": [RESPONSE]}, TOOLS),
        (RESPONSES, {"input": "text", "tools": [RESPONSE], "previous_response_id": "r"}, TOOLS),
        (RESPONSES, {"input": "text", "tools": [RESPONSE], "previous_response_id": "r", "tool_choice": "none"}, 0),
        ("/v1/completions", {"prompt": "text"}, 0),
    ],
)
def test_a_request_without_a_name_tells_whether_it_declares_tools(path: str, body: dict[str, Any], flags: int) -> None:
    assert session(path, **body) == bytes((flags,))
    assert session(path, Hints(ended=True), **body) == bytes((flags | ENDS,))
    assert session(path, prompts=2, **body) == b""


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/chat/completions/batch", "/tokenize"])
def test_only_requests_of_one_answer_to_one_prompt_take_part(path: str) -> None:
    assert session(path, Hints(b"name"), input="text") == b""


def test_a_name_is_of_one_tenant_and_wherever_the_client_gives_it() -> None:
    named = session(CHAT, Hints(b"name"), messages=USER)
    assert (named[0], named[1:2], len(named)) == (NAMED, b"n", 14)
    assert session(CHAT, messages=USER, prompt_cache_key="name") == named
    assert session(RESPONSES, input="text", prompt_cache_key="name", previous_response_id="r") == named
    assert session(CHAT, Hints(b"name"), messages=USER, prompt_cache_key="other") == named
    assert session(CHAT, Hints(b"name"), flow=b"tenant-2", messages=USER)[1:] != named[1:]
    assert session(CHAT, Hints(b"other"), messages=USER)[1:] != named[1:]


def choice(reason: str, **more: Any) -> bytes:
    choices = [{"index": 0, "delta": {"content": '"finish_reason":"tool_calls"'}, "finish_reason": reason} | more]
    return json.dumps({"choices": choices}, separators=(",", ":")).encode()


CALL = b'data: {"type":"response.output_item.done","item":{"arguments":"{}","type":"function_call","name":"look"}}\n\n'
COMPLETED = (
    b'data: {"type":"response.completed","response":{"tools":[%b],"usage":{"input_tokens":7,"output_tokens":2}}}'
)
MANY = b'{"type":"function"},' * 200 + b"{}"
USAGE = b'{"usage":{"prompt_tokens":40,"completion_tokens":5,"completion_tokens_details":{"reasoning_tokens":3}}}'


@pytest.mark.parametrize(
    ("tail", "finish", "tokens"),
    [
        (AnswerTail(choice("tool_calls")), "t", 0),
        (AnswerTail(choice("stop", stop_reason=None) + USAGE), "o", 45),
        (AnswerTail(choice("length")), "o", 0),
        (AnswerTail(b'{"choices":[{"delta":{},"finish_reason":null}]}'), "?", 0),
        (AnswerTail(b'{"delta":{"stop_reason":"tool_use"},"usage":{"input_tokens":3,"output_tokens":4}}'), "t", 7),
        (AnswerTail(b'{"delta": {"stop_reason": "end_turn"}}'), "o", 0),
        (ResponsesTail(CALL + COMPLETED % MANY), "t", 9),
        (ResponsesTail(COMPLETED % MANY), "o", 9),
        (ResponsesTail(b'{"type":"response.created"}'), "?", 0),
    ],
)
def test_the_end_of_an_answer_tells_whether_it_calls_tools(tail: AnswerTail, finish: str, tokens: int) -> None:
    assert (tail.finish(), tail.context_tokens()) == (finish, tokens)


@pytest.mark.parametrize("at", range(1, len(CALL), 7))
def test_a_call_that_comes_in_two_pieces_is_seen(at: int) -> None:
    tail = ResponsesTail()
    for piece in (CALL[:at], CALL[at:], COMPLETED % MANY):
        tail.add(piece)
    assert tail.finish() == "t"


@pytest.mark.parametrize(
    ("flags", "outcome", "tail", "expected"),
    [
        (TOOLS, "finished", AnswerTail(choice("tool_calls") + USAGE), ("t", 45)),
        (TOOLS, "finished", AnswerTail(choice("stop")), ("o", 106)),
        (TOOLS | ENDS, "finished", AnswerTail(choice("stop")), ("e", 106)),
        (TOOLS | ENDS, "failed", None, ("?", 106)),
        (TOOLS, "unsent", None, ("e", 106)),
    ],
)
def test_redis_learns_the_end_and_the_tokens_of_the_whole_context(
    flags: int, outcome: Outcome, tail: AnswerTail | None, expected: tuple[str, int]
) -> None:
    decision = Decision("r", "booked", "w", "w", "", 0, 100, False, False, 0.0, 0, False, 100, 100, session=b"sid")
    end = end_of(bytes((flags,)), decision, outcome, tail, 6)
    assert (end.session, end.finish, end.tokens) == (b"sid", *expected)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[SessionEnd | None]:
    """What Redis was told of the ends of requests that all have a session, if they ask for it."""
    told: list[SessionEnd | None] = []
    decision, command = Bookings.decision, Bookings.settle_command

    def with_session(bookings: Bookings, question: Question, answer: list[Any]) -> Decision:
        return replace(decision(bookings, question, answer), session=question.session and b"sid")

    def noted(
        bookings: Bookings,
        reservation: str,
        outcome: Outcome,
        tokens: int = 0,
        shortfall: Shortfall | None = None,
        session: SessionEnd | None = None,
        moved: Moved | None = None,
    ) -> bytes:
        if outcome not in ("started", "due"):
            told.append(session)
        return command(bookings, reservation, outcome, tokens, shortfall, moved=moved)

    monkeypatch.setattr(Bookings, "decision", with_session)
    monkeypatch.setattr(Bookings, "settle_command", noted)
    return told


def events(*pieces: bytes, ends: bool = True) -> Answer:
    """An engine that streams these pieces; unless it ``ends``, it breaks off."""

    async def answer(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for piece in pieces:
            chunk(writer, piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        if ends:
            chunk(writer, b"")
        else:
            writer.close()

    return answer


async def whole(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
    reply(writer, b'{"choices":[{"message":{},"finish_reason":"tool_calls"}],' + USAGE[1:])


TOOL_CHAT = {"messages": USER, "tools": [FUNCTION], "stream": True}


@pytest.mark.parametrize(
    ("path", "body", "answers", "expected"),
    [
        (CHAT, TOOL_CHAT, events(event("word"), b"data: " + choice("tool_calls") + b"\n\n", b"data: [DONE]\n\n"), "t"),
        (CHAT, TOOL_CHAT, events(event("word"), b"data: " + choice("stop") + b"\n\n"), "o"),
        (CHAT, TOOL_CHAT, events(event("word"), ends=False), "?"),
        (CHAT, TOOL_CHAT | {"stream": False}, whole, "t"),
        (RESPONSES, {"input": "text", "tools": [RESPONSE], "stream": True}, events(CALL, COMPLETED % MANY), "t"),
        (RESPONSES, {"input": "text", "tools": [RESPONSE], "stream": True}, events(COMPLETED % MANY), "o"),
    ],
)
async def test_the_end_of_a_relayed_answer_reaches_redis(
    replica_and_engine: tuple[Replica, Engine],
    ends: list[SessionEnd | None],
    path: str,
    body: dict[str, Any],
    answers: Answer,
    expected: str,
) -> None:
    router, upstream = replica_and_engine
    upstream.answer = answers
    with suppress(aiohttp.ClientPayloadError):
        await router.post({"model": upstream.model, "max_tokens": 8} | body, path)
    await poll(lambda: bool(ends), 10, "the request ended")
    (end,) = ends
    assert end is not None
    assert (end.session, end.finish) == (b"sid", expected)
    assert end.tokens > 0


async def test_of_a_request_without_a_session_nothing_is_kept(
    replica_and_engine: tuple[Replica, Engine], ends: list[SessionEnd | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    router, upstream = replica_and_engine
    upstream.answer = events(event("word"), b"data: " + choice("stop") + b"\n\n")
    kept = list[bytes]()
    monkeypatch.setattr(AnswerTail, "finish", lambda tail: kept.append(tail._tail))
    prompts = {"model": upstream.model, "prompt": ["one", "two"], "max_tokens": 8, "stream": True}
    assert (await router.post(prompts))[0] == 200
    await poll(lambda: bool(ends), 10, "the request ended")
    assert (ends, kept) == ([None], [])
