"""The scripts' queue without a router: when workers count as full, whose turn it is, and which keys are left."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.support.fleet.keyspace import READY, Keyspace
from tests.support.fleet.queue_model import LAG, SUFFIXES, CheckedQueue, Ticket
from tests.support.polling import poll

from warmfleet.errors import BadArgument, CancelledReservation
from warmfleet.fleet import Decision, Flag, Question, Queued, QueueLimits, Standing, Weights
from warmfleet.pools.reasons import ALL_ARE_BUSY, ITS_TURN, ITS_WORKER_IS_BUSY, queue_in_words
from warmfleet.routing.pool_choice import turn_s
from warmfleet_worker.load import REMEMBERED_WORK_SECONDS

pytestmark = pytest.mark.in_turn

FULL = {"prefill_tokens": 1_000, "in_flight": 3}  # a tenth of a second at 10,000 tokens a second: the limit
OWN, OTHER = (8, 0), (8, 1)


@pytest.fixture
async def q(keyspace: Keyspace) -> CheckedQueue:
    """A queue before one worker, which is saturated. Costs are of prefill alone, to be computed by hand."""
    keyspace.fleet.use(weights=Weights(decode_price=0.0, context_price=0.0))
    await keyspace.workers(1, **FULL)
    await keyspace.ticked(grace_ms=3_600_000)
    return CheckedQueue(keyspace, 8)


async def booked(q: CheckedQueue, ticket: Ticket, waited_ms: int = 0) -> bool:
    return isinstance(await q.decide(ticket, waited_ms), Decision)


def ticket(name: str, flow: tuple[int, int] = OWN, tokens: int = 100, barred: tuple[str, ...] = ()) -> Ticket:
    return Ticket(f"wf-{name}", 0, flow, tokens, barred)


async def turns(q: CheckedQueue, *tickets: Ticket) -> list[str]:
    line = await q.keyspace.fleet.queue.poll([queued.reservation for queued in tickets])
    return [name[3:] for name, standing in line.standings.items() if standing is Standing.TURN]


@pytest.mark.parametrize(
    ("row", "waits"),
    [
        (FULL, True),
        ({"prefill_tokens": 999, "in_flight": 1}, False),
        ({"foreign_prefill_tokens": 10_000}, False),  # a second of work may be a mean of the past: no work is left
        ({"foreign_prefill_tokens": 11_000}, True),
        ({"foreign_prefill_tokens": 10_000, "prefill_tokens": 999, "in_flight": 1}, False),
        ({"foreign_prefill_tokens": 10_100, "prefill_tokens": 990, "in_flight": 1}, True),
        ({"decode_tokens": 1_000_000, "in_flight": 9, "foreign_prefill_tokens": 100}, True),
        ({"prefill_tokens": 2_000, "in_flight": 1, "speed_tps": 40_000}, False),
        ({}, False),
        ({"decode_tokens": 1_000_000, "in_flight": 9}, False),
        ({"decode_tokens": 1_000_000, "in_flight": 9, "prefill_tokens": 1}, True),
        ({"foreign_decode_tokens": 1_000_000, "prefill_tokens": 1}, True),
        ({"decode_tokens": 120_000, "in_flight": 9, "prefill_tokens": 1}, False),
        ({**FULL, "flags": READY | Flag.APPROXIMATE}, False),
    ],
    ids=str,
)
async def test_who_is_saturated(keyspace: Keyspace, row: dict[str, int], waits: bool) -> None:
    """A cache of 8,192 blocks of 16 tokens: its content counts while something waits to get in."""
    await keyspace.workers(1, capacity_blocks=8_192, **row)
    q = CheckedQueue(keyspace, 8)
    keyspace.fleet.use(block_tokens={7: 16})
    assert await booked(q, ticket("a", tokens=50_000)) is not waits


async def test_one_with_room_is_enough_and_none_is_asked_for_nothing(q: CheckedQueue) -> None:
    await q.keyspace.worker(2, prefill_tokens=900, in_flight=1)
    assert await booked(q, ticket("a"))
    await q.gone()
    q.keyspace.fleet.use(limits=QueueLimits(0.0))
    await q.keyspace.change(2, prefill_tokens=5_000)
    assert await booked(q, ticket("b")), "0: no queue"


async def test_a_newcomer_waits_behind_who_has_the_turn(q: CheckedQueue) -> None:
    first, second = ticket("first", tokens=900), ticket("second", OTHER)
    assert not await booked(q, first)
    await q.keyspace.change(1, prefill_tokens=500)
    assert not await booked(q, second), "there is room, but not for both"
    assert await turns(q, first, second) == ["first"]
    assert await booked(q, first)
    await q.keyspace.change(1, prefill_tokens=0)
    assert await booked(q, second)
    await q.gone()


async def test_first_come_first_served_among_strangers(q: CheckedQueue) -> None:
    """Tenants that come once are served by arrival, whatever their names."""
    strangers = [ticket(f"s{number}", (8, tenant)) for number, tenant in enumerate((9, 3, 7, 1, 5))]
    for queued in strangers:
        assert not await booked(q, queued)
    await q.keyspace.change(1, prefill_tokens=850)
    assert await turns(q, *strangers) == ["s0", "s1"]


async def test_who_comes_one_by_one_pays_too(q: CheckedQueue) -> None:
    """A tenant without a ticket for a moment does not begin anew. A third tenant cannot be served at all."""
    await q.keyspace.worker(2, **FULL)
    await booked(q, ticket("t0", (8, 2), barred=("w1.0",)))
    many = [ticket(f"m{number}", OWN, 500) for number in range(3)]
    for queued in many:
        await booked(q, queued)
    await booked(q, single := ticket("o0", OTHER, 800))
    await q.keyspace.change(1, prefill_tokens=999)
    assert await turns(q, *many, single) == ["m0"], "both have had nothing: by arrival"
    assert await booked(q, many[0])
    await q.keyspace.change(1, prefill_tokens=999)
    assert await turns(q, *many, single) == ["o0"]
    assert await booked(q, single)
    await q.keyspace.change(1, prefill_tokens=1_000)
    await booked(q, again := ticket("o1", OTHER, 800))
    await q.keyspace.change(1, prefill_tokens=999)
    assert await turns(q, *many, again) == ["m1"]


async def test_who_begins_to_wait_is_not_starved_by_one_whose_engine_was_busy(q: CheckedQueue) -> None:
    """While `held` waits for w1, 36,000 tokens of another tenant are served at w2, so its class is far ahead of it."""
    q.keyspace.fleet.use(limits=QueueLimits(0.1, 64))
    await q.keyspace.worker(2, **FULL)
    held = [ticket(f"held{number}", OWN, 500, ("w2.0",)) for number in range(40)]
    for queued in held:
        await booked(q, queued)
    for number in range(40):
        await booked(q, elsewhere := ticket(f"e{number}", OTHER, 900, ("w1.0",)))
        await q.keyspace.change(2, prefill_tokens=999)
        assert await booked(q, elsewhere)
        await q.keyspace.change(2, **FULL)
    await booked(q, newcomer := ticket("newcomer", (8, 2), 500, ("w2.0",)))
    served = []
    while newcomer.reservation not in served:
        await q.keyspace.change(1, prefill_tokens=999)
        name = next(iter((await q.keyspace.fleet.queue.poll()).turns))
        assert await booked(q, next(queued for queued in (*held, newcomer) if queued.reservation == name))
        await q.keyspace.change(1, **FULL)
        served.append(name)
    assert 500 * (len(served) - 1) <= LAG + 500, "a second of work, and one request"


async def test_a_tenant_of_long_prompts_gets_no_more_than_one_of_short_ones(q: CheckedQueue) -> None:
    """A prompt of 5 s puts the tenant of short prompts more than a second of work behind: it catches up on all."""
    q.keyspace.fleet.use(limits=QueueLimits(0.1, 64))
    long = [ticket(f"l{number}", OWN, 50_000) for number in range(2)]
    short = [ticket(f"s{number}", OTHER, 2_000) for number in range(30)]
    for queued in (*long, *short):
        await booked(q, queued)
    served = []
    while long[1].reservation not in served:
        await q.keyspace.change(1, prefill_tokens=999)
        name = next(iter((await q.keyspace.fleet.queue.poll()).turns))
        assert await booked(q, next(queued for queued in (*long, *short) if queued.reservation == name))
        await q.keyspace.change(1, **FULL)
        served.append(name)
    assert served.index(long[0].reservation) == 0
    assert len(served) == 1 + 25 + 1, "25 short prompts are as much work as a long one"


async def test_classes_go_first_whatever_was_served(q: CheckedQueue) -> None:
    low, high = ticket("low", (15, 0)), ticket("high", (0, 1))
    await booked(q, low)
    await booked(q, high)
    await q.keyspace.change(1, prefill_tokens=950)
    assert await turns(q, low, high) == ["high"]
    ask = q.keyspace.ask(prompt_tokens=10)
    for wild in (-(10**9), 10**9):
        assert isinstance(await q.keyspace.fleet.queue.decide_in_turn(replace(ask, priority=wild)), Queued)


async def test_who_cannot_be_served_holds_up_nobody(q: CheckedQueue) -> None:
    await q.keyspace.worker(2, **FULL)
    barred, other = ticket("barred", barred=("w2.0",)), ticket("other", OTHER)
    await booked(q, barred)
    await booked(q, other)
    await q.keyspace.change(2, prefill_tokens=950)
    assert await turns(q, barred, other) == ["other"]
    await q.keyspace.change(1, prefill_tokens=999)
    await q.keyspace.change(2, prefill_tokens=1_000)
    assert await turns(q, barred, other) == ["barred"], "its own worker has room: it goes first again"


async def test_a_ticket_of_an_older_replica_fails_nobody(q: CheckedQueue) -> None:
    """A record of an older version ends with ids of workers, a record of this version with slots."""
    await q.keyspace.worker(2, **FULL)
    older, other = ticket("older", barred=("w1.0",)), ticket("other", OTHER)
    await booked(q, older)
    key = f"{q.keyspace.keys.queue2}:tickets"
    record: bytes = await cast("Any", q.keyspace.store.hget(key, "wf-older"))
    await cast("Any", q.keyspace.store.hset(key, "wf-older", record[:-4] + b"w1.0,w20.0"))
    assert not await booked(q, other)
    await q.keyspace.change(1, prefill_tokens=950)
    assert await turns(q, older, other)


async def test_a_line_whose_worker_is_busy_holds_up_no_other_tenant(q: CheckedQueue) -> None:
    """A decision looks at a few hundred tickets, which must not all belong to one tenant however long its line is."""
    q.keyspace.fleet.use(limits=QueueLimits(0.1, 300))
    await q.keyspace.worker(2, **FULL)
    for number in range(256):
        await booked(q, ticket(f"b{number}", barred=("w2.0",)))
    await booked(q, other := ticket("other", OTHER))
    await q.keyspace.change(2, prefill_tokens=500)
    assert await turns(q, other) == ["other"]
    assert await booked(q, other)


async def test_a_line_whose_worker_is_busy_hides_nobody_of_its_own_tenant(q: CheckedQueue) -> None:
    """A look takes 256 tickets at most: half at the front, half at a moving place or before the decided ticket."""
    q.keyspace.fleet.use(limits=QueueLimits(0.1, 600))
    await q.keyspace.worker(2, **FULL)
    for number in range(400):
        await booked(q, ticket(f"b{number}", barred=("w2.0",)))
    await booked(q, waits := ticket("waits"))
    await booked(q, comes := ticket("comes"))
    await q.keyspace.change(2, prefill_tokens=999)

    async def told() -> bool:
        return waits.reservation in (await q.keyspace.fleet.queue.poll()).turns

    await poll(told, 30, "by one of some polls")
    assert not await booked(q, comes), "there is room for one, and not for the last"
    assert await booked(q, waits)


async def test_who_cannot_be_served_by_very_many_workers_keeps_no_turn(q: CheckedQueue) -> None:
    """Only two of some hundred workers serve an adapter, so a ticket lists very many workers that cannot serve it."""
    q.keyspace.fleet.use(limits=QueueLimits(0.1, 300))
    others = [f"an-engine-of-a-large-fleet-with-a-long-name-{number:03}.0" for number in range(200)]
    await q.keyspace.worker(2, **FULL)
    await booked(q, ticket("barred", tokens=5_000, barred=(*others, "w2.0")))
    await booked(q, other := ticket("other"))
    await q.keyspace.change(2, prefill_tokens=950)
    assert await turns(q, other) == ["other"]


async def test_a_full_queue_takes_from_the_longest_line(q: CheckedQueue) -> None:
    q.keyspace.fleet.use(limits=QueueLimits(0.1, 7))
    much = [ticket(f"m{number}") for number in range(7)]
    for queued in much:
        await booked(q, queued)
    refused = await q.decide(ticket("m7"))
    assert isinstance(refused, Queued)
    assert (refused.outcome, refused.waiting, refused.work_s) == ("full", 7, 0.07)
    little = [ticket(f"l{number}", OTHER) for number in range(5)]
    answers = [await q.decide(queued) for queued in little]
    assert [answer.outcome for answer in answers if isinstance(answer, Queued)] == ["queued"] * 3 + ["full"] * 2
    line = await q.keyspace.fleet.queue.poll([queued.reservation for queued in much])
    assert [*line.standings.values()] == [Standing.WAITS] * 4 + [Standing.DISPLACED] * 3
    urgent = await q.decide(ticket("u", (0, 0)))
    assert isinstance(urgent, Queued)
    assert urgent.outcome == "queued"
    asked = await q.decide(much[3])
    assert isinstance(asked, Queued)
    assert asked.outcome == "displaced", "the last of those that have most, though nobody has asked since"


async def test_who_may_not_wait_takes_nobodys_place(q: CheckedQueue) -> None:
    q.keyspace.fleet.use(limits=QueueLimits(0.1, 3))
    many = [ticket(f"m{number}") for number in range(3)]
    for queued in many:
        await booked(q, queued)
    refused = await q.keyspace.fleet.queue.decide_in_turn(
        q.keyspace.ask(extra_tokens=100, tenant=b"other000", may_wait=False)
    )
    assert isinstance(refused, Queued)
    assert refused.outcome == "full"
    line = await q.keyspace.fleet.queue.poll([queued.reservation for queued in many])
    assert [*line.standings.values()] == [Standing.WAITS] * 3


async def test_who_displaces_nobody_waits_only_where_there_is_a_place(q: CheckedQueue) -> None:
    q.keyspace.fleet.use(limits=QueueLimits(0.1, 4))
    many = [ticket(f"m{number}") for number in range(3)]
    for queued in many:
        await booked(q, queued)
    answers = []
    for name in ("wf-1", "wf-2"):
        ask = q.keyspace.ask(reservation=name, extra_tokens=100)
        answers.append(await q.keyspace.fleet.queue.decide_in_turn(replace(ask, tenant=b"other000", displaces=False)))
    assert [answer.outcome for answer in answers if isinstance(answer, Queued)] == ["queued", "full"]
    line = await q.keyspace.fleet.queue.poll([queued.reservation for queued in many])
    assert [*line.standings.values()] == [Standing.WAITS] * 3


async def test_who_asks_only_is_told_that_it_would_wait(q: CheckedQueue) -> None:
    _, _, seen = await q.keyspace.fleet.queue.consider(q.keyspace.ask(extra_tokens=100))
    assert seen.waits, "saturated"
    await q.keyspace.worker(2)
    _, _, seen = await q.keyspace.fleet.queue.consider(q.keyspace.ask(extra_tokens=100))
    assert not seen.waits
    await q.gone()


async def test_a_ticket_expires_and_an_empty_queue_is_nothing(q: CheckedQueue) -> None:
    dead, alive = ticket("dead"), ticket("alive", OTHER)
    await booked(q, dead)
    await booked(q, alive)
    await q.keyspace.store.zadd(q.keyspace.keys.queue2 + ":leases", {dead.reservation: 1})
    await q.keyspace.change(1, prefill_tokens=999)
    assert await turns(q, alive) == ["alive"], "the dead do not stand in the way"
    line = await q.keyspace.fleet.queue.poll([dead.reservation])
    assert line.standings == {dead.reservation: Standing.UNKNOWN}
    await q.keyspace.fleet.queue.poll((), [alive.reservation, "wf-unknown"])
    await q.gone()


async def test_a_clock_that_steps_back_leaves_no_dead_ticket_in_the_way(q: CheckedQueue) -> None:
    """A failover to a host whose clock is an hour behind sets the clock back."""
    q.keyspace.fleet.use(spans=replace(q.keyspace.fleet.constants.spans, ticket_ms=100))
    dead = ticket("dead", tokens=5_000)
    await booked(q, dead)
    await q.keyspace.store.zadd(q.keyspace.keys.queue2 + ":leases", {dead.reservation: (time.time() + 3_600) * 1_000})
    await q.keyspace.fleet.queue.poll()
    await asyncio.sleep(0.2)  # twice as long as a ticket lives
    await q.keyspace.fleet.queue.poll()
    await q.gone()


async def test_who_was_lost_gets_the_old_place_back(q: CheckedQueue) -> None:
    old, young = ticket("old"), ticket("young")
    await booked(q, young)
    assert not await booked(q, old, waited_ms=5_000)
    await q.keyspace.change(1, prefill_tokens=950)
    assert await turns(q, old, young) == ["old"]


@pytest.mark.parametrize("suffix", SUFFIXES)
async def test_a_part_that_is_lost_alone_costs_its_tickets_and_no_error(q: CheckedQueue, suffix: str) -> None:
    """Redis may evict a key of the queue: its tickets may wait until their deadline, all others are served."""
    waiting = [ticket(name, flow) for name, flow in (("a", OWN), ("b", OWN), ("c", OTHER), ("d", OTHER))]
    for queued in waiting:
        await booked(q, queued)
    await q.keyspace.store.delete(q.keyspace.keys.queue2 + suffix)
    q.keyspace.fleet.use(limits=QueueLimits(0.1, 3))
    for queued in (*waiting, ticket("e"), ticket("u", (0, 0))):
        await q.decide(queued)
    await turns(q, *waiting)
    await q.keyspace.change(1, prefill_tokens=0, in_flight=0)
    for queued in waiting:
        await q.decide(queued)
    await q.keyspace.fleet.queue.poll((), [f"wf-{name}" for name in "abcdeu"])
    await q.keyspace.store.delete(q.keyspace.keys.queue2)
    assert await booked(q, ticket("later"))


@pytest.mark.parametrize("suffix", ["", ":tickets", ":leases", ":flows", ":lengths"])
async def test_after_a_part_is_lost_the_queue_begins_anew(q: CheckedQueue, suffix: str) -> None:
    """The queue begins anew, or tickets of dead replicas would hold room of engines or places in the queue for ever."""
    waiting = [ticket("a"), ticket("b", OTHER)]
    for queued in waiting:
        await booked(q, queued)
    await q.keyspace.store.delete(q.keyspace.keys.queue2 + suffix)
    line = await q.keyspace.fleet.queue.poll([queued.reservation for queued in waiting])
    assert set(line.standings.values()) == {Standing.UNKNOWN}
    await q.gone()


async def test_who_was_cancelled_gets_no_ticket(q: CheckedQueue) -> None:
    await q.keyspace.fleet.bookings.settle("wf-gone", "cancelled")
    with pytest.raises(CancelledReservation):
        await q.decide(ticket("gone"))
    await q.gone()


@pytest.mark.parametrize("tenant", [b"short", b"more than 8 bytes"])
async def test_a_tenant_has_eight_bytes(q: CheckedQueue, tenant: bytes) -> None:
    with pytest.raises(BadArgument):
        await q.keyspace.fleet.queue.decide_in_turn(q.keyspace.ask(tenant=tenant))


async def test_many_tenants_whose_worker_is_busy_hide_no_other_tenant(q: CheckedQueue) -> None:
    """A look takes 256 tickets. Two tickets that can be served wait behind 600 tenants with one ticket each."""
    q.keyspace.fleet.use(limits=QueueLimits(0.1, 700))
    await q.keyspace.worker(2, **FULL)
    for number in range(600):
        ask = q.keyspace.ask(reservation=f"wf-b{number}", prompt_tokens=100, decode_tokens=0, exclude=("w2.0",))
        tenant = number.to_bytes(8, "big")
        assert isinstance(
            await q.keyspace.fleet.queue.decide_in_turn(replace(ask, tenant=tenant, barred=("w2.0",))), Queued
        )
    behind = [ticket("near", OWN), ticket("far", OTHER)]
    for queued in behind:
        assert not await booked(q, queued)
    await q.keyspace.change(2, prefill_tokens=0, in_flight=0)
    seen = set[str]()
    async with asyncio.timeout(10):
        while len(seen) < 2:
            seen |= (await q.keyspace.fleet.queue.poll()).turns
            await asyncio.sleep(0.001)  # the place to go on with moves with the clock
    assert seen == {queued.reservation for queued in behind}
    assert await booked(q, behind[0]), "a decision looks at its own ticket"


async def test_of_many_tenants_not_only_the_first_request_is_looked_at(q: CheckedQueue) -> None:
    """256 looks are less than two for each of 140 tenants, whose first requests all wait for a busy worker."""
    q.keyspace.fleet.use(limits=QueueLimits(0.1, 700))
    await q.keyspace.worker(2, **FULL)
    for number in range(140):
        tenant = number.to_bytes(8, "big")
        for name, barred in (("first", ("w2.0",)), ("second", ())):
            ask = q.keyspace.ask(reservation=f"wf-{name}{number}", prompt_tokens=100, decode_tokens=0, exclude=barred)
            assert isinstance(
                await q.keyspace.fleet.queue.decide_in_turn(replace(ask, tenant=tenant, barred=barred)), Queued
            )
    await q.keyspace.change(2, prefill_tokens=0, in_flight=0)
    assert any(name.startswith("wf-second") for name in (await q.keyspace.fleet.queue.poll()).turns)


async def test_a_ticket_takes_the_room_that_it_will_use(q: CheckedQueue) -> None:
    """A ticket is small at the worker that is busy for long, but at the other worker it fills all the room."""
    held = q.keyspace.chain(600)
    await q.keyspace.worker(2, prefill_tokens=200_000, in_flight=3)
    await q.keyspace.hold(2, held)
    large = q.keyspace.ask(held, reservation="wf-large", prompt_tokens=9_600, decode_tokens=0)
    assert isinstance(await q.keyspace.fleet.queue.decide_in_turn(large), Queued)
    assert not await booked(q, ticket("later", tokens=600))
    await q.keyspace.change(1, prefill_tokens=100)
    assert (await q.keyspace.fleet.queue.poll()).turns == {"wf-large"}


async def test_who_gives_engines_less_ahead_is_not_overtaken_for_ever(q: CheckedQueue) -> None:
    """The first ticket belongs to a replica that gives engines 0.1 s of work ahead; another replica gives 0.2 s."""
    await q.keyspace.change(1, prefill_tokens=2_000)
    assert not await booked(q, first := ticket("first"))
    own = q.keyspace.fleet.constants.limits
    q.keyspace.fleet.use(limits=replace(own, max_engine_wait_s=0.2))
    assert not await booked(q, ticket("later"))
    q.keyspace.fleet.use(limits=own)
    await q.keyspace.change(1, prefill_tokens=1_500)
    assert await turns(q, first) == ["first"]
    assert await booked(q, first)
    await q.keyspace.fleet.queue.poll((), ["wf-later"])
    await q.gone()
    await q.keyspace.change(1, prefill_tokens=1_500)
    assert not await booked(q, ticket("next")), "once nobody waits each replica gives as much ahead as before"


async def test_small_prompts_go_many_at_once(q: CheckedQueue) -> None:
    """As many small prompts as fit are served at once, not one for each worker."""
    small = [ticket(f"s{number}", OWN, 50) for number in range(8)]
    for queued in small:
        await booked(q, queued)
    await q.keyspace.change(1, prefill_tokens=750)
    assert await turns(q, *small) == ["s0", "s1", "s2", "s3", "s4"]


# ---------------------------------------------------------------- small work first, and engines that hold prompts


async def test_small_work_goes_first_but_not_for_ever(q: CheckedQueue) -> None:
    """With a patience of 10 a prompt of 60 ms may be overtaken by what comes in the 600 ms after it."""
    q.keyspace.fleet.use(limits=QueueLimits(0.1, 8, 10.0))
    large, small = ticket("large", tokens=600), ticket("small", tokens=100)
    await booked(q, large, waited_ms=400)
    await booked(q, small)
    await q.keyspace.change(1, prefill_tokens=999)
    assert await turns(q, large, small) == ["small"]
    assert await booked(q, ticket("early", tokens=600), waited_ms=600), "its patience is over"


async def test_any_patience_leaves_places_of_sixteen_digits(q: CheckedQueue) -> None:
    """A longer one would be cut in the wrong place, and no ticket would get its turn."""
    q.keyspace.fleet.use(limits=QueueLimits(0.1, 8, 1e10))
    large, small = ticket("large", tokens=50_000), ticket("small", OTHER, tokens=50_000)
    await booked(q, large)
    await booked(q, small)
    await q.keyspace.change(1, prefill_tokens=0, in_flight=0)
    assert await turns(q, large, small) == ["large"]
    assert await booked(q, large)


async def holding(q: CheckedQueue, *numbers: int, blocks: int = 60) -> Question:
    """A request of 961 tokens whose first 960 are held by ``workers``; another worker is idle."""
    chain = q.keyspace.chain(blocks)
    for number in numbers:
        await q.keyspace.hold(number, chain)
    return q.keyspace.ask(chain)


async def test_who_waits_for_a_busy_engine_holds_up_nobody(q: CheckedQueue) -> None:
    """The first ticket waits 0.1 s, which is cheaper than computing its prompt elsewhere; others do not wait for it."""
    await q.keyspace.worker(2)
    asks = await holding(q, 1, blocks=600)
    assert isinstance(await q.keyspace.fleet.queue.decide_in_turn(asks), Queued)
    line = await q.keyspace.fleet.queue.poll([asks.reservation])
    assert line.standings == {asks.reservation: Standing.WAITS}
    answer = await q.keyspace.fleet.queue.decide_in_turn(q.keyspace.ask(extra_tokens=50, tenant=b"other000"))
    assert isinstance(answer, Decision)
    assert answer.worker_id == "w2.0"
    await q.keyspace.change(1, prefill_tokens=990)
    answer = await q.keyspace.fleet.queue.decide_in_turn(asks)
    assert isinstance(answer, Decision)
    assert (answer.worker_id, answer.matched_tokens) == ("w1.0", 9_600)
    await q.gone()


async def test_a_look_charges_what_is_to_be_computed(q: CheckedQueue) -> None:
    """A prompt of 9,601 tokens of which the engine holds 9,600 is less work than a prompt of 50 tokens."""
    q.keyspace.fleet.use(limits=QueueLimits(0.1, 64))
    asks = await holding(q, 1, blocks=600)
    for number in range(6):
        cached = replace(asks, reservation=f"wf-c{number}")
        assert isinstance(await q.keyspace.fleet.queue.decide_in_turn(replace(cached, tenant=b"cached00")), Queued)
    for number in range(6):
        assert not await booked(q, ticket(f"n{number}", OTHER, 50))
    await q.keyspace.change(1, prefill_tokens=890)
    told = (await q.keyspace.fleet.queue.poll()).turns
    assert told == {*(f"wf-c{number}" for number in range(6)), "wf-n0", "wf-n1", "wf-n2"}


async def test_who_cannot_wait_for_a_busy_engine_takes_a_free_one(q: CheckedQueue) -> None:
    await q.keyspace.worker(2)
    asks = await holding(q, 1, blocks=600)
    answer = await q.keyspace.fleet.queue.decide_in_turn(replace(asks, may_wait=False))
    assert isinstance(answer, Decision)
    assert (answer.worker_id, answer.why) == ("w2.0", "room")
    await q.gone()


async def test_who_may_wait_no_longer_takes_a_free_engine_or_gives_up_its_ticket(q: CheckedQueue) -> None:
    await q.keyspace.worker(2)
    asks = await holding(q, 1, blocks=600)
    for name in ("wf-1", "wf-2", "wf-3"):
        answer = await q.keyspace.fleet.queue.decide_in_turn(replace(asks, reservation=name))
        assert isinstance(answer, Queued), "to wait for the engine that holds its prompt is cheaper"
    answer = await q.keyspace.fleet.queue.decide_in_turn(replace(asks, reservation="wf-1", may_wait=False))
    assert isinstance(answer, Decision)
    assert (answer.worker_id, answer.why) == ("w2.0", "room")
    answer = await q.keyspace.fleet.queue.decide_in_turn(replace(asks, reservation="wf-2", may_wait=False))
    assert isinstance(answer, Queued)
    assert (answer.outcome, answer.waiting) == ("full", 1), "that engine is busy by now"
    await q.keyspace.change(1, prefill_tokens=990)
    answer = await q.keyspace.fleet.queue.decide_in_turn(replace(asks, reservation="wf-3", may_wait=False))
    assert isinstance(answer, Decision)
    assert answer.worker_id == "w1.0", "its turn has come in time"
    await q.gone()


async def test_who_was_displaced_takes_a_free_engine(q: CheckedQueue) -> None:
    """A displaced request takes a free engine even if it costs more, as does a request that finds the queue full."""
    q.keyspace.fleet.use(limits=QueueLimits(0.1, 2))
    await q.keyspace.worker(2)
    asks = await holding(q, 1, blocks=600)
    for name, tenant in (("m0", b"many0000"), ("m1", b"many0000"), ("o", b"other000")):
        answer = await q.keyspace.fleet.queue.decide_in_turn(replace(asks, reservation=f"wf-{name}", tenant=tenant))
        assert isinstance(answer, Queued)
        assert answer.outcome == "queued"
    displaced = await q.keyspace.fleet.queue.decide_in_turn(replace(asks, reservation="wf-m1", tenant=b"many0000"))
    assert isinstance(displaced, Decision)
    assert (displaced.worker_id, displaced.why) == ("w2.0", "room")
    line = await q.keyspace.fleet.queue.poll(["wf-m0", "wf-o"])
    assert [*line.standings.values()] == [Standing.WAITS] * 2


async def test_a_prompt_that_becomes_cached_goes_ahead(q: CheckedQueue) -> None:
    q.keyspace.fleet.use(limits=QueueLimits(0.1, 8, 10.0))
    asks = await holding(q)
    assert isinstance(await q.keyspace.fleet.queue.decide_in_turn(asks), Queued)
    await booked(q, small := ticket("small", (8, 0)))
    chain = asks.chains[0].hashes
    await q.keyspace.change(1, prefill_tokens=999)
    await q.keyspace.hold(1, chain)
    line = await q.keyspace.fleet.queue.poll([asks.reservation, small.reservation])
    assert line.standings[asks.reservation] is Standing.WAITS, "its ticket is as it was when it came"
    assert line.work_s == pytest.approx(0.1061, abs=0.001), "as it is counted in the work of all"
    await q.keyspace.change(1, prefill_tokens=1_000)
    await q.keyspace.fleet.queue.decide_in_turn(asks)
    await q.keyspace.change(1, prefill_tokens=999)
    line = await q.keyspace.fleet.queue.poll([asks.reservation, small.reservation])
    assert [name for name, standing in line.standings.items() if standing is Standing.TURN] == [asks.reservation]


async def test_who_waits_is_told_the_price_of_its_turn(q: CheckedQueue) -> None:
    """A router compares pools by a price: half of the wait, half of a share of the others' work, and its own work."""
    asks = await holding(q, 1, blocks=60)
    first = await q.decide(ticket("first", tokens=100))
    assert isinstance(first, Queued)
    assert first.turn_s == pytest.approx(turn_s(0.1, 0.01))
    second = await q.keyspace.fleet.queue.decide_in_turn(asks)
    assert isinstance(second, Queued)
    assert second.turn_s == pytest.approx(0.05 + 0.005 + 0.0001)
    assert (first.matched_tokens, second.matched_tokens) == (0, 960)
    await q.keyspace.worker(2, **FULL | {"prefill_tokens": 2_000})
    again = await q.keyspace.fleet.queue.decide_in_turn(asks)
    assert isinstance(again, Queued)
    assert again.turn_s == pytest.approx(0.05 + 0.005 / 2 + 0.0001), "two engines share the others' work"
    assert again.work_s == pytest.approx(0.006)


