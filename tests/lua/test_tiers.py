"""decide on workers with tiers: what a tier holds of the prompt counts as held, at the price of loading it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.keyspace import BLOCK, READY, SCHEME

from warmfleet.fleet import Flag, new_reservation
from warmfleet.prompt.block_hashes import Chain

if TYPE_CHECKING:
    from tests.support.fleet.keyspace import Keyspace

    from warmfleet.fleet import Candidate

CPU, DISK, LOADS_LAST, LOADS_DROPPED = 1, 2, 128, 64
FAST, SLOW = 1e-6, 1e-3  # seconds to load a token; to compute one takes 1e-4
TIERED = READY | Flag.SETS


async def tier(
    keyspace: Keyspace, number: int, hashes: bytes, depth: int, price: float = FAST, kind: int = CPU, slot: int = 0
) -> int:
    """Let a tier of this worker hold the first blocks of a chain; return its slot.

    slot: of a tier that another worker reads, too.
    """
    several = slot > 0
    slot = slot or 1000 * (kind % LOADS_DROPPED) + number
    await keyspace.hold(slot, hashes, depth)
    name = f"w{number}.0:{ {CPU: 'cpu', DISK: 'disk'}[kind % LOADS_DROPPED] }"
    store = cast("Any", keyspace.store)
    await store.hset(keyspace.keys.sets, name, struct.pack(">IIdB", slot, number, price, kind))
    users = await store.hget(keyspace.keys.tiers, slot) or b"" if several else b""
    await store.hset(keyspace.keys.tiers, slot, users + struct.pack(">IdBI", number, price, kind, 1_000))
    return slot


async def explained(keyspace: Keyspace, hashes: bytes = b"", **fields: Any) -> dict[str, Candidate]:
    _, rows = await keyspace.fleet.queue.explain(keyspace.ask(hashes, **fields))
    return {row.worker_id: row for row in rows}


@pytest.mark.parametrize(("gpu", "cpu", "held", "loaded"), [(0, 7, 7, 7), (3, 7, 7, 4), (7, 3, 7, 0), (5, 5, 5, 0)])
async def test_the_tier_continues_what_the_gpu_holds(
    keyspace: Keyspace, gpu: int, cpu: int, held: int, loaded: int
) -> None:
    await keyspace.workers(2, flags=TIERED)
    hashes = keyspace.chain(10)
    await keyspace.hold(1, hashes, gpu)
    await tier(keyspace, 1, hashes, cpu)
    rows = await explained(keyspace, hashes)
    row = rows["w1.0"]
    assert (row.matched_tokens, row.tier_tokens) == (held * BLOCK, loaded * BLOCK)
    assert row.tier_s == pytest.approx(loaded * BLOCK * FAST, abs=1e-6)
    assert row.tier == ("cpu" if loaded else "")
    assert row.terms.load_s == pytest.approx(2 * row.tier_s, abs=2e-6)
    assert (rows["w2.0"].matched_tokens, rows["w2.0"].tier_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("price", "booked"),
    [(0.0, 0), (FAST, 11), (0.4e-4, 448), (SLOW, 1120)],  # at 10,000 tokens a second; as many as are loaded at most
)
async def test_a_load_is_booked_as_the_prefill_of_its_time(keyspace: Keyspace, price: float, booked: int) -> None:
    await keyspace.workers(2, flags=TIERED)
    hashes = keyspace.chain(100)
    await keyspace.hold(2, hashes, 20)
    await tier(keyspace, 2, hashes, 90, price)
    decision = await keyspace.fleet.bookings.decide(keyspace.ask(hashes))
    assert (decision.worker_id, decision.matched_tokens) == ("w2.0", 90 * BLOCK)
    assert (decision.tier_tokens, decision.tier) == (70 * BLOCK, "cpu")
    assert decision.tier_s == pytest.approx(70 * BLOCK * price, abs=1e-6)
    assert decision.prefill_tokens == 10 * BLOCK + 1 + booked
    assert (await keyspace.row(2)).prefill_tokens == decision.prefill_tokens
    [lease] = (await keyspace.leases()).values()
    assert (lease.matched_tokens, lease.prefill_tokens) == (90 * BLOCK, decision.prefill_tokens)
    await keyspace.fleet.bookings.settle(decision.reservation, "started")
    assert (await keyspace.row(2)).prefill_tokens == 0


async def test_the_next_decision_sees_a_load_under_way(keyspace: Keyspace) -> None:
    """Two workers have prompts on slow tiers: the second prompt waits for no load of the first."""
    await keyspace.workers(2, flags=TIERED)
    for hashes in (keyspace.chain(500), keyspace.chain(500)):
        for number in (1, 2):
            await tier(keyspace, number, hashes, 500, 0.5e-4)
        last = hashes
    first = await keyspace.fleet.bookings.decide(keyspace.ask(last))
    rows = await explained(keyspace, keyspace.chain(500))
    waits = {name: row.terms.wait_s for name, row in rows.items()}
    assert waits[first.worker_id] > 0.3
    assert min(waits.values()) == 0


async def test_a_reservation_of_several_prompts_books_no_load(keyspace: Keyspace) -> None:
    """Each of its prompts gives back the tokens that it lacked, so nothing else may be booked."""
    await keyspace.workers(1, flags=TIERED)
    hashes = keyspace.chain(100)
    await tier(keyspace, 1, hashes, 90, 0.5e-4)
    ask = keyspace.ask(hashes, reservation=new_reservation(2))
    assert (await keyspace.fleet.bookings.decide(ask)).prefill_tokens == 10 * BLOCK + 1


async def test_booked_loads_are_given_back_whole(keyspace: Keyspace) -> None:
    """Whatever is decided and however it ends, rows have what the open leases say, and in the end nothing."""
    await keyspace.workers(4, flags=TIERED)
    chains = [keyspace.chain(60) for _ in range(6)]
    for hashes in chains:
        for number in range(1, 5):
            await keyspace.hold(number, hashes, keyspace.rng.randrange(40))
            await tier(keyspace, number, hashes, keyspace.rng.randrange(61), keyspace.rng.choice((FAST, 0.5e-4, SLOW)))
    open_ids: list[str] = []
    for _ in range(150):
        if open_ids and keyspace.rng.random() < 0.45:
            at = keyspace.rng.randrange(len(open_ids))
            if keyspace.rng.random() < 0.3:
                await keyspace.fleet.bookings.settle(open_ids[at], "started")
            else:
                await keyspace.fleet.bookings.settle(open_ids.pop(at), "finished")
        else:
            ask = keyspace.ask(keyspace.rng.choice(chains))
            open_ids.append((await keyspace.fleet.bookings.decide(ask)).reservation)
        booked = dict.fromkeys(await keyspace.rows(), 0)
        for lease in (await keyspace.leases()).values():
            booked[lease.worker_id] += lease.prefill_tokens
        assert {name: row.prefill_tokens for name, row in (await keyspace.rows()).items()} == booked
    for name in open_ids:
        await keyspace.fleet.bookings.settle(name, "cancelled")
    assert {row.prefill_tokens for row in (await keyspace.rows()).values()} == {0}


async def test_loads_of_idle_engines_count_twice_and_never_more_than_computing(keyspace: Keyspace) -> None:
    await keyspace.workers(3, flags=TIERED)
    hashes = keyspace.chain(100)
    for number, price in enumerate((FAST, 0.4e-4, SLOW), 1):
        await tier(keyspace, number, hashes, 100, price)
    rows = await explained(keyspace, hashes)
    assert rows["w1.0"].terms.load_s == pytest.approx(2 * 1600 * FAST)
    assert rows["w2.0"].terms.load_s == pytest.approx(2 * 1600 * 0.4e-4)
    assert rows["w3.0"].terms.load_s == pytest.approx(1600 * 1e-4), "as if it were not there"
    assert rows["w3.0"].tier_s == pytest.approx(1600 * SLOW), "though the engine will take that long"


@pytest.mark.parametrize("booked", [0, 1, 60, 100, 1_000])
@pytest.mark.parametrize("price", [FAST, 0.4e-4, 0.9e-4])
async def test_a_load_beside_booked_prefills_counts_once(keyspace: Keyspace, booked: int, price: float) -> None:
    """An engine loads while it computes what it was sent before."""
    await keyspace.workers(2, flags=TIERED)
    hashes = keyspace.chain(100)
    await tier(keyspace, 1, hashes, 100, price)
    await keyspace.change(1, prefill_tokens=booked - booked // 3, foreign_prefill_tokens=booked // 3)
    loading, line = 1600 * price, booked * 1e-4
    expected = min(loading + max(0.0, loading - line), 1600 * 1e-4)
    assert (await explained(keyspace, hashes))["w1.0"].terms.load_s == pytest.approx(expected, abs=2e-6)


async def test_the_cheaper_of_loading_and_waiting_wins(keyspace: Keyspace) -> None:
    """The GPU that holds the prompt is busy; another worker has it in CPU memory, a third on a slow disk."""
    await keyspace.workers(3, flags=TIERED)
    hashes = keyspace.chain(500)
    await keyspace.hold(1, hashes)
    await keyspace.change(1, prefill_tokens=20_000)
    await tier(keyspace, 2, hashes, 500, FAST)
    await tier(keyspace, 3, hashes, 500, SLOW, DISK)
    assert (await keyspace.fleet.bookings.decide(keyspace.ask(hashes))).worker_id == "w2.0"


async def test_the_fastest_tier_comes_first(keyspace: Keyspace) -> None:
    await keyspace.workers(1, flags=TIERED)
    hashes = keyspace.chain(10)
    await keyspace.hold(1, hashes, 2)
    await tier(keyspace, 1, hashes, 5, FAST)
    await tier(keyspace, 1, hashes, 9, 1e-5, DISK)
    row = (await explained(keyspace, hashes))["w1.0"]
    assert (row.matched_tokens, row.tier_tokens, row.tier) == (9 * BLOCK, 7 * BLOCK, "disk")
    assert row.tier_s == pytest.approx(BLOCK * (3 * FAST + 4 * 1e-5), abs=1e-6)


async def test_a_tier_that_several_workers_read_is_held_once(keyspace: Keyspace) -> None:
    await keyspace.workers(3, flags=TIERED)
    hashes = keyspace.chain(10)
    slot = await tier(keyspace, 1, hashes, 6, FAST)
    await tier(keyspace, 2, hashes, 6, 2 * FAST, slot=slot)
    rows = await explained(keyspace, hashes)
    assert [rows[f"w{number}.0"].tier_tokens for number in (1, 2, 3)] == [96, 96, 0]
    assert rows["w2.0"].tier_s == pytest.approx(2 * rows["w1.0"].tier_s, abs=1e-6)


@pytest.mark.parametrize("gap", [1, 3, 6])
async def test_a_gap_in_the_chosen_workers_tier_is_found(keyspace: Keyspace, gap: int) -> None:
    """gap: the number of a block that the tier lacks, from 0. The first two blocks are on the GPU, too."""
    await keyspace.workers(1, flags=TIERED)
    hashes = keyspace.chain(10)
    await keyspace.hold(1, hashes, 2)
    slot = await tier(keyspace, 1, hashes, 9)
    await keyspace.drop(slot, hashes[8 * gap : 8 * gap + 8])
    decision = await keyspace.fleet.bookings.decide(keyspace.ask(hashes))
    whole = 9 if gap < 2 else gap
    assert (decision.matched_tokens, decision.tier_tokens) == (whole * BLOCK, (whole - 2) * BLOCK)


@pytest.mark.parametrize("others", [0, 20])  # tiers of other workers: few are asked for, many are read
@pytest.mark.parametrize(("begin", "end", "held"), [(2, 9, 9), (4, 9, 9), (5, 9, 4), (1, 4, 4)])
async def test_a_tier_that_lacks_the_beginning_continues_the_gpu_of_the_chosen_worker(
    keyspace: Keyspace, begin: int, end: int, held: int, others: int
) -> None:
    """vLLM touches no block in the tier that its GPU serves, so the tier may evict the beginning of a prompt."""
    await keyspace.workers(1 + others, flags=TIERED)
    for number in range(2, 2 + others):
        await tier(keyspace, number, keyspace.chain(3), 3)
    hashes = keyspace.chain(10)
    await keyspace.hold(1, hashes, 4)
    slot = await tier(keyspace, 1, hashes, 0)
    await keyspace.hold(slot, hashes[8 * begin : 8 * end])
    decision = await keyspace.fleet.bookings.decide(keyspace.ask(hashes))
    assert decision.worker_id == "w1.0"
    assert (decision.matched_tokens, decision.tier_tokens) == (held * BLOCK, (held - 4) * BLOCK)
    assert decision.tier_s == pytest.approx((held - 4) * BLOCK * FAST, abs=1e-6)


@pytest.mark.parametrize(("has_more", "calls"), [(False, 1), (True, 3)])
async def test_a_tier_is_asked_for_many_blocks_only_if_it_has_the_next(
    keyspace: Keyspace, has_more: bool, calls: int
) -> None:
    await keyspace.workers(1, flags=TIERED)
    hashes = keyspace.chain(604)
    await keyspace.hold(1, hashes, 4)
    slot = await tier(keyspace, 1, hashes, 0)
    await keyspace.hold(slot, hashes[8 * 4 :] if has_more else keyspace.chain(3))
    asked, told = list[str](), ""
    async with keyspace.store.monitor() as monitor:
        decision = await keyspace.fleet.bookings.decide(keyspace.ask(hashes))
        await keyspace.store.echo("end")
        while not told.startswith("ECHO"):
            told = (await monitor.next_command())["command"]
            asked += [told] if told.startswith(f"SMISMEMBER {keyspace.keys.slot(slot)} ") else []
    assert decision.matched_tokens == (604 if has_more else 4) * BLOCK
    assert len(asked) == calls
    assert len(asked[0]) < 200, "of one block"


@pytest.mark.parametrize(("begin", "held"), [(3, 9), (4, 4), (2, 9)])
async def test_such_a_tier_loads_the_block_that_a_draft_model_drops(keyspace: Keyspace, begin: int, held: int) -> None:
    """begin: the number of the tier's first block, from 0; the GPU's last is number 3."""
    await keyspace.workers(1, flags=TIERED)
    hashes = keyspace.chain(10)
    await keyspace.hold(1, hashes, 4)
    slot = await tier(keyspace, 1, hashes, 0, kind=CPU + LOADS_LAST + LOADS_DROPPED)
    await keyspace.hold(slot, hashes[8 * begin : 8 * 8])
    decision = await keyspace.fleet.bookings.decide(keyspace.ask(hashes, extra_tokens=1 + BLOCK))
    assert (decision.matched_tokens, decision.tier_tokens) == (held * BLOCK, (held - 4) * BLOCK)


async def test_a_tier_closes_gaps_of_a_gpu_that_is_not_prefix_closed(keyspace: Keyspace) -> None:
    await keyspace.workers(1, flags=TIERED - Flag.CLOSED)
    hashes = keyspace.chain(10)
    await keyspace.hold(1, hashes, 8)
    await keyspace.drop(1, hashes[8 * 4 : 8 * 5])
    await tier(keyspace, 1, hashes, 6)
    decision = await keyspace.fleet.bookings.decide(keyspace.ask(hashes))
    assert (decision.matched_tokens, decision.tier_tokens) == (6 * BLOCK, 2 * BLOCK)


async def test_an_engine_is_stayed_with_for_what_its_tier_holds(keyspace: Keyspace) -> None:
    await keyspace.workers(2, flags=TIERED)
    hashes = keyspace.chain(100)
    await tier(keyspace, 1, hashes, 100)
    rows = await explained(keyspace, hashes)
    assert rows["w1.0"].terms.leave_s == 0
    assert rows["w2.0"].terms.leave_s > 0


async def test_only_the_blocks_of_a_proven_worker_count(keyspace: Keyspace) -> None:
    await keyspace.workers(1, flags=TIERED - Flag.PROVEN)
    hashes = keyspace.chain(10)
    await tier(keyspace, 1, hashes, 10)
    assert (await explained(keyspace, hashes))["w1.0"].matched_tokens == 0


async def test_a_part_of_a_match_that_does_not_count_is_not_loaded_either(keyspace: Keyspace) -> None:
    await keyspace.workers(1, flags=TIERED)
    hashes = keyspace.chain(100)
    await keyspace.hold(1, hashes, 20)
    await tier(keyspace, 1, hashes, 100)
    rows = await explained(keyspace, hashes, prefix_tokens=60 * BLOCK)
    assert rows["w1.0"].terms.load_s == pytest.approx(2 * 40 * BLOCK * FAST, abs=1e-6)
    assert rows["w1.0"].tier_tokens == 80 * BLOCK


async def test_a_prompt_that_is_being_made_beyond_the_tier_needs_no_load(keyspace: Keyspace) -> None:
    await keyspace.workers(1, flags=TIERED)
    hashes = keyspace.chain(40)
    await tier(keyspace, 1, hashes, 20)
    await keyspace.fleet.bookings.decide(keyspace.ask(hashes))
    row = (await explained(keyspace, hashes))["w1.0"]
    assert (row.matched_tokens, row.tier_tokens, row.speculative_tokens) == (40 * BLOCK, 0, 40 * BLOCK)


async def test_random_sets_are_matched_as_a_plain_walk_would(keyspace: Keyspace) -> None:
    await keyspace.workers(6, flags=TIERED)
    for trial in range(30):
        hashes = keyspace.chain(keyspace.rng.randrange(1, 60))
        depths: dict[int, tuple[int, int]] = {}
        for number in range(1, 7):
            gpu, cpu = (keyspace.rng.choice((0, keyspace.rng.randrange(len(hashes) // 8 + 1))) for _ in "gc")
            depths[number] = gpu, cpu
            await keyspace.hold(number, hashes, gpu)
            await tier(keyspace, number, hashes, cpu)
        rows = await explained(keyspace, hashes)
        for number, (gpu, cpu) in depths.items():
            row = rows[f"w{number}.0"]
            expected = (max(gpu, cpu) * BLOCK, max(0, cpu - gpu) * BLOCK)
            assert (row.matched_tokens, row.tier_tokens) == expected, (trial, number, depths)


async def test_gaps_in_tiers_never_hide_what_a_gpu_holds(keyspace: Keyspace) -> None:
    """A tier evicts in an order of its own: it may lack the beginning of a prompt, or blocks in its middle."""
    await keyspace.workers(5, flags=TIERED)
    for trial in range(60):
        length = keyspace.rng.randrange(1, 80)
        hashes, gpus = keyspace.chain(length), [keyspace.rng.randrange(length + 1) for _ in range(5)]
        for number, gpu in enumerate(gpus, 1):
            await keyspace.hold(number, hashes, gpu)
            slot = await tier(keyspace, number, hashes, 0)
            for _ in range(3):
                begin = keyspace.rng.randrange(length)
                await keyspace.hold(slot, hashes[8 * begin : 8 * keyspace.rng.randrange(begin, length + 1)])
        rows = await explained(keyspace, hashes)
        held = [rows[f"w{number}.0"].matched_tokens - rows[f"w{number}.0"].tier_tokens for number in range(1, 6)]
        assert held == [gpu * BLOCK for gpu in gpus], trial


async def test_what_a_tier_holds_is_not_being_computed(keyspace: Keyspace) -> None:
    """A worker computes the beginning for another request, and will load the rest."""
    await keyspace.workers(2, flags=TIERED)
    hashes = keyspace.chain(100)
    maker = (await keyspace.fleet.bookings.decide(keyspace.ask(hashes[: 8 * 16]))).worker_id
    before = await explained(keyspace, hashes)
    await tier(keyspace, int(maker[1]), hashes, 100)
    rows = await explained(keyspace, hashes)
    [other] = [worker for worker in rows if worker != maker]
    assert rows[maker].tier_tokens == 84 * BLOCK
    assert 0 < rows[other].terms.again_s == pytest.approx(before[other].terms.again_s)


def whole(keyspace: Keyspace, hashes: bytes, size: int = BLOCK) -> dict[str, Any]:
    """Fields of a question whose prompt ends with the last of these blocks."""
    prompt = len(hashes) // 8 * size
    chains = (Chain(SCHEME, size, hashes[:-8], hashes[-8:]),)
    return {"chains": chains, "prompt_tokens": prompt, "decode_tokens": prompt + 100}


@pytest.mark.parametrize(
    ("gpu", "cpu", "held", "loaded"),
    [(0, 10, 10, 10), (10, 10, 10, 1), (9, 10, 10, 1), (3, 10, 10, 7), (10, 9, 9, 0), (10, 0, 9, 0), (3, 8, 8, 5)],
)
@pytest.mark.parametrize("others", [0, 20])  # tiers of other workers: few are asked for, many are read
async def test_the_last_block_of_a_prompt_is_loaded_though_the_gpu_holds_it(
    keyspace: Keyspace, gpu: int, cpu: int, held: int, loaded: int, others: int
) -> None:
    await keyspace.workers(1 + others, flags=TIERED)
    for number in range(2, 2 + others):
        await tier(keyspace, number, keyspace.chain(3), 3, kind=CPU + LOADS_LAST)
    hashes = keyspace.chain(10)
    await keyspace.hold(1, hashes, gpu)
    await tier(keyspace, 1, hashes, cpu, kind=CPU + LOADS_LAST)
    row = (await explained(keyspace, **whole(keyspace, hashes)))["w1.0"]
    assert (row.matched_tokens, row.tier_tokens) == (held * BLOCK, loaded * BLOCK)
    assert row.tier_s == pytest.approx(loaded * BLOCK * FAST, abs=1e-6)
    assert row.tier == ("cpu" if loaded else "")


async def test_a_tier_of_another_connector_loads_no_last_block(keyspace: Keyspace) -> None:
    await keyspace.workers(1, flags=TIERED)
    hashes = keyspace.chain(10)
    await tier(keyspace, 1, hashes, 10)
    assert (await explained(keyspace, **whole(keyspace, hashes)))["w1.0"].matched_tokens == 9 * BLOCK


async def test_the_last_block_counts_only_where_all_before_it_is_held(keyspace: Keyspace) -> None:
    """The tier lacks the beginning, which only one of the GPUs has; a gap in a tier is found as before."""
    await keyspace.workers(3, flags=TIERED)
    hashes = keyspace.chain(10)
    await keyspace.hold(1, hashes, 10)
    await keyspace.hold(2, hashes, 8)
    for number in (1, 2):
        slot = await tier(keyspace, number, hashes, 0, kind=CPU + LOADS_LAST)
        await keyspace.hold(slot, hashes[-8:])
    gapped = await tier(keyspace, 3, hashes, 10, kind=CPU + LOADS_LAST)
    await keyspace.drop(gapped, hashes[8 * 4 : 8 * 5])
    rows = await explained(keyspace, **whole(keyspace, hashes))
    assert [rows[f"w{number}.0"].matched_tokens // BLOCK for number in (1, 2)] == [10, 8]
    fields = whole(keyspace, hashes) | {"only": ("w3.0",)}
    decision = await keyspace.fleet.bookings.decide(keyspace.ask(**fields))
    assert (decision.matched_tokens, decision.tier_tokens) == (4 * BLOCK, 4 * BLOCK)


async def test_two_blocks_of_an_engine_that_drafts_are_loaded_whole(keyspace: Keyspace) -> None:
    """Its chain has none of them."""
    await keyspace.workers(1, flags=TIERED)
    hashes = keyspace.chain(1)
    await tier(keyspace, 1, hashes, 1, kind=CPU + LOADS_LAST + LOADS_DROPPED)
    fields = whole(keyspace, hashes) | {"prompt_tokens": 2 * BLOCK}
    decision = await keyspace.fleet.bookings.decide(keyspace.ask(**fields))
    assert (decision.matched_tokens, decision.tier_tokens) == (2 * BLOCK, 2 * BLOCK)


@pytest.mark.parametrize("tiers", [1, 20])
async def test_a_prompt_of_one_block_is_loaded_whole(keyspace: Keyspace, tiers: int) -> None:
    await keyspace.workers(tiers, flags=TIERED)
    hashes = keyspace.chain(1)
    for number in range(1, 1 + tiers):
        await tier(keyspace, number, hashes, 1, kind=CPU + LOADS_LAST)
    decision = await keyspace.fleet.bookings.decide(keyspace.ask(**whole(keyspace, hashes)))
    assert (decision.matched_tokens, decision.tier_tokens) == (BLOCK, BLOCK)


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("gpu", [0, 1, 4, 9, 10])
@pytest.mark.parametrize("cpu", [0, 1, 4, 5, 9, 10])
async def test_a_tier_loads_the_block_that_a_draft_model_drops(
    keyspace: Keyspace, gpu: int, cpu: int, ends: bool
) -> None:
    """The chain has the blocks from the second on, because the GPU's last cached block is computed once more."""
    await keyspace.workers(1, flags=TIERED)
    hashes = keyspace.chain(10)
    await keyspace.hold(1, hashes, gpu)
    await tier(keyspace, 1, hashes, cpu, kind=CPU + LOADS_LAST + LOADS_DROPPED)
    fields: dict[str, Any] = whole(keyspace, hashes) if ends else {"chains": (Chain(SCHEME, BLOCK, hashes),)}
    prompt = fields["prompt_tokens"] = 11 * BLOCK + (0 if ends else 3)
    row = (await explained(keyspace, **fields))["w1.0"]
    on_gpu = min(gpu, 9) if ends else gpu
    reach = max(on_gpu, cpu + 1 if cpu else 0)
    assert (row.matched_tokens, row.tier_tokens) == (min(reach * BLOCK, prompt), (reach - on_gpu) * BLOCK)


