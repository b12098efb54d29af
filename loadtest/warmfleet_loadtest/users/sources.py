"""Locust's users: each is a source whose requests arrive in an open loop, by the plan of the run.

Usually a Locust user is a person who waits for each answer. Here one user of each kind stands for all people, and sends
a request whenever one is due. A request continues the session of its kind that has been ready for longest; if none is
ready (all wait for answers, or their people think), the request begins a new session. So the rate is always that of
the plan, and within a session a request still comes after the answer to the one before.
"""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import gevent
from gevent.pool import Group
from locust import User, task

from warmfleet_loadtest.traces.trace import Arrival, open_trace
from warmfleet_loadtest.users.plan import TRACE_KIND
from warmfleet_loadtest.users.sessions import Agent, Ask, Chat, OneOff, Pool, Rag, Session
from warmfleet_loadtest.users.streaming import TIMEOUT_S, TRIES, Broken, OpenAIClient, Refused
from warmfleet_loadtest.users.tally import Tally, Timing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from warmfleet_loadtest.users.plan import Plan

MOST_OPEN = 2_000  # most open requests of a source; more count as failed, so that a dead server fills no memory
LOOK_S = 0.5  # time between two checks whether the run was ended early


log = logging.getLogger("warmfleet.loadtest")


@dataclass(slots=True)
class Run:
    """The state that the sources of a process share. ended: no further request may be sent. sources: those started."""

    plan: Plan
    tally: Tally = field(default_factory=Tally)
    ended: bool = False
    sources: list[Source] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """True if the sources have not started, or if one of them has requests to send or to finish."""
        return not self.sources or not all(source.done for source in self.sources)


class TooMany(Exception):  # noqa: N818  # a result of a load test, not a fault of it
    """A request was due, but MOST_OPEN requests of this source are already unanswered."""


class Source(User):
    """A Locust user that sends requests when they are due. kind: its name in options and statistics.

    ``environment.warmfleet`` is the ``Run``.
    """

    abstract = True
    kind: ClassVar[str] = ""

    def on_start(self) -> None:
        run: Run = self.environment.warmfleet
        run.sources.append(self)
        self.run_state, self.plan, self.tally = run, run.plan, run.tally
        self.zero = time.perf_counter() + self.plan.began - time.time()
        self.name = f"{self.environment.runner.worker_index}.{len(run.sources)}"
        self.open = Group()
        self.next_due = math.inf
        try:
            self.client = OpenAIClient(str(self.host), os.environ.get("OPENAI_API_KEY", ""))
            self.client.find_model(self._broke)
        except (ValueError, Refused, Broken) as error:
            log.error("no model at %s: %s", self.host, error)  # noqa: TRY400  # the sentence says all
            self._failed(time.perf_counter(), error)
            return
        self.due = self.dues()
        self.next_due = next(self.due, math.inf)

    def dues(self) -> Iterator[float]:
        """Yield the times at which requests are due, in seconds from the begin of the run."""
        raise NotImplementedError

    def begin(self, due: float) -> None:
        """Begin the request that was due at ``due`` (``time.perf_counter``). Each call has a greenlet of its own."""
        raise NotImplementedError

    def wait_time(self) -> float:
        return min(LOOK_S, max(0.0, self.zero + self.next_due - time.perf_counter()))

    @task
    def arrive(self) -> None:
        """Begin all requests that are due."""
        while not self.run_state.ended and self.zero + self.next_due <= time.perf_counter():
            due = self.zero + self.next_due
            self.next_due = next(self.due, math.inf)
            if len(self.open) >= MOST_OPEN:
                self._failed(due, TooMany(f"{MOST_OPEN} requests are open: the fleet is far behind"))
            else:
                self.open.add(gevent.spawn(self.begin, due))

    def on_stop(self) -> None:
        """Wait until all open requests have ended, at the latest by their own time-outs."""
        self.open.join(timeout=TRIES * TIMEOUT_S)

    @property
    def done(self) -> bool:
        """True if no request is open and none will come."""
        return not len(self.open) and (self.run_state.ended or self.next_due == math.inf)

    def send(self, ask: Ask, session: str, due: float) -> str | None:
        """Send a request and count it; return the answer's text, or None if there is none."""
        late_s = time.perf_counter() - due
        self.tally.sent(self.kind, time.time())
        try:
            answer = self.client.answer(ask, session, self._broke)
        except (Refused, Broken) as error:
            self._failed(due, error)
            return None
        timing = Timing(late_s, answer.first_at - due, time.perf_counter() - due)
        self.tally.answered(self.kind, answer, timing, time.time())
        self._fire("TTFT", timing.ttft_s, 0)
        if answer.gaps_s:
            self._fire("gap", sum(answer.gaps_s) / len(answer.gaps_s), 0)
        self._fire("answer", timing.total_s, len(answer.text))
        return answer.text

    def _failed(self, due: float, error: Exception) -> None:
        self.tally.failed(self.kind, time.time())
        self._fire("answer", time.perf_counter() - due, 0, error)

    def _broke(self, reason: Broken) -> None:
        self.tally.broke(reason.kind, time.time())

    def _fire(self, row: str, seconds: float, length: int, failure: Exception | None = None) -> None:
        """Count a time in Locust's own statistics, which its web page shows."""
        self.environment.events.request.fire(
            request_type=row,
            name=self.kind,
            response_time=1_000 * seconds,
            response_length=length,
            exception=failure,
            context={},
        )


