"""The mirror of an approximate worker: the prompts that it served, as an engine of its capacity would keep them."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
from tests.lua.test_credit import matched_blocks
from tests.support.fleet.keyspace import BLOCK, READY, SCHEME, Keyspace

from warmfleet.fleet import Flag, LoadRow, Shortfall

if TYPE_CHECKING:
    from typing import Any

    from warmfleet.fleet import Registered

RECORD = {"scheme_id": SCHEME, "url": "http://10.9.9.9:8000"}


async def approximate(keyspace: Keyspace, capacity: int, name: str = "stock") -> Registered:
    await keyspace.ticked()
    return await keyspace.fleet.workers.register(name, RECORD, capacity)


async def row(keyspace: Keyspace, name: str = "stock") -> LoadRow:
    return LoadRow.unpack(await cast("Any", keyspace.store.hget(keyspace.keys.load, name)))


async def served(keyspace: Keyspace, chain: bytes, shortfall: Shortfall | None = None) -> int:
    """A request for these blocks from its decision to its end. Returns the blocks that the decision saw."""
    ask = keyspace.ask(chain)
    matched = (await keyspace.fleet.bookings.decide(ask)).matched_tokens
    await keyspace.fleet.bookings.settle(ask.reservation, "finished", 0, shortfall)
    return matched // BLOCK


async def nodes(keyspace: Keyspace, slot: int) -> set[bytes]:
    return set(cast("list[bytes]", await keyspace.store.zrange(f"{keyspace.keys.prefix}lru:{slot}", 0, -1)))


async def test_an_approximate_worker_keeps_what_it_was_sent(keyspace: Keyspace) -> None:
    slot = (await approximate(keyspace, 100)).slot
    chain = keyspace.chain(40)
    ask = keyspace.ask(chain)
    decision = await keyspace.fleet.bookings.decide(ask)
    assert (decision.worker_id, decision.server_id, decision.approximate) == ("stock", "stock", True)
    assert decision.url == "http://10.9.9.9:8000"
    await keyspace.fleet.bookings.settle(ask.reservation, "started")
    following = await keyspace.fleet.bookings.decide(keyspace.ask(chain))
    assert (following.matched_tokens, following.speculative) == (40 * BLOCK, False), "its first token came"
    await keyspace.fleet.bookings.settle(ask.reservation, "failed")  # its prompt was computed all the same
    await keyspace.fleet.bookings.settle(following.reservation, "cancelled")
    assert await nodes(keyspace, slot) == {chain[8 * block - 8 : 8 * block] for block in (1, 16, 32)}
    assert all(counts == {slot: 1} for counts in (await keyspace.speculation()).values())
    assert (await row(keyspace)).blocks == 40
    again = await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(60, head=chain)))
    assert (again.matched_tokens, again.speculative) == (40 * BLOCK, False), "held, as far as anybody knows"


async def test_what_was_not_computed_is_not_noted(keyspace: Keyspace) -> None:
    slot = (await approximate(keyspace, 100)).slot
    for outcome in ("failed", "cancelled"):
        ask = keyspace.ask(keyspace.chain(40))
        await keyspace.fleet.bookings.decide(ask)
        await keyspace.fleet.bookings.settle(ask.reservation, cast("Any", outcome))
    assert await nodes(keyspace, slot) == set()
    assert await keyspace.speculation() == {}


async def test_a_mirror_knows_where_conversations_part(keyspace: Keyspace) -> None:
    await approximate(keyspace, 1_000)
    head = keyspace.chain(70)
    turns = [keyspace.chain(120, head=head), keyspace.chain(110, head=head)]
    for turn in turns:
        await served(keyspace, turn)
    assert await keyspace.leases() == {}, "what the mirror holds needs no lease that lingers"
    for turn in turns:
        assert await matched_blocks(keyspace, keyspace.ask(keyspace.chain(150, head=turn))) == {"stock": len(turn) // 8}
    assert (await row(keyspace)).blocks == 70 + 50 + 40


class Engine:
    """A plain model of an engine that evicts the block used longest ago, and of one prompt the deepest block first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[bytes, tuple[int, int]] = {}
        self._now = 0

    def holds(self, chain: bytes) -> int:
        blocks = [chain[at : at + 8] for at in range(0, len(chain), 8)]
        return next((depth for depth, block in enumerate(blocks) if block not in self.used), len(blocks))

    def serve(self, chain: bytes) -> None:
        self._now += 1
        self.used |= {chain[at : at + 8]: (self._now, -at) for at in range(0, len(chain), 8)}
        while len(self.used) > self.capacity:
            del self.used[min(self.used, key=lambda block: self.used[block])]