@pytest.mark.parametrize("overdue_s", [0.0, 3.0])
async def test_the_price_of_a_turn_counts_a_wait_alike_however_busy_the_engines_are(
    q: CheckedQueue, overdue_s: float
) -> None:
    """Inside a pool a second of waiting counts the less the busier its engines are. Between pools it counts half."""
    for share in (0, 65_535):
        seconds, us = await q.keyspace.store.time()
        since_ms = int(1_000 * (seconds - overdue_s - 0.2) + us / 1_000) % 2**32 if overdue_s else 0
        going = {"since_ms": since_ms, "under_way_tokens": 100 if overdue_s else 0}
        await q.keyspace.change(1, prefill_tokens=2_000, busy_share=share, **going)
        answer = await q.keyspace.fleet.queue.decide_in_turn(q.keyspace.ask(reservation="wf-a", prompt_tokens=100))
        assert isinstance(answer, Queued)
        ahead_s = 0.19 if overdue_s else 0.2  # the running prefills should have ended by now
        assert answer.turn_s == pytest.approx(overdue_s + turn_s(ahead_s, 0.01), abs=1.0 if overdue_s else 1e-6)
        await q.keyspace.fleet.queue.poll((), ["wf-a"])


async def test_an_engine_is_not_overdue_before_its_foreign_prefill_should_have_ended(q: CheckedQueue) -> None:
    """The engine has .2 s booked and 1 s of foreign prefill, of which half a second has passed."""
    seconds, us = await q.keyspace.store.time()
    begun = int(1_000 * (seconds - 0.5) + us / 1_000) % 2**32
    await q.keyspace.change(
        1, prefill_tokens=2_000, foreign_prefill_tokens=10_000, under_way_tokens=100, since_ms=begun
    )
    answer = await q.keyspace.fleet.queue.decide_in_turn(q.keyspace.ask(reservation="wf-a", prompt_tokens=100))
    assert isinstance(answer, Queued)
    assert answer.turn_s == pytest.approx(turn_s(1.19, 0.01), abs=1e-6)


