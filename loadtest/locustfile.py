"""Chat and RAG users for Locust, against any OpenAI-compatible address: `locust -f loadtest/locustfile.py -H URL`.

Chat users hold conversations: each turn sends the whole conversation so far, so only its end is new. RAG users ask
questions about a few shared documents. A user waits for each answer (closed loop within a session). Users are paced, so
that a slower server does not lower the rate (close to an open loop) until a turn takes longer than its pace.

Every request opens a connection of its own, so that a TCP balancer spreads the turns of one conversation over replicas.
A request whose connection breaks is sent again, as the OpenAI clients do, at most twice. Each break is counted with its
time, as ``retried`` (no byte had come) or ``cut`` (the stream had begun). Any HTTP error is a failure at once. Rows of
type TTFT are times to the first token, in ms.

WARMFLEET_LOADTEST_SUMMARY: a file that gets the counts as JSON at the end. WARMFLEET_LOADTEST_PACE_S: seconds between
the begins of a user's turns. SIGUSR1 ends a run as the end of ``--run-time`` does: users finish their last request.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gevent
from locust import User, constant_pacing, events, task

PACE_S = float(os.environ.get("WARMFLEET_LOADTEST_PACE_S", "2"))
TIMEOUT_S = 60
TRIES = 3
TURNS = 6  # after so many turns the user begins another conversation
DOCUMENTS = 8
DOCUMENT_WORDS = 1_200
ANSWER_TOKENS = 96
_WORDS = "the cache of a model holds blocks that every request may share when its first tokens are known".split()  # noqa: SIM905


class Refused(Exception):  # noqa: N818  # a result of a load test, not a fault of it
    """The server's status was not 200, its stream held an error, or nothing came for TIMEOUT_S seconds."""


class Broken(Exception):  # noqa: N818  # same
    """The connection broke. kind: ``retried`` if no byte had come, ``cut`` if the stream had begun."""

    def __init__(self, kind: str, reason: BaseException) -> None:
        super().__init__(f"{kind}: {reason!r}")
        self.kind = kind


@dataclass
class Tally:
    """Counts for which Locust's own statistics have no column."""

    workers: Counter[str] = field(default_factory=Counter)
    reservations: Counter[str] = field(default_factory=Counter)
    matched_tokens: int = 0
    prompt_tokens: int = 0
    broken: list[tuple[float, str]] = field(default_factory=list)  # (Unix time of the break, kind)
    fallbacks: list[float] = field(default_factory=list)  # Unix times of answers routed without a decision

    def add(self, headers: http.client.HTTPMessage) -> None:
        self.workers[headers.get("x-warmfleet-worker", "none")] += 1
        reservation = headers.get("x-warmfleet-reservation", "none")
        self.reservations[reservation] += 1
        if reservation == "fallback":
            self.fallbacks.append(time.time())
        self.matched_tokens += int(headers.get("x-warmfleet-matched-tokens", 0))
        self.prompt_tokens += int(headers.get("x-warmfleet-prompt-tokens", 0))


def _start(environment: Any, **_: object) -> None:
    environment.tally = Tally()
    gevent.signal_handler(signal.SIGUSR1, environment.runner.quit)


def _write_summary(environment: Any, **_: object) -> None:
    target = os.environ.get("WARMFLEET_LOADTEST_SUMMARY")
    if not target:
        return
    tally, stats = environment.tally, environment.stats
    rows = {
        f"{entry.method} {entry.name}": {
            "requests": entry.num_requests,
            "failures": entry.num_failures,
            "mean_ms": round(entry.avg_response_time, 1),
            "p50_ms": entry.get_response_time_percentile(0.5),
            "p95_ms": entry.get_response_time_percentile(0.95),
        }
        for entry in stats.entries.values()
    }
    found = {"rows": rows, "workers": tally.workers, "reservations": tally.reservations, "broken": tally.broken}
    found["fallbacks"] = tally.fallbacks
    found |= {"matched_tokens": tally.matched_tokens, "prompt_tokens": tally.prompt_tokens}
    found["errors"] = [f"{error.occurrences} x {error.name}: {error.error}" for error in stats.errors.values()]
    Path(target).write_text(json.dumps(found))


events.init.add_listener(_start)  # type: ignore[no-untyped-call]
events.quitting.add_listener(_write_summary)  # type: ignore[no-untyped-call]


