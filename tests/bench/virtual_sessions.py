"""Agents on the virtual clock: sessions in a closed loop, at engines whose caches may be too small for all of them.

Tokens, blocks and step times are those of a real engine: a token of an arrival stands for many equal tokens, so that a
block of a trace fills whole blocks of an engine. Engines are an 8B model on an H100 with 400,000 tokens of cache; their
scheduler is vLLM's, as the simulator has it.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, overload

from tests.bench.overlays import overlaid
from tests.bench.virtual_fleet import Cluster, Plan, play
from tests.bench.virtual_plans import QUEUE, arrivals
from tests.bench.virtual_tiers import TieredConfig, room_uncounted

from warmfleet.fleet import Hint, SessionLimits, Weights
from warmfleet.pools.policy import HOMES
from warmfleet.protocol.wire import ENDED_MARK
from warmfleet_loadtest.engine import EngineConfig
from warmfleet_loadtest.measuring.figures import quantile
from warmfleet_loadtest.simulator.scheduler import Limits
from warmfleet_loadtest.simulator.step_costs import PRESETS
from warmfleet_loadtest.traces.agents import generated
from warmfleet_loadtest.traces.trace import Arrival, Trace
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from tests.bench.virtual_store import VirtualStore

    from warmfleet.fleet import Decision, Fleet, Question
    from warmfleet_loadtest.simulator.scheduler import Request

    Steps = list[Arrival]

ENGINE_BLOCK = 256  # tokens: a block of 64 tokens of the agents' trace, whose contexts count four times
CACHE_TOKENS = 400_000
LONGEST = 131_072  # tokens of prompt and answer
AGENT_TIMES = 4.0  # the trace's contexts are of an older model with a small window
CHATS = 10_000_000  # sessions of this number and above are chats
DECODES_FREE: dict[str, Any] = {"decode_price": 0.0, "context_price": 0.0}
LONGEST_HOLD_MS = 100_000_000  # nobody is refused
CHAT_RATE = 1.2  # requests a second
START_S = 60.0  # within which the first sessions of a closed loop begin
HOLD_LIMIT = 1.5  # a new session waits for this multiple of the wait that it was told, at most
SOON_S = 2.0  # a time to first token below this is good
ENGINE = EngineConfig(
    wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor"), ENGINE_BLOCK),
    Limits(max_model_len=LONGEST, block_tokens=ENGINE_BLOCK),
    1 + CACHE_TOKENS // ENGINE_BLOCK,
    PRESETS["h100-8b"],
)


class Stretched(Sequence[int]):
    """A prompt in which each token of another prompt stands ``times`` times."""

    def __init__(self, prompt: Sequence[int], times: int) -> None:
        self._prompt = prompt
        self._times = times

    def __len__(self) -> int:
        return len(self._prompt) * self._times

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, int):
            return self._prompt[index // self._times]
        start, stop, _ = index.indices(len(self))
        first = start // self._times
        made = [token for token in self._prompt[first : -(-stop // self._times)] for _ in range(self._times)]
        return made[start - first * self._times : stop - first * self._times]


# ---------------------------------------------------------------- sessions


@dataclass(frozen=True, slots=True)
class Agents:
    """Sessions, each a list of steps, in the order in which they begin.

    prefix_tokens: with which all prompts begin. context_tokens: mean of prompt and answer beyond that.
    """

    sessions: tuple[Steps, ...]
    prefix_tokens: int
    context_tokens: float

    @classmethod
    def of(cls, sessions: Sequence[Steps]) -> Agents:
        prompts = [steps[0].prompt for steps in sessions]
        whole = min(map(len, prompts)) // ENGINE_BLOCK
        same = (len({tuple(prompt[at * ENGINE_BLOCK : (at + 1) * ENGINE_BLOCK]) for prompt in prompts}) == 1
                for at in range(whole))  # fmt: skip
        prefix = ENGINE_BLOCK * next((at for at, equal in enumerate(same) if not equal), whole)
        sizes = [len(step.prompt) + step.output_tokens - prefix for steps in sessions for step in steps]
        return cls(tuple(sessions), prefix, statistics.fmean(sizes))

    def at_once(self, overcommit: float, engines: int) -> int:
        """Return how many sessions have contexts ``overcommit`` times as large as all caches."""
        return round(overcommit * engines * (CACHE_TOKENS - self.prefix_tokens) / self.context_tokens)


@cache
def agents(source: str, number: int, seed: int = 0) -> Agents:
    """Return ``number`` sessions of the agents' trace, or generated ones. Raises FileNotFoundError without the trace.

    The sessions' order follows from the seed; more sessions than the trace has are copies with other text.
    """
    if source == "generated":
        trace = generated(number, seed)
    else:
        trace = arrivals("agents", None)
        trace = overlaid(trace, -(-number // len({arrival.session for arrival in trace.arrivals})))
    found: dict[int, Steps] = {}
    for arrival in trace.arrivals:
        found.setdefault(arrival.session, []).append(scaled(arrival, trace.scale, AGENT_TIMES))
    order = list(found.values())
    if source != "generated":
        random.Random(seed).shuffle(order)
    return Agents.of([_numbered(steps, session) for session, steps in enumerate(order[:number])])


def coming(number: int, rate: float, seed: int) -> Trace:
    """Return ``number`` sessions of the agents' trace in a closed loop, of which ``rate`` begin a second."""
    generator, now, made = random.Random(seed), 0.0, []
    for first, *later in agents("agents", number, seed).sessions:
        now += generator.expovariate(rate)
        made += [replace(first, at_s=now, think_s=None), *later]
    return Trace("agents", tuple(sorted(made, key=lambda arrival: arrival.at_s)), closed=True)


