"""Faults in a fleet whose caches agents overfill, so that the ledger holds some of them: no step fails, and nobody is
held for ever.

Agents run in a closed loop: a chat that declares a tool, the tool's result some time after the answer, and so on. They
ask again only if their replica was killed or stopped, or if a killed engine cut a stream that had begun.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
import signal
import statistics
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import pytest
import pytest_asyncio
from tests.drills.clients import WORDS
from tests.drills.fleet import MODEL, START_S, Engine, Fleet, Replica, running
from tests.support.polling import poll
from tests.support.replicas.replica import sample_of

from warmfleet.errors import WarmfleetError
from warmfleet.fleet import Fleet as Scripts
from warmfleet.fleet import LedgerView, Spans, connect
from warmfleet.fleet.rows import LoadRow, Place, SessionRecord
from warmfleet.routing.sessions import NAME_BYTES
from warmfleet.routing.tenants import Tenancy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

AGENTS, STEPS, GAP_S = 14, 5, 0.2  # contexts of 14 agents are 1.5 times as large as two caches
MANY = 22  # most of them are held
ENGINE = ("--blocks", "256", "--step-time", "2")  # 4,096 tokens; 2,000 tokens a second
SYSTEM, FIRST, LATER = 100, 400, 150  # words of the system prompt, of a first step and of a tool's result
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
GONE_S = 5.0  # after which a session that no replica asks for leaves the line, at the next second
SLACK_S = 3.0  # a busy machine
BUSY, FULL = b"\xff\xff", 0.95
BUSY_AT = 1 + LoadRow(busy_share=0xFFFF).pack("").index(BUSY)
DRAIN_S = GRACE_S = 0.5  # so short that a stopping replica cannot serve what it holds
AWAY_S = 20.0  # for which Redis is away
ALL_OVER_S = 120.0  # the longest hold of a paused session, and as long again for its steps
TENANT = "X-Tenant"


def words(count: int, seed: object) -> str:
    return " ".join(random.Random(str(seed)).choices(WORDS, k=count))


@dataclass(slots=True)
class Step:
    """A model call. first: of its session. again: it was lost, and sent again. wait_s: until the first byte of the
    answer, from the last time that it was sent.
    """

    first: bool
    again: bool
    wait_s: float


@dataclass
class Agents:
    """Agents that go on, session after session, until ``over``. Every second one names its sessions.

    names: how an agent names a request, by the numbers of the agent, session and step; empty: not at all.
    """

    fleet: Fleet
    tenant: str = ""
    names: Callable[[int, int, int], str] = lambda agent, number, _step: f"{agent}-{number}" * (agent % 2)
    steps: list[Step] = field(default_factory=list)
    sessions: int = 0
    again: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    may_cut: bool = False
    may_go: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False
    numbers: Any = field(default_factory=itertools.count)

    async def run(self, count: int) -> None:
        """Play until ``over``; return when every session has ended."""
        self.may_go.set()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as self._http:
            await asyncio.gather(*(self._agent(agent) for agent in range(count)))

    @property
    def told(self) -> str:
        waits = sorted(step.wait_s for step in self.steps) or [0.0]
        again = [round(step.wait_s, 1) for step in self.steps if step.again]
        return (
            f"{self.tenant or 'agents'}: {self.sessions} sessions, {len(self.steps)} steps, first byte after "
            f"{statistics.median(waits):.2f} s (median) to {waits[-1]:.1f} s; lost and sent again {again}"
        )

    async def _agent(self, agent: int) -> None:
        while not self.over:
            number = next(self.numbers)
            seed = f"{self.tenant} {number}"
            talk = [{"role": "system", "content": words(SYSTEM, "system")}]
            talk += [{"role": "user", "content": f"Task {seed}. {words(FIRST, seed)}"}]
            for step in range(STEPS):
                answer = await self._step(talk, step, self.names(agent, number, step))
                if answer is None:
                    break
                talk += [{"role": "assistant", "content": answer}]
                talk += [{"role": "tool", "tool_call_id": "call", "content": words(LATER, f"{seed} {step}")}]
                await asyncio.sleep(GAP_S)
            else:
                self.sessions += 1

    async def _step(self, talk: list[dict[str, Any]], step: int, name: str) -> str | None:
        """Return the answer's text; None if the step failed. One that was lost with its replica is sent again."""
        body = {"model": MODEL, "messages": talk, "tools": TOOLS, "max_tokens": 6, "stream": True}
        body |= {"tool_choice": "none"} if step == STEPS - 1 else {}
        headers = ({TENANT: self.tenant} if self.tenant else {}) | ({"X-Warmfleet-Session": name} if name else {})
        again = False
        while True:
            began = time.monotonic()
            ready = [replica for replica in self.fleet.replicas if replica.ready and not replica.killed]
            replica = random.choice(ready or self.fleet.replicas)
            pieces: list[bytes] = []
            status, wait_s = 0, 0.0
            try:
                async with self._http.post(f"{replica.url}/v1/chat/completions", json=body, headers=headers) as answer:
                    status = answer.status
                    async for piece in answer.content.iter_any():
                        wait_s = wait_s or time.monotonic() - began
                        pieces.append(piece)
            except (aiohttp.ClientError, OSError) as error:
                why = f"{type(error).__name__}: {error}"
            else:
                if status == 200 and b"data: [DONE]" in pieces[-1]:
                    self.steps.append(Step(step == 0, again, wait_s))
                    return text_of(b"".join(pieces))
                why = f"{status} {b''.join(pieces)[-300:]!r}"
            lost = replica.killed and status in (0, 200, 503)
            if not (lost or (self.may_cut and status == 200 and pieces)):
                self.failures.append(f"{replica.name} after {time.monotonic() - began:.1f} s: {why}")
                return None
            self.again.append(why)
            again = True
            await self.may_go.wait()


