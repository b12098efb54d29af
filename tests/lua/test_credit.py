"""Blocks that a decision counts as held or being made: never too many, too few only for a short time, at low cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.keyspace import BLOCK, SCHEME, Keyspace
from tests.support.redis.packed_commands import arguments_of

from warmfleet.errors import BadArgument
from warmfleet.fleet import SCRIPT_ARGS

if TYPE_CHECKING:
    from warmfleet.fleet import Question

RECORD = {"scheme_id": SCHEME, "url": "http://10.9.9.9:8000"}


async def matched_blocks(keyspace: Keyspace, ask: Question) -> dict[str, int]:
    _, rows = await keyspace.fleet.queue.explain(ask)
    return {row.worker_id: row.matched_tokens // BLOCK for row in rows}


async def chains_left(keyspace: Keyspace) -> list[bytes]:
    pattern = keyspace.keys.prefix.encode().replace(b"{", b"\\{") + b"c:*"
    return [key async for key in keyspace.store.scan_iter(match=pattern, count=1_000)]


@pytest.mark.parametrize("parts_at", [0, 280])
async def test_a_long_conversation_on_a_stock_engine_is_known_to_its_end(keyspace: Keyspace, parts_at: int) -> None:
    await keyspace.ticked()
    await keyspace.fleet.workers.register("stock", RECORD, 20_000)
    if parts_at:
        await keyspace.done(keyspace.ask(keyspace.chain(400)[: 8 * 300]))
    whole = keyspace.chain(512)
    sent = 0
    for blocks in range(260, 511, 5):
        ask = keyspace.ask(whole[: 8 * blocks])
        assert await matched_blocks(keyspace, ask) == {"stock": sent}
        await keyspace.done(ask)
        sent = blocks
    assert await chains_left(keyspace) == []


async def test_kappa_is_not_charged_for_what_a_stock_engine_merely_holds(keyspace: Keyspace) -> None:
    await keyspace.ticked()
    await keyspace.fleet.workers.register("a", RECORD, 20_000)
    chain = keyspace.chain(200)
    await keyspace.done(keyspace.ask(chain))
    await keyspace.fleet.workers.register("b", RECORD, 20_000)
    _, rows = await keyspace.fleet.queue.explain(keyspace.ask(chain))
    assert {row.worker_id: row.cost_s for row in rows}["b"] == pytest.approx(
        0.32 * keyspace.fleet.constants.weights.stay, rel=0.01
    )


async def test_an_open_request_does_not_hide_what_another_was_sent(keyspace: Keyspace) -> None:
    await keyspace.ticked()
    await keyspace.fleet.workers.register("a", RECORD, 20_000)
    head = keyspace.chain(50)
    sent = keyspace.chain(62, head=head)
    await keyspace.done(keyspace.ask(sent))
    longer = keyspace.chain(63, head=sent)
    await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(60, head=head)))
    assert await matched_blocks(keyspace, keyspace.ask(longer)) == {"a": 62}


async def test_an_id_that_comes_again_elsewhere_gives_no_credit_here(keyspace: Keyspace) -> None:
    await keyspace.workers(2)
    head = keyspace.chain(20)
    chain = keyspace.chain(100, head=head)
    await keyspace.fleet.bookings.decide(keyspace.ask(chain, reservation="wf-x", exclude=("w2.0",)))
    await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(100, head=head), exclude=("w2.0",)))
    await keyspace.fleet.bookings.settle("wf-x", "failed")
    await keyspace.fleet.bookings.decide(keyspace.ask(chain, reservation="wf-x", exclude=("w1.0",)))
    assert (await matched_blocks(keyspace, keyspace.ask(chain)))["w1.0"] <= 20


@pytest.mark.parametrize("number", ["nan", "inf", "1e300", "4294967296", "2147483648", "0"])
async def test_numbers_that_no_row_can_hold_are_refused(keyspace: Keyspace, number: str) -> None:
    await keyspace.workers(1)
    args = arguments_of(keyspace.fleet.bookings.decide_command(keyspace.ask(b""), in_turn=False))
    args[SCRIPT_ARGS["decide"].index("prompt_tokens")] = number.encode()
    with pytest.raises(BadArgument):
        await keyspace.fleet.scripts.run("decide", *args)


async def test_a_row_without_a_name_is_nobody(keyspace: Keyspace) -> None:
    await keyspace.workers(2)
    await cast("Any", keyspace.store.hset(keyspace.keys.load, "w2.0", (await keyspace.row(2)).pack("")))
    assert {(await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(30)))).worker_id for _ in range(4)} == {
        "w1.0"
    }


@pytest.mark.in_turn
async def test_open_leases_of_everybody_on_one_chain_do_not_make_a_decision_dear(keyspace: Keyspace) -> None:
    """64 workers hold a chain and make more of it: two or three times the cost of one, as no chain is read whole."""
    names, blocks = await keyspace.workers(65), 2_500
    chain = keyspace.chain(blocks)

    async def only(number: int, hashes: bytes) -> None:
        others = tuple(name for name in names if name != f"w{number}.0")
        await keyspace.fleet.bookings.decide(keyspace.ask(hashes, exclude=others))

    async def used_s() -> float:
        said: Any = await keyspace.store.info("cpu")
        return float(said["used_cpu_user"] + said["used_cpu_sys"])

    async def cpu_ms(hashes: bytes) -> float:
        """CPU time of Redis for one decision."""
        before = await used_s()
        for _ in range(50):
            await keyspace.fleet.queue.explain(keyspace.ask(hashes))
        return 1_000 * (await used_s() - before) / 50

    for number in range(1, 65):
        await keyspace.hold(number, chain)
    other = keyspace.chain(blocks, head=chain[: 8 * (blocks // 2 + 40)])
    alone = [await cpu_ms(hashes) for hashes in (chain, other)]
    for number in range(1, 65):
        await only(number, keyspace.chain(blocks + 5, head=chain))
    await only(65, chain)
    leased = [await cpu_ms(hashes) for hashes in (chain, other)]
    assert max(now / before for now, before in zip(leased, alone, strict=True)) < 5
