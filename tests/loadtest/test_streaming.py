"""A request of a load test against a small OpenAI server that can misbehave."""

from __future__ import annotations

import time

import pytest
from tests.loadtest.openai_server import engine

from warmfleet_loadtest.users.sessions import Ask
from warmfleet_loadtest.users.streaming import Answer, Broken, OpenAIClient, Refused

CHAT = Ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3})


def ask(url: str, broken: list[str], what: Ask = CHAT, key: str = "") -> Answer:
    client = OpenAIClient(url, key)
    client.find_model(lambda _reason: None)
    return client.answer(what, "session-1", lambda reason: broken.append(reason.kind))


def test_an_answer_is_timed_and_counted() -> None:
    before = time.perf_counter()
    with engine() as (url, server):
        answer = ask(url, [], key="secret")

    assert answer.text == "one two three "
    assert before < answer.first_at < time.perf_counter()
    assert len(answer.gaps_s) == 2
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (40, 32, 3)
    assert (answer.headers["x-warmfleet-worker"], answer.headers["x-warmfleet-reservation"]) == ("w1", "booked")
    assert server.bodies == [CHAT.body | {"model": "m", "stream": True, "stream_options": {"include_usage": True}}]
    assert server.headers_seen[0]["X-Session-ID"] == "session-1"
    assert server.headers_seen[0]["Authorization"] == "Bearer secret"


def test_a_completion_of_token_ids_has_its_text_elsewhere() -> None:
    with engine() as (url, _seen):
        assert ask(url, [], Ask("/v1/completions", {"prompt": [1, 2]})).text == "one two three "


def test_an_address_may_end_with_v1() -> None:
    with engine() as (url, _seen):
        assert ask(f"{url}/v1/", []).text == "one two three "


@pytest.mark.parametrize(("fault", "kind"), [("reset", "retried"), ("cut", "cut"), ("reset in the stream", "cut")])
def test_a_broken_connection_is_sent_again_and_counted(fault: str, kind: str) -> None:
    broken: list[str] = []
    with engine(fault) as (url, server):
        answer = ask(url, broken)

    assert answer.text == "one two three "
    assert broken == [kind]
    assert len(server.bodies) == 2
    assert server.bodies[0] == server.bodies[1]


@pytest.mark.parametrize(
    ("faults", "kind", "message", "tries"),
    [
        (["500"], Refused, "500", 1),
        (["error in the stream"], Refused, "engine died", 1),
        (["no JSON"], Refused, "JSON", 1),
        (["reset", "reset", "reset"], Broken, "retried", 3),
        (["cut", "reset", "cut"], Broken, "cut", 3),
    ],
)
def test_what_sending_again_cannot_mend_is_raised(
    faults: list[str], kind: type[Exception], message: str, tries: int
) -> None:
    with engine(*faults) as (url, server), pytest.raises(kind, match=message):
        ask(url, [])

    assert len(server.bodies) == tries


@pytest.mark.parametrize("url", ["", "127.0.0.1:8080", "ftp://host"])
def test_an_address_that_is_none_is_told(url: str) -> None:
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:8080"):
        OpenAIClient(url)


def test_a_server_that_is_not_there_is_told() -> None:
    with pytest.raises(Broken, match="ConnectionRefused"):
        OpenAIClient("http://127.0.0.1:9").find_model(lambda _reason: None)
