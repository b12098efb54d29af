"""renew keeps and rebuilds reservations; register makes approximate workers; prove records probes."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, cast

import pytest
from tests.support.fleet.keyspace import READY, SCHEME, Keyspace

from warmfleet.errors import BadArgument, NoWorker
from warmfleet.fleet import RENEW_AT_ONCE, Check, Flag, LoadRow, Proof, Renewal, Stage

RECORD = {"scheme_id": SCHEME, "url": "http://10.9.9.9:8000"}

# ---------------------------------------------------------------- renew


async def test_renewing_moves_the_expiry_and_nothing_else(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    ask = keyspace.ask(keyspace.chain(10))
    await keyspace.fleet.bookings.decide(ask)
    before, row = await keyspace.leases(), await keyspace.row(1)
    await keyspace.store.zadd(keyspace.keys.leases, {ask.reservation: 1})
    assert await keyspace.fleet.bookings.renew([Renewal(ask.reservation, "w1.0", 161, 300)]) == (1, 0, 0)
    expiry = cast("float", await keyspace.store.zscore(keyspace.keys.leases, ask.reservation))
    assert expiry == pytest.approx(time.time() * 1000 + 30_000, abs=9_000)
    assert (await keyspace.leases(), await keyspace.row(1)) == (before, row)


async def test_what_redis_lost_is_booked_anew(keyspace: Keyspace) -> None:
    await keyspace.workers(2)
    renewals = [Renewal("wf-a", "w1.0", 700, 900), Renewal("wf-b", "w1.0", 700, 900, started=True)]
    renewals += [Renewal("wf-c", "gone.0", 1, 1)]
    assert await keyspace.fleet.bookings.renew(renewals) == (0, 2, 1)
    row = await keyspace.row(1)
    assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (700, 1_800, 2)
    assert await keyspace.fleet.bookings.renew(renewals[:2]) == (2, 0, 0)
    for name in ("wf-a", "wf-b"):
        assert await keyspace.fleet.bookings.settle(name, "finished") == "SETTLED"
    row = await keyspace.row(1)
    assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, 0, 0)
    assert await keyspace.leases() == {}


async def test_a_first_token_that_redis_lost_is_told_again(keyspace: Keyspace) -> None:
    """Only the other lease's expiry moves; a worker that has joined anew since then owes nothing."""
    await keyspace.workers(1)
    asks = [keyspace.ask(keyspace.chain(10), decode_tokens=300) for _ in range(3)]
    for ask in asks:
        await keyspace.fleet.bookings.decide(ask)
    renewals = [Renewal(ask.reservation, "w1.0", 0, 300, started=True) for ask in asks]
    assert await keyspace.fleet.bookings.renew([renewals[0], renewals[1]._replace(started=False)]) == (2, 0, 0)
    row, leases = await keyspace.row(1), await keyspace.leases()
    assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (2 * 161, 900, 3)
    lease = leases[asks[0].reservation]
    assert (lease.stage, lease.prefill_tokens, lease.prompt_tokens) == (Stage.STARTED, 0, 161)
    await keyspace.change(1, epoch=2, prefill_tokens=500, decode_tokens=70, in_flight=2)  # requests that came since
    assert await keyspace.fleet.bookings.renew(renewals) == (3, 0, 0)
    for ask in asks:
        await keyspace.fleet.bookings.settle(ask.reservation, "failed")
    row = await keyspace.row(1)
    assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (500, 70, 2)
    assert (await keyspace.leases(), await keyspace.speculation()) == ({}, {})


