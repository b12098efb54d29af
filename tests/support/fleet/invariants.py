"""Lets a fleet come to rest after the steps of ``chaos``, and asserts the invariants that must hold then."""

from __future__ import annotations

import json
import struct
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.support.fleet.chaos import FOREIGN_SLOT, NAMES, NUMBERS
from tests.support.fleet.reporting_worker import block

from warmfleet.errors import NoWorker
from warmfleet.fleet import Lease, LoadRow, Question, Spans, Stage
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.fleet.chaos import ChaosFleet
    from tests.support.fleet.stepped_publisher import SteppedPublisher


# ---------------------------------------------------------------- coming to rest


async def quiet(chaos: ChaosFleet) -> None:
    """Heartbeats, ticks and commands as in life, until no worker waits for anything; then check the invariants."""
    for _ in range(12):
        await period(chaos)
        half_a_minute_passes(chaos)
        if not wrong(chaos):
            break
    else:
        raise AssertionError(f"still not in step: {wrong(chaos)}")
    while (await chaos.fleets[0].upkeep.collect(500))[1]:
        pass
    check_index(chaos)
    check_load(chaos)
    await check_the_gone(chaos)


async def period(chaos: ChaosFleet) -> None:
    """Five seconds pass: each process sends a heartbeat and reads its command; snapshots that were begun end."""
    everybody = [process for name in NAMES for process in chaos.processes[name]]
    for process in everybody:
        process.round(beat=True, listen=True)
    for _ in range(60):
        blocks = [(await fleet.upkeep.step()).blocks for fleet in chaos.fleets]
        for process in everybody:
            process.round(listen=True)
        left = any(unread(chaos, name) for name in NAMES)
        if not left and not any(blocks) and not any(process.busy for process in everybody):
            return


def unread(chaos: ChaosFleet, name: str) -> bool:
    kind = chaos.store.type(chaos.keys.events(name))
    return kind not in (b"none", b"stream") or (kind == b"stream" and chaos.store.xlen(chaos.keys.events(name)) > 0)


def half_a_minute_passes(chaos: ChaosFleet) -> None:
    """Snapshots that were commanded or begun and made no progress are commanded again; so are a plugin's own."""
    for name, score in chaos.store.zrange(chaos.keys.resync, 0, -1, withscores=True):
        if score > 0:
            chaos.store.zadd(chaos.keys.resync, {name: 1})
    for name in NAMES:
        for process in chaos.processes[name]:
            process.half_a_minute_passes()


def owner(chaos: ChaosFleet, name: str) -> SteppedPublisher | None:
    """The process that Redis has recorded as this worker."""
    raw = chaos.store.hget(chaos.keys.workers, name)
    nonce = json.loads(raw)["nonce"] if raw else None
    return next((other for other in chaos.processes[name] if other.running and other.stream.nonce == nonce), None)


def row_of(chaos: ChaosFleet, name: str) -> LoadRow | None:
    raw = chaos.store.hget(chaos.keys.load, name)
    return LoadRow.unpack(raw) if raw else None


def further(chaos: ChaosFleet, name: str, process: SteppedPublisher) -> dict[str, tuple[bytes, set[bytes]]]:
    """By kind of the worker's further sets: the slot with its mark, and the process's own table."""
    sets = json.loads(chaos.store.hget(chaos.keys.workers, name)).get("sets", {})
    return {
        kind: (b"%d%s" % (sets[kind]["slot"], b":e" if kind == "ends" else b""), set(tracker.table))
        for kind, tracker in process.further.items()
    }


def held(chaos: ChaosFleet, slot: bytes) -> set[bytes]:
    return set(chaos.store.smembers(chaos.keys.prefix.encode() + b"s:" + slot))


def wrong(chaos: ChaosFleet) -> str:
    """The violations that are found; empty if there are none."""
    for name in NAMES:
        process, row = owner(chaos, name), row_of(chaos, name)
        if not chaos.processes[name]:
            continue
        if process is None or row is None:
            return f"nobody is taken for {name}: {[other.publisher.state for other in chaos.processes[name]]}"
        if any(other.running for other in chaos.processes[name] if other is not process):
            return f"two processes go on as {name}"
        if chaos.store.smembers(chaos.keys.slot(row.slot)) != process.table:
            return f"the index of {name} is not its table"
        if differing := [
            kind for kind, (key, table) in further(chaos, name, process).items() if held(chaos, key) != table
        ]:
            return f"the index of {name} differs in {differing}"
        if chaos.store.zscore(chaos.keys.resync, name) is not None:
            return f"{name} still waits for a snapshot"
        truth = json.loads(chaos.store.hget(chaos.keys.workers, name))["truth"]
        if truth.get("cause", "join") != "join" or truth.get("healed", 0) != truth.get("found", 0):
            return f"{name} is right, and is said to differ: {truth}"
    return ""


# ---------------------------------------------------------------- what must hold at rest


