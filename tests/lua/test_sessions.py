"""The ledger of sessions: who is a session, who has a place, who waits for one, and that nobody waits for ever."""

from __future__ import annotations

import struct
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.sessions import CAPACITY_BLOCKS, Agent, Sessions

from warmfleet.fleet import (
    ClientLimits,
    Decision,
    Hint,
    Hold,
    Place,
    Queued,
    Role,
    SessionEnd,
    SessionLimits,
    Spans,
    Split,
    Standing,
    new_reservation,
)
from warmfleet.fleet.rows import Lease, Stage, Trait

if TYPE_CHECKING:
    from tests.support.fleet.keyspace import Keyspace

CHAT = 0  # hint of a request without a name and tools
LARGE = 300  # blocks: two such sessions fit into an engine, of which .8 of 1,000 are for sessions


@pytest.fixture
async def sessions(keyspace: Keyspace) -> Sessions:
    made = Sessions(keyspace)
    await made.bind()
    return made


async def keys(sessions: Sessions) -> set[bytes]:
    prefix = sessions.keyspace.keys.prefix.encode()
    found: Any = await sessions.keyspace.store.keys()
    names: set[bytes] = {key[len(prefix) :] for key in found if key.startswith(prefix)}
    return {name for name in names if name.startswith((b"sessions", b"session_line", b"places", b"way:"))}


# ---------------------------------------------------------------- whether it binds


@pytest.mark.parametrize(
    ("row", "binds"),
    [
        ({}, True),
        ({"busy_share": 20_000}, False),  # the engine has time to compute
        ({"blocks": 900}, False),  # its cache has room
        ({"capacity_blocks": 0}, False),
    ],
)
async def test_the_ledger_binds_while_an_engine_is_busy_and_full(
    keyspace: Keyspace, row: dict[str, int], *, binds: bool
) -> None:
    sessions = Sessions(keyspace)
    await sessions.bind(busy=False)
    await sessions.load(busy=True)
    await keyspace.change(1, **row)
    await sessions.tick()
    decided = await sessions.step(Agent())
    assert isinstance(decided, Decision)
    assert bool(decided.session) == binds == bool(await keys(sessions))


async def test_without_the_setting_there_is_no_ledger(keyspace: Keyspace) -> None:
    sessions = Sessions(keyspace)
    await sessions.bind(held_max_ms=0)
    decided = await sessions.step(Agent())
    assert isinstance(decided, Decision)
    assert (decided.session, await keys(sessions)) == (b"", set())


async def test_an_idle_fleet_forgets_its_ledger_and_lets_all_go(sessions: Sessions) -> None:
    """The ledger binds on for a minute after the last busy second."""
    first, second = await sessions.turn(LARGE), await sessions.turn(LARGE)
    held = Agent()
    assert isinstance(await sessions.step(held, LARGE), Queued)
    await sessions.load(busy=False)
    await sessions.keyspace.change(1, prefill_tokens=9_000)  # work is ahead: no time for one more
    await sessions.tick()
    assert await sessions.standing(held) == [Standing.WAITS]
    await binds_until(sessions, 0)
    await sessions.keyspace.change(1, prefill_tokens=0, busy_share=0)
    await sessions.tick()
    assert {key for key in await keys(sessions) if not key.startswith(b"way:")} == set()
    assert await sessions.standing(held) == [Standing.UNKNOWN]
    assert isinstance(await sessions.again(held), Decision)
    assert first.sid != second.sid


async def binds_until(sessions: Sessions, ms: int) -> None:
    """Change the time until which the ledger binds without a busy engine."""
    await state_is(sessions, 2, ms)


async def state_is(sessions: Sessions, number: int, value: float) -> None:
    """Change a number of the whole ledger (lua/parts/shared/sessions.lua); 3: sessions in, 4: let in a second."""
    store, places = sessions.keyspace.store, sessions.keyspace.keys.places
    packed = bytearray(await cast("Any", store.hget(places, b"")))
    struct.pack_into(">d", packed, 8 * number, value)
    await cast("Any", store.hset(places, b"", bytes(packed)))


async def older_tick(sessions: Sessions) -> None:
    """Leave what a tick of a version without the ledger leaves: no word of it."""
    store, tick = sessions.keyspace.store, sessions.keyspace.keys.tick
    told: Any = await store.get(tick)
    await store.set(tick, b" ".join(told.split()[:6]))


async def test_a_tick_of_an_older_replica_ends_no_ledger(sessions: Sessions) -> None:
    """While a fleet is upgraded, ticks are those of old and new replicas in turn; the old ones write no bound."""
    await sessions.turn(LARGE)
    await sessions.turn(LARGE)
    held = Agent()
    await sessions.step(held, LARGE)
    await sessions.load(busy=False)  # it goes on to bind for a minute
    await sessions.keyspace.change(1, prefill_tokens=9_000)
    await older_tick(sessions)
    await sessions.tick()
    assert await sessions.standing(held) == [Standing.WAITS]
    assert isinstance(await sessions.step(Agent(), LARGE), Queued)


