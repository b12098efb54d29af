"""decide: refused arguments, which workers may be chosen, its answer and its booking."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from tests.support.fleet.keyspace import BLOCK, READY, SCHEME, Keyspace
from tests.support.redis.servers import PATIENT, redis7_binary, server, valkey_binary

from warmfleet.errors import BadArgument, CancelledReservation, NoWorker
from warmfleet.fleet import Flag, Fleet, Lease, Stage, connect
from warmfleet.prompt.block_hashes import Chain
from warmfleet_worker.protocol import wire

# ---------------------------------------------------------------- guards


@pytest.mark.parametrize(
    "change",
    [
        {"policy": "hottest"},
        {"prompt_tokens": 0},
        {"decode_tokens": -1},
        {"chains": (Chain(SCHEME, BLOCK, b"1234567"),)},
        {"chains": (Chain(SCHEME, 0, b"12345678"),)},
        {"chains": (Chain(SCHEME, BLOCK, b"12345678" * 8193),)},
        {"chains": (Chain(SCHEME, BLOCK, b"12345678"),) * 5},
        {"reservation": ""},
    ],
)
async def test_what_decide_refuses(keyspace: Keyspace, change: dict[str, Any]) -> None:
    await keyspace.workers(2)
    with pytest.raises(BadArgument):
        await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(4), **change))
    assert await keyspace.leases() == {}
    assert all(row.in_flight == 0 for row in (await keyspace.rows()).values())


async def test_no_worker(keyspace: Keyspace) -> None:
    await keyspace.ticked()
    with pytest.raises(NoWorker):
        await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(4)))


@pytest.mark.parametrize(
    "flags",
    [READY & ~Flag.SERVER, READY & ~Flag.URL, READY | Flag.DRAINING, READY | Flag.HOSTILE, READY | Flag.PAUSED],
    ids=["no server", "no url", "draining", "hostile", "paused"],
)
async def test_who_is_not_routable(keyspace: Keyspace, flags: int) -> None:
    await keyspace.workers(2)
    await keyspace.change(1, flags=flags)
    chosen = {(await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(4)))).worker_id for _ in range(8)}
    assert chosen == {"w2.0"}


async def test_excluded_workers_are_not_chosen(keyspace: Keyspace) -> None:
    await keyspace.workers(12)
    names = {f"w{number}.0" for number in range(1, 13)}
    exclude = tuple(sorted(names - {"w1.0", "w2.0"}))  # w1 is no prefix match of w11 and w12
    chosen = {
        (await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(4), exclude=exclude))).worker_id
        for _ in range(16)
    }
    assert chosen == {"w1.0", "w2.0"}
    with pytest.raises(NoWorker):
        await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(4), exclude=tuple(names)))


async def test_a_silent_worker_is_not_chosen_after_its_ttl(keyspace: Keyspace) -> None:
    await keyspace.ticked()
    await keyspace.worker(1, age_ms=16_000)
    await keyspace.worker(2, age_ms=10_000)
    assert {(await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(4)))).worker_id for _ in range(8)} == {
        "w2.0"
    }


@pytest.mark.parametrize(
    "tick", [{"age_ms": 3_000}, {"age_ms": -5_000}, {"grace_ms": 5_000}, None], ids=["old", "future", "grace", "none"]
)
async def test_in_grace_nobody_expires(keyspace: Keyspace, tick: dict[str, int] | None) -> None:
    await keyspace.worker(1, age_ms=60_000)
    if tick is not None:
        await keyspace.ticked(**tick)
    assert (await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(4)))).worker_id == "w1.0"


async def test_a_tick_that_is_due_is_no_grace(keyspace: Keyspace) -> None:
    """A fleet at rest ticks once a second."""
    await keyspace.ticked(age_ms=1_200)
    await keyspace.worker(1, age_ms=60_000)
    with pytest.raises(NoWorker):
        await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(4)))


async def test_a_row_without_alive_is_not_routable_even_in_grace(keyspace: Keyspace) -> None:
    await keyspace.worker(1)
    await keyspace.store.zrem(keyspace.keys.alive, "w1.0")
    with pytest.raises(NoWorker):
        await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(4)))


# ---------------------------------------------------------------- the answer, once


async def test_a_known_id_gets_its_stored_answer(keyspace: Keyspace) -> None:
    await keyspace.workers(4)
    chain = keyspace.chain(40)
    await keyspace.hold(3, chain, 30)
    ask = keyspace.ask(chain)
    first = await keyspace.fleet.bookings.decide(ask)
    assert (first.outcome, first.worker_id, first.matched_tokens) == ("booked", "w3.0", 480)
    await keyspace.hold(1, chain)
    again = await keyspace.fleet.bookings.decide(ask)
    assert again.outcome == "known"
    same = ("worker_id", "server_id", "url", "matched_tokens", "prompt_tokens", "prefill_tokens", "decode_tokens")
    assert [getattr(again, name) for name in same] == [getattr(first, name) for name in same]
    assert first.url == "http://10.0.0.3:8000"
    assert first.server_id == "w3"
    assert (await keyspace.row(3)).in_flight == 1


async def test_a_cancelled_id_books_nothing(keyspace: Keyspace) -> None:
    await keyspace.workers(2)
    ask = keyspace.ask(keyspace.chain(4))
    assert await keyspace.fleet.bookings.settle(ask.reservation, "cancelled") == "UNKNOWN"
    with pytest.raises(CancelledReservation):
        await keyspace.fleet.bookings.decide(ask)
    assert all(row.in_flight == 0 for row in (await keyspace.rows()).values())


async def test_what_is_booked(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    chain = keyspace.chain(200)
    await keyspace.hold(1, chain, 70)
    decision = await keyspace.fleet.bookings.decide(keyspace.ask(chain, extra_tokens=5, decode_tokens=4_000))
    assert (decision.matched_tokens, decision.prefill_tokens, decision.wait_tokens) == (1120, 2085, 0)
    row = await keyspace.row(1)
    assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (2085, 2880, 1)  # neither counts the match
    made = [1, 64, 128, 200]  # block 1, the checkpoints beyond the 70 blocks it has, and the one before
    hashes = tuple(chain[8 * block - 8 : 8 * block] for block in made)
    lease = (await keyspace.leases())[decision.reservation]
    assert lease == Lease(1, 1, 2085, 2_880, 1120, 3205, Stage.BOOKED, "w1.0", hashes)
    assert await keyspace.speculation() == {block: {1: 1} for block in hashes}
    expiry = await keyspace.store.zscore(keyspace.keys.leases, decision.reservation)
    seconds, micros = await keyspace.store.time()
    assert expiry == pytest.approx(seconds * 1000 + micros / 1000 + 30_000, abs=2_000)


async def test_the_checkpoints_of_a_long_chain(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    chain = keyspace.chain(3_000)
    await keyspace.fleet.bookings.decide(keyspace.ask(chain))
    grid = [1, 16, 32, 64, 128, 256, 512, 1024, 2048, 3000]
    assert set(await keyspace.speculation()) == {chain[8 * block - 8 : 8 * block] for block in grid}


async def test_expired_leases_are_reaped_by_the_next_decision(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    for _ in range(20):
        await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(30)))
    started = keyspace.ask(keyspace.chain(30))
    await keyspace.fleet.bookings.decide(started)
    await keyspace.fleet.bookings.settle(started.reservation, "started")
    for name in await keyspace.leases():
        await keyspace.store.zadd(keyspace.keys.leases, {name: 1})
    for left in (13, 5, 0):
        await keyspace.fleet.queue.explain(keyspace.ask(keyspace.chain(1)))
        assert (await keyspace.row(1)).in_flight == left, "eight a call"
    row = await keyspace.row(1)
    assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, 0, 0)
    assert await keyspace.leases() == {}
    assert await keyspace.speculation() == {}


async def test_a_lease_of_an_earlier_epoch_owes_nothing(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    ask = keyspace.ask(keyspace.chain(30))
    await keyspace.fleet.bookings.decide(ask)
    await keyspace.change(1, epoch=2, prefill_tokens=7, decode_tokens=8, in_flight=9)
    await keyspace.store.zadd(keyspace.keys.leases, {ask.reservation: 1})
    await keyspace.fleet.queue.explain(keyspace.ask(keyspace.chain(1)))
    row = await keyspace.row(1)
    assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (7, 8, 9)
    assert await keyspace.leases() == {}
    assert await keyspace.speculation() == {}


# ---------------------------------------------------------------- many at once, and trouble


async def test_a_hundred_at_once_book_exactly_a_hundred(redis_url: str, keyspace: Keyspace) -> None:
    await keyspace.workers(4)
    other = connect(redis_url, timeout_s=5)
    fleets = [keyspace.fleet, Fleet(other, keyspace.keys.tag.replace("~", "/"), timeouts=PATIENT)]
    asks = [keyspace.ask(keyspace.chain(20), extra_tokens=7) for _ in range(50)]
    both = [fleet.bookings.decide(ask) for ask in asks for fleet in fleets]  # every id from two routers at once
    decisions = await asyncio.gather(*both)
    await other.aclose()
    assert sorted(decision.outcome for decision in decisions) == ["booked"] * 50 + ["known"] * 50
    assert len({(decision.reservation, decision.worker_id) for decision in decisions}) == 50
    rows = (await keyspace.rows()).values()
    assert sum(row.in_flight for row in rows) == 50
    assert sum(row.prefill_tokens for row in rows) == 50 * 327
    assert max(row.in_flight for row in rows) - min(row.in_flight for row in rows) <= 1


async def test_a_full_redis_still_books_and_settles(model: str) -> None:
    for binary in (valkey_binary(), redis7_binary()):
        with server(binary) as url:
            client = connect(url, timeout_s=5)
            keyspace = Keyspace(client, Fleet(client, model, timeouts=PATIENT))
            await keyspace.workers(2)
            ask = keyspace.ask(keyspace.chain(10))
            await keyspace.fleet.queue.explain(ask)  # the script is known before memory is full
            await keyspace.fleet.bookings.settle("wf-nobody", "finished")
            await client.config_set("maxmemory", 1)
            assert (await keyspace.fleet.bookings.decide(ask)).outcome == "booked"
            assert await keyspace.fleet.bookings.settle(ask.reservation, "started") == "STARTED"
            assert await keyspace.fleet.bookings.settle(ask.reservation, "finished") == "SETTLED"
            await client.aclose()


async def test_the_url_is_cut_out_of_any_record(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    record = {
        "artifacts": {"a": {"chunks": ["00"] * 100}},
        "facts": {"note": 'an "url":"x" in text'},
        "url": "http://h/v1",
    }
    for text in (wire.dumps(record), wire.dumps(record).replace("/", "\\/")):
        await cast("Any", keyspace.store.hset(keyspace.keys.servers, "w1", text))
        assert (await keyspace.fleet.bookings.decide(keyspace.ask())).url == "http://h/v1"