def scaled(arrival: Arrival, scale: float, times: float = 1.0) -> Arrival:
    prompt, answer = Stretched(arrival.prompt, round(scale * times)), round(scale * arrival.output_tokens)
    return replace(arrival, prompt=prompt, output_tokens=answer)


def _numbered(steps: Steps, session: int) -> Steps:
    return [replace(step, session=session) for step in steps]


@cache
def chats() -> tuple[Arrival, ...]:
    """Return chats that arrive CHAT_RATE times a second, for an hour. Raises FileNotFoundError without the trace."""
    trace = arrivals("conversation", None)
    every = overlaid(trace, 2).arrivals
    pace = len(every) / every[-1].at_s / CHAT_RATE
    return tuple(
        replace(scaled(chat, trace.scale), at_s=chat.at_s * pace, session=CHATS + chat.session) for chat in every
    )


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a run. gaps: factor of all times between an answer and the session's next step.

    at_once: so many sessions run at a time, and when one ends the next begins; 0: each begins at its own at_s.
    skip: sessions that end before anything is counted. ends: the run stops when so many have ended; 0: when all have.
    beside: chats that arrive meanwhile.
    """

    sessions: tuple[Steps, ...]
    at_once: int = 0
    skip: int = 0
    ends: int = 0
    gaps: float = 1.0
    beside: tuple[Arrival, ...] = ()

    def trace(self, seed: int) -> Trace:
        """Return all arrivals but the first steps of sessions that begin when another ends."""
        generator = random.Random(seed)
        made = list(self.beside)
        for number, (first, *later) in enumerate(self.sessions):
            made += [replace(step, think_s=(step.think_s or 0.0) * self.gaps) for step in later]
            if number < self.at_once:
                made.append(replace(first, at_s=generator.uniform(0.0, START_S)))
            elif not self.at_once:
                made.append(first)
        return Trace("sessions", tuple(sorted(made, key=lambda arrival: arrival.at_s)), closed=True)


def burst(found: Agents, rate: float = 0.5, seconds: float = 1_031.0, more: int = 60, at_s: float = 200.0) -> Load:
    """Return sessions that begin ``rate`` times a second, and ``more`` that begin together at ``at_s``."""
    generator, times = random.Random(0), [at_s] * more
    now = generator.expovariate(rate)
    while now < seconds:
        times.append(now)
        now += generator.expovariate(rate)
    begun = zip(found.sessions, sorted(times), strict=False)
    return Load(tuple([replace(steps[0], at_s=at), *steps[1:]] for steps, at in begun))


# ---------------------------------------------------------------- a run


@dataclass(frozen=True, slots=True)
class Features:
    """The hints of clients, and the settings of replicas and engines, that a run is with or without.

    header: clients name their sessions. ended: they say which step is the last. ledger: replicas keep the ledger of
    sessions; without it the cost has no decode terms. tools: requests declare tools, and answers end in tool calls but
    for a session's last. forgets: engines evict the blocks of ended and paused sessions first. tier_times: blocks of
    each engine's tier per block of its GPU; 0: it has no tier. room: the ledger counts the tier as room.
    """

    header: bool = False
    ended: bool = False
    ledger: bool = False
    tools: bool = False
    forgets: bool = False
    tier_times: float = 0.0
    room: bool = True

    def plan(self, engines: int, replicas: int, seed: int) -> Plan:
        sessions = SessionLimits(held_max_ms=LONGEST_HOLD_MS) if self.ledger else SessionLimits()
        engine = ENGINE
        if self.tier_times:
            engine = TieredConfig(ENGINE.scheme, ENGINE.limits, ENGINE.blocks, ENGINE.costs, tier_times=self.tier_times)
        return Plan(
            (engine,) * engines,
            weights=Weights() if self.ledger else replace(Weights(), **DECODES_FREE),
            replicas=replicas,
            speed=1.0,
            seed=seed,
            queue=QUEUE,
            sessions=sessions,
            forgets=self.forgets,
        )


@dataclass(slots=True)
class Step:
    """A request with its first token. necessary: tokens that no cache of its session's earlier prompts would save."""

    session: int
    number: int
    at_s: float
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    necessary: int

    @property
    def computed(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@dataclass(slots=True)
class SessionRecord:
    """A session under way. hashes: of its last prompt."""

    began_s: float
    steps: int = 0
    hashes: list[bytes] = field(default_factory=list)
    ended_s: float = math.inf


class SessionCluster(Cluster):
    """A cluster that begins a session when another ends, and keeps a record of all steps."""

    def __init__(self, store: VirtualStore, plan: Plan, load: Load, features: Features) -> None:
        super().__init__(store, plan)
        self.steps: list[Step] = []
        self.records: dict[int, SessionRecord] = {}
        self.ended: list[SessionRecord] = []
        self._load = load
        self._features = features
        self._next = load.at_once
        self._asked: dict[Request, Step] = {}
        self._prefix: list[bytes] = []  # the block hashes of the first prompt: all agents' prompts begin alike

    async def choose(self, request: Request, arrival: Arrival, now: float) -> int | None:
        record = self.records.setdefault(arrival.session, SessionRecord(now))
        if not self._prefix and arrival.session < CHATS:
            self._prefix = request.hashes
        known = _common(record.hashes or self._prefix, request.hashes) if arrival.session < CHATS else 0
        known = min(known, (request.prompt_tokens - 1) // ENGINE_BLOCK)
        necessary = request.prompt_tokens - known * ENGINE_BLOCK
        self._asked[request] = Step(arrival.session, record.steps, now, 0.0, request.prompt_tokens, 0, necessary)
        record.steps += 1
        record.hashes = request.hashes[: request.prompt_tokens // ENGINE_BLOCK]
        return await super().choose(request, arrival, now)

    def _ask(self, reservation: str, request: Request, session: int) -> Question:
        question = super()._ask(reservation, request, session)
        features, agent = self._features, session < CHATS
        hint = Hint.TOOLS if features.tools and agent else 0
        if features.header and agent:
            question.order = self._ring(b"%d" % session)[:HOMES]
            hint += Hint.NAMED
        if features.ended and agent and self._is_last(self._asked[request]):
            hint += Hint.ENDS
        if features.ledger:
            question.session = bytes([hint]) + (b"n%012d" % session if features.header and agent else b"")
        return question

    def _finish(self, request: Request) -> Literal["t", "e", "o", "?"]:
        step, features = self._asked[request], self._features
        if step.session >= CHATS:
            return "o"
        if self._is_last(step):
            return "e" if features.ended else "o"
        return "t" if features.tools else "o"

    def _booked(self, fleet: Fleet, request: Request, decision: Decision, now: float) -> int:
        number = super()._booked(fleet, request, decision, now)
        if self._features.ended and self._is_last(self._asked[request]):
            request.request_id = request.request_id.replace(".", f".{ENDED_MARK}", 1)
        return number

    def _is_last(self, step: Step) -> bool:
        return step.session < CHATS and step.number + 1 == len(self._load.sessions[step.session])

    async def started(self, request: Request, engine: int, now: float) -> None:
        step = self._asked[request]
        step.ttft_s, step.cached_tokens = now - step.at_s, request.cached_tokens
        self.steps.append(step)
        await super().started(request, engine, now)

    async def finished(self, request: Request, engine: int, now: float) -> None:
        await super().finished(request, engine, now)
        step = self._asked.pop(request)
        if self._is_last(step):
            self._end(self.records[step.session], now)

    def _end(self, record: SessionRecord, now: float) -> None:
        record.ended_s, record.hashes = now, []
        self.ended.append(record)
        if len(self.ended) == self._load.ends:
            self.virtual.stop()
        elif self._load.at_once and self._next < len(self._load.sessions):
            self.virtual.at(now, partial(self.virtual.arrive, self._load.sessions[self._next][0]))
            self._next += 1


def _common(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    """Return how many hashes two chains have in common. Chains that differ once differ to their ends."""
    return bisect_left(range(min(len(left), len(right))), True, key=lambda at: left[at] != right[at])


async def run(
    url: str, load: Load, features: Features, *, engines: int = 4, replicas: int = 4, seed: int = 0
) -> SessionCluster:
    """Play a load, and return the cluster with its records. Raises RuntimeError if the queue refused a request."""
    made = partial(SessionCluster, load=load, features=features)
    with nullcontext() if features.room else room_uncounted():
        cluster = (await play(url, load.trace(seed), features.plan(engines, replicas, seed), made)).cluster
    assert isinstance(cluster, SessionCluster)
    if any(tickets.refused for tickets in cluster.tickets.values()):
        raise RuntimeError("the fleet refused requests, its queue was full")
    return cluster


def figures(cluster: SessionCluster, load: Load) -> dict[str, float]:
    """Return the figures of what came or ended after the first ``skip`` ends of sessions."""
    since = cluster.ended[load.skip - 1].ended_s if load.skip else 0.0
    until = cluster.store.clock.now
    lasted = sorted(record.ended_s - record.began_s for record in cluster.ended[load.skip :])
    steps = [step for step in cluster.steps if step.at_s >= since]
    own = [step for step in steps if step.session < CHATS]
    told: dict[str, float] = {}
    if own:
        ttft, necessary = sorted(step.ttft_s for step in own), sum(step.necessary for step in own)
        told = {
            "sessions_per_hour": 3_600 * len(lasted) / (until - since),
            "session_p50_s": quantile(lasted, 0.5),
            "session_p95_s": quantile(lasted, 0.95),
            "ttft_mean_s": statistics.fmean(ttft),
            "ttft_p50_s": quantile(ttft, 0.5),
            "ttft_p99_s": quantile(ttft, 0.99),
            "ttft_below_2s": bisect_left(ttft, SOON_S) / len(ttft),
            "recomputed": sum(step.computed for step in own) / necessary - 1,
            "sessions": len(lasted),
            "at_once": load.at_once,
        }
    if beside := sorted(step.ttft_s for step in steps if step.session >= CHATS):
        told |= {"chats_ttft_mean_s": statistics.fmean(beside), "chats": len(beside)}
        told |= {f"chats_ttft_p{q}_s": quantile(beside, q / 100) for q in (50, 90)}
    held = [
        (began, ended - began, hold) for tickets in cluster.tickets.values() for began, ended, hold in tickets.holds
    ]
    if held:
        fresh = [seconds / hold.predicted_s for began, seconds, hold in held if not hold.paused and began >= since]
        told |= {"held": len(held) / len(cluster.steps), "longest_hold_s": max(seconds for _, seconds, _ in held)}
        told["longest_pause_s"] = max((seconds for _, seconds, hold in held if hold.paused), default=0.0)
        told |= {f"hold_over_told_p{q}": quantile(sorted(fresh or [0.0]), q / 100) for q in (50, 90, 100)}
        told["over_limit"] = sum(each > HOLD_LIMIT for each in fresh) / max(1, len(fresh))
    cores = [worker.engine for worker in cluster.workers]
    told["busy"] = sum(core.busy_s for core in cores) / len(cores) / until
    told["preemptions"] = sum(core.scheduler.totals.preemptions for core in cores)
    return {name: round(value, 4) for name, value in told.items()}