async def test_after_an_older_replicas_tick_a_ledger_goes_on_as_long_as_after_any(sessions: Sessions) -> None:
    """The ledger begins once an engine is busy for half of its time, and goes on while an engine is for a third."""
    await sessions.turn(LARGE)
    await sessions.turn(LARGE)
    await sessions.keyspace.change(1, busy_share=26_000)
    await binds_until(sessions, int(time.time() * 1000) + 5_000)
    await older_tick(sessions)
    await sessions.tick()
    packed: Any = await sessions.keyspace.store.hget(sessions.keyspace.keys.places, b"")
    assert struct.unpack_from(">d", packed, 16)[0] > time.time() * 1000 + 50_000


# ---------------------------------------------------------------- who is a session


async def test_a_session_is_known_by_its_prompt(sessions: Sessions) -> None:
    agent, other = await sessions.turn(), await sessions.turn()
    for blocks in (1, 30, 100):
        sid = agent.sid
        await sessions.step(agent, blocks)
        assert agent.sid == sid != other.sid
        await sessions.ends(agent)


async def test_two_tenants_share_no_session(sessions: Sessions) -> None:
    agent = await sessions.turn()
    thief = Agent(agent.hashes, tenant=b"tenant-2")
    await sessions.step(thief, 10)
    assert thief.sid != agent.sid


async def test_identical_openings_are_sessions_of_their_own(sessions: Sessions) -> None:
    """Requests of the same prompt at a time are several sessions; afterwards each has its own."""
    opening = sessions.keyspace.chain(50)
    agents = [Agent(opening) for _ in range(4)]
    for agent in agents:
        await sessions.again(agent)
    assert len({agent.sid for agent in agents}) == 4
    for agent in agents:
        await sessions.ends(agent)
    for agent in agents:
        await sessions.step(agent, 10)
    assert len({agent.sid for agent in agents}) == 4
    for agent in agents:
        await sessions.ends(agent)
    for agent in agents:
        sid = agent.sid
        await sessions.step(agent, 10)
        assert agent.sid == sid


async def test_a_fork_has_a_session_of_its_own_with_its_parents_arrival(sessions: Sessions) -> None:
    parent = await sessions.turn()
    await sessions.passes(parent, 5)
    await sessions.step(parent, 10)
    child = Agent(parent.hashes)
    await sessions.step(child, 12)
    assert child.sid != parent.sid
    assert (await sessions.record(child)).first_ms == (await sessions.record(parent)).first_ms


async def test_a_system_prompt_is_no_session(sessions: Sessions) -> None:
    """A prompt that others have but for less than two blocks names no session."""
    system = sessions.keyspace.chain(40)
    await sessions.keyspace.hold(1, system)
    first = Agent(system, hint=CHAT)
    await sessions.step(first, 1)
    await sessions.ends(first, "o")
    second = Agent(first.hashes, hint=CHAT)
    await sessions.step(second, 1)
    assert second.sid != first.sid


async def test_a_named_session_is_known_by_its_name_alone(sessions: Sessions) -> None:
    agent = await sessions.turn(name=b"nameofsession")
    agent.hashes = b""
    await sessions.step(agent, 60)
    assert agent.sid == b"nameofsession"


async def test_an_invented_name_for_each_request_gains_nothing(sessions: Sessions) -> None:
    """The prompt shows whose step it is: a fork of an agent waits like a new agent."""
    agent = await sessions.turn(LARGE, name=b"name-00000001")
    await sessions.turn(LARGE)
    await sessions.passes(agent, 100)
    first = (await sessions.record(agent)).first_ms
    await sessions.tick()
    await sessions.turn(LARGE)
    renamed = Agent(agent.hashes, hint=0, name=b"name-00000002")
    assert isinstance(await sessions.step(renamed, 10), Queued)
    assert (await sessions.record(renamed)).first_ms == first


# ---------------------------------------------------------------- who has a place


async def test_sessions_are_let_in_until_most_of_the_cache_is_theirs(sessions: Sessions) -> None:
    await sessions.turn(LARGE)
    await sessions.turn(LARGE)
    held = Agent()
    told = await sessions.step(held, LARGE)
    assert isinstance(told, Queued)
    assert told.hold is not None
    assert (told.outcome, told.hold.ahead, told.hold.in_line, told.hold.paused) == ("held", 0, 1, False)
    assert 0 < told.hold.predicted_s < 120, "two places end now and then"
    small = Agent()
    assert isinstance(await sessions.step(small, 10), Queued), "nobody passes"


async def test_others_than_agents_are_never_held(sessions: Sessions) -> None:
    await sessions.turn(LARGE)
    await sessions.turn(LARGE)
    chat = Agent(hint=CHAT)
    for _ in range(3):
        assert isinstance(await sessions.step(chat, LARGE), Decision)
        await sessions.ends(chat, "o")
        await sessions.passes(chat, 100)
    assert (await sessions.record(chat)).place == Place.OUT


async def test_a_session_that_comes_back_soon_is_an_agents(sessions: Sessions) -> None:
    chat = Agent(hint=CHAT)
    await sessions.step(chat, 100)
    await sessions.ends(chat, "o")
    assert (await sessions.record(chat)).place == Place.OUT
    await sessions.step(chat, 10)
    assert (await sessions.record(chat)).place == Place.IN
    await sessions.ends(chat, "o")
    assert (await sessions.record(chat)).place == Place.IN, "its answers are followed soon"


