"""Effects of the cost rule on a fleet: bursts for one prefix, bursts for many, shared system prompts, idle fleets."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from tests.support.fleet.keyspace import BLOCK, Keyspace
from tests.support.redis.servers import PATIENT

from warmfleet.fleet import Decision, Fleet, Weights, connect
from warmfleet.pools.reasons import in_words

if TYPE_CHECKING:
    import redis.asyncio as aioredis


@dataclass
class Burst:
    """Requests that come before anything is computed, and which worker would compute which prefix."""

    cold: list[tuple[str, int]] = field(default_factory=list)  # (worker, prefix) in order of decision
    early: int = 0  # cold pairs made while a holder's wait was under twice the prefix
    work: Counter[str] = field(default_factory=Counter)  # tokens that each worker really computes


async def burst(keyspace: Keyspace, prefixes: list[bytes], order: list[int], suffix_blocks: int) -> Burst:
    """Decide for one request per entry of ``order`` (an index of ``prefixes``), nothing finishes in between."""
    seen = Burst()
    for prefix in order:
        head = prefixes[prefix]
        tokens = len(head) // 8 * BLOCK
        waits = [row.prefill_tokens for name, row in (await keyspace.rows()).items() if (name, prefix) in seen.cold]
        chain = keyspace.chain(len(head) // 8 + suffix_blocks, head=head)
        decision = await keyspace.fleet.bookings.decide(keyspace.ask(chain, extra_tokens=3))
        pair = (decision.worker_id, prefix)
        if pair not in seen.cold:
            seen.cold.append(pair)
            seen.early += bool(waits) and min(waits) < 2 * tokens
            seen.work[decision.worker_id] += tokens
        seen.work[decision.worker_id] += suffix_blocks * BLOCK + 3
    return seen


@pytest.mark.parametrize(
    ("prefix_blocks", "suffix_blocks"),
    [(256, 4), (256, 40), (250, 4), (250, 3), (287, 4), (64, 1), (61, 1), (640, 10), (901, 10)],
)
async def test_one_new_prefix_is_computed_by_at_most_two(
    keyspace: Keyspace, prefix_blocks: int, suffix_blocks: int
) -> None:
    await keyspace.workers(8)
    seen = await burst(keyspace, [keyspace.chain(prefix_blocks)], [0] * 64, suffix_blocks)
    assert 1 + seen.early <= 2, seen
    if suffix_blocks * 64 <= prefix_blocks:
        assert len(seen.cold) <= 2, "all of the burst fits into twice the prefix"


async def test_a_burst_over_two_routers_chooses_as_one_after_another(
    keyspace: Keyspace, redis_url: str, model: str
) -> None:
    await keyspace.workers(8, speed_tps=1)  # in the time that the test takes, nothing of a prefill is done
    await keyspace.store.set(keyspace.keys.tick, f"{10**15} 0 1")
    head = keyspace.chain(256)
    asks = [keyspace.ask(keyspace.chain(260, head=head), extra_tokens=3) for _ in range(64)]
    other = connect(redis_url, timeout_s=5)
    fleets = [keyspace.fleet, Fleet(other, model, timeouts=PATIENT)]
    together = await asyncio.gather(*(fleets[at % 2].bookings.decide(ask) for at, ask in enumerate(asks)))
    for ask in asks:
        await keyspace.fleet.bookings.settle(ask.reservation, "failed")
    await other.aclose()
    assert all(row.in_flight == 0 for row in (await keyspace.rows()).values())
    alone = [
        await keyspace.fleet.bookings.decide(keyspace.ask(ask.chains[0].hashes, extra_tokens=3, seed=1)) for ask in asks
    ]

    def pairs(decisions: list[Decision]) -> int:
        return len({decision.worker_id for decision in decisions})

    assert pairs(list(together)) == pairs(alone) <= 2
    assert sorted(Counter(decision.worker_id for decision in together).values()) == sorted(
        Counter(decision.worker_id for decision in alone).values()
    )


@pytest.mark.parametrize("prefix_blocks", [64, 128, 256])
@pytest.mark.parametrize("arrival", ["shuffled", "in turn", "one prefix after another"])
async def test_24_prefixes_16_requests_4_workers(keyspace: Keyspace, arrival: str, prefix_blocks: int) -> None:
    await keyspace.workers(4)
    order = [number for number in range(24) for _ in range(16)]
    if arrival == "in turn":
        order = list(range(24)) * 16
    elif arrival == "shuffled":
        keyspace.rng.shuffle(order)
    seen = await burst(keyspace, [keyspace.chain(prefix_blocks) for _ in range(24)], order, 4)
    assert len(seen.cold) <= 28
    mean = sum(seen.work.values()) / 4
    assert max(seen.work.values()) / mean <= 1.2


async def converse(keyspace: Keyspace, system: bytes, count: int, blocks: int) -> Counter[str]:
    """Conversations on an idle fleet, one after another; each leaves its blocks behind."""
    homes: Counter[str] = Counter()
    for _ in range(count):
        chain = keyspace.chain(blocks, head=system)
        ask = keyspace.ask(chain, extra_tokens=5)
        decision = await keyspace.fleet.bookings.decide(ask)
        slot = int(decision.worker_id[1:].partition(".")[0])
        await keyspace.fleet.bookings.settle(ask.reservation, "failed")
        await keyspace.hold(slot, chain)
        row = await keyspace.row(slot)
        await keyspace.change(slot, blocks=row.blocks + blocks - decision.matched_tokens // BLOCK)
        homes[decision.worker_id] += 1
    return homes


@pytest.mark.parametrize("system_blocks", [4, 16, 32])
async def test_conversations_that_share_a_system_prompt_spread(keyspace: Keyspace, system_blocks: int) -> None:
    await keyspace.workers(8)
    homes = await converse(keyspace, keyspace.chain(system_blocks), 200, 100)
    assert len(homes) >= 3
    assert max(homes.values()) <= 100, homes


async def test_an_idle_fleet_goes_where_the_prefix_is(keyspace: Keyspace) -> None:
    await keyspace.workers(8)
    chain = keyspace.chain(100)
    await keyspace.hold(5, chain, 4)  # 4 % of the prompt: more than a tie
    for _ in range(8):
        ask = keyspace.ask(chain)
        assert (await keyspace.fleet.bookings.decide(ask)).worker_id == "w5.0"
        await keyspace.fleet.bookings.settle(ask.reservation, "failed")


async def test_an_idle_fleet_duplicates_where_costs_tie(keyspace: Keyspace) -> None:
    await keyspace.workers(8)
    head = keyspace.chain(2)
    await keyspace.hold(5, head)  # 32 of 3,216 tokens: under 2 %
    chosen = {(await keyspace.fleet.queue.explain(keyspace.ask(keyspace.chain(201, head=head))))[0] for _ in range(64)}
    assert len(chosen) >= 5


async def test_of_equal_costs_the_worker_that_holds_the_prefix_wins(keyspace: Keyspace) -> None:
    """A short prompt again and again: 3.2 ms of work are no reason to compute it on a second, emptier engine."""
    await keyspace.workers(4)
    chain = keyspace.chain(1)
    await keyspace.hold(2, chain)
    await keyspace.change(2, blocks=30, evicted=1, in_flight=2)
    for _ in range(6):
        ask = keyspace.ask(chain)
        worker_id, why, seen = await keyspace.fleet.queue.consider(ask)
        assert (worker_id, why) == ("w2.0", "prefix")
        assert seen.tie_s == 0.005
        words = "tie within 5 ms of 4 engines: it holds more of the prompt than the others"
        assert in_words("cost", why, seen) == words
        assert (await keyspace.fleet.bookings.decide(ask)).worker_id == "w2.0"
        await keyspace.fleet.bookings.settle(ask.reservation, "finished")


async def test_a_hot_short_prefix_spreads_under_load(keyspace: Keyspace) -> None:
    """The cost includes the holder's present work, so a burst spreads to other workers."""
    await keyspace.workers(8, speed_tps=10_000)
    head = keyspace.chain(2)
    await keyspace.hold(5, head)
    went = Counter[str]()
    for _ in range(160):
        went[
            (
                await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(2, head=head), extra_tokens=12))
            ).worker_id
        ] += 1
    assert len(went) == 8
    assert max(went.values()) <= 40, went