async def test_what_has_ended_is_not_renewed(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    ask = keyspace.ask(keyspace.chain(10))
    await keyspace.fleet.bookings.decide(ask)
    await keyspace.fleet.bookings.settle(ask.reservation, "finished")
    await keyspace.fleet.bookings.settle("wf-dead", "cancelled")
    renewals = [Renewal(ask.reservation, "w1.0", 1, 1), Renewal("wf-dead", "w1.0", 1, 1)]
    assert await keyspace.fleet.bookings.renew(renewals) == (0, 0, 2)
    assert (await keyspace.row(1)).in_flight == 0


async def test_a_call_renews_so_many_and_no_more(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    renewals = [Renewal(f"wf-{number}", "w1.0", 1, 1) for number in range(RENEW_AT_ONCE + 1)]
    assert await keyspace.fleet.bookings.renew(renewals[:-1]) == (0, RENEW_AT_ONCE, 0)
    with pytest.raises(BadArgument):
        await keyspace.fleet.bookings.renew(renewals)
    assert (await keyspace.row(1)).in_flight == RENEW_AT_ONCE
    assert await keyspace.fleet.bookings.renew([]) == (0, 0, 0)


async def test_what_renew_refuses(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    refused: list[tuple[Any, ...]] = [
        ("x",),
        (1, "wf", "w1.0", 1),
        (1, *["wf", "w1.0", 1, 1, 0] * 201),
        (1, "wf", "w1.0", 1, 1, 2),
    ]
    for args in refused:
        with pytest.raises(BadArgument):
            await keyspace.fleet.scripts.run("renew", *args)
    with pytest.raises(BadArgument):
        await keyspace.fleet.bookings.renew([Renewal("wf-1", "w1.0", 1, 1), Renewal("wf-2", "w1.0", -1, 1)])
    assert (await keyspace.row(1)).in_flight == 0, "all or nothing"


# ---------------------------------------------------------------- register


async def row_of(keyspace: Keyspace, name: str) -> LoadRow:
    return LoadRow.unpack(await cast("Any", keyspace.store.hget(keyspace.keys.load, name)))


async def test_a_registered_worker_is_routable_and_a_repeat_is_its_heartbeat(keyspace: Keyspace) -> None:
    await keyspace.ticked()
    slot, in_flight, word = await keyspace.fleet.workers.register("stock", RECORD, 50)
    assert (in_flight, word) == (0, "UP")
    row = await row_of(keyspace, "stock")
    assert row == LoadRow(
        epoch=slot + 1, slot=slot, scheme=SCHEME, capacity_blocks=50,
        flags=Flag.SERVER | Flag.URL | Flag.APPROXIMATE | Flag.CLOSED,
    )  # fmt: skip
    ask = keyspace.ask(keyspace.chain(4))
    assert (await keyspace.fleet.bookings.decide(ask)).worker_id == "stock"
    await keyspace.store.zadd(keyspace.keys.alive, {"stock": 1_000})
    assert await keyspace.fleet.workers.register("stock", RECORD, 60) == (slot, 1, "UP")
    assert cast("float", await keyspace.store.zscore(keyspace.keys.alive, "stock")) > 1_000
    row = await row_of(keyspace, "stock")
    assert (row.in_flight, row.capacity_blocks) == (1, 60)
    (view,) = await keyspace.fleet.workers.read()
    assert (view.url, view.models, view.routable, view.proof) == (RECORD["url"], [], True, "approximate")
    await keyspace.fleet.bookings.settle(ask.reservation, "finished")
    await keyspace.fleet.workers.register("stock", RECORD, 60)
    assert (await row_of(keyspace, "stock")).blocks == 4, "a heartbeat keeps what the mirror counts"


async def test_an_unhealthy_worker_is_out_at_once_and_returns_with_a_new_slot(keyspace: Keyspace) -> None:
    await keyspace.ticked()
    assert await keyspace.fleet.workers.register("stock", RECORD, 50, Check("FAILED")) == (0, 0, "OUT"), (
        "it never passed"
    )
    slot = (await keyspace.fleet.workers.register("stock", RECORD, 50)).slot
    await keyspace.done(keyspace.ask(keyspace.chain(4)))
    assert await keyspace.fleet.workers.register("stock", RECORD, 50, Check("FAILED")) == (slot, 0, "OUT")
    with pytest.raises(NoWorker):
        await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(4)))
    back = (await keyspace.fleet.workers.register("stock", RECORD, 50)).slot
    assert back != slot
    assert await cast("Any", keyspace.store.smembers(keyspace.keys.retired)) == {b"%d" % slot}
    assert (await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(4)))).worker_id == "stock"
    assert (await row_of(keyspace, "stock")).blocks == 0


async def test_another_scheme_is_another_slot(keyspace: Keyspace) -> None:
    slot = (await keyspace.fleet.workers.register("stock", RECORD, 50)).slot
    other = await keyspace.fleet.workers.register("stock", RECORD | {"scheme_id": 8}, 50)
    assert other.slot != slot
    assert (await row_of(keyspace, "stock")).scheme == 8


