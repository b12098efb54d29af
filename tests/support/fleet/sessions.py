"""Agents of a fleet whose ledger of sessions binds, against the scripts alone. Times pass by changing records."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from tests.support.fleet.keyspace import BLOCK, SCHEME, Keyspace

from warmfleet.fleet import Decision, Hint, Queued, SessionEnd, SessionLimits, Split, Standing, new_reservation
from warmfleet.fleet.rows import SESSION, SessionRecord
from warmfleet.fleet.upkeep import Pace

if TYPE_CHECKING:
    from warmfleet.fleet import Question

CAPACITY_BLOCKS = 1_000  # of an engine, 16,000 tokens
NUMBERS = len(fields(SessionRecord)) - 3


@dataclass(slots=True)
class Agent:
    """A conversation. hashes: of its last prompt. hint: of its requests. name: given by the client; empty: none."""

    hashes: bytes = b""
    hint: int = Hint.TOOLS
    tenant: bytes = b"tenant-1"
    name: bytes = b""
    sid: bytes = b""
    asked: Question | None = None
    held: bool = False


class Sessions:
    """Drives decisions, ends and ticks."""

    def __init__(self, keyspace: Keyspace) -> None:
        self.keyspace, self.fleet = keyspace, keyspace.fleet
        self.split = Split.ROLES_IGNORED

    async def bind(self, engines: int = 1, *, busy: bool = True, held_max_ms: int = 600_000) -> None:
        """Make engines that are busy and full, and let the ledger bind."""
        self.fleet.use(
            limits=replace(self.fleet.constants.limits, max_engine_wait_s=0.0),
            sessions=SessionLimits(held_max_ms=held_max_ms),
            block_tokens={SCHEME: BLOCK},
        )
        self.fleet.upkeep.pace = Pace(min_gap_ms=0)
        await self.keyspace.ticked(grace_ms=3_600_000)
        for number in range(1, engines + 1):
            await self.keyspace.worker(number, capacity_blocks=CAPACITY_BLOCKS)
        await self.load(engines, busy=busy)
        await self.tick()

    async def load(self, engines: int = 1, *, busy: bool) -> None:
        """Set how much of its time each engine computed lately."""
        now = int(time.time() * 1000) % 2**32
        for number in range(1, engines + 1):
            share = 65_535 if busy else 0
            await self.keyspace.change(number, blocks=CAPACITY_BLOCKS, busy_share=share, since_ms=now)

    async def tick(self) -> None:
        """Do what is done once a second, an hour within grace."""
        told: Any = await self.keyspace.store.get(self.keyspace.keys.tick)
        state: list[bytes] = told.split()
        state[0] = b"%d" % (time.time() * 1000 - 1_000)
        await self.keyspace.store.set(self.keyspace.keys.tick, b" ".join(state))
        await self.fleet.upkeep.tick()

    async def step(self, agent: Agent, blocks: int = 100, answer: int = 0) -> Decision | Queued:
        """Ask for the agent's next prompt, which has so many blocks more than the last, or again for a held one."""
        if not agent.held:
            agent.hashes = self.keyspace.chain(len(agent.hashes) // 8 + blocks, agent.hashes)
        return await self.again(agent, answer)

    async def again(self, agent: Agent, answer: int = 0) -> Decision | Queued:
        """Ask for the agent's prompt as it is."""
        hint = agent.hint | (Hint.NAMED if agent.name else 0)
        sid = agent.name or (agent.sid if agent.held else b"")
        ask = self.keyspace.ask(
            agent.hashes, reservation=new_reservation(1), tenant=agent.tenant, session=bytes([hint]) + sid
        )
        ask.decode_tokens, ask.split = ask.prompt_tokens + answer, self.split
        told = await self.fleet.queue.decide_in_turn(ask)
        if isinstance(told, Decision):
            agent.asked, agent.sid, agent.held = ask, told.session, False
        else:
            assert told.hold is not None
            agent.asked, agent.sid, agent.held = None, told.hold.session, True
        return told

    async def ends(self, agent: Agent, finish: Literal["t", "e", "o", "?"] = "t") -> None:
        """End the agent's request; the engine then holds the prompt."""
        assert agent.asked is not None
        slot = (await self.record(agent)).slot if agent.sid else 1
        await self.fleet.bookings.settle(agent.asked.reservation, "started")
        end = SessionEnd(agent.sid, finish, agent.asked.prompt_tokens) if agent.sid else None
        await self.fleet.bookings.settle(agent.asked.reservation, "finished", session=end)
        await self.keyspace.hold(slot, agent.hashes)
        await self.load(len(await self.keyspace.rows()), busy=True)

    async def turn(self, blocks: int = 100, finish: Literal["t", "e", "o", "?"] = "t", **agent: Any) -> Agent:
        """A new agent after its first step."""
        made = Agent(**agent)
        told = await self.step(made, blocks)
        assert isinstance(told, Decision), "it should have had a place at once"
        await self.ends(made, finish)
        return made

    async def standing(self, *agents: Agent) -> list[Standing]:
        line = await self.fleet.ledger.poll([agent.sid for agent in agents])
        return [line.standings[agent.sid].standing for agent in agents]

    async def record(self, agent: Agent) -> SessionRecord:
        packed = await cast("Any", self.keyspace.store.hget(self.keyspace.keys.sessions, agent.sid))
        assert packed is not None, "there is no such session"
        return SessionRecord.unpack(packed)

    async def change(self, agent: Agent, **values: Any) -> None:
        """Change numbers of a session's record."""
        record = replace(await self.record(agent), **values)
        numbers = [getattr(record, field.name) for field in fields(SessionRecord)[:NUMBERS]]
        packed = SESSION.pack(*numbers) + record.tenant + record.tail + record.reservation
        await cast("Any", self.keyspace.store.hset(self.keyspace.keys.sessions, agent.sid, packed))

    async def passes(self, agent: Agent, seconds: float) -> None:
        """Let so much time pass for this session: it came, and its last request began or ended, earlier."""
        record = await self.record(agent)
        times = {name: getattr(record, name) - 1_000 * seconds for name in ("first_ms", "since_ms")}
        await self.change(agent, **times)