@pytest.mark.parametrize(("gap", "held"), [(0, 10), (1, 2), (2, 3), (5, 6)])
async def test_a_gap_in_such_a_tier_ends_the_match(keyspace: Keyspace, gap: int, held: int) -> None:
    """gap: the number of a block that the tier lacks, from 0. The GPU's last, number 1, must be loaded to go on."""
    await keyspace.workers(1, flags=TIERED)
    hashes = keyspace.chain(10)
    await keyspace.hold(1, hashes, 2)
    slot = await tier(keyspace, 1, hashes, 9, kind=CPU + LOADS_LAST + LOADS_DROPPED)
    await keyspace.drop(slot, hashes[8 * gap : 8 * gap + 8])
    decision = await keyspace.fleet.bookings.decide(keyspace.ask(hashes, extra_tokens=1 + BLOCK))
    assert decision.matched_tokens == held * BLOCK


async def test_a_prompt_that_is_held_whole_books_the_token_that_is_computed_again(keyspace: Keyspace) -> None:
    await keyspace.workers(1, flags=TIERED)
    hashes = keyspace.chain(10)
    await keyspace.hold(1, hashes, 10)
    await tier(keyspace, 1, hashes, 10, 0.0, kind=CPU + LOADS_LAST)
    decision = await keyspace.fleet.bookings.decide(keyspace.ask(**whole(keyspace, hashes)))
    assert (decision.matched_tokens, decision.prefill_tokens) == (10 * BLOCK, 1)
    assert (await keyspace.row(1)).prefill_tokens == 1
    await keyspace.fleet.bookings.settle(decision.reservation, "finished")
    assert (await keyspace.row(1)).prefill_tokens == 0


async def test_chains_of_several_schemes_have_last_blocks_of_their_own(keyspace: Keyspace) -> None:
    """A prompt of 5 blocks of 16 tokens ends within a block of 32; engines with tiers hold it in both schemes."""
    await keyspace.workers(2, flags=TIERED)
    small, large = keyspace.chain(5), keyspace.chain(2)
    await keyspace.change(2, scheme=SCHEME + 1)
    await tier(keyspace, 1, small, 5, kind=CPU + LOADS_LAST)
    await tier(keyspace, 2, large, 2, kind=CPU + LOADS_LAST)
    for chains in ((0, 1), (1, 0)):
        both = Chain(SCHEME, 16, small[:-8], small[-8:]), Chain(SCHEME + 1, 32, large)
        fields = whole(keyspace, small) | {"chains": tuple(both[k] for k in chains)}
        rows = await explained(keyspace, **fields)
        assert [rows[f"w{number}.0"].matched_tokens for number in (1, 2)] == [80, 64]
