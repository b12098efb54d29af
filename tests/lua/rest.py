"""Lets a fleet come to rest after the steps of ``chaos``, and asserts the invariants that must hold then."""

from __future__ import annotations

import json
import struct
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.lua.chaos import FOREIGN_SLOT, NAMES, NUMBERS
from tests.lua.stream import block

from warmfleet.errors import NoWorker
from warmfleet.fleet import Ask, Lease, LoadRow, Stage
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lua.chaos import World
    from tests.lua.process import Process


# ---------------------------------------------------------------- coming to rest


async def quiet(world: World) -> None:
    """Heartbeats, ticks and commands as in life, until no worker waits for anything; then check the invariants."""
    for _ in range(12):
        await period(world)
        half_a_minute_passes(world)
        if not wrong(world):
            break
    else:
        raise AssertionError(f"still not in step: {wrong(world)}")
    while (await world.fleets[0].collect(500))[1]:
        pass
    check_index(world)
    check_load(world)
    await check_the_gone(world)


async def period(world: World) -> None:
    """Five seconds pass: each process sends a heartbeat and reads its command; snapshots that were begun end."""
    everybody = [process for name in NAMES for process in world.processes[name]]
    for process in everybody:
        process.round(beat=True, listen=True)
    for _ in range(60):
        blocks = [await fleet.step() for fleet in world.fleets]
        for process in everybody:
            process.round(listen=True)
        left = any(unread(world, name) for name in NAMES)
        if not left and not any(blocks) and not any(process.busy for process in everybody):
            return


def unread(world: World, name: str) -> bool:
    kind = world.store.type(world.keys.events(name))
    return kind not in (b"none", b"stream") or (kind == b"stream" and world.store.xlen(world.keys.events(name)) > 0)


def half_a_minute_passes(world: World) -> None:
    """Snapshots that were commanded or begun and made no progress are commanded again; so are a plugin's own."""
    for name, score in world.store.zrange(world.keys.resync, 0, -1, withscores=True):
        if score > 0:
            world.store.zadd(world.keys.resync, {name: 1})
    for name in NAMES:
        for process in world.processes[name]:
            process.half_a_minute_passes()


def owner(world: World, name: str) -> Process | None:
    """The process that Redis has recorded as this worker."""
    raw = world.store.hget(world.keys.workers, name)
    nonce = json.loads(raw)["nonce"] if raw else None
    return next((one for one in world.processes[name] if one.running and one.stream.nonce == nonce), None)


def row_of(world: World, name: str) -> LoadRow | None:
    raw = world.store.hget(world.keys.load, name)
    return LoadRow.unpack(raw) if raw else None


def wrong(world: World) -> str:
    """The violations that are found; empty if there are none."""
    for name in NAMES:
        process, row = owner(world, name), row_of(world, name)
        if not world.processes[name]:
            continue
        if process is None or row is None:
            return f"nobody is taken for {name}: {[one.publisher.state for one in world.processes[name]]}"
        if any(one.running for one in world.processes[name] if one is not process):
            return f"two processes go on as {name}"
        if world.store.smembers(world.keys.slot(row.slot)) != process.table:
            return f"the index of {name} is not its table"
        if world.store.zscore(world.keys.resync, name) is not None:
            return f"{name} still waits for a snapshot"
        truth = json.loads(world.store.hget(world.keys.workers, name))["truth"]
        if truth.get("cause", "join") != "join" or truth.get("healed", 0) != truth.get("found", 0):
            return f"{name} is right, and is said to differ: {truth}"
    return ""


# ---------------------------------------------------------------- what must hold at rest