async def test_a_process_that_started_anew_is_another_slot(keyspace: Keyspace) -> None:
    slot = (await keyspace.fleet.workers.register("stock", RECORD, 50)).slot
    for started, same in ((1_763_000_001, True), (1_763_000_001, True), (0, True), (1_763_000_002, False)):
        found = (await keyspace.fleet.workers.register("stock", RECORD | {"started": started}, 50)).slot
        assert (found == slot) is same, "known late, and once not read, is no restart"
        slot = found
    late = await keyspace.fleet.workers.register("stock", RECORD | {"started": 1_763_000_001}, 50)
    assert late.slot == slot, "a check of another replica that began before the restart"
    assert (await keyspace.fleet.workers.register("stock", RECORD | {"started": 1_763_000_002}, 50)).slot == slot


# Facts that the engine announces.


async def test_an_engine_is_paused_until_a_check_finds_it_otherwise(keyspace: Keyspace) -> None:
    await keyspace.ticked()
    for told, held in ((False, False), (True, True), (None, True), (False, False), (None, False), (True, True)):
        await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", "A", paused=told))
        (view,) = await keyspace.fleet.workers.read()
        assert view.state == ("paused" if held else "approximate")
    with pytest.raises(NoWorker):
        await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(4)))
    await keyspace.fleet.workers.register("stock", RECORD, 50, Check("LEAVING", "A", 5.0))
    assert (await row_of(keyspace, "stock")).flags & Flag.PAUSED


async def test_one_that_was_down_or_started_anew_is_paused_no_more(keyspace: Keyspace) -> None:
    await keyspace.fleet.workers.register("stock", RECORD | {"started": 7}, 50, Check("PASSED", "A", paused=True))
    await keyspace.fleet.workers.register("stock", RECORD | {"started": 9}, 50, Check("PASSED", "A"))
    assert not (await row_of(keyspace, "stock")).flags & Flag.PAUSED
    await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", "A", paused=True))
    await keyspace.fleet.workers.register("stock", RECORD, 50, Check("FAILED", "A"))
    await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", "A"))
    assert not (await row_of(keyspace, "stock")).flags & Flag.PAUSED


async def test_a_wait_in_the_engine_is_load_of_others_beside_what_is_booked(keyspace: Keyspace) -> None:
    await keyspace.ticked(median=1_000)
    await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", "A", wait_s=6.0))
    assert (await row_of(keyspace, "stock")).foreign_prefill_tokens == 6_000, (
        "by the median, its own speed is not known"
    )
    await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", "A", wait_s=0.0))
    await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(100)))
    booked = (await row_of(keyspace, "stock")).prefill_tokens
    assert booked > 1_000
    for wait_s, foreign in ((6.0, 6_000 - booked), (1.0, 1), (None, 1), (0.0, 0), (None, 0)):
        await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", "A", wait_s=wait_s))
        assert (await row_of(keyspace, "stock")).foreign_prefill_tokens == foreign


async def test_a_wait_that_nobody_confirms_ends_after_a_ttl(keyspace: Keyspace) -> None:
    await keyspace.ticked()
    await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", "A", wait_s=6.0))
    record = json.loads(await cast("Any", keyspace.store.hget(keyspace.keys.workers, "stock")))
    record["told"] -= 15_001
    await cast("Any", keyspace.store.hset(keyspace.keys.workers, "stock", json.dumps(record)))
    await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", "B"))
    assert (await row_of(keyspace, "stock")).foreign_prefill_tokens == 0


