"""Choosers that look into simulated engines. No router can know more, so routers' figures are compared with theirs.

They read the block pools and queues of the engines directly, at no cost and without delay. Two of them decide when a
request arrives, the third keeps requests back:

- ``Oracle`` takes the engine that would finish the prompt first, by its wait and the prompt's uncached tokens.
- ``Sticky`` sends all requests of a session to one engine, by a hash of the session.
- ``Central`` keeps every request back until an engine is free, and then sends the one with the least to compute.

Times are seconds by the clock of the engines, real or virtual.
"""

from __future__ import annotations

import random
import zlib
from typing import TYPE_CHECKING, NamedTuple, Protocol

from warmfleet_loadtest.simulator.step_costs import StepWork

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from warmfleet_loadtest.simulator.scheduler import Request, Scheduler
    from warmfleet_loadtest.simulator.step_costs import StepCosts

CHOOSERS = ("oracle", "sticky", "central")
SAME_S = 1e-9  # difference up to which times count as equal, because of rounding errors


class Engine(Protocol):
    """A simulated engine. step_ends: when the step under way will end, or else the last step ended."""

    @property
    def scheduler(self) -> Scheduler: ...
    @property
    def costs(self) -> StepCosts: ...
    @property
    def step_ends(self) -> float: ...


class Outlook(NamedTuple):
    """A request's time on an engine. ready_s: until its prompt is computed. own_s: the part for the prompt itself."""

    ready_s: float
    own_s: float


class Backlog:
    """The work that an engine would do first if a request came now: the present step and all earlier prompts."""

    def __init__(self, engine: Engine, now: float) -> None:
        self._engine = engine
        self._left_s = max(0.0, engine.step_ends - now)
        self._tokens = 0
        self._ahead: set[bytes] = set()  # block hashes of the prompts that it would compute first
        scheduler, costs = engine.scheduler, engine.costs
        decoding = [request.tokens for request in scheduler.running if request.output_tokens]
        self._step_s = costs.seconds(StepWork(decode_requests=len(decoding), decode_context=sum(decoding)))
        for request in scheduler.running:
            if request.computed < request.prompt_tokens:
                self.queue(request, request.prompt_tokens - request.computed)
        for request in scheduler.waiting:
            self.queue(request)

    def queue(self, request: Request, tokens: int | None = None) -> None:
        """Add a request to this work. tokens: prompt tokens still to compute; None = all that are not cached."""
        self._tokens += self.uncached(request) if tokens is None else tokens
        self._ahead.update(request.hashes)

    def uncached(self, request: Request) -> int:
        """Return the tokens of the request's prompt that the engine would have to compute."""
        scheduler = self._engine.scheduler
        size, known = scheduler.limits.block_tokens, 0
        for block_hash in request.hashes[: (request.prompt_tokens - 1) // size]:
            if block_hash not in self._ahead and not scheduler.pool.holds(block_hash):
                break
            known += 1
        return request.prompt_tokens - known * size

    def outlook(self, request: Request) -> Outlook:
        own = self.uncached(request)
        ready_s = self._left_s + self._seconds(self._tokens + own)
        return Outlook(ready_s, self._seconds(own))

    def _seconds(self, tokens: int) -> float:
        """Return the time for these prompt tokens, with the fixed costs and the decoding of their steps."""
        steps = -(-tokens // self._engine.scheduler.limits.step_tokens)
        return steps * self._step_s + tokens * self._engine.costs.prefill_token_s


class Chooser(Protocol):
    """Chooses an engine for each request. now: seconds by the engines' clock.

    choose: returns the engine's number, or None to keep the request back until a later call of ``send``. room_made:
    call it when an engine may have become free. gone: call it when the client of a request has hung up.
    """

    def choose(self, request: Request, session: Hashable, now: float) -> int | None: ...
    def room_made(self, now: float) -> None: ...
    def gone(self, request: Request) -> None: ...


class _AtOnce:
    """The methods of a chooser that keeps no request back."""

    def room_made(self, now: float) -> None: ...
    def gone(self, request: Request) -> None: ...


class Oracle(_AtOnce):
    """Sends a request to the engine that would finish its prompt first. Ties are broken at random, by ``seed``."""

    def __init__(self, engines: Sequence[Engine], seed: int = 0) -> None:
        self._engines = engines
        self._random = random.Random(seed)

    def choose(self, request: Request, session: Hashable, now: float) -> int | None:  # noqa: ARG002 - as of Chooser
        ready = [Backlog(engine, now).outlook(request).ready_s for engine in self._engines]
        first = min(ready) + SAME_S
        return self._random.choice([number for number, at in enumerate(ready) if at <= first])


class Sticky(_AtOnce):
    """Sends all requests of a session to one engine, by a hash of the session."""

    def __init__(self, engines: Sequence[Engine], seed: int = 0) -> None:
        self._count = len(engines)
        self._seed = seed

    def choose(self, request: Request, session: Hashable, now: float) -> int | None:  # noqa: ARG002 - as of Chooser
        return zlib.crc32(f"{self._seed}-{session}".encode()) % self._count


class Central:
    """Keeps requests back until an engine is free. A free engine computes no prompt, and no prompt waits there.

    Requests are planned in the order of their uncached tokens, least first: each gets the engine that would finish its
    prompt first, after the requests planned before, and is sent if that engine is free. So a request waits for a busy
    engine that would still finish its prompt first. send: is called with a request and the engine's number, and must
    hand the request to the engine's scheduler at once.
    """

    def __init__(self, engines: Sequence[Engine], send: Callable[[Request, int], None]) -> None:
        self._engines = engines
        self._send = send
        self._waiting: dict[Request, None] = {}

    def choose(self, request: Request, session: Hashable, now: float) -> int | None:  # noqa: ARG002 - as of Chooser
        self._waiting[request] = None
        self.room_made(now)
        return None

    def room_made(self, now: float) -> None:
        while self._waiting and (free := {number for number, engine in enumerate(self._engines) if _free(engine)}):
            backlogs = [Backlog(engine, now) for engine in self._engines]
            taken = _least_work(self._waiting, backlogs, free)
            if taken is None:
                return
            request, number = taken
            del self._waiting[request]
            self._send(request, number)

    def gone(self, request: Request) -> None:
        self._waiting.pop(request, None)


def _free(engine: Engine) -> bool:
    scheduler = engine.scheduler
    return not scheduler.waiting and all(request.output_tokens for request in scheduler.running)


def _least_work(waiting: Iterable[Request], backlogs: Sequence[Backlog], free: set[int]) -> tuple[Request, int] | None:
    """Return (shortest request whose best engine is free, engine's number). Adds skipped requests to the backlogs."""
    for request in sorted(waiting, key=lambda request: min(backlog.uncached(request) for backlog in backlogs)):
        outlooks = [backlog.outlook(request) for backlog in backlogs]
        number = outlooks.index(min(outlooks))
        if number in free:
            return request, number
        backlogs[number].queue(request)
    return None


def chooser(name: str, engines: Sequence[Engine], send: Callable[[Request, int], None], seed: int = 0) -> Chooser:
    """Return one of CHOOSERS. send: see ``Central``."""
    if name == "central":
        return Central(engines, send)
    return Oracle(engines, seed) if name == "oracle" else Sticky(engines, seed)