async def test_of_each_kind_redis_learns_whether_its_sessions_are_agents(sessions: Sessions) -> None:
    for number in range(11):
        named = Agent(hint=0, name=b"name-%08d" % number)
        await sessions.step(named, 20)
        assert (await sessions.record(named)).place == Place.OUT
        await sessions.ends(named, "t")
    fresh = Agent(hint=0, name=b"another-named")
    await sessions.step(fresh, 20)
    assert (await sessions.record(fresh)).place == Place.IN, "named sessions turned out to be agents"
    assert (await sessions.record(await sessions.turn(20, "?", hint=CHAT))).place == Place.OUT, "others may be people"


@pytest.mark.parametrize(("finish", "place"), [("t", Place.IN), ("o", Place.OUT), ("?", Place.IN)])
async def test_an_answer_without_tool_calls_gives_up_the_place(sessions: Sessions, finish: Any, place: Place) -> None:
    agent = await sessions.turn(100, finish)
    assert (await sessions.record(agent)).place == place


async def test_a_session_that_calls_tools_ends_with_an_answer_that_calls_none(sessions: Sessions) -> None:
    agent = await sessions.turn()
    await sessions.step(agent, 10)
    await sessions.ends(agent, "o")
    assert (await sessions.record(agent)).place == Place.OUT, "however soon it came back before"


@pytest.mark.parametrize(("hint", "place"), [(Hint.TOOLS, Place.OUT), (CHAT, Place.IN)])
async def test_where_ends_are_known_an_engine_has_time_only_if_it_is_hardly_busy(
    sessions: Sessions, hint: int, place: Place
) -> None:
    agents = [Agent(hint=hint) for _ in range(3)]
    for agent in agents:
        for _ in range(2):
            await sessions.step(agent, 100)
            await sessions.ends(agent, "t" if hint else "o")
    await sessions.keyspace.change(1, busy_share=26_000)
    await grown(sessions, *agents)
    assert (await sessions.record(agents[-1])).place == place


async def test_an_ended_session_is_forgotten(sessions: Sessions) -> None:
    agent = await sessions.turn(100, "e")
    assert not await cast("Any", sessions.keyspace.store.hexists(sessions.keyspace.keys.sessions, agent.sid))


async def test_a_place_ends_when_computing_anew_is_cheaper(sessions: Sessions) -> None:
    """16,000 tokens are computed in 1.6 s, and the least time is 5 s."""
    agent, held = await sessions.turn(LARGE), Agent()
    await sessions.turn(LARGE)
    await sessions.step(held, LARGE)
    await sessions.passes(agent, 4)
    await sessions.tick()
    assert (await sessions.record(agent)).place == Place.IN
    assert await sessions.standing(held) == [Standing.WAITS]
    await sessions.passes(agent, 2)
    await sessions.tick()
    assert (await sessions.record(agent)).place == Place.OUT
    assert await sessions.standing(held) == [Standing.TURN]
    assert isinstance(await sessions.again(held), Decision)


async def test_a_request_goes_to_the_engine_that_has_the_session(keyspace: Keyspace) -> None:
    sessions = Sessions(keyspace)
    await sessions.bind(2)
    agent = await sessions.turn()
    slot = (await sessions.record(agent)).slot
    await keyspace.change(slot, prefill_tokens=8_000, in_flight=3)
    decided = await sessions.step(agent, 100)
    assert isinstance(decided, Decision)
    assert (decided.worker_id, decided.why) == (f"w{slot}.0", "place")
    await sessions.ends(agent)
    await keyspace.change(slot, flags=0)
    decided = await sessions.step(agent, 100)
    assert isinstance(decided, Decision), "its engine is away"
    assert decided.worker_id == f"w{3 - slot}.0"


async def test_a_session_larger_than_all_places_runs_alone(sessions: Sessions) -> None:
    agent = await sessions.turn(CAPACITY_BLOCKS - 20)
    assert (await sessions.record(agent)).place == Place.IN
    held = Agent()
    await sessions.step(held, CAPACITY_BLOCKS - 20)
    assert held.held
    await sessions.passes(agent, 100)
    await sessions.tick()
    assert await sessions.standing(held) == [Standing.TURN]


async def test_an_engine_with_time_takes_one_more(sessions: Sessions) -> None:
    await sessions.turn(LARGE)
    await sessions.turn(LARGE)
    held, later = Agent(), Agent()
    await sessions.step(held, LARGE)
    await sessions.step(later, LARGE)
    await sessions.load(busy=False)
    await sessions.tick()
    assert await sessions.standing(held, later) == [Standing.TURN, Standing.WAITS], "one a second"


async def test_room_that_others_have_booked_is_none_for_sessions(sessions: Sessions) -> None:
    await sessions.keyspace.change(1, decode_tokens=16 * 600, in_flight=2)
    await sessions.tick()
    await sessions.turn(LARGE)
    assert isinstance(await sessions.step(Agent(), LARGE), Queued)


# ---------------------------------------------------------------- pauses, and the line


async def grown(sessions: Sessions, *agents: Agent, tokens: int = 16 * 600) -> None:
    for agent in agents:
        await sessions.change(agent, tokens=tokens)
    await sessions.tick()


