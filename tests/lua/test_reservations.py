"""An engine tells which reservations it has and when they end; load follows it, whatever routers do."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import redis
from tests.support.fleet.engine_with_ends import ANSWER, PROMPT, WORKER, EngineWithEnds, request_id, reservation
from tests.support.redis.servers import PATIENT, redis7_binary, server, valkey_binary

from warmfleet.fleet import Flag, Fleet, Question, Stage, connect
from warmfleet.fleet.client_limits import ClientLimits
from warmfleet.fleet.upkeep import Pace
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ONE, OTHER, SEVERAL = reservation(1), reservation(2), reservation(3, "-")
BOOKED, STARTED = (PROMPT, PROMPT + ANSWER, 1), (0, PROMPT + ANSWER, 1)
NONE = (0, 0, 0)


@pytest.fixture
async def engine(valkey_url: str) -> AsyncIterator[EngineWithEnds]:
    client, store = connect(valkey_url, timeout_s=10), redis.Redis.from_url(valkey_url)
    engine = EngineWithEnds(store, Fleet(client, f"ends/{uuid.uuid4().hex}", timeouts=PATIENT))
    await engine.routable()
    yield engine
    await client.aclose()
    store.close()


async def runs(engine: EngineWithEnds, reserved: str = ONE) -> None:
    """The engine has a request and has computed its prompt."""
    await engine.decide(reserved)
    engine.arrive(reserved)
    engine.prefill(request_id(reserved))
    await told(engine)


async def run_many(engine: EngineWithEnds, number: int = 80) -> None:
    """More than one call ends."""
    for which in range(10, 10 + number):
        await runs(engine, reservation(which))
    time.sleep(0.002)  # noqa: ASYNC251  a list that begins in the same ms would name the last, too


async def told(engine: EngineWithEnds) -> None:
    engine.round()
    await engine.apply()


async def test_the_report_of_an_end_gives_the_load_back_at_once(engine: EngineWithEnds) -> None:
    await runs(engine)
    assert engine.load() == STARTED
    assert engine.running() == {ONE}
    engine.end(request_id(ONE))
    await told(engine)
    assert engine.load() == NONE
    assert engine.leases()[ONE].stage == Stage.ENDED, "settle may still come"
    assert not engine.running()


async def test_an_aborted_request_that_waited_gives_its_prefill_back(engine: EngineWithEnds) -> None:
    await engine.decide(ONE)
    engine.arrive(ONE)
    assert engine.load() == BOOKED
    assert engine.store.keys(f"{engine.keys.prefix}x:*".replace("{", "\\{"))
    engine.end(request_id(ONE))
    await told(engine)
    assert engine.load() == NONE
    assert not engine.store.keys(f"{engine.keys.prefix}x:*".replace("{", "\\{")), "nobody computes its blocks now"


async def test_settle_after_the_report_does_the_rest_and_changes_no_load(engine: EngineWithEnds) -> None:
    await runs(engine)
    await runs(engine, OTHER)
    engine.end(request_id(ONE))
    await told(engine)
    assert await engine.fleet.bookings.settle(ONE, "started") == "SAME"
    assert await engine.fleet.bookings.settle(ONE, "finished") == "SETTLED"
    assert await engine.fleet.bookings.settle(ONE, "finished") == "UNKNOWN"
    assert engine.load()[2] == 1
    assert set(engine.leases()) == {OTHER}


async def test_an_aborted_request_gives_back_its_own_prefill_only(engine: EngineWithEnds) -> None:
    await engine.decide(ONE)
    await engine.decide(OTHER)
    engine.arrive(ONE)
    engine.end(request_id(ONE))
    await told(engine)
    engine.check()
    assert engine.load()[2] == 1


async def test_the_report_after_settle_changes_no_load(engine: EngineWithEnds) -> None:
    await runs(engine)
    await runs(engine, OTHER)
    await engine.fleet.bookings.settle(ONE, "cancelled")
    engine.end(request_id(ONE))
    await told(engine)
    assert engine.load()[2] == 1
    counts: Any = engine.store.hgetall(engine.keys.counts)
    assert counts[b"ended_before"] == b"1"


async def test_a_replica_keeps_the_lease_of_an_answer_that_it_still_sends(engine: EngineWithEnds) -> None:
    await runs(engine)
    engine.end(request_id(ONE))
    await told(engine)
    engine.store.zadd(engine.keys.leases, {ONE: 1})
    assert await engine.renew(ONE, started=True) == (1, 0, 0)
    assert engine.load() == NONE
    await engine.fleet.bookings.settle("nobody", "finished")
    assert await engine.fleet.bookings.settle(ONE, "finished") == "SETTLED"


async def test_a_reservation_that_its_engine_has_needs_no_renewal(engine: EngineWithEnds) -> None:
    await runs(engine)
    engine.round(beat=True)
    await engine.apply()
    for _ in range(3):
        await engine.reap(ONE)
        assert engine.load() == STARTED


async def test_a_reservation_is_reaped_if_its_engine_is_not_heard(engine: EngineWithEnds) -> None:
    await runs(engine)
    engine.store.zadd(engine.keys.running(WORKER), {"": 1})
    engine.store.set(engine.keys.tick, f"{int(time.time() * 1000)} 0 0")
    await engine.reap(ONE)
    assert engine.load() == NONE


@pytest.mark.parametrize("tick", ["{now} {later} 0", "1 0 0", ""])
async def test_in_grace_what_the_engine_told_last_counts(engine: EngineWithEnds, tick: str) -> None:
    """Redis or all routers were away: what the engine tells now waits unread."""
    await runs(engine)
    now = int(time.time() * 1000)
    engine.store.zadd(engine.keys.running(WORKER), {"": 1})
    engine.store.set(engine.keys.tick, tick.format(now=now, later=now + 15_000))
    await engine.reap(ONE)
    assert engine.load() == STARTED


async def test_a_full_redis_books_while_a_reservation_of_an_engine_is_due(model: str) -> None:
    for binary in (valkey_binary(), redis7_binary()):
        with server(binary) as url:
            client, store = connect(url, timeout_s=10), redis.Redis.from_url(url)
            engine = EngineWithEnds(store, Fleet(client, model, timeouts=PATIENT))
            await engine.routable()
            await runs(engine)
            engine.round(beat=True)
            await engine.apply()
            await engine.decide(OTHER)  # the script is known before memory is full
            store.zadd(engine.keys.leases, {ONE: 1})
            store.config_set("maxmemory", 1)
            decision = await engine.fleet.bookings.decide(Question(reservation(7), (), PROMPT, PROMPT))
            assert decision.outcome == "booked"
            assert ONE in engine.open(), "the engine has it"
            store.close()
            await client.aclose()


async def test_a_reservation_of_which_the_engine_says_nothing_is_reaped(engine: EngineWithEnds) -> None:
    await engine.decide(ONE)
    await engine.quiet()
    await engine.reap(ONE)
    assert engine.load() == NONE


async def test_a_request_that_waits_longer_than_a_heartbeat_is_told(engine: EngineWithEnds) -> None:
    await engine.decide(ONE)
    engine.arrive(ONE)
    await engine.quiet()
    await engine.reap(ONE)
    assert engine.load() == BOOKED


async def test_an_id_that_has_ended_is_booked_anew(engine: EngineWithEnds) -> None:
    await runs(engine)
    engine.end(request_id(ONE))
    await told(engine)
    assert (await engine.fleet.bookings.decide(Question(ONE, (), PROMPT, PROMPT + ANSWER))).outcome == "booked"
    assert engine.load() == BOOKED


async def test_a_broken_engine_locks_no_client_out(engine: EngineWithEnds) -> None:
    """An answer counts with the tokens that were booked at most, until its replica knows them."""
    reserved, limits = f"{ONE[:25]}{'C' * 11}", ClientLimits("k", 0, 10_000)
    assert len(reserved) == 36
    await engine.fleet.bookings.decide(Question(reserved, (), PROMPT, PROMPT + ANSWER, limits=limits))
    engine.publisher._stream.put("ended", json.dumps([[reserved, 2**32 - 1, "stop"]]))
    engine.publisher._stream.flush()
    await engine.apply()
    assert engine.leases()[reserved].prefill_tokens == PROMPT + ANSWER
    other = Question(f"{OTHER[:25]}{'C' * 11}", (), PROMPT, PROMPT + ANSWER, limits=limits)
    assert (await engine.fleet.bookings.decide(other)).outcome == "booked"


async def test_a_request_for_several_answers_ends_with_the_last(engine: EngineWithEnds) -> None:
    await engine.decide(ONE)
    for child in range(3):
        engine.arrive(ONE, child)
    for child in (0, 2, 1):
        assert engine.load()[2] == 1
        engine.end(request_id(ONE, child))
        await told(engine)
    assert engine.load() == NONE
    assert engine.leases()[ONE].prefill_tokens == 3 * ANSWER, "the tokens of all answers"


async def test_several_prompts_end_with_the_last(engine: EngineWithEnds) -> None:
    await engine.decide(SEVERAL)
    first, second = f"cmpl-{SEVERAL}.client-0", f"cmpl-{SEVERAL}.client-1"
    for each in (first, second):
        engine.add(each, SEVERAL)
    engine.end(first)
    await told(engine)
    assert engine.load()[2] == 1
    engine.end(second)
    await told(engine)
    assert engine.load() == NONE


async def test_a_reservation_that_goes_on_gets_its_load_again(engine: EngineWithEnds) -> None:
    """As in a beam search, each step of which is a request of its own."""
    await runs(engine)
    engine.end(request_id(ONE))
    await told(engine)
    assert engine.load() == NONE
    engine.arrive(ONE)
    engine.prefill(request_id(ONE))
    await told(engine)
    assert engine.load() == STARTED
    engine.end(request_id(ONE))
    await told(engine)
    assert engine.load() == NONE


async def test_a_process_that_starts_anew_ends_what_the_former_had(engine: EngineWithEnds) -> None:
    many = [reservation(number) for number in range(10, 80)]  # more than one call ends
    for reserved in many:
        await runs(engine, reserved)
    assert engine.load()[2] == len(many)
    engine.start()
    await engine.routable()
    assert engine.load() == NONE
    assert not engine.running()


async def test_a_process_that_joins_again_keeps_what_it_has(engine: EngineWithEnds) -> None:
    await runs(engine)
    engine.publisher._update(joined=False, acknowledged=False)
    await engine.routable()
    assert engine.load() == STARTED
    assert engine.running() == {ONE}


async def test_a_process_that_leaves_gives_back_what_it_had(engine: EngineWithEnds) -> None:
    await run_many(engine)
    engine.publisher._stopping.set()
    await told(engine)
    assert engine.load() == NONE
    assert not engine.running()


@pytest.mark.parametrize("rest", [False, True])
async def test_steps_alone_give_back_what_a_process_that_left_had(engine: EngineWithEnds, rest: bool) -> None:
    """No further entry comes, and the stream is what wakes upkeep."""
    await run_many(engine)
    engine.fleet.upkeep.pace = Pace(min_gap_ms=0, rest_gap_ms=0)
    engine.publisher._stopping.set()
    engine.round()
    for _ in range(4):
        await engine.fleet.upkeep.step(rest=rest)
    assert engine.load() == NONE
    assert (await engine.fleet.upkeep.tick(rest=rest)).backlog == ()


async def test_a_process_that_leaves_at_once_after_another_control_entry(engine: EngineWithEnds) -> None:
    await run_many(engine)
    engine.publisher._stream.put("cleared")
    engine.publisher._stream.put("leave")
    engine.publisher._stream.flush()
    await engine.apply()
    assert engine.load() == NONE


async def test_a_hostile_stream_costs_one_call_a_step(engine: EngineWithEnds) -> None:
    await run_many(engine)
    upkeep, stream = engine.fleet.upkeep, engine.publisher._stream
    upkeep.pace = Pace(min_gap_ms=0)
    await upkeep.step()
    stream.put("running", "[1]")
    stream.put("tally", "[0,0,0]")
    stream.flush()
    engine.store.xadd(engine.keys.events(WORKER), {b"x": b"y"}, id=f"{round(time.time() * 1000) + 10**9}-0")
    await engine.apply()
    assert engine.load() == NONE
    for _ in range(3):
        engine.store.xadd(engine.keys.events(WORKER), {b"n": b"x", b"b": b"1", b"o": b"heartbeat", b"d": b"[]"})
        assert len(await upkeep._drain(await upkeep.tick())) == 1


async def test_one_call_ends_or_counts_few(engine: EngineWithEnds) -> None:
    """Each of these entries takes long, so a call that applied others leaves it to the next."""
    await run_many(engine)
    stream = engine.publisher._stream
    ends = [json.dumps([[reservation(which), 1, "stop"] for which in some]) for some in (range(10, 40), range(40, 70))]
    for operation, data in [("ended", ends[0]), ("ended", ends[1]), ("running", "[1]"), ("tally", "[0,0,0]")]:
        stream.put(operation, data)
    stream.flush()
    loads = []
    for _ in range(4):
        await engine.fleet.upkeep.apply(WORKER)
        loads.append(engine.load()[2])
    assert loads == [50, 20, 20, 0]


async def test_one_call_compares_few_tallies_of_many_reservations(engine: EngineWithEnds) -> None:
    many = [reservation(which) for which in range(1000)]
    engine.store.zadd(engine.keys.running(WORKER), dict.fromkeys(many, 1))
    for _ in range(3):
        engine.publisher._stream.put("tally", wire.dumps(wire.reservations_digest(many).as_list()))
    engine.publisher._stream.flush()
    assert [(await engine.fleet.upkeep.apply(WORKER)).entries for _ in range(3)] == [1, 1, 1]


async def test_a_tally_that_differs_asks_for_the_list(engine: EngineWithEnds) -> None:
    """Redis has lost that the engine has one reservation, and that another has ended."""
    await runs(engine)
    await runs(engine, OTHER)
    engine.store.zrem(engine.keys.running(WORKER), ONE)
    engine.end(request_id(OTHER), told=False)
    await engine.quiet()
    assert engine.running() == {ONE}
    assert engine.load() == STARTED
    assert b'"do"' not in (engine.store.get(engine.keys.command(WORKER)) or b"")


async def test_a_forgotten_worker_leaves_nothing(engine: EngineWithEnds) -> None:
    await runs(engine)
    await engine.fleet.upkeep.forget(WORKER)
    assert not engine.store.exists(engine.keys.running(WORKER))


async def test_a_decision_tells_whether_the_engine_reports_ends(engine: EngineWithEnds) -> None:
    question = Question(ONE, (), PROMPT, PROMPT)
    assert (await engine.fleet.bookings.decide(question)).reports_ends
    engine.publisher.config = replace(engine.publisher.config, ends=False)
    engine.publisher._update(joined=False, acknowledged=False)
    await engine.routable()
    assert not engine.row().flags & Flag.ENDS
    assert not (await engine.fleet.bookings.decide(Question(OTHER, (), PROMPT, PROMPT))).reports_ends
    assert not engine.store.exists(engine.keys.running(WORKER)), "from now on replicas renew"


@pytest.mark.parametrize(
    ("operation", "data"),
    [
        *[
            ("ended", bad)
            for bad in ("", "{}", "[1]", '[["short",1,"stop"]]', f'[["{ONE}",-1,"stop"]]', f'[["{ONE}",1]]')
        ],
        *[("running", bad) for bad in ("", "[]", "[2]", "[0,5]", '[1,"short"]')],
        *[("tally", bad) for bad in ("", "[1,2]", "[1,2,-3]", '["",1,2]')],
    ],
)
async def test_a_malformed_report_is_counted(engine: EngineWithEnds, operation: str, data: str) -> None:
    await runs(engine)
    engine.publisher._stream.put(operation, data)
    await told(engine)
    assert engine.store.hget(engine.keys.counts, "malformed") == b"1"
    assert engine.load() == STARTED


async def test_the_digest_counts_each_reservation() -> None:
    assert wire.reservations_digest([ONE, OTHER]).count == 2
    assert wire.reservations_digest([ONE]) != wire.reservations_digest([OTHER])


# ---------------------------------------------------------------- reports that stop, engines that die


@pytest.fixture
async def ticked(engine: EngineWithEnds) -> EngineWithEnds:
    """An engine after the time of grace with which a fleet begins."""
    await engine.second()
    return engine


async def reports_ends(engine: EngineWithEnds, reserved: str) -> bool:
    return (await engine.fleet.bookings.decide(Question(reserved, (), PROMPT, PROMPT))).reports_ends


async def test_an_engine_whose_tallies_stop_counts_as_without_reports(ticked: EngineWithEnds) -> None:
    """Its heartbeats still come, or replicas vouch for it: a picker must stay with requests there."""
    ticked.silent(11)
    await ticked.second()
    assert await reports_ends(ticked, reservation(50))
    ticked.silent(13)
    await ticked.second()
    assert not await reports_ends(ticked, reservation(51))
    await ticked.quiet()
    assert await reports_ends(ticked, reservation(52)), "a right tally came"


async def test_an_engine_that_has_never_told_counts_as_without_reports(ticked: EngineWithEnds) -> None:
    ticked.start()
    ticked.round()
    await ticked.apply()
    ticked.store.delete(ticked.keys.running(WORKER))
    await ticked.second()
    assert not ticked.row().flags & Flag.ENDS


async def test_in_grace_an_engine_counts_as_it_did(ticked: EngineWithEnds) -> None:
    ticked.silent(60)
    ticked.store.set(ticked.keys.tick, "1 0 0")
    await ticked.fleet.upkeep.tick()
    assert await reports_ends(ticked, ONE)


async def test_a_dead_engine_has_no_load_within_a_second(ticked: EngineWithEnds) -> None:
    """Neither what it had computed, nor what it had not told yet; settle and expiry then change nothing."""
    await runs(ticked)
    await ticked.decide(OTHER)
    ticked.silent(16)
    await ticked.second()
    assert ticked.load()[2] == 2, "a replica may be asking it"
    ticked.silent(17.1)
    await ticked.second()
    assert ticked.load() == NONE
    assert not ticked.running()
    await ticked.fleet.bookings.settle(ONE, "cancelled")
    await ticked.reap(OTHER)
    assert ticked.load() == NONE


async def test_the_load_of_an_engine_that_replicas_vouch_for_stays(ticked: EngineWithEnds) -> None:
    await runs(ticked)
    ticked.silent(14)
    ticked.store.zadd(ticked.keys.alive_servers, {"w": int(time.time() * 1000 - 14_000)})
    assert await ticked.fleet.workers.vouch(WORKER, ticked.publisher._stream.nonce) == "VOUCHED"
    ticked.silent(20)
    await ticked.second()
    assert ticked.load() == STARTED


async def test_the_load_of_a_silent_engine_stays_in_grace(ticked: EngineWithEnds) -> None:
    await runs(ticked)
    ticked.silent(60)
    ticked.store.set(ticked.keys.tick, "1 0 0")
    await ticked.fleet.upkeep.tick()
    assert ticked.load() == STARTED


async def test_an_engine_that_was_taken_for_dead_gets_its_load_again(ticked: EngineWithEnds) -> None:
    """Its machine stood still. A request that ended before, and goes on in a further step, counts as well."""
    await runs(ticked)
    await ticked.decide(OTHER)
    ticked.arrive(OTHER)
    await runs(ticked, reservation(60))
    ticked.end(request_id(reservation(60)))
    await told(ticked)
    ticked.silent(20)
    await ticked.second()
    assert ticked.load() == NONE
    ticked.arrive(reservation(60))
    await ticked.quiet()
    assert ticked.running() == {ONE, OTHER, reservation(60)}
    ticked.check()
    assert ticked.load()[2] == 3
    for each in (ONE, OTHER, reservation(60)):
        ticked.end(request_id(each))
    await told(ticked)
    assert ticked.load() == NONE


async def test_a_prefill_that_ends_first_gets_its_load_again(ticked: EngineWithEnds) -> None:
    """The report of it makes the first tally right, so that no list follows."""
    await ticked.decide(ONE)
    ticked.arrive(ONE)
    ticked.silent(20)
    ticked.store.zadd(ticked.keys.running(WORKER), {"": 1})
    await ticked.second()
    assert ticked.load() == NONE
    ticked.prefill(request_id(ONE))
    await told(ticked)
    assert ticked.load() == STARTED
    await ticked.quiet()
    ticked.check()
    assert ticked.load() == STARTED
    ticked.end(request_id(ONE))
    await told(ticked)
    assert ticked.load() == NONE


# ---------------------------------------------------------------- prefill legs


async def test_the_context_of_a_prefill_leg_stays_after_its_end(engine: EngineWithEnds) -> None:
    """Until another engine has taken the blocks, or the lease expires."""
    leg, other = reservation(4, "p"), reservation(5, "p")
    for reserved in (leg, other):
        await runs(engine, reserved)
        engine.end(request_id(reserved))
        await told(engine)
    context, further = (engine.leases()[reserved].decode_tokens for reserved in (leg, other))
    assert engine.load() == (0, context + further, 2)
    assert not engine.running()
    await engine.fleet.bookings.settle(leg, "finished")
    assert engine.load() == (0, further, 1)
    await engine.reap(other)
    assert engine.load() == NONE
