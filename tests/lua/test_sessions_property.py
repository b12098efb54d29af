"""Any history of steps, ends, deaths and losses leaves a ledger that adds up, and nobody waits for ever."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.sessions import Agent, Sessions

from warmfleet.fleet import Hint, Place, Standing

if TYPE_CHECKING:
    from tests.support.fleet.keyspace import Keyspace

ENGINES = 3


class History:
    """Random agents of two tenants. An agent is idle, under way (``asked``) or held."""

    def __init__(self, sessions: Sessions, seed: int) -> None:
        self.sessions, self.keyspace, self.rng = sessions, sessions.keyspace, random.Random(seed)
        self.agents: list[Agent] = []

    async def step(self) -> None:
        """A new agent comes, or an idle one comes back."""
        rng = self.rng
        idle = [agent for agent in self.agents if agent.asked is None and not agent.held]
        if idle and rng.random() < 0.6:
            agent = rng.choice(idle)
        else:
            name = b"name-%08d" % rng.randrange(10**8) if rng.random() < 0.3 else b""
            hint = rng.choice((0, int(Hint.TOOLS)))
            agent = Agent(hint=hint, tenant=rng.choice((b"tenant-1", b"tenant-2")), name=name)
            self.agents.append(agent)
        await self.sessions.step(agent, rng.choice((2, 20, 100, 300)))

    async def end(self) -> None:
        running = [agent for agent in self.agents if agent.asked is not None]
        if not running:
            return
        agent = self.rng.choice(running)
        known = agent.sid and await self.recorded(agent)
        finish = self.rng.choice("ttttoe?")
        if known:
            await self.sessions.ends(agent, cast("Any", finish))
        else:
            assert agent.asked is not None
            await self.sessions.fleet.bookings.settle(agent.asked.reservation, "finished")
        agent.asked = None
        if finish == "e":
            self.agents.remove(agent)

    async def polled(self) -> None:
        """Replicas ask for their held sessions, and decide those again whose turn has come."""
        held = [agent for agent in self.agents if agent.held]
        for agent, standing in zip(held, await self.sessions.standing(*held), strict=True):
            if standing is not Standing.WAITS:
                await self.sessions.again(agent)

    async def time_passes(self) -> None:
        seconds = self.rng.choice((1, 3, 10))
        for each in (await self.sessions.fleet.ledger.read()).sessions:
            await self.sessions.passes(Agent(sid=each.session), seconds)

    async def loss(self) -> None:
        """Redis loses a key, a replica dies with its requests, or an engine starts anew."""
        kind = self.rng.randrange(3)
        keys = self.keyspace.keys
        if kind == 0:
            await self.keyspace.store.delete(self.rng.choice((keys.sessions, keys.session_line, keys.places)))
        elif kind == 1:
            for agent in [agent for agent in self.agents if agent.asked is not None]:
                assert agent.asked is not None
                await self.keyspace.expire(agent.asked.reservation)
                self.agents.remove(agent)
        else:
            await self.keyspace.change(self.rng.randint(1, ENGINES), slot=self.rng.randint(10, 10**6))

    async def recorded(self, agent: Agent) -> bool:
        return bool(await cast("Any", self.keyspace.store.hexists(self.keyspace.keys.sessions, agent.sid)))

    async def check(self) -> None:
        """After a tick the engines' sums are those of the sessions in, and the line has exactly those that wait."""
        view = await self.sessions.fleet.ledger.read()
        line: Any = await self.keyspace.store.zrange(self.keyspace.keys.session_line, 0, -1)
        assert set(line) == {each.session for each in view.held}
        inside = [each for each in view.sessions if each.place is Place.IN]
        assert sum(engine.inside for engine in view.engines) == len(inside), "a place is at an engine that lives"
        taken = sum(engine.taken_tokens for engine in view.engines)
        assert taken <= sum(each.tokens for each in inside) + ENGINES
        assert all(each.running >= 0 for each in view.sessions)

    async def until_all_are_served(self) -> None:
        for _ in range(40 * (1 + len(self.agents))):
            held = [agent for agent in self.agents if agent.held]
            if not held:
                return
            await self.end()
            await self.time_passes()
            await self.sessions.tick()
            await self.polled()
        raise AssertionError(f"{len(held)} are held for ever")


@pytest.mark.long(minutes=1, shows="40 random histories of sessions add up in the ledger, and nobody waits for ever")
@pytest.mark.parametrize("seed", range(4, 40))
async def test_many_histories_add_up_and_end(keyspace: Keyspace, seed: int) -> None:
    await any_history(keyspace, seed)


@pytest.mark.parametrize("seed", range(4))
async def test_any_history_adds_up_and_ends(keyspace: Keyspace, seed: int) -> None:
    await any_history(keyspace, seed)


async def any_history(keyspace: Keyspace, seed: int) -> None:
    sessions = Sessions(keyspace)
    await sessions.bind(ENGINES)
    history = History(sessions, seed)
    actions = (history.step, history.step, history.step, history.end, history.end, history.time_passes, history.polled)
    for turn in range(120):
        await history.rng.choice(actions)()
        if history.rng.random() < 0.05:
            await history.loss()
        if turn % 6 == 0:
            await sessions.load(ENGINES, busy=history.rng.random() < 0.9)
            await sessions.tick()
            await history.check()
    await history.until_all_are_served()