async def test_the_youngest_idle_session_is_paused(sessions: Sessions) -> None:
    old, young, running = await sessions.turn(200), await sessions.turn(200), await sessions.turn(200)
    await sessions.step(running, 1)
    await grown(sessions, old, young, running, tokens=16 * 450)
    assert [(await sessions.record(each)).place for each in (old, young, running)] == [Place.IN, Place.OUT, Place.IN]
    yields = sessions.keyspace.keys.prefix + "yields:w1.0"
    told = await cast("Any", sessions.keyspace.store.lrange(yields, 0, -1))
    assert told == [(await sessions.record(young)).reservation]
    assert 0 < await sessions.keyspace.store.ttl(yields) <= 30


async def test_a_paused_session_comes_before_new_ones_and_waits_a_minute_at_most(sessions: Sessions) -> None:
    old, young, fresh = await sessions.turn(LARGE), await sessions.turn(LARGE), Agent()
    await sessions.step(fresh, LARGE)
    await grown(sessions, old, young)
    told = await sessions.step(young, 1)
    assert isinstance(told, Queued)
    assert told.hold is not None
    assert (told.hold.paused, told.hold.ahead) == (True, 0)
    await sessions.change(young, since_ms=(await sessions.record(young)).since_ms - 59_000)
    await sessions.passes(old, 0)
    await sessions.tick()
    assert await sessions.standing(young, fresh) == [Standing.WAITS, Standing.WAITS]
    await sessions.change(young, since_ms=(await sessions.record(young)).since_ms - 2_000)
    await sessions.tick()
    assert await sessions.standing(young, fresh) == [Standing.TURN, Standing.WAITS]


async def test_new_sessions_come_in_the_order_of_their_arrival(sessions: Sessions) -> None:
    await sessions.turn(LARGE)
    blocker = await sessions.turn(LARGE)
    held = [Agent() for _ in range(3)]
    for agent in held:
        await sessions.step(agent, LARGE)
    while held:
        await sessions.passes(blocker, 100)
        await sessions.tick()
        assert await sessions.standing(*held) == [Standing.TURN, *[Standing.WAITS] * (len(held) - 1)]
        blocker = held.pop(0)
        await sessions.again(blocker)
        await sessions.ends(blocker)


async def test_a_tenant_with_few_sessions_comes_before_one_with_many(sessions: Sessions) -> None:
    await sessions.turn(LARGE)
    blocker = await sessions.turn(LARGE)
    many = [Agent() for _ in range(300)]
    for agent in many:
        await sessions.step(agent, LARGE)
    few = Agent(tenant=b"tenant-2")
    await sessions.step(few, LARGE)
    await sessions.passes(blocker, 100)
    await sessions.tick()
    assert await sessions.standing(few) == [Standing.TURN]
    assert Standing.TURN not in await sessions.standing(*many)


async def waits_told(sessions: Sessions, count: int) -> list[float]:
    """Fill the engine; return what so many new sessions are told then."""
    for _ in range(2):
        await sessions.turn(LARGE)
    told = []
    for _ in range(count):
        answer = await sessions.step(Agent(), LARGE)
        assert isinstance(answer, Queued)
        assert answer.hold is not None
        told.append(answer.hold.predicted_s)
    return told


async def test_nobody_is_told_more_than_the_bound_before_the_pace_is_known(sessions: Sessions) -> None:
    """Nor is anybody refused: a burst may come in the ledger's first second."""
    await state_is(sessions, 4, 0.0)
    told = await waits_told(sessions, 20)
    assert max(told) == 600.0
    assert told[0] < 600.0


async def test_a_new_session_is_told_its_whole_wait(sessions: Sessions) -> None:
    """A replica makes Retry-After of it. The bound counts for how long it is held."""
    await state_is(sessions, 4, 0.01)
    held = Agent()
    assert (await waits_told(sessions, 19))[-1] == 1_900.0
    answer = await sessions.step(held, LARGE)
    assert isinstance(answer, Queued)
    assert answer.hold is not None
    assert (answer.hold.predicted_s, (await sessions.record(held)).told_ms) == (2_000.0, 601_000)


async def test_a_new_session_waits_for_half_more_than_it_was_told_at_most(sessions: Sessions) -> None:
    await sessions.turn(LARGE)
    await sessions.turn(LARGE)
    held = Agent()
    told = await sessions.step(held, LARGE)
    assert isinstance(told, Queued)
    assert told.hold is not None
    limit_s = 1.5 * told.hold.predicted_s
    for agent in (1, 2):
        await sessions.step(Agent(), LARGE)
        assert agent
    await sessions.change(held, since_ms=(await sessions.record(held)).since_ms - 1_000 * (limit_s - 3))
    await sessions.tick()
    assert await sessions.standing(held) == [Standing.WAITS]
    await sessions.change(held, since_ms=(await sessions.record(held)).since_ms - 2_000)
    await sessions.tick()
    assert await sessions.standing(held) == [Standing.TURN]