def check_noticed(chaos: ChaosFleet) -> None:
    """At any time: an index that differs from what was published, although all entries are read, is known to differ.

    A digest would show the difference too, five seconds later; batch numbers and nonces must show it at once.
    """
    for name in NAMES:
        process = owner(chaos, name)
        if process is None or process.forged == process.stream.nonce or process.publisher._snapshot is not None:
            continue
        pipe = chaos.store.pipeline(transaction=False)
        pipe.hget(chaos.keys.batch, name).zscore(chaos.keys.resync, name)
        pipe.hget(chaos.keys.digest, name).hget(chaos.keys.workers, name)
        batch, waiting, digest, raw = pipe.execute()
        record = json.loads(raw)
        assert waiting is None or waiting > 0 or record["truth"].get("cause"), f"{name} waits, and nobody can say why"
        if int(batch) != process.stream.number or waiting is not None or record.get("rejoin") or unread(chaos, name):
            continue
        heard_ms, now_ms = chaos.store.zscore(chaos.keys.alive, name) or 0, 1_000 * chaos.store.time()[0]
        if record["truth"].get("cause") and heard_ms < now_ms - Spans().worker_ttl_ms:
            continue  # noted; a silent worker gets no snapshot until it returns
        published = process.publisher._main.digest.as_list()
        assert list(struct.unpack(">3I", digest or bytes(12))) == published, f"{name} diverged and nobody noticed"
        assert chaos.store.scard(chaos.keys.slot(record["slot"])) == published[0]


def check_index(chaos: ChaosFleet) -> None:
    """Invariants 1 and 5: forward and reverse sets, entry by entry, and nothing else; digests say the same."""
    slots = {b"%d" % FOREIGN_SLOT: {block(number) for number in range(0, NUMBERS, 3)}}
    for name in NAMES:
        process, record = owner(chaos, name), json.loads(chaos.store.hget(chaos.keys.workers, name) or "{}")
        of_the_record = [b"%d" % record[kind] for kind in ("slot", "shadow") if kind in record]
        of_the_record += [
            b"%d%s" % (kept["slot"], b":e" * (kind == "ends")) for kind, kept in record.get("sets", {}).items()
        ]
        slots |= {slot: held(chaos, slot) for slot in of_the_record}  # gone: only forward and reverse sets must agree
        if process:
            tables = {"": (b"%d" % record["slot"], process.table), **further(chaos, name, process)}
            for kind, (slot, table) in tables.items():
                slots[slot] = table
                field = f"{name}:{kind}" if kind else name
                digest, raw = wire.Digest(), chaos.store.hget(chaos.keys.digest, field) or bytes(12)
                digest.add(b"".join(table))
                assert list(struct.unpack(">3I", raw)) == digest.as_list(), f"digest of {field}"
    holders: dict[bytes, dict[bytes, set[bytes]]] = {b"b:": {}, b"e:": {}}
    for slot, blocks in slots.items():
        number, mark, _ = slot.partition(b":")
        for key in blocks:
            holders[b"e:" if mark else b"b:"].setdefault(key, set()).add(number)
    assert everything(chaos, b"s:", bytes) == {slot: blocks for slot, blocks in slots.items() if blocks}
    for forward, expected in holders.items():
        assert everything(chaos, forward, bytes) == expected


def everything(chaos: ChaosFleet, kind: bytes, name: Callable[[bytes], Any]) -> dict[Any, set[bytes]]:
    prefix = chaos.keys.prefix.encode() + kind
    keys = [key for key in chaos.store.keys("*") if key.startswith(prefix)]
    pipe = chaos.store.pipeline(transaction=False)
    for key in keys:
        pipe.smembers(key)
    return {name(key[len(prefix) :]): members for key, members in zip(keys, pipe.execute(), strict=True)}


def check_load(chaos: ChaosFleet) -> None:
    """Invariant 3: the sums of a row are those of its open leases."""
    sums: dict[str, Counter[str]] = {name: Counter() for name in NAMES}
    for name, packed in chaos.store.hgetall(chaos.keys.lease).items():
        lease = Lease.unpack(packed) if name[-1:] != b"+" else None
        row = row_of(chaos, lease.worker_id) if lease else None
        if lease and row and lease.stage <= Stage.STARTED and lease.epoch == row.epoch:
            sums[lease.worker_id].update(prefill=lease.prefill_tokens, decode=lease.decode_tokens, count=1)
    for name in NAMES:
        row, of = row_of(chaos, name) or LoadRow(), sums[name]
        assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (of["prefill"], of["decode"], of["count"])


async def check_the_gone(chaos: ChaosFleet) -> None:
    """Invariant 2: a worker that is gone is not chosen after its TTL; once it is forgotten nothing of it is left."""
    gone, now = [name for name in NAMES if not chaos.processes[name]], int(time.time() * 1000)
    for name in gone:
        chaos.store.zadd(chaos.keys.alive, {name: now - 700_000}, xx=True)
    chaos.store.set(chaos.keys.tick, f"{now} 0 0 0")
    try:
        _, candidates = await chaos.fleets[0].queue.explain(Question("wf-look", (), 10, 10))
    except NoWorker:
        candidates = []
    assert not {candidate.worker_id for candidate in candidates} & set(gone)
    for name in gone:
        slots = {row.slot for row in [row_of(chaos, name)] if row}
        record = json.loads(chaos.store.hget(chaos.keys.workers, name) or "{}")
        slots |= {kept["slot"] for kept in record.get("sets", {}).values()}
        await chaos.fleets[1].upkeep.forget(name, 600_000)
        while (await chaos.fleets[0].upkeep.collect(500))[1]:
            pass
        assert row_of(chaos, name) is None
        assert not slots & {int(slot.partition(b":")[0]) for slot in everything(chaos, b"s:", bytes)}