async def test_in_every_tie_the_home_wins_then_the_longest_part_of_the_prompt(keyspace: Keyspace) -> None:
    """Random fleets: the choice follows the documented rule, by the decision's own figures."""
    names, reasons = await keyspace.workers(6), Counter[str]()
    for _ in range(150):
        blocks = keyspace.rng.choice((1, 2, 3, 6, 60, 300))
        chain = keyspace.chain(blocks)
        for number in range(1, 7):
            fill, busy = keyspace.rng.choice((0, 0, 5, 3_000)), keyspace.rng.choice((0, 0, 0, 30, 60))
            await keyspace.change(number, blocks=fill, prefill_tokens=busy, in_flight=keyspace.rng.choice((0, 1)))
            await keyspace.hold(number, chain, keyspace.rng.choice((0, 0, 1, blocks // 2, blocks)))
        order = tuple(keyspace.rng.sample(names, 2)) if keyspace.rng.random() < 0.2 else ()
        ask = keyspace.ask(chain, extra_tokens=keyspace.rng.choice((1, 9)), order=order)
        chosen, why, seen = await keyspace.fleet.queue.consider(ask)
        reasons[why] += 1
        lowest = min(row.cost_s for row in seen.candidates)
        tied = [row for row in seen.candidates if row.cost_s <= lowest + seen.tie_s]
        steps = {row.worker_id: int(row.matched_tokens / (0.02 * ask.prompt_tokens)) for row in tied}
        assert chosen in steps
        if order and order[0] in steps:
            assert chosen == order[0]
        else:
            assert steps[chosen] == max(steps.values())
    assert min(reasons[word] for word in ("lowest", "prefix", "pressure")) > 5, reasons


async def test_cold_prefixes_on_an_idle_fleet_spread_evenly(keyspace: Keyspace) -> None:
    await keyspace.workers(8)
    homes = Counter([(await keyspace.fleet.queue.explain(keyspace.ask(keyspace.chain(10))))[0] for _ in range(400)])
    assert len(homes) == 8
    assert max(homes.values()) <= 80, "50 each, give or take what chance does"


async def test_ties_go_to_the_least_evicting_then_the_least_filled_then_the_least_in_flight(keyspace: Keyspace) -> None:
    keyspace.fleet.use(weights=Weights(decode_price=0.0, context_price=0.0))
    await keyspace.workers(4)
    for number, row in enumerate([{"evicted": 1}, {"blocks": 200}, {"in_flight": 2}, {"in_flight": 1}], 1):
        await keyspace.change(number, **row)
    order: list[str] = []
    for _ in range(4):
        chosen, _ = await keyspace.fleet.queue.explain(keyspace.ask(keyspace.chain(100), exclude=tuple(order)))
        order.append(chosen)
    assert order == ["w4.0", "w3.0", "w2.0", "w1.0"]


async def test_a_busy_holder_is_left_when_waiting_costs_more_than_computing(keyspace: Keyspace) -> None:
    await keyspace.workers(2)
    chain = keyspace.chain(256)
    await keyspace.hold(1, chain)
    cases = ((0, 5_400, "w1.0"), (0, 5_700, "w2.0"), (16, 8_100, "w1.0"), (16, 8_400, "w2.0"))
    # A token ahead costs 1.5; to compute one costs 1, or 2 if no worker is idle, and 1 more if only w1 holds it.
    for other, wait, wanted in cases:
        await keyspace.change(1, prefill_tokens=wait)
        await keyspace.change(2, prefill_tokens=other)
        assert (await keyspace.fleet.queue.explain(keyspace.ask(chain)))[0] == wanted


async def test_a_fuller_cache_has_its_price(store: aioredis.Redis, keyspace: Keyspace) -> None:
    await keyspace.workers(2)
    chain = keyspace.chain(100)
    await keyspace.hold(1, chain, 20)
    assert (await keyspace.fleet.queue.explain(keyspace.ask(chain)))[0] == "w1.0"
    await keyspace.change(1, blocks=6_000)  # 0.3 caches over the mean: 80 blocks count as 128; at w2, 100 as 120
    assert (await keyspace.fleet.queue.explain(keyspace.ask(chain)))[0] == "w2.0"
