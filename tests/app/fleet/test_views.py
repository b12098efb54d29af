"""Replicas read workers, slots, counters and artifacts of workers from Redis."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.keyspace import READY, Keyspace

from warmfleet.errors import NotFound
from warmfleet.fleet import Flag, Fleet
from warmfleet.fleet.artifacts import BadArtifact
from warmfleet_worker.protocol import artifacts

if TYPE_CHECKING:
    import redis.asyncio as aioredis


@pytest.fixture
def redis_url(valkey_url: str) -> str:
    """A single kind of Redis server is enough, because the tests of this file read without scripts."""
    return valkey_url


@pytest.fixture
def keyspace(store: aioredis.Redis, fleet: Fleet) -> Keyspace:
    return Keyspace(store, fleet)


async def test_workers(keyspace: Keyspace) -> None:
    await keyspace.workers(3)
    await keyspace.change(2, flags=READY | Flag.DRAINING)
    await keyspace.worker(3, age_ms=60_000)
    await cast("Any", keyspace.store.hdel(keyspace.keys.servers, "w3"))
    await cast("Any", keyspace.store.hset(keyspace.keys.workers, "halfway.0", "{}"))  # a record without a row yet
    one, two, three = await keyspace.fleet.workers.read()
    assert (one.worker_id, one.url, one.models, one.proof) == ("w1.0", "http://10.0.0.1:8000", ["m"], "pending")
    assert [view.routable for view in (one, two, three)] == [True, False, False]
    assert one.heartbeat_age_s is not None
    assert one.heartbeat_age_s < 15
    assert three.heartbeat_age_s == pytest.approx(60, abs=10)
    assert (three.server, three.url, three.models) == (None, "", [])
    assert one.load == await keyspace.row(1)


async def test_holds(keyspace: Keyspace) -> None:
    chain = keyspace.chain(1_100)
    await keyspace.hold(4, chain, 1_050)
    blocks = [chain[at : at + 8] for at in range(0, len(chain), 8)]
    assert await keyspace.fleet.index.holds(4, blocks) == [True] * 1_050 + [False] * 50
    assert await keyspace.fleet.index.holds(5, blocks[:2]) == [False, False]
    assert await keyspace.fleet.index.holds(4, []) == []


async def test_counts_and_memory(keyspace: Keyspace) -> None:
    assert await keyspace.fleet.index.counts() == {}
    await keyspace.workers(1)
    await keyspace.fleet.bookings.decide(keyspace.ask(policy="round_robin"))
    assert await keyspace.fleet.index.counts() == {"round_robin": 1}
    memory = await keyspace.fleet.index.memory()
    assert memory.used > 100_000
    assert (memory.limit, memory.policy, memory.used_permille) == (0, "noeviction", 0)


# ---------------------------------------------------------------- artifacts


async def bring(fleet: Fleet, content: bytes) -> dict[str, Any]:
    entry, pieces = artifacts.split(content)
    for sha256, piece in pieces.items():
        await fleet.redis.set(fleet.keys.artifact("s", sha256), piece)
    return entry


async def test_an_artifact_comes_back_whole(fleet: Fleet) -> None:
    content = b"".join(hashlib.sha256(b"%d" % number).digest() for number in range(10_000))  # incompressible
    entry = await bring(fleet, content)
    assert len(entry["chunks"]) == 5
    assert await fleet.artifacts.read("s", entry) == content


async def test_an_artifact_with_a_piece_missing(fleet: Fleet) -> None:
    entry = await bring(fleet, b"content")
    with pytest.raises(NotFound):
        await fleet.artifacts.read("another server", entry)


async def test_a_piece_that_a_server_lacks_is_taken_from_one_that_has_it_right(keyspace: Keyspace) -> None:
    fleet, content = keyspace.fleet, b"".join(hashlib.sha256(b"%d" % number).digest() for number in range(5_000))
    entry, pieces = artifacts.split(content)
    await keyspace.workers(3)
    for name, stored in {"w1": b"", "w2": b"poison", "w3": None}.items():
        record = {"nonce": name, "url": "http://w", "models": ["m"], "artifacts": {"tokenizer.json": entry}}
        await cast("Any", keyspace.store.hset(keyspace.keys.servers, name, json.dumps(record)))
        for sha256, piece in pieces.items():
            await keyspace.store.set(keyspace.keys.artifact(name, sha256), piece if stored is None else stored)
    with pytest.raises(NotFound):
        await fleet.artifacts.read("w1", entry)
    await fleet.workers.read()
    assert await fleet.artifacts.read("w1", entry) == content
    with pytest.raises(BadArtifact):
        await fleet.artifacts.read("w2", entry)


async def test_an_artifact_that_was_tampered_with(fleet: Fleet) -> None:
    entry = await bring(fleet, b"content")
    await fleet.redis.set(fleet.keys.artifact("s", entry["chunks"][0]), b"something else")
    with pytest.raises(BadArtifact):
        await fleet.artifacts.read("s", entry)


@pytest.mark.parametrize("bytes_announced", [10, 200 * 2**20, -1], ids=["bomb", "too large", "negative"])
async def test_an_artifact_that_lies_about_its_size(fleet: Fleet, bytes_announced: int) -> None:
    entry = await bring(fleet, bytes(50 * 2**20))  # 50 MB of zeros are 50 kB
    with pytest.raises(BadArtifact):
        await fleet.artifacts.read("s", entry | {"bytes": bytes_announced})


@pytest.mark.parametrize("change", [{"sha256": "0" * 64}, {"bytes": None}, {"bytes": "x"}])
async def test_a_malformed_manifest(fleet: Fleet, change: dict[str, Any]) -> None:
    entry = await bring(fleet, b"content")
    with pytest.raises(BadArtifact):
        await fleet.artifacts.read("s", entry | change)


async def test_an_artifact_that_is_no_zlib_stream(fleet: Fleet) -> None:
    piece = b"no zlib"
    name = hashlib.sha256(piece).hexdigest()
    await fleet.redis.set(fleet.keys.artifact("s", name), piece)
    with pytest.raises(BadArtifact):
        await fleet.artifacts.read("s", {"sha256": name, "bytes": 7, "chunks": [name]})