async def test_a_turn_comes_though_an_engine_remembers_foreign_prefill(q: CheckedQueue) -> None:
    """The plugin reports at most one second of past foreign prefill, and that much takes no room."""
    assert not await booked(q, first := ticket("first"))
    remembered = int(REMEMBERED_WORK_SECONDS * 10_000)
    await q.keyspace.change(1, prefill_tokens=0, in_flight=0, foreign_prefill_tokens=2 * remembered)
    assert await turns(q, first) == []
    await q.keyspace.change(1, foreign_prefill_tokens=remembered)
    assert await turns(q, first) == ["first"]
    assert await booked(q, first)
    await q.gone()


async def test_a_burst_for_a_new_prefix_waits_for_the_engine_that_makes_it(q: CheckedQueue) -> None:
    """All engines are idle. Each request has .3 s of its own behind a beginning of 9.6 s: to compute that once more
    takes no longer than to wait for it, but would take an engine from others. A line as long as that spreads.
    """
    q.keyspace.fleet.use(limits=QueueLimits(0.05, 200, 1.0))
    await q.keyspace.change(1, prefill_tokens=0, in_flight=0, speed_tps=100)
    await q.keyspace.worker(2, speed_tps=100)
    head = q.keyspace.chain(60)
    first = await q.keyspace.fleet.queue.decide_in_turn(q.keyspace.ask(q.keyspace.chain(62, head)))
    assert isinstance(first, Decision)
    line, spread = 0, None
    while not isinstance(spread, Decision) and line < 60:
        spread = await q.keyspace.fleet.queue.decide_in_turn(q.keyspace.ask(q.keyspace.chain(62, head)))
        line += isinstance(spread, Queued)
    assert isinstance(spread, Decision)
    assert spread.worker_id != first.worker_id
    assert 24 < line < 36


