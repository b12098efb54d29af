"""decide: guards, who may be chosen, what it matches, what it books."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conftest import PATIENT, redis7_binary, server, valkey_binary
from tests.lua.world import BLOCK, READY, SCHEME, World

from warmfleet.errors import BadArgument, CancelledReservation, NoWorker
from warmfleet.fleet import Ask, Chain, Flag, Fleet, Lease, Stage, Weights, connect
from warmfleet_worker import wire

if TYPE_CHECKING:
    import redis.asyncio as aioredis

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
async def test_what_decide_refuses(world: World, change: dict[str, Any]) -> None:
    await world.workers(2)
    with pytest.raises(BadArgument):
        await world.fleet.decide(world.ask(world.chain(4), **change))
    assert await world.leases() == {}
    assert all(row.in_flight == 0 for row in (await world.rows()).values())


async def test_no_worker(world: World) -> None:
    await world.ticked()
    with pytest.raises(NoWorker):
        await world.fleet.decide(world.ask(world.chain(4)))


@pytest.mark.parametrize(
    "flags",
    [READY & ~Flag.SERVER, READY & ~Flag.URL, READY | Flag.DRAINING, READY | Flag.HOSTILE],
    ids=["no server", "no url", "draining", "hostile"],
)
async def test_who_is_not_routable(world: World, flags: int) -> None:
    await world.workers(2)
    await world.change(1, flags=flags)
    chosen = {(await world.fleet.decide(world.ask(world.chain(4)))).worker_id for _ in range(8)}
    assert chosen == {"w2.0"}


async def test_excluded_workers_are_not_chosen(world: World) -> None:
    await world.workers(12)
    names = {f"w{number}.0" for number in range(1, 13)}
    exclude = tuple(sorted(names - {"w1.0", "w2.0"}))  # w1 is no prefix match of w11 and w12
    chosen = {(await world.fleet.decide(world.ask(world.chain(4), exclude=exclude))).worker_id for _ in range(16)}
    assert chosen == {"w1.0", "w2.0"}
    with pytest.raises(NoWorker):
        await world.fleet.decide(world.ask(world.chain(4), exclude=tuple(names)))


async def test_a_silent_worker_is_not_chosen_after_its_ttl(world: World) -> None:
    await world.ticked()
    await world.worker(1, age_ms=16_000)
    await world.worker(2, age_ms=14_000)
    assert {(await world.fleet.decide(world.ask(world.chain(4)))).worker_id for _ in range(8)} == {"w2.0"}


@pytest.mark.parametrize(
    "tick", [{"age_ms": 1_500}, {"age_ms": -5_000}, {"grace_ms": 5_000}, None], ids=["old", "future", "grace", "none"]
)
async def test_in_grace_nobody_expires(world: World, tick: dict[str, int] | None) -> None:
    await world.worker(1, age_ms=60_000)
    if tick is not None:
        await world.ticked(**tick)
    assert (await world.fleet.decide(world.ask(world.chain(4)))).worker_id == "w1.0"


async def test_a_row_without_alive_is_not_routable_even_in_grace(world: World) -> None:
    await world.worker(1)
    await world.store.zrem(world.keys.alive, "w1.0")
    with pytest.raises(NoWorker):
        await world.fleet.decide(world.ask(world.chain(4)))


# ---------------------------------------------------------------- the answer, once


async def test_a_known_id_gets_its_stored_answer(world: World) -> None:
    await world.workers(4)
    chain = world.chain(40)
    await world.hold(3, chain, 30)
    ask = world.ask(chain)
    first = await world.fleet.decide(ask)
    assert (first.outcome, first.worker_id, first.matched_tokens) == ("booked", "w3.0", 480)
    await world.hold(1, chain)
    again = await world.fleet.decide(ask)
    assert again.outcome == "known"
    same = ("worker_id", "server_id", "url", "matched_tokens", "prompt_tokens", "prefill_tokens", "decode_tokens")
    assert [getattr(again, name) for name in same] == [getattr(first, name) for name in same]
    assert first.url == "http://10.0.0.3:8000"
    assert first.server_id == "w3"
    assert (await world.row(3)).in_flight == 1


async def test_a_cancelled_id_books_nothing(world: World) -> None:
    await world.workers(2)
    ask = world.ask(world.chain(4))
    assert await world.fleet.settle(ask.reservation, "cancelled") == "UNKNOWN"
    with pytest.raises(CancelledReservation):
        await world.fleet.decide(ask)
    assert all(row.in_flight == 0 for row in (await world.rows()).values())


async def test_what_is_booked(world: World) -> None:
    await world.workers(1)
    chain = world.chain(200)
    await world.hold(1, chain, 70)
    decision = await world.fleet.decide(world.ask(chain, extra_tokens=5, decode_tokens=4_000))
    assert (decision.matched_tokens, decision.prefill_tokens, decision.wait_tokens) == (1120, 2085, 0)
    row = await world.row(1)
    assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (2085, 0, 1)
    made = [1, 96, 128, 160, 192, 200]  # block 1, and the checkpoints beyond the 70 blocks it has
    hashes = tuple(chain[8 * block - 8 : 8 * block] for block in made)
    lease = (await world.leases())[decision.reservation]
    assert lease == Lease(1, 1, 2085, 4_000, 1120, 3205, Stage.BOOKED, "w1.0", hashes)
    assert await world.speculation() == {one: {1: 1} for one in hashes}
    expiry = await world.store.zscore(world.keys.leases, decision.reservation)
    seconds, micros = await world.store.time()
    assert expiry == pytest.approx(seconds * 1000 + micros / 1000 + 30_000, abs=2_000)


async def test_the_checkpoints_of_a_long_chain(world: World) -> None:
    await world.workers(1)
    chain = world.chain(3_000)
    await world.fleet.decide(world.ask(chain))
    grid = [1, 2, 4, *range(8, 65, 8), *range(96, 513, 32), *range(640, 2049, 128), 2560, 3000]
    assert set(await world.speculation()) == {chain[8 * block - 8 : 8 * block] for block in grid}


async def test_expired_leases_are_reaped_by_the_next_decision(world: World) -> None:
    await world.workers(1)
    for _ in range(20):
        await world.fleet.decide(world.ask(world.chain(30)))
    started = world.ask(world.chain(30))
    await world.fleet.decide(started)
    await world.fleet.settle(started.reservation, "started")
    for name in await world.leases():
        await world.store.zadd(world.keys.leases, {name: 1})
    for left in (13, 5, 0):
        await world.fleet.explain(world.ask(world.chain(1)))
        assert (await world.row(1)).in_flight == left, "eight a call"
    row = await world.row(1)
    assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, 0, 0)
    assert await world.leases() == {}
    assert await world.speculation() == {}


async def test_a_lease_of_an_earlier_epoch_owes_nothing(world: World) -> None:
    await world.workers(1)
    ask = world.ask(world.chain(30))
    await world.fleet.decide(ask)
    await world.change(1, epoch=2, prefill_tokens=7, decode_tokens=8, in_flight=9)
    await world.store.zadd(world.keys.leases, {ask.reservation: 1})
    await world.fleet.explain(world.ask(world.chain(1)))
    row = await world.row(1)
    assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (7, 8, 9)
    assert await world.leases() == {}
    assert await world.speculation() == {}


# ---------------------------------------------------------------- the match


async def matched(world: World, ask: Ask) -> dict[str, int]:
    _, rows = await world.fleet.explain(ask)
    return {row.worker_id: row.matched_tokens for row in rows}


async def test_the_match_is_the_held_prefix_in_tokens(world: World) -> None:
    await world.workers(5)
    chain = world.chain(625)
    for slot, depth in ((1, 625), (2, 300), (3, 1), (4, 0)):
        await world.hold(slot, chain, depth)
    await world.hold(99, chain, 400)  # a retired slot counts for nothing
    await world.hold(5, chain)
    await world.drop(5, chain[:8])  # lost its head: what follows is of no use
    found = await matched(world, world.ask(chain))
    assert found == {"w1.0": 10_000, "w2.0": 4_800, "w3.0": 16, "w4.0": 0, "w5.0": 0}


async def test_only_proven_workers_of_the_scheme_are_matched(world: World) -> None:
    await world.workers(3)
    chain = world.chain(20)
    for slot in (1, 2, 3):
        await world.hold(slot, chain)
    await world.change(1, flags=READY & ~Flag.PROVEN)
    await world.change(2, scheme=8)
    assert await matched(world, world.ask(chain)) == {"w1.0": 0, "w2.0": 0, "w3.0": 320}
    both = (Chain(SCHEME, BLOCK, chain), Chain(8, 32, chain[: 8 * 10]))
    assert await matched(world, world.ask(chain, chains=both)) == {"w1.0": 0, "w2.0": 320, "w3.0": 320}


async def test_open_reservations_count_as_held(world: World) -> None:
    await world.workers(3)
    chain = world.chain(200)
    await world.hold(1, chain, 70)
    first = world.ask(chain, exclude=("w2.0", "w3.0"))
    await world.fleet.decide(first)
    longer = world.chain(300, head=chain)
    found = await matched(world, world.ask(longer))
    assert found == {"w1.0": 192 * BLOCK, "w2.0": 0, "w3.0": 0}, "the deepest checkpoint that both chains have"
    decision = await world.fleet.decide(world.ask(chain))
    assert (decision.worker_id, decision.matched_tokens, decision.speculative) == ("w1.0", 200 * BLOCK, True)


async def test_one_reservation_that_ends_leaves_the_credit_of_the_others(world: World) -> None:
    await world.workers(2)
    chain = world.chain(100)
    asks = [world.ask(chain, exclude=("w2.0",)) for _ in range(2)]
    for ask in asks:
        await world.fleet.decide(ask)
    await world.fleet.settle(asks[0].reservation, "failed")
    assert await matched(world, world.ask(chain)) == {"w1.0": 1600, "w2.0": 0}
    await world.fleet.settle(asks[1].reservation, "cancelled")
    assert await matched(world, world.ask(chain)) == {"w1.0": 0, "w2.0": 0}
    assert await world.speculation() == {}


async def test_a_spent_budget_gives_a_lower_bound_and_says_so(store: aioredis.Redis, model: str) -> None:
    fleet = Fleet(store, model, timeouts=PATIENT, weights=Weights(max_probes=8))
    world = World(store, fleet)
    await world.workers(30)
    chain = world.chain(900)
    depths = {slot: 900 * slot // 30 for slot in range(1, 31)}
    for slot, depth in depths.items():
        await world.hold(slot, chain, depth)
    found = await matched(world, world.ask(chain))
    for slot, depth in depths.items():
        assert 0 < found[f"w{slot}.0"] <= depth * BLOCK
    decision = await fleet.decide(world.ask(chain))
    assert decision.flagged
    exact = Fleet(store, model, timeouts=PATIENT, weights=Weights(max_probes=2_000))
    _, rows = await exact.explain(world.ask(chain))
    assert {row.worker_id: row.matched_tokens // BLOCK for row in rows} == {f"w{s}.0": d for s, d in depths.items()}
    assert not (await exact.decide(world.ask(chain))).flagged


async def test_a_winner_with_holes_is_verified_and_the_choice_made_again(world: World) -> None:
    await world.workers(3, flags=READY & ~Flag.CLOSED)
    chain = world.chain(1_000)
    await world.hold(1, chain)
    await world.drop(1, chain[8 * 10 : 8 * 11])  # block 11
    await world.hold(2, chain, 900)
    await world.drop(2, chain[8 * 700 : 8 * 701])  # block 701
    await world.hold(3, chain, 500)
    decision = await world.fleet.decide(world.ask(chain))
    assert (decision.worker_id, decision.matched_tokens) == ("w2.0", 700 * BLOCK)


async def test_choosing_again_ends_at_a_verified_lower_bound(world: World) -> None:
    await world.workers(5, flags=READY & ~Flag.CLOSED)
    chain = world.chain(600)
    for slot in range(1, 6):
        await world.hold(slot, chain, 600 - slot)
        await world.drop(slot, chain[8 * slot : 8 * (slot + 1)])
    decision = await world.fleet.decide(world.ask(chain))
    assert decision.matched_tokens == int(decision.worker_id[1]) * BLOCK, "what the third choice really holds"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_the_match_equals_a_plain_walk(valkey_url: str, data: st.DataObject) -> None:
    client = connect(valkey_url, timeout_s=5)
    try:
        seed = data.draw(st.integers(0, 2**32))
        fleet = Fleet(client, f"walk/{uuid.uuid4().hex}", timeouts=PATIENT, weights=Weights(max_probes=4_096))
        world = World(client, fleet, seed)
        count, blocks = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 140))
        await world.workers(count)
        chain = world.chain(blocks)
        depths = data.draw(st.lists(st.integers(0, blocks), min_size=count + 3, max_size=count + 3))
        for slot, depth in enumerate(depths, 1):  # three of them are slots of nobody
            await world.hold(slot, chain, depth)
        wanted = {f"w{slot}.0": depths[slot - 1] * BLOCK for slot in range(1, count + 1)}
        assert await matched(world, world.ask(chain)) == wanted
    finally:
        await client.aclose()


# ---------------------------------------------------------------- policies


async def test_least_loaded_takes_the_least_tokens_then_the_least_in_flight(world: World) -> None:
    await world.workers(3)
    chain = world.chain(50)
    await world.hold(1, chain)
    await world.change(1, prefill_tokens=100)
    await world.change(2, foreign_prefill_tokens=100, in_flight=1)
    await world.change(3, prefill_tokens=50, foreign_prefill_tokens=50)
    decision = await world.fleet.decide(world.ask(chain, policy="least_loaded"))
    assert decision.worker_id in ("w1.0", "w3.0")
    await world.change(2, foreign_prefill_tokens=99)
    assert (await world.fleet.decide(world.ask(chain, policy="least_loaded"))).worker_id == "w2.0"


async def test_round_robin_takes_turns_and_matches_all_the_same(world: World) -> None:
    await world.workers(3)
    chain = world.chain(50)
    await world.hold(2, chain)
    seen = []
    for _ in range(6):
        ask = world.ask(chain, policy="round_robin")
        dry, _ = await world.fleet.explain(ask)
        decision = await world.fleet.decide(ask)
        assert dry == decision.worker_id
        seen.append((decision.worker_id, decision.matched_tokens > 0))
        await world.fleet.settle(ask.reservation, "failed")
    assert seen == [("w1.0", False), ("w2.0", True), ("w3.0", False)] * 2


async def test_cost_is_wait_and_uncached_tokens_over_speed(world: World) -> None:
    await world.workers(3, decode_tokens=1_000_000)
    await world.change(1, prefill_tokens=500, foreign_prefill_tokens=300)
    await world.change(2, speed_tps=100)  # counts as an eighth of the median
    await world.change(3, speed_tps=0, prefill_tokens=100_000)  # unknown: the median
    _, rows = await world.fleet.explain(world.ask(extra_tokens=1_000))
    cost = {row.worker_id: row.cost_s for row in rows}
    assert cost["w1.0"] == pytest.approx((800 + 1000) / 10_000 + 0.1, abs=1e-5)
    assert cost["w2.0"] == pytest.approx(1000 / 1_250 + 0.1, abs=1e-5)
    assert cost["w3.0"] == pytest.approx((100_000 + 1000) / 10_000 + 0.1, abs=1e-5)


# ---------------------------------------------------------------- many at once, and trouble


async def test_a_hundred_at_once_book_exactly_a_hundred(redis_url: str, world: World) -> None:
    await world.workers(4)
    other = connect(redis_url, timeout_s=5)
    fleets = [world.fleet, Fleet(other, world.keys.tag.replace("~", "/"), timeouts=PATIENT)]
    asks = [world.ask(world.chain(20), extra_tokens=7) for _ in range(50)]
    both = [fleet.decide(ask) for ask in asks for fleet in fleets]  # every id from two routers at once
    decisions = await asyncio.gather(*both)
    await other.aclose()
    assert sorted(one.outcome for one in decisions) == ["booked"] * 50 + ["known"] * 50
    assert len({(one.reservation, one.worker_id) for one in decisions}) == 50
    rows = (await world.rows()).values()
    assert sum(row.in_flight for row in rows) == 50
    assert sum(row.prefill_tokens for row in rows) == 50 * 327
    assert max(row.in_flight for row in rows) - min(row.in_flight for row in rows) <= 1


async def test_a_full_redis_still_books_and_settles(model: str) -> None:
    for binary in (valkey_binary(), redis7_binary()):
        with server(binary) as url:
            client = connect(url, timeout_s=5)
            world = World(client, Fleet(client, model, timeouts=PATIENT))
            await world.workers(2)
            ask = world.ask(world.chain(10))
            await world.fleet.explain(ask)  # the script is known before memory is full
            await world.fleet.settle("wf-nobody", "finished")
            await client.config_set("maxmemory", 1)
            assert (await world.fleet.decide(ask)).outcome == "booked"
            assert await world.fleet.settle(ask.reservation, "started") == "STARTED"
            assert await world.fleet.settle(ask.reservation, "finished") == "SETTLED"
            await client.aclose()


async def test_the_url_is_cut_out_of_any_record(world: World) -> None:
    await world.workers(1)
    record = {
        "artifacts": {"a": {"chunks": ["00"] * 100}},
        "facts": {"note": 'an "url":"x" in text'},
        "url": "http://h/v1",
    }
    for text in (wire.dumps(record), wire.dumps(record).replace("/", "\\/")):
        await cast("Any", world.store.hset(world.keys.servers, "w1", text))
        assert (await world.fleet.decide(world.ask())).url == "http://h/v1"