def text_of(stream: bytes) -> str:
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


@dataclass
class Look:
    """Reads the ledger of the fleet."""

    fleet: Fleet
    scripts: Scripts

    async def ledger(self) -> LedgerView:
        """The ledger; empty while Redis is away."""
        try:
            return await self.scripts.ledger.read()
        except (WarmfleetError, OSError):
            return LedgerView()

    async def held(self, least: int = 1) -> None:
        """Return once so many sessions are held."""

        async def some() -> bool:
            return len((await self.ledger()).held) >= least

        await poll(some, 90, f"{least} sessions are held", every_s=0.1)

    async def silent(self, seconds: float = 2.0) -> list[bytes]:
        """The sessions that wait, or have their turn, for which no replica asked for so long."""
        now, micros = await self.scripts.redis.time()
        packed = await cast("Any", self.scripts.redis.hgetall(self.scripts.keys.sessions))
        records = {sid: SessionRecord.unpack(record) for sid, record in packed.items()}
        before = 1000 * (now + micros / 1e6 - seconds)
        some = records.items()
        return [sid for sid, record in some if record.place != Place.OUT and 0 < record.heard_ms < before]

    async def waits_at(self, replica: Replica) -> float:
        """The number of requests that this replica holds; 0 if it does not answer."""
        try:
            async with self.fleet.http.get(f"{replica.url}/metrics") as answer:
                return sample_of(await answer.text(), "warmfleet_held_requests")
        except (aiohttp.ClientError, OSError):
            return 0.0

    async def waits(self) -> float:
        return sum([await self.waits_at(replica) for replica in self.fleet.replicas])

    async def held_at(self, replica: Replica, least: int = 2) -> None:
        """Return once this replica holds so many requests."""

        async def some() -> bool:
            return await self.waits_at(replica) >= least

        await poll(some, 90, f"{replica.name} holds {least} requests", every_s=0.1)

    async def speed_up_binding(self) -> None:
        """Once the caches are full, say that the engines were busy for long, which takes 11 s to show by itself."""
        keys, redis = self.scripts.keys, self.scripts.redis
        script = """local row = redis.call("HGET", KEYS[1], ARGV[1])
            redis.call("HSET", KEYS[1], ARGV[1], row:sub(1, ARGV[2] - 1) .. ARGV[3] .. row:sub(ARGV[2] + 2))"""

        async def full() -> bool:
            workers = await self.scripts.workers.read()
            return all(worker.load.blocks >= FULL * worker.load.capacity_blocks for worker in workers)

        await poll(full, 60, "the caches are full", every_s=0.1)
        for worker in await self.scripts.workers.read():
            await cast("Any", redis.eval(script, 1, keys.load, worker.worker_id, BUSY_AT, BUSY))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    settings = {
        "TENANT_HEADER": TENANT,
        "DRAIN_S": f"{DRAIN_S:g}",
        "SHUTDOWN_GRACE_S": f"{GRACE_S:g}",
        "QUEUE_TIMEOUT_S": "60",
        "SESSION_WAIT_MAX_S": "100000",  # a ledger that has let in few sessions yet predicts long waits
    }
    async with running(2, ENGINE, **settings) as made:
        yield made