async def test_nobody_waits_longer_for_a_little_more_that_is_being_made(q: CheckedQueue) -> None:
    """A burst shares a beginning that the engine holds, of which another 3 % is being computed."""
    q.keyspace.fleet.use(limits=QueueLimits(0.05, 200, 1.0))
    await q.keyspace.change(1, prefill_tokens=0, in_flight=0, speed_tps=100)
    await q.keyspace.worker(2, speed_tps=100)
    head = q.keyspace.chain(60)
    await q.keyspace.hold(1, head)
    newer = q.keyspace.chain(62, head)
    assert isinstance(await q.keyspace.fleet.queue.decide_in_turn(q.keyspace.ask(newer)), Decision)
    await q.keyspace.change(1, prefill_tokens=960)
    line, spread = 0, None
    while not isinstance(spread, Decision) and line < 60:
        spread = await q.keyspace.fleet.queue.decide_in_turn(q.keyspace.ask(q.keyspace.chain(64, newer)))
        line += isinstance(spread, Queued)
    assert isinstance(spread, Decision)
    assert spread.worker_id == "w2.0"
    assert line < 4


async def test_a_line_in_a_busy_fleet_spreads_to_an_engine_that_has_just_joined(q: CheckedQueue) -> None:
    """Each request has 32 ms of its own behind a beginning of .96 s, which one engine holds. All others are full."""
    q.keyspace.fleet.use(limits=QueueLimits(0.1, 200, 1.0))
    await q.keyspace.change(1, busy_share=65_535, since_ms=0)
    for number in range(2, 9):
        await q.keyspace.worker(number, **FULL | {"busy_share": 65_535})
    await q.keyspace.worker(9)
    head = q.keyspace.chain(600)
    await q.keyspace.hold(1, head)
    assert not await booked(q, ticket("somebody waits", OTHER, barred=("w1.0", "w9.0")))
    served: list[Decision] = []
    line = 0
    while not served and line < 60:
        answer = await q.keyspace.fleet.queue.decide_in_turn(q.keyspace.ask(q.keyspace.chain(620, head)))
        served += [answer] if isinstance(answer, Decision) else []
        line += not served
    assert [decision.worker_id for decision in served] == ["w9.0"]
    assert 20 < line < 40, "as soon as it would wait for longer than it computes there"


