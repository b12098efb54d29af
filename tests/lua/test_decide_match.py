"""decide: matched tokens, and the policies."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.fleet.keyspace import BLOCK, READY, SCHEME, Keyspace
from tests.support.redis.servers import PATIENT

from warmfleet.errors import BadArgument
from warmfleet.fleet import Constants, Flag, Fleet, Question, Weights, connect
from warmfleet.prompt.block_hashes import Chain

if TYPE_CHECKING:
    import redis.asyncio as aioredis


async def matched(keyspace: Keyspace, ask: Question) -> dict[str, int]:
    _, rows = await keyspace.fleet.queue.explain(ask)
    return {row.worker_id: row.matched_tokens for row in rows}


async def test_the_match_is_the_held_prefix_in_tokens(keyspace: Keyspace) -> None:
    await keyspace.workers(5)
    chain = keyspace.chain(625)
    for slot, depth in ((1, 625), (2, 300), (3, 1), (4, 0)):
        await keyspace.hold(slot, chain, depth)
    await keyspace.hold(99, chain, 400)  # a retired slot counts for nothing
    await keyspace.hold(5, chain)
    await keyspace.drop(5, chain[:8])  # lost its head: later blocks are of no use
    found = await matched(keyspace, keyspace.ask(chain))
    assert found == {"w1.0": 10_000, "w2.0": 4_800, "w3.0": 16, "w4.0": 0, "w5.0": 0}


async def test_each_scheme_has_one_chain(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    chains = tuple(Chain(SCHEME, BLOCK, keyspace.chain(20)) for _ in range(2))
    with pytest.raises(BadArgument):
        await keyspace.fleet.bookings.decide(keyspace.ask(chains=chains))


async def test_only_proven_workers_of_the_scheme_are_matched(keyspace: Keyspace) -> None:
    await keyspace.workers(3)
    chain = keyspace.chain(20)
    for slot in (1, 2, 3):
        await keyspace.hold(slot, chain)
    await keyspace.change(1, flags=READY & ~Flag.PROVEN)
    await keyspace.change(2, scheme=8)
    assert await matched(keyspace, keyspace.ask(chain)) == {"w1.0": 0, "w2.0": 0, "w3.0": 320}
    both = (Chain(SCHEME, BLOCK, chain), Chain(8, 32, chain[: 8 * 10]))
    assert await matched(keyspace, keyspace.ask(chain, chains=both)) == {"w1.0": 0, "w2.0": 320, "w3.0": 320}


async def test_a_new_prompt_goes_where_its_blocks_can_be_found_again(keyspace: Keyspace) -> None:
    """An engine whose blocks cannot be matched reports none, or none that count. That does not make it look empty."""
    await keyspace.workers(3, capacity_blocks=1_000, blocks=1_000, evicted=50)
    await keyspace.change(3, flags=READY & ~Flag.PROVEN, blocks=0, evicted=0)
    for _ in range(12):
        decision = await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(40)))
        assert decision.worker_id != "w3.0"
        await keyspace.fleet.bookings.settle(decision.reservation, "finished")
    booked = [await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(40))) for _ in range(12)]
    assert "w3.0" in {decision.worker_id for decision in booked}, "it takes its share of the load all the same"


async def test_open_reservations_count_as_held(keyspace: Keyspace) -> None:
    await keyspace.workers(3)
    chain = keyspace.chain(200)
    await keyspace.hold(1, chain, 70)
    first = keyspace.ask(chain, exclude=("w2.0", "w3.0"))
    await keyspace.fleet.bookings.decide(first)
    longer = keyspace.chain(300, head=chain)
    found = await matched(keyspace, keyspace.ask(longer))
    assert found == {"w1.0": 200 * BLOCK, "w2.0": 0, "w3.0": 0}, "the trail leads to the block where they part"
    decision = await keyspace.fleet.bookings.decide(keyspace.ask(chain))
    assert (decision.worker_id, decision.matched_tokens, decision.speculative) == ("w1.0", 200 * BLOCK, True)


async def test_one_reservation_that_ends_leaves_the_credit_of_the_others(keyspace: Keyspace) -> None:
    await keyspace.workers(2)
    chain = keyspace.chain(100)
    asks = [keyspace.ask(chain, exclude=("w2.0",)) for _ in range(2)]
    for ask in asks:
        await keyspace.fleet.bookings.decide(ask)
    await keyspace.fleet.bookings.settle(asks[0].reservation, "failed")
    assert await matched(keyspace, keyspace.ask(chain)) == {"w1.0": 1600, "w2.0": 0}
    await keyspace.fleet.bookings.settle(asks[1].reservation, "cancelled")
    assert await matched(keyspace, keyspace.ask(chain)) == {"w1.0": 0, "w2.0": 0}
    assert await keyspace.speculation() == {}


async def test_a_spent_budget_gives_a_lower_bound_and_says_so(store: aioredis.Redis, model: str) -> None:
    fleet = Fleet(store, model, timeouts=PATIENT, constants=Constants(weights=Weights(max_probes=8)))
    keyspace = Keyspace(store, fleet)
    await keyspace.workers(30)
    chain = keyspace.chain(900)
    depths = {slot: 900 * slot // 30 for slot in range(1, 31)}
    for slot, depth in depths.items():
        await keyspace.hold(slot, chain, depth)
    found = await matched(keyspace, keyspace.ask(chain))
    for slot, depth in depths.items():
        assert 0 < found[f"w{slot}.0"] <= depth * BLOCK
    decision = await fleet.bookings.decide(keyspace.ask(chain))
    assert decision.flagged
    exact = Fleet(store, model, timeouts=PATIENT, constants=Constants(weights=Weights(max_probes=2_000)))
    _, rows = await exact.queue.explain(keyspace.ask(chain))
    assert {row.worker_id: row.matched_tokens // BLOCK for row in rows} == {f"w{s}.0": d for s, d in depths.items()}
    assert not (await exact.bookings.decide(keyspace.ask(chain))).flagged


async def test_a_winner_with_holes_is_verified_and_the_choice_made_again(keyspace: Keyspace) -> None:
    await keyspace.workers(3, flags=READY & ~Flag.CLOSED)
    chain = keyspace.chain(1_000)
    await keyspace.hold(1, chain)
    await keyspace.drop(1, chain[8 * 10 : 8 * 11])  # block 11
    await keyspace.hold(2, chain, 900)
    await keyspace.drop(2, chain[8 * 700 : 8 * 701])  # block 701
    await keyspace.hold(3, chain, 500)
    decision = await keyspace.fleet.bookings.decide(keyspace.ask(chain))
    assert (decision.worker_id, decision.matched_tokens) == ("w2.0", 700 * BLOCK)


async def test_choosing_again_ends_at_a_verified_lower_bound(keyspace: Keyspace) -> None:
    await keyspace.workers(5, flags=READY & ~Flag.CLOSED)
    chain = keyspace.chain(600)
    for slot in range(1, 6):
        await keyspace.hold(slot, chain, 600 - slot)
        await keyspace.drop(slot, chain[8 * slot : 8 * (slot + 1)])
    decision = await keyspace.fleet.bookings.decide(keyspace.ask(chain))
    assert decision.matched_tokens == int(decision.worker_id[1]) * BLOCK, "what the third choice really holds"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_the_match_equals_a_plain_walk(valkey_url: str, data: st.DataObject) -> None:
    client = connect(valkey_url, timeout_s=5)
    try:
        seed = data.draw(st.integers(0, 2**32))
        fleet = Fleet(
            client, f"walk/{uuid.uuid4().hex}", timeouts=PATIENT, constants=Constants(weights=Weights(max_probes=4_096))
        )
        keyspace = Keyspace(client, fleet, seed)
        count, blocks = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 140))
        await keyspace.workers(count)
        chain = keyspace.chain(blocks)
        depths = data.draw(st.lists(st.integers(0, blocks), min_size=count + 3, max_size=count + 3))
        for slot, depth in enumerate(depths, 1):  # three of them are slots of nobody
            await keyspace.hold(slot, chain, depth)
        wanted = {f"w{slot}.0": depths[slot - 1] * BLOCK for slot in range(1, count + 1)}
        assert await matched(keyspace, keyspace.ask(chain)) == wanted
    finally:
        await client.aclose()


# ---------------------------------------------------------------- policies


async def test_least_loaded_takes_the_least_tokens_then_the_least_in_flight(keyspace: Keyspace) -> None:
    await keyspace.workers(3)
    chain = keyspace.chain(50)
    await keyspace.hold(1, chain)
    await keyspace.change(1, prefill_tokens=100)
    await keyspace.change(2, foreign_prefill_tokens=100, in_flight=1)
    await keyspace.change(3, prefill_tokens=50, foreign_prefill_tokens=50)
    decision = await keyspace.fleet.bookings.decide(keyspace.ask(chain, policy="least_loaded"))
    assert decision.worker_id in ("w1.0", "w3.0")
    await keyspace.change(2, foreign_prefill_tokens=99)
    assert (await keyspace.fleet.bookings.decide(keyspace.ask(chain, policy="least_loaded"))).worker_id == "w2.0"


async def test_round_robin_takes_turns_and_matches_all_the_same(keyspace: Keyspace) -> None:
    await keyspace.workers(3)
    chain = keyspace.chain(50)
    await keyspace.hold(2, chain)
    seen = []
    for _ in range(6):
        ask = keyspace.ask(chain, policy="round_robin")
        dry, _ = await keyspace.fleet.queue.explain(ask)
        decision = await keyspace.fleet.bookings.decide(ask)
        assert dry == decision.worker_id
        seen.append((decision.worker_id, decision.matched_tokens > 0))
        await keyspace.fleet.bookings.settle(ask.reservation, "failed")
    assert seen == [("w1.0", False), ("w2.0", True), ("w3.0", False)] * 2


async def test_cost_is_priced_wait_and_uncached_tokens_over_speed(keyspace: Keyspace) -> None:
    keyspace.fleet.use(weights=Weights(decode_price=0.0, context_price=0.0))
    await keyspace.workers(5, decode_tokens=100_000)
    await keyspace.change(1, prefill_tokens=500, foreign_prefill_tokens=300)
    await keyspace.change(2, speed_tps=100)  # counts as an eighth of the median
    await keyspace.change(3, speed_tps=0, prefill_tokens=100_000)  # unknown: the median
    await keyspace.change(4, foreign_decode_tokens=300_000)  # needs 2.5 caches of 10,000 blocks of 16 tokens
    await keyspace.change(5, speed_tps=4_000_000_000)  # counts as four times the median
    _, rows = await keyspace.fleet.queue.explain(keyspace.ask(extra_tokens=1_000))
    cost, price = {row.worker_id: row.cost_s for row in rows}, keyspace.fleet.constants.weights.pressure_price
    lately = keyspace.fleet.constants.weights.place * 0.03 * 1000  # a second of foreign prefill counts as no idle time
    assert cost["w1.0"] == pytest.approx((1.5 * 800 + 1000 + lately) / 10_000 + 1.5 * 0.01, abs=1e-5)
    assert cost["w2.0"] == pytest.approx(1000 / 1_250 + 1.5 * 0.01, abs=1e-5)
    assert cost["w3.0"] == pytest.approx((1.5 * 100_000 + 1000) / 10_000 + 1.5 * 0.01, abs=1e-5)
    assert cost["w5.0"] == pytest.approx(1000 / 40_000 + 1.5 * 0.01, abs=1e-5)
    assert cost["w4.0"] == pytest.approx((1.0 + price * 1.5) * 1000 / 10_000 + 1.5 * 0.04, abs=1e-5)


async def test_chains_that_part_between_checkpoints_are_each_known_to_their_last_block(keyspace: Keyspace) -> None:
    """130 blocks in common, then three ways that all end within one octave of the checkpoint at 128."""
    await keyspace.workers(2)
    head = keyspace.chain(130)
    ways = [keyspace.chain(250, head=head) for _ in range(3)]
    for way in ways:
        await keyspace.fleet.bookings.decide(keyspace.ask(way, exclude=("w2.0",)))
    for way in ways:
        for shared in (131, 200, 250):
            found = await matched(keyspace, keyspace.ask(keyspace.chain(256, head=way[: 8 * shared])))
            assert found == {"w1.0": shared * BLOCK, "w2.0": 0}
    assert await matched(keyspace, keyspace.ask(keyspace.chain(256, head=head))) == {"w1.0": 130 * BLOCK, "w2.0": 0}


async def test_the_next_request_speaks_for_a_checkpoint_whose_maker_was_cancelled(keyspace: Keyspace) -> None:
    await keyspace.workers(2)
    chain = keyspace.chain(250)
    asks = [keyspace.ask(keyspace.chain(256, head=chain), exclude=("w2.0",)) for _ in range(3)]
    for ask in asks[:2]:
        await keyspace.fleet.bookings.decide(ask)
    await keyspace.fleet.bookings.settle(asks[0].reservation, "cancelled")
    assert await matched(keyspace, keyspace.ask(chain)) == {"w1.0": 128 * BLOCK, "w2.0": 0}, "less, never more"
    await keyspace.fleet.bookings.decide(asks[2])
    assert await matched(keyspace, keyspace.ask(chain)) == {"w1.0": 250 * BLOCK, "w2.0": 0}
