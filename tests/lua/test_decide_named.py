"""The policies besides cost: each case ends as its published rule says and no similar rule would."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.fleet.keyspace import BLOCK, Keyspace

from warmfleet.fleet import Weights

if TYPE_CHECKING:
    from warmfleet.fleet import Question


async def chosen(keyspace: Keyspace, ask: Question, **fields: Any) -> str:
    """The number of the worker that the policy would choose."""
    worker, _ = await keyspace.fleet.queue.explain(replace(ask, **fields))
    return worker[1:].partition(".")[0]


async def loads(keyspace: Keyspace, *in_flight: int) -> None:
    for number, count in enumerate(in_flight, 1):
        await keyspace.change(number, in_flight=count)


async def test_sticky_takes_the_least_loaded_holder_of_the_first_64_tokens(keyspace: Keyspace) -> None:
    await keyspace.workers(4)
    chain = keyspace.chain(20)
    ask = keyspace.ask(chain, policy="sticky")
    for slot, depth in ((1, 3), (2, 4), (3, 20)):
        await keyspace.hold(slot, chain, depth)
    await loads(keyspace, 0, 8, 9, 1)
    assert await chosen(keyspace, ask) == "2", (
        "48 tokens are not 64; how much more is held does not matter, nor a load of 0"
    )
    assert await chosen(keyspace, ask, prefix_tokens=80) == "3", "the client's L"
    assert await chosen(keyspace, ask, prefix_tokens=48) == "1"
    assert await chosen(keyspace, ask, prefix_tokens=79) == "2", "full blocks only"
    assert await chosen(keyspace, keyspace.ask(keyspace.chain(20), policy="sticky")) == "1", (
        "nobody holds it: the least loaded"
    )


async def test_two_state_follows_the_match_until_load_differs_by_64_and_by_half(keyspace: Keyspace) -> None:
    await keyspace.workers(3, blocks=50)
    await keyspace.change(3, blocks=10)
    chain = keyspace.chain(100)
    ask = keyspace.ask(chain, policy="two_state")
    await keyspace.hold(1, chain, 31)
    for in_flight, wanted in (
        ((64, 0, 0), "1"),  # a difference of 64 is not more than 64
        ((65, 0, 1), "2"),  # imbalanced: the least loaded, not the smallest
        ((195, 130, 130), "1"),  # 1.5 times is not more than 1.5 times
        ((196, 130, 131), "2"),
    ):
        await loads(keyspace, *in_flight)
        assert await chosen(keyspace, ask) == wanted, in_flight
    await loads(keyspace, 0, 0, 5)
    await keyspace.hold(2, chain, 30)
    await keyspace.drop(1, chain[30 * 8 : 31 * 8])
    assert await chosen(keyspace, keyspace.ask(chain, extra_tokens=0, policy="two_state")) in "12", "30 % is enough"
    assert await chosen(keyspace, ask) == "3", "under 30 % (30 of 100 blocks and a token): the smallest, loaded or not"


async def test_two_state_leaves_out_what_everybody_holds(keyspace: Keyspace) -> None:
    await keyspace.workers(2, blocks=50)
    await keyspace.change(2, blocks=10)
    chain = keyspace.chain(100)
    await keyspace.hold(1, chain, 60)
    await keyspace.hold(2, chain, 50)
    assert await chosen(keyspace, keyspace.ask(chain, policy="two_state")) == "2", "10 of the 50 that are left"
    await keyspace.hold(1, chain, 70)
    assert await chosen(keyspace, keyspace.ask(chain, policy="two_state")) == "1"


@pytest.mark.parametrize("policy", ["two_state", "prefix_affinity"])
async def test_which_full_cache_lacks_a_few_blocks_says_nothing(keyspace: Keyspace, policy: str) -> None:
    await keyspace.workers(3, blocks=1_000, capacity_blocks=1_000)
    await keyspace.change(1, blocks=951)
    ask = keyspace.ask(keyspace.chain(20), policy=policy)
    await loads(keyspace, 3, 2, 4)
    assert await chosen(keyspace, ask) == "2", "of full caches the least in flight"
    await keyspace.change(3, blocks=949)
    assert await chosen(keyspace, ask) == "3", "this one has room"
    await keyspace.change(3, prefill_tokens=2 * BLOCK)
    assert await chosen(keyspace, ask) == "2", "what it was just given will fill it"


@pytest.mark.parametrize("policy", ["two_state", "prefix_affinity"])
async def test_the_smallest_cache_among_unequal_ones(keyspace: Keyspace, policy: str) -> None:
    await keyspace.workers(2, blocks=1_000, capacity_blocks=1_000)
    await keyspace.change(2, blocks=4_000, capacity_blocks=4_000)
    ask = keyspace.ask(keyspace.chain(20), policy=policy)
    await loads(keyspace, 3, 0)
    assert await chosen(keyspace, ask) == "2", "both are full: the least in flight"
    await loads(keyspace, 0, 3)
    await keyspace.change(2, blocks=1_500)
    assert await chosen(keyspace, ask) == "2", "the only one with room"
    await keyspace.change(1, blocks=900)
    await keyspace.change(2, blocks=100, prefill_tokens=400 * BLOCK)
    for asked in (ask, replace(ask, chains=())):
        assert await chosen(keyspace, asked) == "2", "500 blocks with what is on its way, known or not"
    await keyspace.change(2, prefill_tokens=900 * BLOCK)
    for asked in (ask, replace(ask, chains=())):
        assert await chosen(keyspace, asked) == "1"


async def test_prefix_affinity_follows_a_tenth_until_queues_differ_by_ten(keyspace: Keyspace) -> None:
    await keyspace.workers(3, blocks=50)
    await keyspace.change(3, blocks=10)
    chain = keyspace.chain(100)
    ask = keyspace.ask(chain, extra_tokens=0, policy="prefix_affinity")
    await keyspace.hold(1, chain, 10)
    await loads(keyspace, 10, 0, 0)
    assert await chosen(keyspace, ask) == "1"
    await loads(keyspace, 11, 0, 1)
    drawn = Counter([await chosen(keyspace, ask, seed=seed) for seed in range(1, 61)])
    assert set(drawn) == {"2", "3"}, (
        "two at random of three, the shorter queue: never the longest, not always the shortest"
    )
    assert drawn["3"] > 10
    await loads(keyspace, 0, 0, 5)
    assert await chosen(keyspace, keyspace.ask(chain, extra_tokens=1, policy="prefix_affinity")) == "3", "under a tenth"


async def test_chwbl_takes_the_first_of_the_ring_under_its_bound(keyspace: Keyspace) -> None:
    await keyspace.workers(4)
    chain = keyspace.chain(20)
    await keyspace.hold(1, chain)
    ask = keyspace.ask(chain, policy="chwbl", order=("w9.0", "w3.0", "w2.0", "w1.0", "w4.0"))
    for in_flight, wanted in (
        ((0, 0, 0, 0), "3"),  # nothing is in flight: the first that is there
        ((2, 2, 4, 7), "3"),  # 4 + 1 of at most 1.25 * 16 / 4
        ((2, 2, 5, 7), "2"),
        ((0, 1, 1, 0), "3"),  # nobody is under 1.25 * 3 / 4: the first of the ring after all
        ((1, 1, 1, 0), "4"),
        ((0, 5, 5, 0), "1"),
    ):
        await loads(keyspace, *in_flight)
        assert await chosen(keyspace, ask) == wanted, in_flight
    await loads(keyspace, 3, 2, 1, 0)
    assert await chosen(keyspace, ask, order=()) == "4", "no ring: the least loaded"


async def test_session_goes_home_or_else_to_the_least_loaded(keyspace: Keyspace) -> None:
    await keyspace.workers(3)
    await keyspace.change(2, prefill_tokens=50_000, in_flight=40)
    await keyspace.change(1, prefill_tokens=1)
    ask = keyspace.ask(keyspace.chain(20), policy="session", order=("w7.0", "w2.0", "w1.0"))
    assert await chosen(keyspace, ask) == "2", "whatever its load"
    assert await chosen(keyspace, ask, exclude=("w2.0",)) == "1", "the next on the ring"
    assert await chosen(keyspace, ask, order=()) == "3"


async def test_power_of_two_is_the_less_loaded_of_a_fair_draw(keyspace: Keyspace) -> None:
    await keyspace.workers(4)
    await loads(keyspace, 0, 1, 2, 3)
    ask = keyspace.ask(keyspace.chain(5), policy="power_of_two")
    drawn = Counter([await chosen(keyspace, ask, seed=seed) for seed in range(1, 241)])
    assert "4" not in drawn, "the busiest loses every pair"
    for number, share in (("1", 3 / 6), ("2", 2 / 6), ("3", 1 / 6)):
        assert abs(drawn[number] - 240 * share) < 30, drawn
    assert await chosen(keyspace, ask, exclude=("w1.0", "w2.0", "w3.0")) == "4", "one alone"


async def test_random_is_fair_whatever_the_load(keyspace: Keyspace) -> None:
    await keyspace.workers(4)
    await loads(keyspace, 0, 100, 0, 0)
    ask = keyspace.ask(keyspace.chain(5), policy="random")
    drawn = Counter([await chosen(keyspace, ask, seed=seed) for seed in range(1, 241)])
    assert all(abs(drawn[number] - 60) < 25 for number in "1234"), drawn
    assert len({await chosen(keyspace, ask, seed=7) for _ in range(3)}) == 1, "by the seed alone"


@pytest.mark.parametrize(
    "policy", ["sticky", "two_state", "chwbl", "session", "power_of_two", "random", "least_loaded"]
)
async def test_every_policy_books_what_its_winner_lacks(keyspace: Keyspace, policy: str) -> None:
    await keyspace.workers(1)
    chain = keyspace.chain(20)
    await keyspace.hold(1, chain, 8)
    decision = await keyspace.fleet.bookings.decide(
        keyspace.ask(chain, policy=policy, prefix_tokens=32, order=("w1.0",))
    )
    assert (decision.matched_tokens, decision.prefill_tokens) == (8 * BLOCK, 12 * BLOCK + 1)


# ------------------------------------------------ cost and its hints


async def test_cost_counts_no_more_of_a_match_than_the_prefix_hint(keyspace: Keyspace) -> None:
    await keyspace.workers(2)
    chain = keyspace.chain(100)
    ask = keyspace.ask(chain)
    await keyspace.hold(1, chain, 100)
    await keyspace.hold(2, chain, 10)
    await keyspace.change(1, prefill_tokens=100)
    assert await chosen(keyspace, ask) == "1"
    assert await chosen(keyspace, ask, prefix_tokens=160) == "2", "both hold the prefix"
    decision = await keyspace.fleet.bookings.decide(replace(ask, prefix_tokens=160, exclude=("w2.0",)))
    assert decision.prefill_tokens == 1, "booked is what is true"


async def test_a_match_under_the_minimum_counts_for_nothing(keyspace: Keyspace) -> None:
    await keyspace.workers(2)
    chain, common = keyspace.chain(100), 10
    await keyspace.hold(1, chain, common + 9)
    await keyspace.hold(2, chain, common)
    await keyspace.change(1, prefill_tokens=100)
    weights = keyspace.fleet.constants.weights
    for least, wanted in ((9 * BLOCK, "1"), (9 * BLOCK + 1, "2")):
        keyspace.fleet.use(weights=replace(weights, min_match_tokens=least))
        assert await chosen(keyspace, keyspace.ask(chain)) == wanted, "what both hold is left out"


async def test_a_sessions_home_wins_among_equals_and_no_further(keyspace: Keyspace) -> None:
    keyspace.fleet.use(weights=Weights(decode_price=0.0, context_price=0.0))
    await keyspace.workers(3)
    chain = keyspace.chain(100)
    ask = keyspace.ask(chain, order=("w2.0", "w1.0"))
    for number in (1, 3):
        await keyspace.hold(number, chain, 1)
    await keyspace.change(2, evicted=7, blocks=3, in_flight=5)
    assert await chosen(keyspace, ask) == "2", "16 of 1,601 tokens are a tie"
    assert await chosen(keyspace, ask, order=()) in "13"
    await keyspace.hold(3, chain, 5)
    assert await chosen(keyspace, ask) == "3", "80 are not"


async def test_who_meets_the_objective_is_not_traded_for_a_bigger_hit(keyspace: Keyspace) -> None:
    await keyspace.workers(2)
    chain = keyspace.chain(100)
    await keyspace.hold(1, chain)
    await keyspace.change(1, prefill_tokens=900)
    ask = keyspace.ask(chain)
    for objective_s, wanted in ((0.0, "1"), (0.08, "1"), (0.4, "2")):  # alone: 0.09 s there, 0.32 s idle
        assert await chosen(keyspace, ask, objective_s=objective_s) == wanted, objective_s
    await keyspace.change(2, prefill_tokens=890)
    assert await chosen(keyspace, ask, objective_s=0.4) == "1", "at the same load the bigger hit is welcome"