def check_noticed(world: World) -> None:
    """At any time: an index that differs from what was published, although all entries are read, is known to differ.

    A digest would show the difference too, five seconds later; batch numbers and nonces must show it at once.
    """
    for name in NAMES:
        process = owner(world, name)
        if process is None or process.forged == process.stream.nonce or process.publisher._snapshot is not None:
            continue
        pipe = world.store.pipeline(transaction=False)
        pipe.hget(world.keys.batch, name).zscore(world.keys.resync, name)
        pipe.hget(world.keys.digest, name).hget(world.keys.workers, name)
        batch, waiting, digest, raw = pipe.execute()
        record = json.loads(raw)
        assert waiting is None or waiting > 0 or record["truth"].get("cause"), f"{name} waits, and nobody can say why"
        if int(batch) != process.stream.number or waiting is not None or record.get("rejoin") or unread(world, name):
            continue
        published = process.publisher._digest.as_list()
        assert list(struct.unpack(">3I", digest or bytes(12))) == published, f"{name} diverged and nobody noticed"
        assert world.store.scard(world.keys.slot(record["slot"])) == published[0]


def check_index(world: World) -> None:
    """Invariants 1 and 5: forward and reverse sets, entry by entry, and nothing else; digests say the same."""
    slots = {FOREIGN_SLOT: {block(number) for number in range(0, NUMBERS, 3)}}
    for name in NAMES:
        process, record = owner(world, name), json.loads(world.store.hget(world.keys.workers, name) or "{}")
        for slot in [record[kind] for kind in ("slot", "shadow") if kind in record]:
            held = world.store.smembers(world.keys.slot(slot))  # of a process that is gone: only both ways the same
            slots |= {slot: held} if held else {}
        if process:
            slots |= {record["slot"]: process.table} if process.table else {}
            digest, raw = wire.Digest(), world.store.hget(world.keys.digest, name) or bytes(12)
            digest.add(b"".join(process.table))
            assert list(struct.unpack(">3I", raw)) == digest.as_list(), f"digest of {name}"
    holders: dict[bytes, set[bytes]] = {}
    for slot, held in slots.items():
        for one in held:
            holders.setdefault(one, set()).add(b"%d" % slot)
    assert everything(world, b"s:", int) == slots
    assert everything(world, b"b:", bytes) == holders


def everything(world: World, kind: bytes, name: Callable[[bytes], Any]) -> dict[Any, set[bytes]]:
    prefix = world.keys.prefix.encode() + kind
    keys = [key for key in world.store.keys("*") if key.startswith(prefix)]
    pipe = world.store.pipeline(transaction=False)
    for key in keys:
        pipe.smembers(key)
    return {name(key[len(prefix) :]): members for key, members in zip(keys, pipe.execute(), strict=True)}


def check_load(world: World) -> None:
    """Invariant 3: the sums of a row are those of its open leases."""
    sums: dict[str, Counter[str]] = {name: Counter() for name in NAMES}
    for name, packed in world.store.hgetall(world.keys.lease).items():
        lease = Lease.unpack(packed) if name[-1:] != b"+" else None
        row = row_of(world, lease.worker_id) if lease else None
        if lease and row and lease.stage <= Stage.STARTED and lease.epoch == row.epoch:
            sums[lease.worker_id].update(prefill=lease.prefill_tokens, decode=lease.decode_tokens, count=1)
    for name in NAMES:
        row, of = row_of(world, name) or LoadRow(), sums[name]
        assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (of["prefill"], of["decode"], of["count"])


async def check_the_gone(world: World) -> None:
    """Invariant 2: a worker that is gone is not chosen after its TTL; once it is forgotten nothing of it is left."""
    gone, now = [name for name in NAMES if not world.processes[name]], int(time.time() * 1000)
    for name in gone:
        world.store.zadd(world.keys.alive, {name: now - 700_000}, xx=True)
    world.store.set(world.keys.tick, f"{now} 0 0 0")
    try:
        _, candidates = await world.fleets[0].explain(Ask("wf-look", (), 10, 10))
    except NoWorker:
        candidates = []
    assert not {one.worker_id for one in candidates} & set(gone)
    for name in gone:
        slots = {row.slot for row in [row_of(world, name)] if row}
        await world.fleets[1].forget(name, 600_000)
        while (await world.fleets[0].collect(500))[1]:
            pass
        assert row_of(world, name) is None
        assert not slots & set(everything(world, b"s:", int))