class OpenAIUser(User):
    """A user that streams chat completions and measures them. kind: its name in the statistics."""

    abstract = True
    wait_time = constant_pacing(PACE_S)
    kind = ""

    def on_start(self) -> None:
        self.random = random.Random(f"{self.kind}-{id(self)}-{time.time_ns()}")
        self.url = urlsplit(str(self.host))
        self.model = self._first_model()

    def _first_model(self) -> str:
        """The first served model. Tries as often as a request does, for a replica may be killed just now."""
        for left in reversed(range(TRIES)):
            connection = self._connect()
            try:
                connection.request("GET", "/v1/models")
                return str(json.load(connection.getresponse())["data"][0]["id"])
            except (OSError, http.client.HTTPException):
                self.environment.tally.broken.append((time.time(), "retried"))
                if not left:
                    raise
            finally:
                connection.close()
        raise AssertionError("unreachable")

    def ask(self, messages: list[dict[str, str]]) -> str:
        """The whole answer, or an empty string after a failure, which is counted."""
        body = {"model": self.model, "messages": messages, "max_tokens": ANSWER_TOKENS, "stream": True}
        began, answer = time.perf_counter(), ""
        failure: Exception | None = None
        for left in reversed(range(TRIES)):
            try:
                answer = self._once(json.dumps(body).encode(), began)
                break
            except Broken as broken:
                self.environment.tally.broken.append((time.time(), broken.kind))
                failure = broken if not left else None
            except (Refused, OSError, ValueError) as error:
                failure = error
                break
        self._count("chat", began, len(answer), failure)
        return answer

    def _once(self, body: bytes, began: float) -> str:
        """The answer of one try. Raises Broken, Refused."""
        connection, kind = self._connect(), "retried"
        pieces: list[str] = []
        try:
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise Refused(f"{response.status} {response.read(300).decode(errors='replace')}")
            for line in response:
                if kind == "retried":
                    kind = "cut"
                    self._count("TTFT", began, 0, None)
                if line.strip() == b"data: [DONE]":
                    self.environment.tally.add(response.headers)
                    return "".join(pieces)
                pieces.append(_text(line))
        except TimeoutError as error:
            raise Refused(f"no answer within {TIMEOUT_S} s") from error
        except (ConnectionError, http.client.HTTPException) as error:
            raise Broken(kind, error) from error
        finally:
            connection.close()
        raise Broken(kind, EOFError("the stream ended without [DONE]"))

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.url.hostname or "", self.url.port, timeout=TIMEOUT_S)

    def _count(self, what: str, began: float, length: int, failure: BaseException | None) -> None:
        self.environment.events.request.fire(
            request_type=what,
            name=self.kind,
            response_time=(time.perf_counter() - began) * 1_000,
            response_length=length,
            exception=failure,
            context={},
        )


class ChatUser(OpenAIUser):
    """Conversations that share one system prompt. Each turn adds a question, and the next turn its answer, too."""

    weight = 3
    kind = "chat"

    def on_start(self) -> None:
        super().on_start()
        self.messages: list[dict[str, str]] = []

    @task
    def turn(self) -> None:
        if not self.messages or len(self.messages) > 2 * TURNS:
            self.messages = [{"role": "system", "content": f"You are helpful. {_prose(random.Random(0), 200)}"}]
        self.messages.append({"role": "user", "content": _prose(self.random, 60)})
        answer = self.ask(self.messages)
        self.messages.append({"role": "assistant", "content": answer})


class RagUser(OpenAIUser):
    """Questions about a few long documents that all users share; some documents are much more popular."""

    weight = 1
    kind = "rag"

    @task
    def question(self) -> None:
        number = min(int(self.random.paretovariate(1)) - 1, DOCUMENTS - 1)
        document = _prose(random.Random(number), DOCUMENT_WORDS)
        content = f"Document {number}:\n{document}\n\nQuestion: {_prose(self.random, 20)}?"
        self.ask([{"role": "user", "content": content}])


def _prose(source: random.Random, words: int) -> str:
    return " ".join(f"{source.choice(_WORDS)}{source.randrange(100)}" for _ in range(words))


def _text(line: bytes) -> str:
    """The words in one server-sent event. Raises Refused for an error sent inside the stream."""
    if not line.startswith(b"data: "):
        return ""
    event = json.loads(line[6:])
    if "error" in event:
        raise Refused(f"error in the stream: {event['error']}")
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