async def test_a_higher_class_comes_first(sessions: Sessions) -> None:
    await sessions.turn(LARGE)
    blocker = await sessions.turn(LARGE)
    usual, urgent = Agent(), Agent(sessions.keyspace.chain(LARGE))
    await sessions.step(usual, LARGE)
    ask = sessions.keyspace.ask(urgent.hashes, reservation=f"wf-0{'u' * 21}", session=bytes([Hint.TOOLS]), priority=-1)
    told = await sessions.fleet.queue.decide_in_turn(ask)
    assert isinstance(told, Queued)
    assert told.hold is not None
    urgent.sid = told.hold.session
    await sessions.passes(blocker, 100)
    await sessions.tick()
    assert await sessions.standing(urgent, usual) == [Standing.TURN, Standing.WAITS]


async def test_no_paused_session_of_a_lower_class_keeps_a_higher_class_waiting(sessions: Sessions) -> None:
    await sessions.turn(LARGE)
    await sessions.turn(LARGE)
    usual, urgent, later = Agent(), Agent(), Agent()
    await sessions.step(usual, LARGE)
    await sessions.change(usual, place=Place.PAUSED, priority=9)
    await sessions.step(urgent, 100)
    await sessions.step(later, 50)
    await sessions.change(later, priority=9)
    await sessions.tick()
    waits = Standing.WAITS
    assert await sessions.standing(urgent, usual, later) == [Standing.TURN, waits, waits], "in its class none passes"


# ---------------------------------------------------------------- nobody is held for ever


async def test_a_held_session_leaves_with_its_replica(sessions: Sessions) -> None:
    await sessions.turn(LARGE)
    await sessions.turn(LARGE)
    lost, told = Agent(), Agent()
    await sessions.step(lost, LARGE)
    await sessions.step(told, LARGE)
    await sessions.change(lost, heard_ms=(await sessions.record(lost)).heard_ms - 6_000)
    await sessions.tick()
    assert await sessions.standing(lost, told) == [Standing.UNKNOWN, Standing.WAITS]
    left = await sessions.fleet.ledger.poll([], [told.sid])
    assert left.in_line == 0


async def test_a_place_that_nobody_takes_is_given_up(sessions: Sessions) -> None:
    await sessions.turn(LARGE)
    blocker = await sessions.turn(LARGE)
    lost, later = Agent(), Agent()
    await sessions.step(lost, LARGE)
    await sessions.step(later, LARGE)
    await sessions.passes(blocker, 100)
    await sessions.tick()
    assert await sessions.standing(lost, later) == [Standing.TURN, Standing.WAITS]
    await sessions.change(lost, heard_ms=(await sessions.record(lost)).heard_ms - 6_000)
    await sessions.tick()
    assert await sessions.standing(later) == [Standing.TURN]


async def test_requests_that_their_engine_has_ended_do_not_keep_a_place(sessions: Sessions) -> None:
    agent = Agent()
    await sessions.step(agent, LARGE)
    await sessions.passes(agent, 40)
    assert agent.asked is not None
    store, key, reserved = sessions.keyspace.store, sessions.keyspace.keys.lease, agent.asked.reservation
    packed: Any = await cast("Any", store.hget(key, reserved))
    ended = replace(Lease.unpack(packed), stage=Stage.ENDED)
    await cast("Any", store.hset(key, reserved, ended.pack()))
    await sessions.tick()
    assert (await sessions.record(agent)).running == 0


async def test_requests_that_were_lost_with_their_replica_do_not_keep_a_place(sessions: Sessions) -> None:
    agent = Agent()
    await sessions.step(agent, LARGE)
    await sessions.passes(agent, 40)
    await sessions.tick()
    assert (await sessions.record(agent)).running == 1, "its lease is alive"
    assert agent.asked is not None
    await sessions.keyspace.expire(agent.asked.reservation)
    await sessions.tick()
    assert (await sessions.record(agent)).running == 0
    await sessions.passes(agent, 40)
    await sessions.tick()
    assert (await sessions.record(agent)).place == Place.OUT


async def test_a_request_that_was_settled_without_its_session_is_not_under_way(sessions: Sessions) -> None:
    """Redis decided, the answer was lost, and the replica cancelled the request: its next step is no fork."""
    agent = await sessions.turn()
    sid = agent.sid
    await sessions.step(agent, 10)
    assert agent.asked is not None
    await sessions.fleet.bookings.settle(agent.asked.reservation, "cancelled")
    await sessions.step(agent, 10)
    assert (agent.sid, (await sessions.record(agent)).running) == (sid, 1)


@pytest.mark.parametrize("name", [b"", b"nameofsession"])
async def test_a_repeated_decision_tells_the_session_that_it_was_asked_with(sessions: Sessions, name: bytes) -> None:
    await sessions.turn(LARGE)
    await sessions.turn(LARGE)
    agent = Agent(name=name)
    await sessions.step(agent, LARGE)
    assert agent.held
    await sessions.change(agent, place=Place.IN)
    assert isinstance(await sessions.again(agent), Decision)
    assert agent.asked is not None
    agent.asked.session = agent.asked.session[:1] + agent.sid
    again = await sessions.fleet.queue.decide_in_turn(agent.asked)
    assert isinstance(again, Decision)
    assert (again.outcome, again.session) == ("known", agent.sid)


