"""The sessions of a load test: their requests extend each other, and sessions share the texts that they should."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from warmfleet_loadtest.users.sessions import SESSIONS, Agent, Chat, OneOff, Pool, Rag, Session

KINDS = pytest.mark.parametrize("kind", SESSIONS)


def played(session: Session) -> list[list[dict[str, str]]]:
    """The messages of each request of a session, to its end."""
    sent: list[list[dict[str, str]]] = []
    think_s: float | None = 0.0
    while think_s is not None:
        body: dict[str, Any] = session.ask().body
        sent.append(list(body["messages"]))
        think_s = session.answered(f"answer {len(sent)}")
    return sent


@KINDS
def test_every_request_extends_the_one_before_by_its_answer_and_new_words(kind: str) -> None:
    sent = played(SESSIONS[kind]("key", "shared"))

    for number, (before, after) in enumerate(pairwise(sent), 1):
        assert after[: len(before)] == before
        assert after[len(before)] == {"role": "assistant", "content": f"answer {number}"}
        assert [message["role"] for message in after[len(before) + 1 :]] == ["user"]


@KINDS
def test_a_session_has_as_many_requests_as_its_class_says(kind: str) -> None:
    low, high = SESSIONS[kind].turns
    lengths = {len(played(SESSIONS[kind](f"key-{number}", "shared"))) for number in range(60)}

    assert lengths == set(range(low, high + 1))


@KINDS
def test_equal_keys_give_equal_sessions_and_other_keys_do_not(kind: str) -> None:
    assert played(SESSIONS[kind]("key", "s")) == played(SESSIONS[kind]("key", "s"))
    assert played(SESSIONS[kind]("key", "s"))[0][-1] != played(SESSIONS[kind]("other", "s"))[0][-1]


@pytest.mark.parametrize(("kind", "texts"), [(Chat, Chat.prompts), (Rag, Rag.documents), (Agent, Agent.roles)])
def test_sessions_share_a_few_long_texts(kind: type[Session], texts: int) -> None:
    openings = [kind(f"key-{number}", "shared").messages[0]["content"] for number in range(400)]

    assert 0.7 * texts <= len(set(openings)) <= texts
    assert min(len(text.split()) for text in openings) > 200
    assert set(openings).isdisjoint(kind("key", "other").messages[0]["content"] for _ in range(1))


def test_some_documents_are_more_popular() -> None:
    openings = [Rag(f"key-{number}", "shared").messages[0]["content"] for number in range(400)]
    often = sorted((openings.count(text) for text in set(openings)), reverse=True)

    assert often[0] > 4 * often[len(often) // 2]


def test_agents_give_short_answers_at_once_and_many_of_them() -> None:
    assert Agent.answer_tokens < Chat.answer_tokens
    assert Agent.think_s < Chat.think_s
    assert Agent.turns[0] > Rag.turns[1]


def test_single_prompts_share_nothing_and_vary_in_length() -> None:
    prompts = [played(OneOff(f"key-{number}", "shared"))[0][0]["content"] for number in range(100)]

    assert len({prompt.split()[0] + prompt.split()[1] for prompt in prompts}) > 50
    assert max(map(len, prompts)) > 8 * min(map(len, prompts))


def test_a_request_continues_the_session_that_has_been_ready_for_longest() -> None:
    pool = Pool(lambda number: OneOff(f"key-{number}", "shared"))
    first, second = pool.take(0.0), pool.take(0.0)
    pool.give_back(second, 5.0)
    pool.give_back(first, 7.0)

    assert pool.take(4.9) not in (first, second)  # nobody is ready: another session begins
    assert pool.take(8.0) is second
    assert pool.take(8.0) is first