async def test_a_slow_check_takes_no_engine_at_work_from_those_that_it_answers(keyspace: Keyspace) -> None:
    """Replica B found the engine slow twice; A gets bytes from it meanwhile, and says so."""
    await keyspace.ticked()
    slot = (await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", "B"))).slot
    ask = keyspace.ask(keyspace.chain(4))
    await keyspace.fleet.bookings.decide(ask)
    assert await keyspace.fleet.workers.register("stock", RECORD, 50, Check("SLOW", "B")) == (slot, 1, "UP")
    await asyncio.sleep(0.02)  # by the clock of Redis
    await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", "A"))
    assert (await keyspace.fleet.workers.register("stock", RECORD, 50, Check("SLOW", "B", 60.0))).word == "UP"
    await asyncio.sleep(0.02)
    assert (await keyspace.fleet.workers.register("stock", RECORD, 50, Check("SLOW", "B", 0.01))).word == "OUT"
    await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", "B"))
    await keyspace.fleet.bookings.settle(ask.reservation, "finished")
    assert (await keyspace.fleet.workers.register("stock", RECORD, 50, Check("SLOW", "B"))).word == "OUT", (
        "nothing runs there"
    )


# Several replicas check one engine: A and B.


async def test_a_replica_that_does_not_reach_it_does_not_take_it_from_the_others(keyspace: Keyspace) -> None:
    slot = (await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", "A"))).slot
    for since_s in (0.0, 60.0, 65.0):
        await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", "A"))
        assert await keyspace.fleet.workers.register("stock", RECORD, 50, Check("FAILED", "B", since_s)) == (
            slot,
            0,
            "UP",
        )


async def test_a_replica_takes_it_out_if_no_check_has_passed_since_its_own_failed(keyspace: Keyspace) -> None:
    await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", "A"))
    assert (await keyspace.fleet.workers.register("stock", RECORD, 50, Check("FAILED", "B"))).word == "UP"
    await asyncio.sleep(0.02)  # by the clock of Redis
    assert (await keyspace.fleet.workers.register("stock", RECORD, 50, Check("FAILED", "B", 0.01))).word == "OUT"


async def test_replicas_that_hash_otherwise_do_not_take_its_slot_in_turn(keyspace: Keyspace) -> None:
    """A replica has WARMFLEET_TOKENIZER, another has not: the recorded scheme stays while a replica confirms it."""
    other = RECORD | {"scheme_id": 8}
    slot = (await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", "A"))).slot
    assert (await keyspace.fleet.workers.register("stock", other, 50, Check("PASSED", "B"))).slot == slot
    assert (await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", "A"))).slot == slot
    record = json.loads(await cast("Any", keyspace.store.hget(keyspace.keys.workers, "stock")))
    assert record["scheme_id"] == SCHEME
    record["confirmed"] -= 20_000  # A is gone
    await cast("Any", keyspace.store.hset(keyspace.keys.workers, "stock", json.dumps(record)))
    await keyspace.fleet.workers.register("stock", other, 50, Check("PASSED", "C"))
    await keyspace.fleet.workers.register("stock", other, 50, Check("PASSED", "B"))
    assert (await row_of(keyspace, "stock")).scheme == 8


async def test_one_that_is_listed_no_longer_drains_and_then_goes(keyspace: Keyspace) -> None:
    await keyspace.ticked()
    slot = (await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", "A"))).slot
    ask = keyspace.ask(keyspace.chain(4))
    await keyspace.fleet.bookings.decide(ask)
    assert await keyspace.fleet.workers.register("stock", RECORD, 50, Check("LEAVING", "A")) == (slot, 1, "UP")
    assert await keyspace.fleet.workers.register("stock", RECORD, 50, Check("LEAVING", "A", 5.0)) == (
        slot,
        1,
        "LEAVING",
    )
    with pytest.raises(NoWorker):
        await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(4)))
    await keyspace.fleet.bookings.settle(ask.reservation, "finished")
    assert await keyspace.fleet.workers.register("stock", RECORD, 50, Check("LEAVING", "A", 7.0)) == (
        slot,
        0,
        "LEAVING",
    )
    assert await keyspace.fleet.upkeep.forget("stock")
    assert await keyspace.fleet.workers.register("stock", RECORD, 50, Check("LEAVING", "A", 9.0)) == (0, 0, "GONE")
    assert await keyspace.fleet.workers.read() == []


@pytest.mark.parametrize("older", [False, True], ids=["of one version", "of two versions"])
@pytest.mark.parametrize("last", ["A", "B"])
async def test_a_replica_with_a_new_list_takes_nothing_from_the_others(
    keyspace: Keyspace, last: str, older: bool
) -> None:
    """Replica A drops the engine from its list, B keeps it. The engine gets new requests at every moment."""
    await keyspace.ticked()
    await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", last))
    words = []
    for since_s in (0.0, 5.0, 10.0):
        words.append((await keyspace.fleet.workers.register("stock", RECORD, 50, Check("LEAVING", "A", since_s))).word)
        assert (await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(4)))).worker_id == "stock"
        await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", "B"))
        if older:  # register writes its record, and keeps the row
            await cast("Any", keyspace.store.hset(keyspace.keys.workers, "stock", json.dumps(RECORD)))
    assert words == ["UP" if last == "A" else "LISTED", "LISTED", "LISTED"]


async def test_one_that_another_replica_lists_drains_no_longer(keyspace: Keyspace) -> None:
    """Replica B did not reach the engine, or did not run, while A let it drain."""
    await keyspace.ticked()
    await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", "A"))
    for since_s in (0.0, 5.0):
        await keyspace.fleet.workers.register("stock", RECORD, 50, Check("LEAVING", "A", since_s))
    assert (await row_of(keyspace, "stock")).flags & Flag.DRAINING
    assert (await keyspace.fleet.workers.register("stock", RECORD, 50, Check("PASSED", "B"))).word == "UP"
    assert (await keyspace.fleet.workers.register("stock", RECORD, 50, Check("LEAVING", "A", 10.0))).word == "LISTED"
    assert (await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(4)))).worker_id == "stock"