async def test_an_explanation_tells_that_a_session_would_be_held_and_writes_nothing(sessions: Sessions) -> None:
    sessions.fleet.use(spans=Spans(linger_ms=60_000))  # whoever comes deletes a finished lease that has lingered
    agent, _ = await sessions.turn(LARGE), await sessions.turn(LARGE)
    keyspace = sessions.keyspace
    waiting, paused = Agent(), await sessions.turn(100)
    await sessions.change(paused, place=Place.OUT)
    await sessions.step(waiting, LARGE)

    async def explained(chain: bytes) -> tuple[str, Hold | None]:
        ask = keyspace.ask(chain, reservation=new_reservation(1), session=bytes([Hint.TOOLS]), tenant=b"tenant-1")
        before = await contents(sessions)
        _, why, seen = await sessions.fleet.queue.consider(ask)
        assert await contents(sessions) == before
        return why, seen.hold

    new = (await explained(keyspace.chain(LARGE)))[1]
    assert new is not None
    assert (new.ahead, new.paused) == (1, False)
    again = (await explained(keyspace.chain(len(paused.hashes) // 8 + 100, paused.hashes)))[1]
    assert again is not None
    assert (again.ahead, again.paused, again.session) == (0, True, paused.sid)
    assert (await explained(keyspace.chain(len(agent.hashes) // 8 + 1, agent.hashes)))[1] is None


async def contents(sessions: Sessions) -> dict[bytes, bytes]:
    """All that Redis holds, by key."""
    store: Any = sessions.keyspace.store
    found = {key: await store.dump(key) for key in await store.keys(f"{sessions.keyspace.keys.prefix}*")}
    return {key: value for key, value in found.items() if value is not None}


async def test_a_request_of_a_client_with_limits_is_under_way_while_it_has_a_lease(sessions: Sessions) -> None:
    """The client's tag is at the end of its reservation's id."""
    older, agent = await sessions.turn(200), Agent()
    await sessions.change(older, first_ms=0.0)
    limits, chain = ClientLimits("client", 10), sessions.keyspace.chain(LARGE)
    told = await sessions.fleet.queue.decide_in_turn(
        sessions.keyspace.ask(
            chain,
            reservation=new_reservation(1, client=limits.tag),
            tenant=agent.tenant,
            limits=limits,
            session=bytes([agent.hint]),
        )
    )
    assert isinstance(told, Decision)
    agent.sid = told.session
    await sessions.passes(agent, 40)
    await sessions.change(older, since_ms=(await sessions.record(agent)).since_ms + 40_000)
    await sessions.tick()
    assert (await sessions.record(agent)).running == 1
    end = SessionEnd(agent.sid, "t")
    await sessions.fleet.bookings.settle(told.reservation, "finished", session=end)
    await grown(sessions, older, agent, tokens=16 * 600)
    yields = sessions.keyspace.keys.prefix + "yields:w1.0"
    assert await cast("Any", sessions.keyspace.store.lrange(yields, 0, -1)) == [told.reservation[:25].encode()]


async def test_a_lost_ledger_holds_nobody(sessions: Sessions) -> None:
    await sessions.turn(LARGE)
    await sessions.turn(LARGE)
    held = Agent()
    await sessions.step(held, LARGE)
    await sessions.keyspace.store.delete(
        *[getattr(sessions.keyspace.keys, name) for name in ("sessions", "session_line")]
    )
    assert await sessions.standing(held) == [Standing.UNKNOWN]
    await sessions.tick()
    assert isinstance(await sessions.again(held), Decision)


async def test_nobody_is_held_once_the_ledger_has_stopped(sessions: Sessions) -> None:
    """As after a tick of a replica without the ledger, or of an older version."""
    await sessions.turn(LARGE)
    await sessions.turn(LARGE)
    held = Agent()
    await sessions.step(held, LARGE)
    await older_tick(sessions)
    assert await sessions.standing(held) == [Standing.UNKNOWN]
    assert isinstance(await sessions.again(held), Decision)
    sessions.fleet.use(sessions=SessionLimits())
    await sessions.tick()
    assert {key for key in await keys(sessions) if not key.startswith(b"way:")} == set()


async def test_a_replica_that_does_not_know_the_blocks_yet_changes_no_place(sessions: Sessions) -> None:
    agent = await sessions.turn(LARGE)
    await sessions.turn(LARGE)
    sessions.fleet.use(block_tokens={})
    await sessions.tick()
    assert (await sessions.record(agent)).place == Place.IN
    assert isinstance(await sessions.step(Agent(), LARGE), Queued)


async def test_an_engine_outside_the_ledger_draws_no_sessions(keyspace: Keyspace) -> None:
    sessions = Sessions(keyspace)
    await sessions.bind(1)
    await keyspace.worker(2, capacity_blocks=0)
    for _ in range(2):
        told = await sessions.step(Agent(), LARGE)
        assert isinstance(told, Decision)
        assert told.worker_id == "w1.0"
    assert isinstance(await sessions.step(Agent(), LARGE), Queued)


async def test_a_prompt_that_cannot_be_known_again_makes_no_session(sessions: Sessions) -> None:
    decided = await sessions.step(Agent(), 1)
    assert isinstance(decided, Decision)
    assert decided.session == b""


async def test_a_name_of_several_conversations_is_none(sessions: Sessions) -> None:
    agents = [Agent(name=b"name-of-these") for _ in range(3)]
    for agent in agents:
        assert isinstance(await sessions.step(agent, 100), Decision)
    assert len({agent.sid for agent in agents}) == 3


async def test_a_client_that_asks_again_keeps_its_place_in_the_line(sessions: Sessions) -> None:
    await sessions.turn(LARGE)
    await sessions.turn(LARGE)
    first, second = Agent(), Agent()
    await sessions.step(first, LARGE)
    await sessions.step(second, LARGE)
    await sessions.fleet.ledger.poll([], [first.sid])
    again = Agent(first.hashes)
    told = await sessions.again(again)
    assert isinstance(told, Queued)
    assert told.hold is not None
    assert (told.hold.session, told.hold.ahead) == (first.sid, 0)


async def test_a_session_that_waits_for_its_engine_keeps_place_and_id(sessions: Sessions) -> None:
    sessions.fleet.use(limits=replace(sessions.fleet.constants.limits, max_engine_wait_s=0.1))
    await sessions.keyspace.change(1, prefill_tokens=9_000, in_flight=3)
    agent = Agent(sessions.keyspace.chain(100))
    ask = sessions.keyspace.ask(
        agent.hashes, reservation=new_reservation(1), tenant=agent.tenant, session=bytes([Hint.TOOLS])
    )
    waits = await sessions.fleet.queue.decide_in_turn(ask)
    assert isinstance(waits, Queued)
    assert waits.outcome == "queued"
    agent.sid = waits.session
    await sessions.tick()
    assert (await sessions.record(agent)).place == Place.IN
    again = await sessions.fleet.queue.decide_in_turn(replace(ask, session=ask.session + waits.session))
    assert isinstance(again, Queued)
    assert again.session == waits.session
    assert len((await sessions.fleet.ledger.read()).sessions) == 1


async def test_a_spoilt_record_counts_as_absent(sessions: Sessions) -> None:
    agent = await sessions.turn()
    await cast("Any", sessions.keyspace.store.hset(sessions.keyspace.keys.sessions, agent.sid, b"short"))
    assert isinstance(await sessions.step(agent, 10), Decision)
    await sessions.tick()


async def test_the_number_of_sessions_is_bounded(sessions: Sessions) -> None:
    store, name = sessions.keyspace.store, sessions.keyspace.keys.sessions
    agent = await sessions.turn()
    packed = await cast("Any", store.hget(name, agent.sid))
    await cast("Any", store.hset(name, mapping={f"other-{number:07}": packed for number in range(4_096)}))
    decided = await sessions.step(Agent())
    assert isinstance(decided, Decision)
    assert decided.session == b""


async def test_the_view_tells_who_is_in_and_who_is_held(sessions: Sessions) -> None:
    agent, held = await sessions.turn(LARGE), Agent()
    await sessions.turn(LARGE)
    await sessions.step(held, LARGE)
    await sessions.tick()
    view = await sessions.fleet.ledger.read()
    (engine,) = view.engines
    assert (engine.worker_id, engine.inside, engine.idle) == ("w1.0", 2, 2)
    assert engine.taken_tokens == pytest.approx(2 * 16 * LARGE, abs=2)
    assert engine.capacity_tokens == pytest.approx(16 * CAPACITY_BLOCKS, rel=0.01)
    assert [each.session for each in view.held] == [held.sid]
    known = {each.session: each for each in view.sessions}
    assert known[agent.sid].calls_tools
    assert (await sessions.record(agent)).traits & Trait.PLACED


# ---------------------------------------------------------------- tiers


async def give_tier(sessions: Sessions, blocks: int, share: float = 0.1, users: int = 1) -> None:
    """Give engine 1 a tier, of which a token is loaded in this share of the time to compute it."""
    store, keys, speed = cast("Any", sessions.keyspace.store), sessions.keyspace.keys, 10_000
    entry = struct.pack(">IdBI", 1, share / speed, 1, blocks)
    await store.hset(keys.tiers, "99", entry + b"".join(struct.pack(">IdBI", 70, 0.0, 1, 0) for _ in range(users - 1)))
    await sessions.keyspace.change(1, speed_tps=speed)
    await sessions.tick()


@pytest.mark.parametrize(
    ("tier", "places"),
    [
        ({"blocks": 1_200}, 3),  # .8 of 1,200 blocks hold three sessions of 280
        ({"blocks": 4_000}, 4),  # 1.5 times the GPU at most
        ({"blocks": 500}, 2),  # smaller than the GPU, of which it is a copy
        ({"blocks": 4_000, "share": 0.3}, 2),  # to compute is not much dearer
        ({"blocks": 2_400, "users": 2}, 3),
    ],
    ids=str,
)
async def test_a_tier_is_room_for_sessions(sessions: Sessions, tier: dict[str, Any], places: int) -> None:
    await give_tier(sessions, **tier)
    made = []
    while isinstance(await sessions.step(agent := Agent(), 280), Decision):
        await sessions.ends(agent)
        made.append(agent)
        assert len(made) <= places
    assert len(made) == places
    await sessions.tick()
    assert {(await sessions.record(agent)).place for agent in made} == {Place.IN}, "nobody is paused"


async def test_a_tier_that_is_gone_is_no_room_any_more(sessions: Sessions) -> None:
    await give_tier(sessions, 4_000)
    agents = [await sessions.turn(280) for _ in range(4)]
    await cast("Any", sessions.keyspace.store).delete(sessions.keyspace.keys.tiers)
    await sessions.tick()
    places = [(await sessions.record(agent)).place for agent in agents]
    assert places == [Place.IN] * 3 + [Place.OUT], "the youngest is paused, so that the rest fits the GPU"


# ---------------------------------------------------------------- engines that hand prompts over


async def test_a_session_has_its_place_at_an_engine_that_makes_answers(keyspace: Keyspace) -> None:
    sessions = Sessions(keyspace)
    sessions.split = Split.ALLOWED
    await sessions.bind(3)
    keyspace.fleet.use(roles={1: Role(1, 0, alone=False), 2: Role(0, 1, alone=True), 3: Role(0, 1, alone=True)})
    agents = [Agent() for _ in range(4)]  # each engine has room for two
    for agent in agents:
        told = await sessions.step(agent, LARGE)
        assert isinstance(told, Decision)
        assert (await sessions.record(agent)).slot in (2, 3)
        await sessions.ends(agent)
    assert isinstance(await sessions.step(Agent(), LARGE), Queued)
    for agent in agents:  # the prompt is computed elsewhere, but the answer is made where the session has its place
        slot = (await sessions.record(agent)).slot
        await keyspace.change(slot, prefill_tokens=50_000, in_flight=50, decode_tokens=90_000)
        await keyspace.change(5 - slot, prefill_tokens=0, in_flight=0, decode_tokens=0)
        told = await sessions.step(agent, 20)
        assert isinstance(told, Decision)
        assert told.prefill is not None
        assert (told.worker_id, told.prefill.worker_id) == (f"w{(await sessions.record(agent)).slot}.0", "w1.0")


PAIRS = {1: Role(1, 0, alone=False), 2: Role(0, 1, alone=True), 3: Role(0, 1, alone=True)}


@pytest.mark.parametrize("own_share", [65_535, 0])
async def test_a_held_session_gets_no_place_at_an_engine_that_only_computes_prompts(
    keyspace: Keyspace, own_share: int
) -> None:
    """And none at a full engine that computes little itself while the prompts' engine is busy."""
    sessions = Sessions(keyspace)
    sessions.split = Split.ALLOWED
    await sessions.bind(3)
    keyspace.fleet.use(roles=PAIRS)
    for _ in range(4):
        await sessions.turn(LARGE)
    held = Agent()
    assert isinstance(await sessions.step(held, LARGE), Queued)
    for slot in (2, 3):
        await keyspace.change(slot, busy_share=own_share)
    await sessions.tick()
    assert await sessions.standing(held) == [Standing.WAITS]
    assert {engine.worker_id for engine in (await sessions.fleet.ledger.read()).engines} == {"w2.0", "w3.0"}


@pytest.mark.parametrize(
    ("roles", "full", "busy", "binds"),
    [
        (PAIRS, {1}, {1}, False),  # the caches of answers have room
        (PAIRS, {2, 3}, {1}, True),
        (PAIRS, {2, 3}, {2}, True),
        (PAIRS | {2: Role(1, 0, alone=False)}, {3}, {1}, False),  # one of two computes prompts and has time
        (PAIRS | {2: Role(1, 0, alone=False)}, {3}, {1, 2}, True),
        (PAIRS | {2: Role(2, 0, alone=False)}, {3}, {1}, True),  # the other may not hand to engine 3
        ({slot: Role(1, 1, alone=True) for slot in (1, 2, 3)}, {2, 3}, {1}, False),  # each computes its prompts
        ({slot: Role(1, 0, alone=False) for slot in (1, 2, 3)}, {1}, {1}, True),  # there is no other engine
        ({}, {1}, {1}, True),  # a replica that knows no roles
        ({}, {2, 3}, {1}, False),
    ],
)
async def test_the_ledger_looks_at_caches_of_answers_and_at_who_computes_their_prompts(
    keyspace: Keyspace, roles: dict[int, Role], full: set[int], busy: set[int], *, binds: bool
) -> None:
    sessions = Sessions(keyspace)
    sessions.split = Split.ALLOWED
    await sessions.bind(3, busy=False)
    keyspace.fleet.use(roles=roles)
    for slot in (1, 2, 3):
        blocks = CAPACITY_BLOCKS if slot in full else 0
        await keyspace.change(slot, blocks=blocks, busy_share=65_535 if slot in busy else 0)
    await sessions.tick()
    assert bool(await keys(sessions)) == binds


async def test_without_an_engine_for_answers_one_that_computes_prompts_gives_places(keyspace: Keyspace) -> None:
    sessions = Sessions(keyspace)
    sessions.split = Split.ALLOWED
    await sessions.bind(1)
    keyspace.fleet.use(roles={1: Role(1, 0, alone=False)})
    await sessions.tick()
    assert {engine.worker_id for engine in (await sessions.fleet.ledger.read()).engines} == {"w1.0"}