def prompts(keyspace: Keyspace, rng: random.Random) -> list[bytes]:
    """Prompts that share beginnings of every length: conversations that go on, part, and come again in part."""
    found = [keyspace.chain(rng.choice((1, 15, 16, 17, 33, 70)))]
    for _ in range(30):
        head = rng.choice(found)
        head = head[: 8 * rng.randint(0, len(head) // 8)] if rng.random() < 0.6 else head
        found.append(keyspace.chain(max(1, len(head) // 8 + rng.choice((0, 1, 5, 40))), head=head))
    return found


async def test_the_mirror_is_what_an_engine_of_its_capacity_holds(keyspace: Keyspace) -> None:
    """Block by block, over prompts that share, part and come again; the bound is exact at every step."""
    rng = random.Random(13)
    slot = (await approximate(keyspace, 150)).slot
    engine = Engine(150)
    known = prompts(keyspace, rng)
    for _ in range(120):
        chain = rng.choice(known)
        assert await served(keyspace, chain) == engine.holds(chain)
        engine.serve(chain)
        assert (await row(keyspace)).blocks == len(engine.used) <= 150
    for chain in known:
        assert await matched_blocks(keyspace, keyspace.ask(chain)) == {"stock": engine.holds(chain)}
    assert set(await keyspace.speculation()) == await nodes(keyspace, slot), "nothing is left of what was given up"


async def test_evictions_count_against_a_worker_and_fade(keyspace: Keyspace) -> None:
    """Of equal workers the least evicting wins, whether it has the plugin or not."""
    await approximate(keyspace, 100)
    await served(keyspace, keyspace.chain(100))
    assert (await row(keyspace)).evicted == 0
    await served(keyspace, keyspace.chain(30))
    assert (await row(keyspace)).evicted == 30
    await served(keyspace, keyspace.chain(20), Shortfall(0, 0.0))
    assert (await row(keyspace)).evicted == 50
    record = json.loads(await cast("Any", keyspace.store.hget(keyspace.keys.workers, "stock")))
    record["passed"] -= 5_000
    await cast("Any", keyspace.store.hset(keyspace.keys.workers, "stock", json.dumps(record)))
    await keyspace.fleet.workers.register("stock", RECORD, 100)
    assert (await row(keyspace)).evicted == pytest.approx(50 / 2.72, abs=1)


async def test_many_small_prompts_that_must_go_at_once_go_with_the_next_prompts(keyspace: Keyspace) -> None:
    await approximate(keyspace, 300)
    for _ in range(300):
        await served(keyspace, keyspace.chain(1))
    assert (await row(keyspace)).blocks == 300
    await served(keyspace, keyspace.chain(290))
    assert (await row(keyspace)).blocks == 300 + 290 - 128, "one call gives up 128 nodes at most"
    await served(keyspace, keyspace.chain(200))
    await served(keyspace, keyspace.chain(200))
    assert (await row(keyspace)).blocks <= 300
    slot = (await row(keyspace)).slot
    await keyspace.fleet.workers.register("stock", RECORD, 100)  # the engine says now that it holds less
    await served(keyspace, keyspace.chain(50))
    assert ((await row(keyspace)).blocks, (await row(keyspace)).slot) == (100, slot)


# ---------------------------------------------------------------- corrected by what answers say


async def test_what_the_engine_lacked_is_given_up_with_all_that_is_older(keyspace: Keyspace) -> None:
    slot = (await approximate(keyspace, 1_000)).slot
    old, talk, young = keyspace.chain(50), keyspace.chain(60), keyspace.chain(70)
    for chain in (old, talk, young):
        await served(keyspace, chain)
    assert await served(keyspace, keyspace.chain(80, head=talk), Shortfall(20, 0.0)) == 60
    told = await matched_blocks(keyspace, keyspace.ask(old))
    assert told == {"stock": 0}, "an engine that lacks the talk lacks what was used before it"
    assert await matched_blocks(keyspace, keyspace.ask(young)) == {"stock": 70}
    assert await matched_blocks(keyspace, keyspace.ask(talk)) == {"stock": 60}, "it was computed anew"
    assert (await row(keyspace)).blocks == 80 + 70
    assert set(await keyspace.speculation()) == await nodes(keyspace, slot)


async def test_one_answer_of_an_engine_that_lost_all_corrects_all_that_was_used_before(keyspace: Keyspace) -> None:
    await approximate(keyspace, 10_000)
    system = keyspace.chain(20)
    talks = [keyspace.chain(rng, head=system) for rng in range(30, 60)]
    for talk in talks:
        await served(keyspace, talk)
    await served(keyspace, talks[0], Shortfall(0, 0.0))
    assert [await matched_blocks(keyspace, keyspace.ask(talk)) for talk in talks] == [{"stock": 30}] + [
        {"stock": 20}
    ] * 29


async def test_more_than_can_be_given_up_at_once_goes_with_the_next_prompts(keyspace: Keyspace) -> None:
    await approximate(keyspace, 10_000)
    lost = [keyspace.chain(1) for _ in range(200)]
    for chain in lost:
        await served(keyspace, chain)
    await served(keyspace, lost[-1], Shortfall(0, 0.0))
    assert 60 < (await row(keyspace)).blocks < 200
    await served(keyspace, keyspace.chain(3))
    await served(keyspace, keyspace.chain(3))
    assert (await row(keyspace)).blocks == 1 + 3 + 3
    assert await matched_blocks(keyspace, keyspace.ask(lost[0])) == {"stock": 0}


async def test_an_answer_says_nothing_of_blocks_that_were_made_while_it_was_awaited(keyspace: Keyspace) -> None:
    """Of two simultaneous requests for one prompt, the second to end could not use the blocks that the first made."""
    await approximate(keyspace, 1_000)
    other, chain = keyspace.chain(40), keyspace.chain(30)
    await served(keyspace, other)
    await served(keyspace, chain)
    first, second = keyspace.ask(chain), keyspace.ask(chain)
    await keyspace.fleet.bookings.decide(first)
    await keyspace.fleet.bookings.decide(second)
    began = time.monotonic()
    await keyspace.fleet.bookings.settle(first.reservation, "finished")
    age_s = time.monotonic() - began + 1.0
    await keyspace.fleet.bookings.settle(second.reservation, "finished", 0, Shortfall(0, age_s))
    assert await matched_blocks(keyspace, keyspace.ask(other)) == {"stock": 40}


async def test_a_shortfall_of_another_incarnation_changes_nothing(keyspace: Keyspace) -> None:
    await approximate(keyspace, 1_000)
    ask = keyspace.ask(keyspace.chain(40))
    await keyspace.fleet.bookings.decide(ask)
    slot = (await keyspace.fleet.workers.register("stock", RECORD | {"scheme_id": 8}, 1_000)).slot
    await keyspace.fleet.bookings.settle(ask.reservation, "finished", 0, Shortfall(0, 0.0))
    assert await nodes(keyspace, slot) == set()
    assert (await row(keyspace)).blocks == 0


async def test_a_node_that_was_given_up_under_a_reservation_has_no_maker(keyspace: Keyspace) -> None:
    """The mirror made it where two prompts part, so no reservation is noted there as its maker."""
    await approximate(keyspace, 1_000)
    long, young = keyspace.chain(40), keyspace.chain(30)
    for chain in (long, keyspace.chain(40, head=long[: 8 * 20]), young):
        await served(keyspace, chain)
    asks = [keyspace.ask(long[: 8 * 21]) for _ in range(2)]
    await keyspace.fleet.bookings.decide(asks[0])
    assert await served(keyspace, young, Shortfall(0, 0.0)) == 30  # the engine evicted all that was used before it
    decision = await keyspace.fleet.bookings.decide(asks[1])
    assert (decision.matched_tokens, decision.speculative) == (21 * BLOCK, True), "the reservation makes it anew"
    for ask in asks:
        await keyspace.fleet.bookings.settle(ask.reservation, "finished")
    assert await matched_blocks(keyspace, keyspace.ask(long)) == {"stock": 21}


async def test_a_mirror_whose_blocks_an_older_replica_counted_as_none_never_has_fewer(keyspace: Keyspace) -> None:
    """`register` of before 2026-11-23 writes 0. Fewer than none would wrap, and the mirror would be full for ever."""
    await approximate(keyspace, 1_000)
    for blocks in (50, 60):
        await served(keyspace, keyspace.chain(blocks))
    await cast(
        "Any", keyspace.store.hset(keyspace.keys.load, "stock", replace(await row(keyspace), blocks=0).pack("stock"))
    )
    lacking = keyspace.chain(4)
    await served(keyspace, lacking)
    await served(keyspace, lacking, Shortfall(0, 0.0))
    assert (await row(keyspace)).blocks == 0
    assert await served(keyspace, lacking) == 4
    await served(keyspace, keyspace.chain(20))
    assert (await row(keyspace)).blocks == 20


# ---------------------------------------------------------------- speed, learned from first tokens


async def first_token(keyspace: Keyspace, after_ms: int, blocks: int = 100) -> int:
    """A request whose first token came after ``after_ms`` of prefill. Returns the worker's learned speed."""
    ask = keyspace.ask(keyspace.chain(blocks), extra_tokens=0)
    await keyspace.fleet.bookings.decide(ask)
    began = replace(await row(keyspace), since_ms=(int(time.time() * 1000) - after_ms) % 2**32)
    await cast("Any", keyspace.store.hset(keyspace.keys.load, "stock", began.pack("stock")))
    await keyspace.fleet.bookings.settle(ask.reservation, "started")
    return (await row(keyspace)).speed_tps


async def test_first_tokens_tell_the_speed_of_a_worker(keyspace: Keyspace) -> None:
    await approximate(keyspace, 10_000)
    assert await first_token(keyspace, 400, blocks=2) == 0, "two blocks say nothing"
    assert await first_token(keyspace, 3_600_000) == 0, "nor does an hour"
    assert await first_token(keyspace, 400) == pytest.approx(1_600 / 0.4, rel=0.1)
    for _ in range(40):
        speed = await first_token(keyspace, 800)
    assert speed == pytest.approx(1_600 / 0.8, rel=0.1), "an engine that became slower"


async def test_prompts_that_are_computed_together_count_as_one(keyspace: Keyspace) -> None:
    """Their first tokens come at once, so the first of them seems slow and the second takes no time."""
    await approximate(keyspace, 10_000)
    await first_token(keyspace, 400)
    for _ in range(40):
        await first_token(keyspace, 800)
        speed = await first_token(keyspace, 0)
    assert speed == pytest.approx(3_200 / 0.8, rel=0.2)


async def test_a_worker_whose_heartbeats_tell_a_speed_learns_none(keyspace: Keyspace) -> None:
    """An engine with the plugin tells its speed from its first prefill on; an engine behind a bridge tells none."""
    await keyspace.workers(2, speed_tps=0)
    for number, told in ((1, 0), (2, 9_000)):
        await keyspace.change(number, speed_tps=told)
        ask = keyspace.ask(keyspace.chain(100), exclude=(f"w{3 - number}.0",))
        await keyspace.fleet.bookings.decide(ask)
        await keyspace.change(number, since_ms=(int(time.time() * 1000) - 400) % 2**32)
        await keyspace.fleet.bookings.settle(ask.reservation, "started")
    bridged, plugged = await keyspace.row(1), await keyspace.row(2)
    assert bridged.speed_tps == pytest.approx(4_000, rel=0.1)
    assert bridged.flags == READY | Flag.LEARNED
    assert (plugged.speed_tps, plugged.flags) == (9_000, READY)


async def test_a_worker_that_learned_its_speed_takes_many_requests(keyspace: Keyspace) -> None:
    await approximate(keyspace, 10_000)
    assert await first_token(keyspace, 400) > 0
    assert not (await row(keyspace)).flags & Flag.LEARNED, "replicas of before 2026-11-23 take it for a trial"
    for _ in range(3):
        assert (await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(2)))).worker_id == "stock"


async def test_a_worker_behind_a_bridge_that_learned_its_speed_takes_many_requests(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    await keyspace.change(1, flags=READY | Flag.LEARNED)
    for _ in range(3):
        assert (await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(2)))).worker_id == "w1.0"


async def test_a_registered_worker_keeps_its_speed(keyspace: Keyspace) -> None:
    await approximate(keyspace, 10_000)
    speed = await first_token(keyspace, 400)
    await keyspace.fleet.workers.register("stock", RECORD, 10_000)
    assert (await row(keyspace)).speed_tps == speed > 0