@asynccontextmanager
async def playing(fleet: Fleet, *groups: tuple[Agents, int], hangs_up: bool = False) -> AsyncIterator[Look]:
    """Agents that overfill the caches, some of which are held. At the end every session ends, or all clients hang up;
    then nothing is left.
    """
    await poll(fleet.whole, START_S, "the fleet is whole before the drill")
    look = Look(fleet, Scripts(connect(f"redis://127.0.0.1:{fleet.redis_port}/0", timeout_s=5), MODEL))
    play = asyncio.gather(*(agents.run(count) for agents, count in groups))
    try:
        await look.speed_up_binding()
        await look.held()
        yield look
        for agents, _ in groups:
            agents.over = True
        if not hangs_up:
            async with asyncio.timeout(ALL_OVER_S):
                await play
        play.cancel()
        await asyncio.gather(play, return_exceptions=True)
        assert [failure for agents, _ in groups for failure in agents.failures] == []
        await poll(lambda: nobody_held(look), 5, "the line is empty", every_s=0.1)
        if not hangs_up:
            await poll(lambda: unbooked(fleet), Spans().lease_ms / 1000 + 15, "nothing is booked", every_s=0.2)
    finally:
        play.cancel()
        await asyncio.gather(play, return_exceptions=True)
        for agents, _ in groups:
            print(agents.told, *agents.failures, sep="\n")
        await look.scripts.close()


async def nobody_waits(look: Look) -> bool:
    return await look.waits() == 0


async def line_is_of(look: Look, replica: Replica) -> bool:
    return len((await look.ledger()).held) == await look.waits_at(replica)


async def nobody_held(look: Look) -> bool:
    return await nobody_waits(look) and (await look.ledger()).held == ()


async def unbooked(fleet: Fleet) -> bool:
    return await fleet.load() == 0


async def more(agents: Agents, sessions: int = 2) -> None:
    """Return once so many more sessions have ended."""
    wanted = agents.sessions + sessions
    await poll(lambda: agents.sessions >= wanted, 90, f"{sessions} more sessions end", every_s=0.1)


@contextmanager
def gone_for_good(fleet: Fleet, replica: Replica) -> Iterator[None]:
    """In this block the replica is killed or stopped; at its end another takes its name."""
    replica.killed = True
    try:
        yield
    finally:
        fleet.start_replica(replica)


async def test_a_killed_replica_and_a_client_that_hangs_up_leave_the_line(fleet: Fleet) -> None:
    agents, victim = Agents(fleet), fleet.replicas[0]
    async with playing(fleet, (agents, AGENTS), hangs_up=True) as look:
        await hangs_up(fleet, look, fleet.replicas[1])
        await look.held_at(victim)
        agents.may_go.clear()  # so that nobody asks for its sessions
        with gone_for_good(fleet, victim):
            fleet.processes.kill(victim.name)
            killed = time.monotonic()
            await poll(look.silent, 10, "nobody asks for its sessions")
            await poll(lambda: gone(look), GONE_S + SLACK_S, "its sessions have left the line")
            print(f"left the line after {time.monotonic() - killed:.1f} s")
            agents.may_go.set()
            await more(agents)
    assert agents.again


async def gone(look: Look) -> bool:
    return not await look.silent()


async def hangs_up(fleet: Fleet, look: Look, replica: Replica) -> None:
    """A client is held, hangs up, and its session leaves the line long before it would be missed."""
    talk = [{"role": "system", "content": words(SYSTEM, "system")}, {"role": "user", "content": words(FIRST, "gone")}]
    body = {"model": MODEL, "messages": talk, "tools": TOOLS, "max_tokens": 6}
    headers, flow = {"X-Warmfleet-Session": "hangs up"}, Tenancy("", TENANT).flow_of(b"")
    sid = b"n" + hashlib.blake2b(flow + b"hangs up", digest_size=NAME_BYTES).digest()

    async def place() -> Place | None:
        return next((each.place for each in (await look.ledger()).sessions if each.session == sid), None)

    async def held() -> bool:
        return await place() is Place.NEW

    async def left() -> bool:
        return await place() in (None, Place.OUT)

    asked = asyncio.create_task(fleet.http.post(f"{replica.url}/v1/chat/completions", json=body, headers=headers))
    await poll(held, 20, "it is held")
    asked.cancel()
    hung_up = time.monotonic()
    await poll(left, GONE_S - 1, "it has left the line")
    print(f"hung up: left the line after {time.monotonic() - hung_up:.2f} s")


# ---------------------------------------------------------------- the other faults

LONG = pytest.mark.long(
    minutes=6,
    shows=(
        "agents overfill the caches while a replica is stopped, Redis is killed or frozen, or an engine is killed and "
        "joins again: no step fails, nobody is held for ever, and the ledger comes back"
    ),
)


