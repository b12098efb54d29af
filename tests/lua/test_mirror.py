"""The mirror of an approximate worker: the prompts that it served, as an engine of its capacity would keep them."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
from tests.lua.test_credit import matched_blocks
from tests.lua.world import BLOCK, READY, SCHEME, World

from warmfleet.fleet import Flag, LoadRow, Shortfall

if TYPE_CHECKING:
    from typing import Any

    from warmfleet.fleet import Registered

RECORD = {"scheme_id": SCHEME, "url": "http://10.9.9.9:8000"}


async def approximate(world: World, capacity: int, name: str = "stock") -> Registered:
    await world.ticked()
    return await world.fleet.register(name, RECORD, capacity)


async def row(world: World, name: str = "stock") -> LoadRow:
    return LoadRow.unpack(await cast("Any", world.store.hget(world.keys.load, name)))


async def served(world: World, chain: bytes, shortfall: Shortfall | None = None) -> int:
    """A request for these blocks from its decision to its end. Returns the blocks that the decision saw."""
    ask = world.ask(chain)
    matched = (await world.fleet.decide(ask)).matched_tokens
    await world.fleet.settle(ask.reservation, "finished", 0, shortfall)
    return matched // BLOCK


async def nodes(world: World, slot: int) -> set[bytes]:
    return set(cast("list[bytes]", await world.store.zrange(f"{world.keys.prefix}lru:{slot}", 0, -1)))


async def test_an_approximate_worker_keeps_what_it_was_sent(world: World) -> None:
    slot = (await approximate(world, 100)).slot
    chain = world.chain(40)
    ask = world.ask(chain)
    decision = await world.fleet.decide(ask)
    assert (decision.worker_id, decision.server_id, decision.approximate) == ("stock", "stock", True)
    assert decision.url == "http://10.9.9.9:8000"
    await world.fleet.settle(ask.reservation, "started")
    following = await world.fleet.decide(world.ask(chain))
    assert (following.matched_tokens, following.speculative) == (40 * BLOCK, False), "its first token came"
    await world.fleet.settle(ask.reservation, "failed")  # its prompt was computed all the same
    await world.fleet.settle(following.reservation, "cancelled")
    assert await nodes(world, slot) == {chain[8 * block - 8 : 8 * block] for block in (1, 16, 32)}
    assert all(counts == {slot: 1} for counts in (await world.speculation()).values())
    assert (await row(world)).blocks == 40
    again = await world.fleet.decide(world.ask(world.chain(60, head=chain)))
    assert (again.matched_tokens, again.speculative) == (40 * BLOCK, False), "held, as far as anybody knows"


async def test_what_was_not_computed_is_not_noted(world: World) -> None:
    slot = (await approximate(world, 100)).slot
    for outcome in ("failed", "cancelled"):
        ask = world.ask(world.chain(40))
        await world.fleet.decide(ask)
        await world.fleet.settle(ask.reservation, cast("Any", outcome))
    assert await nodes(world, slot) == set()
    assert await world.speculation() == {}


async def test_a_mirror_knows_where_conversations_part(world: World) -> None:
    await approximate(world, 1_000)
    head = world.chain(70)
    turns = [world.chain(120, head=head), world.chain(110, head=head)]
    for turn in turns:
        await served(world, turn)
    assert await world.leases() == {}, "what the mirror holds needs no lease that lingers"
    for turn in turns:
        assert await matched_blocks(world, world.ask(world.chain(150, head=turn))) == {"stock": len(turn) // 8}
    assert (await row(world)).blocks == 70 + 50 + 40


class Engine:
    """What an engine holds that evicts the block that was used longest ago, of one prompt the deepest first."""

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


def prompts(world: World, rng: random.Random) -> list[bytes]:
    """Prompts that share beginnings of every length: conversations that go on, part, and are asked again in part."""
    found = [world.chain(rng.choice((1, 15, 16, 17, 33, 70)))]
    for _ in range(30):
        head = rng.choice(found)
        head = head[: 8 * rng.randint(0, len(head) // 8)] if rng.random() < 0.6 else head
        found.append(world.chain(max(1, len(head) // 8 + rng.choice((0, 1, 5, 40))), head=head))
    return found


async def test_the_mirror_is_what_an_engine_of_its_capacity_holds(world: World) -> None:
    """Block by block, over prompts that share, part and come again; the bound is exact at every step."""
    rng = random.Random(13)
    slot = (await approximate(world, 150)).slot
    engine = Engine(150)
    known = prompts(world, rng)
    for _ in range(120):
        chain = rng.choice(known)
        assert await served(world, chain) == engine.holds(chain)
        engine.serve(chain)
        assert (await row(world)).blocks == len(engine.used) <= 150
    for chain in known:
        assert await matched_blocks(world, world.ask(chain)) == {"stock": engine.holds(chain)}
    assert set(await world.speculation()) == await nodes(world, slot), "nothing is left of what was given up"


async def test_evictions_count_against_a_worker_and_fade(world: World) -> None:
    """Of equal workers the least evicting wins, whether it has the plugin or not."""
    await approximate(world, 100)
    await served(world, world.chain(100))
    assert (await row(world)).evicted == 0
    await served(world, world.chain(30))
    assert (await row(world)).evicted == 30
    await served(world, world.chain(20), Shortfall(0, 0.0))
    assert (await row(world)).evicted == 50
    record = json.loads(await cast("Any", world.store.hget(world.keys.workers, "stock")))
    record["passed"] -= 5_000
    await cast("Any", world.store.hset(world.keys.workers, "stock", json.dumps(record)))
    await world.fleet.register("stock", RECORD, 100)
    assert (await row(world)).evicted == pytest.approx(50 / 2.72, abs=1)


async def test_many_small_prompts_that_must_go_at_once_go_with_the_next_prompts(world: World) -> None:
    await approximate(world, 300)
    for _ in range(300):
        await served(world, world.chain(1))
    assert (await row(world)).blocks == 300
    await served(world, world.chain(290))
    assert (await row(world)).blocks == 300 + 290 - 128, "one call gives up 128 nodes at most"
    await served(world, world.chain(200))
    await served(world, world.chain(200))
    assert (await row(world)).blocks <= 300
    slot = (await row(world)).slot
    await world.fleet.register("stock", RECORD, 100)  # the engine says now that it holds less
    await served(world, world.chain(50))
    assert ((await row(world)).blocks, (await row(world)).slot) == (100, slot)


# ---------------------------------------------------------------- corrected by what answers say


async def test_what_the_engine_lacked_is_given_up_with_all_that_is_older(world: World) -> None:
    slot = (await approximate(world, 1_000)).slot
    old, talk, young = world.chain(50), world.chain(60), world.chain(70)
    for chain in (old, talk, young):
        await served(world, chain)
    assert await served(world, world.chain(80, head=talk), Shortfall(20, 0.0)) == 60
    told = await matched_blocks(world, world.ask(old))
    assert told == {"stock": 0}, "an engine that lacks the talk lacks what was used before it"
    assert await matched_blocks(world, world.ask(young)) == {"stock": 70}
    assert await matched_blocks(world, world.ask(talk)) == {"stock": 60}, "it was computed anew"
    assert (await row(world)).blocks == 80 + 70
    assert set(await world.speculation()) == await nodes(world, slot)


async def test_one_answer_of_an_engine_that_lost_all_corrects_all_that_was_used_before(world: World) -> None:
    await approximate(world, 10_000)
    system = world.chain(20)
    talks = [world.chain(rng, head=system) for rng in range(30, 60)]
    for talk in talks:
        await served(world, talk)
    await served(world, talks[0], Shortfall(0, 0.0))
    assert [await matched_blocks(world, world.ask(talk)) for talk in talks] == [{"stock": 30}] + [{"stock": 20}] * 29


async def test_more_than_can_be_given_up_at_once_goes_with_the_next_prompts(world: World) -> None:
    await approximate(world, 10_000)
    lost = [world.chain(1) for _ in range(200)]
    for chain in lost:
        await served(world, chain)
    await served(world, lost[-1], Shortfall(0, 0.0))
    assert 60 < (await row(world)).blocks < 200
    await served(world, world.chain(3))
    await served(world, world.chain(3))
    assert (await row(world)).blocks == 1 + 3 + 3
    assert await matched_blocks(world, world.ask(lost[0])) == {"stock": 0}


async def test_an_answer_says_nothing_of_blocks_that_were_made_while_it_was_awaited(world: World) -> None:
    """Two requests for one prompt at once: the second to end lacked at its start what the first had made since."""
    await approximate(world, 1_000)
    other, chain = world.chain(40), world.chain(30)
    await served(world, other)
    await served(world, chain)
    first, second = world.ask(chain), world.ask(chain)
    await world.fleet.decide(first)
    await world.fleet.decide(second)
    began = time.monotonic()
    await world.fleet.settle(first.reservation, "finished")
    age_s = time.monotonic() - began + 1.0
    await world.fleet.settle(second.reservation, "finished", 0, Shortfall(0, age_s))
    assert await matched_blocks(world, world.ask(other)) == {"stock": 40}


async def test_a_shortfall_of_another_incarnation_changes_nothing(world: World) -> None:
    await approximate(world, 1_000)
    ask = world.ask(world.chain(40))
    await world.fleet.decide(ask)
    slot = (await world.fleet.register("stock", RECORD | {"scheme_id": 8}, 1_000)).slot
    await world.fleet.settle(ask.reservation, "finished", 0, Shortfall(0, 0.0))
    assert await nodes(world, slot) == set()
    assert (await row(world)).blocks == 0


async def test_a_node_that_was_given_up_under_a_reservation_has_no_maker(world: World) -> None:
    """The mirror made it where two prompts part, so no reservation is noted there as its maker."""
    await approximate(world, 1_000)
    long, young = world.chain(40), world.chain(30)
    for chain in (long, world.chain(40, head=long[: 8 * 20]), young):
        await served(world, chain)
    asks = [world.ask(long[: 8 * 21]) for _ in range(2)]
    await world.fleet.decide(asks[0])
    assert await served(world, young, Shortfall(0, 0.0)) == 30  # the engine evicted all that was used before it
    decision = await world.fleet.decide(asks[1])
    assert (decision.matched_tokens, decision.speculative) == (21 * BLOCK, True), "the reservation makes it anew"
    for ask in asks:
        await world.fleet.settle(ask.reservation, "finished")
    assert await matched_blocks(world, world.ask(long)) == {"stock": 21}


async def test_a_mirror_whose_blocks_an_older_replica_counted_as_none_never_has_fewer(world: World) -> None:
    """`register` of before 2026-11-23 writes 0. Fewer than none would wrap, and the mirror would be full for ever."""
    await approximate(world, 1_000)
    for blocks in (50, 60):
        await served(world, world.chain(blocks))
    await cast("Any", world.store.hset(world.keys.load, "stock", replace(await row(world), blocks=0).pack("stock")))
    lacking = world.chain(4)
    await served(world, lacking)
    await served(world, lacking, Shortfall(0, 0.0))
    assert (await row(world)).blocks == 0
    assert await served(world, lacking) == 4
    await served(world, world.chain(20))
    assert (await row(world)).blocks == 20


# ---------------------------------------------------------------- speed, learned from first tokens


async def first_token(world: World, after_ms: int, blocks: int = 100) -> int:
    """A request whose prefill was under way for so long when its first token came. Returns the speed that is known."""
    ask = world.ask(world.chain(blocks), extra_tokens=0)
    await world.fleet.decide(ask)
    began = replace(await row(world), since_ms=(int(time.time() * 1000) - after_ms) % 2**32)
    await cast("Any", world.store.hset(world.keys.load, "stock", began.pack("stock")))
    await world.fleet.settle(ask.reservation, "started")
    return (await row(world)).speed_tps


async def test_first_tokens_tell_the_speed_of_a_worker(world: World) -> None:
    await approximate(world, 10_000)
    assert await first_token(world, 400, blocks=2) == 0, "two blocks say nothing"
    assert await first_token(world, 3_600_000) == 0, "nor does an hour"
    assert await first_token(world, 400) == pytest.approx(1_600 / 0.4, rel=0.1)
    for _ in range(40):
        speed = await first_token(world, 800)
    assert speed == pytest.approx(1_600 / 0.8, rel=0.1), "an engine that became slower"


async def test_prompts_that_are_computed_together_count_as_one(world: World) -> None:
    """Their first tokens come at once, so the first of them seems slow and the second takes no time."""
    await approximate(world, 10_000)
    await first_token(world, 400)
    for _ in range(40):
        await first_token(world, 800)
        speed = await first_token(world, 0)
    assert speed == pytest.approx(3_200 / 0.8, rel=0.2)


async def test_a_worker_whose_heartbeats_tell_a_speed_learns_none(world: World) -> None:
    """An engine behind a bridge tells none; an engine with the plugin tells it from its first prefill on."""
    await world.workers(2, speed_tps=0)
    for number, told in ((1, 0), (2, 9_000)):
        await world.change(number, speed_tps=told)
        ask = world.ask(world.chain(100), exclude=(f"w{3 - number}.0",))
        await world.fleet.decide(ask)
        await world.change(number, since_ms=(int(time.time() * 1000) - 400) % 2**32)
        await world.fleet.settle(ask.reservation, "started")
    bridged, plugged = await world.row(1), await world.row(2)
    assert bridged.speed_tps == pytest.approx(4_000, rel=0.1)
    assert bridged.flags == READY | Flag.LEARNED
    assert (plugged.speed_tps, plugged.flags) == (9_000, READY)


async def test_a_worker_that_learned_its_speed_takes_many_requests(world: World) -> None:
    await approximate(world, 10_000)
    assert await first_token(world, 400) > 0
    assert not (await row(world)).flags & Flag.LEARNED, "replicas of before 2026-11-23 take it for a trial"
    for _ in range(3):
        assert (await world.fleet.decide(world.ask(world.chain(2)))).worker_id == "stock"


async def test_a_worker_behind_a_bridge_that_learned_its_speed_takes_many_requests(world: World) -> None:
    await world.workers(1)
    await world.change(1, flags=READY | Flag.LEARNED)
    for _ in range(3):
        assert (await world.fleet.decide(world.ask(world.chain(2)))).worker_id == "w1.0"


async def test_a_registered_worker_keeps_its_speed(world: World) -> None:
    await approximate(world, 10_000)
    speed = await first_token(world, 400)
    await world.fleet.register("stock", RECORD, 10_000)
    assert (await row(world)).speed_tps == speed > 0
