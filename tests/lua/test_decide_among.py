"""decide among given workers (`only`): no other is chosen, and no ticket waits for another."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.fleet.keyspace import Keyspace
from tests.support.redis.servers import PATIENT

from warmfleet.errors import NoWorker
from warmfleet.fleet import QUEUE_PATIENCE, Fleet, Queued, QueueLimits, connect
from warmfleet.settings import POLICIES

if TYPE_CHECKING:
    from warmfleet.fleet import Question


async def chosen(keyspace: Keyspace, ask: Question) -> str:
    return (await keyspace.fleet.bookings.decide(ask)).worker_id


async def test_no_other_worker_is_chosen(keyspace: Keyspace) -> None:
    await keyspace.workers(12)
    chain = keyspace.chain(40)
    await keyspace.hold(5, chain)
    only = ("w1.0", "w12.0")  # w1 is no prefix match of w11 and w12
    assert {await chosen(keyspace, keyspace.ask(keyspace.chain(4), only=only)) for _ in range(16)} == {*only}
    assert await chosen(keyspace, keyspace.ask(chain, only=(*only, "w5.0"))) == "w5.0"


async def test_only_and_exclude_both_count(keyspace: Keyspace) -> None:
    await keyspace.workers(4)
    ask = keyspace.ask(keyspace.chain(4), only=("w1.0", "w2.0"), exclude=("w1.0",))
    assert await chosen(keyspace, ask) == "w2.0"
    with pytest.raises(NoWorker):
        await chosen(keyspace, replace(ask, reservation="wf-none", exclude=("w1.0", "w2.0")))


async def test_unknown_and_dead_workers_are_no_choice(keyspace: Keyspace) -> None:
    await keyspace.ticked()
    await keyspace.worker(1)
    await keyspace.worker(2, age_ms=16_000)
    with pytest.raises(NoWorker):
        await chosen(keyspace, keyspace.ask(keyspace.chain(4), only=("w2.0", "elsewhere.0")))


async def test_a_ticket_waits_for_its_own_workers_only(keyspace: Keyspace) -> None:
    """Room at another worker is no turn of this ticket, and does not keep that room from others."""
    keyspace.fleet.use(limits=QueueLimits(0.05, 8, QUEUE_PATIENCE))
    await keyspace.workers(2)
    await keyspace.change(1, prefill_tokens=1_000_000)
    ask = keyspace.ask(keyspace.chain(4), only=("w1.0",), tenant=b"tenant_1")
    assert isinstance(await keyspace.fleet.queue.decide_in_turn(ask), Queued)
    other = keyspace.ask(keyspace.chain(4), tenant=b"tenant_2")
    answer = await keyspace.fleet.queue.decide_in_turn(other)
    assert not isinstance(answer, Queued)
    assert answer.worker_id == "w2.0"
    await keyspace.change(1, prefill_tokens=0)
    answer = await keyspace.fleet.queue.decide_in_turn(ask)
    assert not isinstance(answer, Queued)
    assert answer.worker_id == "w1.0"


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_among_some_is_without_the_others(valkey_url: str, data: st.DataObject) -> None:
    """A decision among some workers sees and chooses the same as one that can never use any other worker."""
    client = connect(valkey_url, timeout_s=5)
    try:
        fleet = Fleet(client, f"among/{uuid.uuid4().hex}", timeouts=PATIENT)
        keyspace = Keyspace(client, fleet, data.draw(st.integers(0, 2**32)))
        count, blocks = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 60))
        names = await keyspace.workers(count)
        chain = keyspace.chain(blocks)
        for slot in range(1, count + 1):
            await keyspace.hold(slot, chain, data.draw(st.integers(0, blocks)))
            load = data.draw(st.integers(0, 4_000))
            await keyspace.change(slot, prefill_tokens=load, decode_tokens=2 * load, in_flight=load // 500)
        only = tuple(data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True)))
        others = tuple(name for name in names if name not in only)
        ask = keyspace.ask(chain, policy=data.draw(st.sampled_from(POLICIES)), tenant=b"a tenant")
        among, rows = await fleet.queue.explain(replace(ask, only=only))
        without, others_rows = await fleet.queue.explain(replace(ask, exclude=others, barred=others))
        assert {row.worker_id for row in rows} == {*only}
        assert (among, rows) == (without, others_rows)
    finally:
        await client.aclose()