@LONG
async def test_a_stopping_replica_answers_held_requests_in_time(fleet: Fleet) -> None:
    agents, victim = Agents(fleet), fleet.replicas[0]
    async with playing(fleet, (agents, MANY)) as look:
        await look.held_at(victim, 5)
        agents.may_go.clear()  # so that only those that it holds leave the line
        with gone_for_good(fleet, victim):
            began = time.monotonic()
            await fleet.stop_replica(victim)
            took_s = time.monotonic() - began
            print(f"stopped after {took_s:.1f} s")
            assert took_s < DRAIN_S + GRACE_S + SLACK_S
            await poll(lambda: line_is_of(look, fleet.replicas[1]), GONE_S - 2, "it took its sessions out of the line")
            assert agents.again
            assert all(why.startswith(("503", "200")) for why in agents.again), "each request was answered"
            agents.may_go.set()
            await more(agents)


@asynccontextmanager
async def redis_away(fleet: Fleet, fault: str) -> AsyncIterator[None]:
    """In this block Redis is frozen, or killed and then empty."""
    if fault == "killed":
        fleet.processes.kill("redis")
    else:
        fleet.signal("redis", signal.SIGSTOP)
    try:
        yield
    finally:
        if fault == "killed":
            await fleet.start_redis()
        else:
            fleet.signal("redis", signal.SIGCONT)


@LONG
@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_nobody_is_held_while_redis_is_away_and_the_ledger_comes_back(fleet: Fleet, fault: str) -> None:
    agents = Agents(fleet)
    async with playing(fleet, (agents, AGENTS)) as look:
        await look.held(3)
        async with redis_away(fleet, fault):
            away = time.monotonic()
            await poll(lambda: nobody_waits(look), GONE_S + SLACK_S, "nobody is held")
            print(f"nobody is held after {time.monotonic() - away:.1f} s")
            while time.monotonic() - away < AWAY_S:
                assert await look.waits() == 0
                await asyncio.sleep(0.2)
        back = time.monotonic()
        await look.held()
        print(f"again held {time.monotonic() - back:.1f} s after Redis")
        await more(agents)


@LONG
async def test_sessions_of_a_killed_engine_go_on_elsewhere_and_an_engine_that_joins_takes_some(fleet: Fleet) -> None:
    agents, victim = Agents(fleet, may_cut=True), fleet.engines[0]
    async with playing(fleet, (agents, AGENTS)) as look:
        await poll(lambda: half_inside(look, victim), 60, "it has half of the sessions")
        fleet.processes.kill(victim.name)
        try:
            await more(agents, 4)
            await poll(lambda: left(look, victim), 60, "the ledger has it no longer", every_s=0.1)
            await look.held(3)
        finally:
            fleet.start_engine(victim)
        began = time.monotonic()
        await poll(lambda: inside(look, victim), 60, "sessions are let in at the engine that joined")
        print(f"let in {time.monotonic() - began:.1f} s after its start")
        await more(agents, 4)


async def half_inside(look: Look, engine: Engine) -> bool:
    counts = [await inside(look, each) for each in look.fleet.engines]
    return sum(counts) > 2 and 2 * await inside(look, engine) >= sum(counts) - 1


async def inside(look: Look, engine: Engine) -> int:
    """The number of sessions that have places at this engine."""
    engines = (await look.ledger()).engines
    return sum(each.inside for each in engines if each.worker_id.startswith(f"{engine.name}."))


async def left(look: Look, engine: Engine) -> bool:
    return all(not each.worker_id.startswith(f"{engine.name}.") for each in (await look.ledger()).engines)


# ---------------------------------------------------------------- fairness

FAIR = pytest.mark.long(
    minutes=4,
    shows=(
        "a tenant with a tenth of the agents waits less for its first steps, and an agent with a new session id for "
        "each request gains nothing"
    ),
)


@FAIR
async def test_a_small_tenant_is_let_in_before_a_large_one(fleet: Fleet) -> None:
    large, small = Agents(fleet, "large"), Agents(fleet, "small")
    async with playing(fleet, (large, MANY - 2), (small, 2)):
        await more(small, 6)
    waits = [statistics.mean(step.wait_s for step in agents.steps if step.first) for agents in (small, large)]
    print(f"first steps: small {waits[0]:.2f} s, large {waits[1]:.2f} s")
    assert waits[0] < waits[1] / 2


@FAIR
async def test_a_new_session_id_for_each_request_gains_nothing(fleet: Fleet) -> None:
    honest = Agents(fleet, "honest", lambda agent, number, _step: f"{agent}-{number}")
    inventive = Agents(fleet, "inventive", lambda agent, number, step: f"{agent}-{number}-{step}")
    async with playing(fleet, (honest, AGENTS // 2), (inventive, AGENTS // 2)):
        await more(honest, 30)
    print(f"sessions: honest {honest.sessions}, inventive {inventive.sessions}")
    assert inventive.sessions <= 1.1 * honest.sessions
    assert honest.sessions > 0