async def test_leaving_does_not_end_what_the_operator_drains(keyspace: Keyspace) -> None:
    await keyspace.fleet.workers.register("stock", RECORD, 50)
    assert await keyspace.fleet.workers.drain("stock", draining=True)
    for since_s in (0.0, 5.0):
        word = (await keyspace.fleet.workers.register("stock", RECORD, 50, Check("LEAVING", since_s=since_s))).word
    assert word == "LEAVING"
    await keyspace.fleet.workers.register("stock", RECORD, 50)
    assert (await row_of(keyspace, "stock")).flags & Flag.DRAINING


async def test_what_register_refuses(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    before = await keyspace.row(1)
    with pytest.raises(BadArgument):
        await keyspace.fleet.workers.register("w1.0", RECORD, 50)  # the worker joined by its own stream
    with pytest.raises(BadArgument):
        await keyspace.fleet.workers.register("stock", RECORD, 0)
    with pytest.raises(BadArgument):
        await keyspace.fleet.scripts.run("register", "stock", "not json", 5, "PASSED", "A", 0, 15_000)
    assert await keyspace.row(1) == before


# ---------------------------------------------------------------- prove


@pytest.mark.parametrize(
    ("proof", "flags"), [("proven", 2 | 4), ("identity", 2), ("url", 0), ("pending", 0)], ids=lambda value: str(value)
)
async def test_a_proof_sets_the_flags(keyspace: Keyspace, proof: str, flags: int) -> None:
    await keyspace.workers(2, flags=READY)
    before = await keyspace.row(1)
    assert await keyspace.fleet.probes.prove("w1.0", "n1", Proof(proof, "because", "text")) == "OK"
    row = await keyspace.row(1)
    assert row.flags == (READY & ~(Flag.URL | Flag.PROVEN)) | flags
    assert LoadRow(**{**_fields(row), "flags": before.flags}) == before
    record = json.loads(await cast("Any", keyspace.store.hget(keyspace.keys.workers, "w1.0")))
    assert (record["proof"], record["reason"], record["cause"], record["nonce"]) == (proof, "because", "text", "n1")
    (view, _) = await keyspace.fleet.workers.read()
    assert view.probed_age_s is not None
    assert 0 <= view.probed_age_s < 5
    assert (await keyspace.fleet.index.counts())[f"proof_{proof}"] == 1


def _fields(row: LoadRow) -> dict[str, int]:
    return {name: getattr(row, name) for name in LoadRow.__slots__}


async def test_a_stale_proof_changes_nothing(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    before = await keyspace.row(1)
    assert await keyspace.fleet.probes.prove("w1.0", "another nonce", Proof("url", "")) == "STALE"
    assert await keyspace.fleet.probes.prove("nobody.0", "n1", Proof("url", "")) == "STALE"
    assert await keyspace.row(1) == before
    with pytest.raises(BadArgument):
        await keyspace.fleet.probes.prove("w1.0", "n1", Proof("maybe", ""))


async def test_of_two_probes_a_failure_does_not_undo_a_success(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    assert await keyspace.fleet.probes.prove("w1.0", "n1", Proof("identity", "", "untested", probed_ms=0)) == "OK"
    probed = (await _record(keyspace))["probed"]
    await asyncio.sleep(0.002)  # results differ by the millisecond
    assert await keyspace.fleet.probes.prove("w1.0", "n1", Proof("proven", "", "", probed_ms=0)) == "OK"
    for seen in (0, probed):
        assert (
            await keyspace.fleet.probes.prove("w1.0", "n1", Proof("identity", "", "untested", probed_ms=seen))
            == "STALE"
        )
    now = (await _record(keyspace))["probed"]
    assert await keyspace.fleet.probes.prove("w1.0", "n1", Proof("identity", "", "text", probed_ms=now)) == "DOWNGRADED"


async def test_a_result_ends_a_suspicion_and_results_that_settle_nothing_are_counted(keyspace: Keyspace) -> None:
    await keyspace.workers(1)

    async def suspected() -> None:
        record = await _record(keyspace) | {"suspect": "blocks", "strikes": 2}
        await cast("Any", keyspace.store.hset(keyspace.keys.workers, "w1.0", json.dumps(record)))

    seen = []
    for proof in ("proven", "suspected", "proven", "suspected", "proven", "identity", "identity", "proven", "proven"):
        if proof == "suspected":
            await suspected()
            continue
        told = await keyspace.fleet.probes.prove("w1.0", "n1", Proof(proof, "", "text" if proof == "identity" else ""))
        record = await _record(keyspace)
        assert "suspect" not in record
        assert "strikes" not in record
        seen.append((told, record["tries"]))
    assert seen == [("OK", 0), ("OK", 1), ("OK", 2), ("DOWNGRADED", 1), ("OK", 2), ("OK", 0), ("OK", 0)]
    assert (await keyspace.fleet.index.counts())["downgrade_text"] == 1


async def _record(keyspace: Keyspace) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads(await cast("Any", keyspace.store.hget(keyspace.keys.workers, "w1.0"))))


# ---------------------------------------------------------------- prove: warming


async def joined(keyspace: Keyspace, proof: str = "pending") -> None:
    """A worker that no replica has probed."""
    await keyspace.workers(1, flags=Flag.SERVER)
    record = await _record(keyspace) | {"proof": proof}
    await cast("Any", keyspace.store.hset(keyspace.keys.workers, "w1.0", json.dumps(record)))


async def warms(keyspace: Keyspace, owner: str, lease_ms: int = 60_000) -> str:
    return await keyspace.fleet.probes.warming("w1.0", "n1", owner, lease_ms)


async def test_one_replica_warms_and_its_word_ends_it(keyspace: Keyspace) -> None:
    await joined(keyspace)
    assert [await warms(keyspace, owner) for owner in ("a", "b", "a")] == ["OK", "TAKEN", "OK"]
    (view,) = await keyspace.fleet.workers.read()
    assert (view.proof, view.routable, (await keyspace.row(1)).flags) == ("warming", False, Flag.SERVER)
    for owner in ("", "b"):
        for proof in ("proven", "identity", "url", "pending"):
            assert await keyspace.fleet.probes.prove("w1.0", "n1", Proof(proof, "", owner=owner)) == "TAKEN"
    assert (await keyspace.fleet.workers.read())[0].proof == "warming"
    assert await keyspace.fleet.probes.prove("w1.0", "n1", Proof("proven", "", owner="a")) == "OK"
    assert (await keyspace.fleet.workers.read())[0].routable
    assert (await keyspace.fleet.index.counts())["proof_warming"] == 1
    for owner in ("a", "b"):
        assert await warms(keyspace, owner) == "TAKEN", "once for an incarnation"
    assert (await keyspace.fleet.workers.read())[0].routable


async def test_a_warming_whose_time_is_over_is_everybodys_but_its_owners(keyspace: Keyspace) -> None:
    await joined(keyspace)
    assert await warms(keyspace, "a", 1) == "OK"
    await asyncio.sleep(0.005)  # its lease is over
    (view,) = await keyspace.fleet.workers.read()
    assert view.proof == "pending", "it is to be tested"
    assert [await warms(keyspace, owner) for owner in ("a", "b")] == ["TAKEN", "TAKEN"]
    assert await keyspace.fleet.probes.prove("w1.0", "n1", Proof("proven", "", owner="a")) == "TAKEN"
    assert await keyspace.fleet.probes.prove("w1.0", "n1", Proof("proven", "")) == "OK"


@pytest.mark.parametrize("proof", ["proven", "identity"])
async def test_who_is_routed_to_is_not_warmed(keyspace: Keyspace, proof: str) -> None:
    await joined(keyspace, proof)
    assert await warms(keyspace, "a") == "TAKEN"
    assert (await _record(keyspace))["proof"] == proof


async def test_a_server_that_joins_anew_ends_its_warming(keyspace: Keyspace) -> None:
    await joined(keyspace)
    assert await warms(keyspace, "a") == "OK"
    record = await _record(keyspace) | {"proof": "pending"}  # as apply_server leaves it
    await cast("Any", keyspace.store.hset(keyspace.keys.workers, "w1.0", json.dumps(record)))
    assert await keyspace.fleet.probes.prove("w1.0", "n1", Proof("proven", "", owner="a")) == "TAKEN", (
        "another URL, perhaps"
    )
    assert await warms(keyspace, "b") == "TAKEN", "once for an incarnation"
    assert await keyspace.fleet.probes.prove("w1.0", "n1", Proof("proven", "")) == "OK"