async def test_a_tenants_price_counts_its_own_line_and_not_the_length_of_others(q: CheckedQueue) -> None:
    """A tenant takes the pool where less of its own work waits, however much work a busy tenant has in both pools."""
    q.keyspace.fleet.use(limits=QueueLimits(0.1, 64))
    for number in range(12):
        last = await q.decide(ticket(f"much{number}"))
    assert isinstance(last, Queued)
    assert last.turn_s == pytest.approx(turn_s(0.1 + 11 * 0.01, 0.01)), "behind all others of its tenant"
    for number in range(3):
        little = await q.decide(ticket(f"little{number}", OTHER))
        assert isinstance(little, Queued)
        before = 2 * (number + 1) - 1  # its own tickets, and as many of the other tenant's
        assert little.turn_s == pytest.approx(turn_s(0.1 + before * 0.01, 0.01))


async def test_a_poll_foretells_when_an_engine_has_room(q: CheckedQueue) -> None:
    """1,500 tokens at 10,000 a second are 50 ms too many; of them 900 are under way, or only 100."""
    await booked(q, waiting := ticket("a"))
    seconds, us = await q.keyspace.store.time()
    for under_way, foretold in ((900, True), (100, False)):
        now_ms = (1_000 * seconds + us // 1_000) % 2**32
        await q.keyspace.change(1, prefill_tokens=1_500, under_way_tokens=under_way, since_ms=now_ms)
        line = await q.keyspace.fleet.queue.poll([waiting.reservation])
        assert (0.0 < line.room_in_s <= 0.051) == foretold, "else only the engine's report can tell"


async def test_a_look_at_the_queue_tells_who_is_first_and_what_for(q: CheckedQueue) -> None:
    await q.keyspace.worker(2)
    asks = await holding(q, 1, blocks=600)
    await q.keyspace.fleet.queue.decide_in_turn(asks)
    first = (await q.keyspace.fleet.queue.poll()).next
    assert first is not None
    assert (first.reservation, first.prompt_tokens, first.tenants) == (asks.reservation, asks.prompt_tokens, 1)
    assert (first.worker_id, first.has_room) == ("w1.0", False)
    assert first.to_compute_s == pytest.approx(0.0001)
    assert first.to_compute_there_s == pytest.approx(0.0001, abs=1e-4)
    assert 0.0 <= first.waited_s < 1.0
    told = queue_in_words(await q.keyspace.fleet.queue.poll())
    assert told["next"]["because"] == ITS_WORKER_IS_BUSY
    assert "reservation" not in told["next"], "a client's own"
    line = await q.keyspace.fleet.queue.poll([asks.reservation])
    assert line.next is None
    await q.keyspace.change(1, prefill_tokens=0, in_flight=0)
    line = await q.keyspace.fleet.queue.poll()
    assert line.turns == {asks.reservation}, "also of those that the poll does not name"
    assert "turn" in queue_in_words(line)["next"]["because"]
    await q.keyspace.fleet.queue.poll((), [asks.reservation])
    assert queue_in_words(await q.keyspace.fleet.queue.poll())["next"] is None


async def test_the_first_is_not_said_to_have_a_choice_while_all_engines_are_busy(q: CheckedQueue) -> None:
    await q.keyspace.worker(2, **FULL)
    await booked(q, ticket("a", barred=("w1.0",)))
    told = queue_in_words(await q.keyspace.fleet.queue.poll())["next"]
    assert (told["worker_id"], told["has_room"], told["any_has_room"]) == ("w2.0", False, False)
    assert told["because"] == ALL_ARE_BUSY
    await q.keyspace.change(1, prefill_tokens=0, in_flight=0)
    told = queue_in_words(await q.keyspace.fleet.queue.poll())["next"]
    assert told["because"] == ALL_ARE_BUSY, "the free one cannot serve it"
    await q.keyspace.change(2, prefill_tokens=0, in_flight=0)
    told = queue_in_words(await q.keyspace.fleet.queue.poll())["next"]
    assert (told["worker_id"], told["has_room"], told["any_has_room"]) == ("w2.0", True, True)
    assert told["because"] == ITS_TURN


async def test_the_first_is_told_by_the_engine_that_it_waits_for(q: CheckedQueue) -> None:
    """w1 holds the 9,600 tokens, but has 3 s of prefill ahead; w2 has 0.1 s ahead, and computes them in 0.96 s."""
    await q.keyspace.change(1, prefill_tokens=30_000, in_flight=5)
    await q.keyspace.worker(2, **FULL)
    asks = await holding(q, 1, blocks=600)
    assert isinstance(await q.keyspace.fleet.queue.decide_in_turn(asks), Queued)
    first = (await q.keyspace.fleet.queue.poll()).next
    assert first is not None
    assert first.worker_id == "w2.0"
    assert first.to_compute_s == pytest.approx(0.0001), "where it takes least"
    assert first.to_compute_there_s == pytest.approx(0.9601, abs=1e-4)


async def test_the_first_is_told_the_engine_with_room_that_costs_it_the_same(q: CheckedQueue) -> None:
    """The request costs 3.8 ms less at w1, which is busy and holds 48 tokens of it: the costs count as equal."""
    await q.keyspace.worker(2, **FULL)
    asks = await holding(q, 1, blocks=3)
    assert isinstance(await q.keyspace.fleet.queue.decide_in_turn(asks), Queued)
    await q.keyspace.change(2, prefill_tokens=980)
    line = await q.keyspace.fleet.queue.poll()
    assert line.turns == {asks.reservation}
    assert line.next is not None
    assert (line.next.worker_id, line.next.has_room) == ("w2.0", True)


async def test_a_long_line_for_one_engine_spreads_to_an_engine_that_is_free(q: CheckedQueue) -> None:
    """All requests share 9,600 tokens, which take 0.96 s to compute again, and add 320 tokens (32 ms) each."""
    q.keyspace.fleet.use(limits=QueueLimits(0.1, 200, 1.0))
    await q.keyspace.worker(2)
    head = q.keyspace.chain(600)
    await q.keyspace.hold(1, head)
    served = []
    for _ in range(80):
        answer = await q.keyspace.fleet.queue.decide_in_turn(q.keyspace.ask(q.keyspace.chain(620, head)))
        served += [answer.worker_id] if isinstance(answer, Decision) else []
    assert served == ["w2.0"], "80 wait for 2.5 s at the one engine; the other takes one, and then holds the beginning"
    assert len(await q.zset("")) == 79


@pytest.mark.parametrize("decode_tokens", [0, 1_000_000], ids=["it stands still", "its cache is full"])
async def test_nobody_waits_for_an_engine_of_which_nobody_knows_when_it_goes_on(
    q: CheckedQueue, decode_tokens: int
) -> None:
    """The engine's prefill of 0.3 s should have ended a minute ago. Another request waits for another engine."""
    q.keyspace.fleet.use(block_tokens={7: 16})
    await q.keyspace.worker(2)
    await q.keyspace.worker(3, prefill_tokens=5_000, in_flight=1)
    waits_for_third = ticket("third", OTHER, barred=("w1.0", "w2.0"))
    assert not await booked(q, waits_for_third)
    asks = await holding(q, 1, blocks=600)
    since_ms = (1_000 * (await q.keyspace.store.time())[0] - 60_000) % 2**32
    stands = {"prefill_tokens": 3_000, "under_way_tokens": 1_000, "since_ms": since_ms}
    await q.keyspace.change(1, **stands, decode_tokens=decode_tokens)
    answer = await q.keyspace.fleet.queue.decide_in_turn(asks)
    assert isinstance(answer, Decision)
    assert answer.worker_id == "w2.0"


async def test_an_engine_is_not_overdue_because_the_clock_stepped_back(q: CheckedQueue) -> None:
    """The prefill of the engine that holds the prompt began an hour after now: to wait for it is still cheapest."""
    await q.keyspace.worker(2)
    asks = await holding(q, 1, blocks=600)
    seconds, us = await q.keyspace.store.time()
    since_ms = (1_000 * seconds + us // 1_000 + 3_600_000) % 2**32
    await q.keyspace.change(1, prefill_tokens=3_000, under_way_tokens=1_000, since_ms=since_ms)
    assert isinstance(await q.keyspace.fleet.queue.decide_in_turn(asks), Queued)


async def test_tickets_of_older_routers_are_another_queue(q: CheckedQueue) -> None:
    """Older tickets have another format: a poll or decision that read one as a new ticket would fail."""
    place, flow, queue = b"%016d" % (1_000_000 * int(time.time())), b"I" + b"tenant00", q.keyspace.keys.prefix + "queue"
    old, record = "wf-old", (5_000).to_bytes(4, "big") + flow + place + b"an-engine-with-a-name-0001.0,another-0002.0"
    await q.keyspace.store.zadd(queue, {flow + place + old.encode(): 0})
    await cast("Any", q.keyspace.store.hset(queue + ":tickets", old, record))
    await q.keyspace.store.zadd(queue + ":leases", {old: (time.time() + 60) * 1_000})
    await q.keyspace.store.zadd(queue + ":flows", {place + flow: 8 * 2**44})
    await q.keyspace.change(1, prefill_tokens=0, in_flight=0)
    assert (await q.keyspace.fleet.queue.poll([old])).standings == {old: Standing.UNKNOWN}
    assert await booked(q, ticket("new"))
    assert await q.keyspace.store.zcard(queue) == 1