class SessionSource(Source):
    """A source of generated sessions of one class."""

    abstract = True
    session: ClassVar[type[Session]]

    def on_start(self) -> None:
        super().on_start()
        key = f"{self.plan.seed}-{self.kind}-{self.name}"
        self.pool = Pool(lambda number: self.session(f"{key}-{number}", self.plan.seed))

    def dues(self) -> Iterator[float]:
        return self.plan.arrivals(self.kind, self.name).times()

    def begin(self, due: float) -> None:
        session = self.pool.take(time.perf_counter())
        text = self.send(session.ask(), session.key, due)
        think_s = None if text is None else session.answered(text)
        if think_s is not None:
            self.pool.give_back(session, time.perf_counter() + think_s)


class ChatUser(SessionSource):
    """Conversations: each request sends the whole conversation so far, so only its end is new."""

    kind = Chat.kind
    session = Chat


class RagUser(SessionSource):
    """Short questions about long documents that many ask about."""

    kind = Rag.kind
    session = Rag


class AgentUser(SessionSource):
    """Agents: a long prefix with tools, and many short answers, each followed at once by a tool's result."""

    kind = Agent.kind
    session = Agent


class OneOffUser(SessionSource):
    """Single prompts that share nothing."""

    kind = OneOff.kind
    session = OneOff


class TraceUser(Source):
    """Plays a trace: `--trace conversation`, `--trace agents` or a file in the format of loadtest/README.md.

    Requests have the trace's own times, divided by --speed. In a trace with a closed loop a session's next request
    waits for its previous answer. With several processes each plays its share of the sessions.
    """

    kind = TRACE_KIND

    def on_start(self) -> None:
        options: Any = self.environment.parsed_options
        self.speed = options.speed
        trace = open_trace(options.trace, options.rows or None)
        sources = self.environment.warmfleet.plan.sources
        share = self.environment.runner.worker_index % sources
        mine = [arrival for arrival in trace.arrivals if arrival.session % sources == share]
        self.sessions = by_session(mine) if trace.closed else [[arrival] for arrival in mine]
        super().on_start()

    def dues(self) -> Iterator[float]:
        self.waiting = iter(self.sessions)
        seconds = self.plan.seconds
        return (at for at in (session[0].at_s / self.speed for session in self.sessions) if at < seconds)

    def begin(self, due: float) -> None:
        for arrival in next(self.waiting):
            if arrival.think_s is not None:
                due = time.perf_counter() + arrival.think_s / self.speed
                gevent.sleep(arrival.think_s / self.speed)
                if self.run_state.ended or due - self.zero >= self.plan.seconds:
                    return
            body = {"prompt": arrival.prompt, "max_tokens": arrival.output_tokens, "ignore_eos": True}
            if self.send(Ask("/v1/completions", body), f"{self.plan.seed}-trace-{arrival.session}", due) is None:
                return


def by_session(arrivals: list[Arrival]) -> list[list[Arrival]]:
    """Return the arrivals of each session, sessions in the order of their first arrival."""
    sessions: dict[int, list[Arrival]] = {}
    for arrival in arrivals:
        sessions.setdefault(arrival.session, []).append(arrival)
    return sorted(sessions.values(), key=lambda session: session[0].at_s)
