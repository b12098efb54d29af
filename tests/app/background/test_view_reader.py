"""Readings of the fleet while Redis comes back: prompts stay identified while no worker is routable."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from tests.app.prompt.test_images import rules
from tests.app.test_damage import healthy
from tests.support.fleet.keyspace import Keyspace
from tests.support.redis.servers import PATIENT
from tests.support.replicas.stepped import SteppedReplica, stepped_replica

from warmfleet import main
from warmfleet.background.view_reader import IMAGE_PAGES, ViewReader
from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import Fleet, Question
from warmfleet.fleet.artifacts import BadArtifact
from warmfleet.fleet.image_reports import AT_ONCE
from warmfleet.metrics import Metrics
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.identified_prompt import identify_here
from warmfleet.pools.idle import Idle
from warmfleet.pools.pool import Pool
from warmfleet.pools.served_models import Pools, ServedModel
from warmfleet.prompt import request as prompt
from warmfleet.settings import Settings
from warmfleet.timing import Timing
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import redis.asyncio as aioredis

    from warmfleet.background.prober import Prober
    from warmfleet.fleet import Decision, WorkerView
    from warmfleet.pools.identified_prompt import IdentifiedPrompt
    from warmfleet.pools.identities import Identities


@pytest.fixture
def redis_url(valkey_url: str) -> str:
    return valkey_url


async def identified(replica: SteppedReplica, model: str) -> IdentifiedPrompt:
    body = {"model": model, "prompt": "a prompt that fills several blocks of tokens " * 9}
    return await identify_here(prompt.from_dict("completions", body), replica.pool)


async def old_dump(keyspace: Keyspace) -> None:
    """Restore a dump that is older than a TTL; without a tick since then no worker expires."""
    await keyspace.store.zadd(keyspace.keys.alive, dict.fromkeys(("w1.0", "w2.0"), 1.0))
    await keyspace.ticked(age_ms=60_000)


async def empty(keyspace: Keyspace) -> None:
    await keyspace.store.flushall()


async def before_the_reading(keyspace: Keyspace) -> None:
    """Let the workers join and be proved after this replica's last reading."""
    await healthy(keyspace)


async def nothing(_: Keyspace) -> None:
    pass


@pytest.mark.parametrize(
    ("lost", "back"), [(old_dump, nothing), (empty, before_the_reading)], ids=["old dump", "empty"]
)
async def test_a_decision_after_redis_came_back_matches_before_the_next_reading(
    store: aioredis.Redis,
    fleet: Fleet,
    lost: Callable[[Keyspace], Awaitable[None]],
    back: Callable[[Keyspace], Awaitable[None]],
) -> None:
    keyspace = Keyspace(store, fleet)
    await healthy(keyspace)
    async with stepped_replica(fleet) as replica:
        await replica.look()
        await replica.loaded()
        await replica.look()
        hashers = replica.pool.view.hashers
        known = {model: await identified(replica, model) for model in ("m", "adapter")}
        assert known["m"].chains[0].hashes[:8] != known["adapter"].chains[0].hashes[:8]
        await lost(keyspace)
        shown = await replica.look()
        assert not any(worker["routable"] for worker in shown["workers"])
        await back(keyspace)
        await keyspace.hold(2, known["m"].chains[0].hashes)
        for model in known:
            assert (await identified(replica, model)).chains == known[model].chains, "as before Redis was lost"
        again = await identified(replica, "m")
        booked = await decided(fleet, again)
        assert (booked.worker_id, booked.matched_tokens) == ("w2.0", len(again.chains[0].hashes) // 8 * 16)
        await replica.look()
        assert replica.pool.view.hashers == hashers, "the trie keeps what it knows for a hasher, not for its equal"


async def decided(fleet: Fleet, known: IdentifiedPrompt) -> Decision:
    return await fleet.bookings.decide(Question("wf-1", known.chains, known.prompt_tokens, known.decode_tokens))


async def test_a_fleet_that_comes_back_otherwise_is_believed(store: aioredis.Redis, fleet: Fleet) -> None:
    """A joined worker decides about its scheme at once; routable workers decide about the identity's other parts."""
    keyspace = Keyspace(store, fleet)
    await healthy(keyspace)
    async with stepped_replica(fleet) as replica:
        await replica.look()
        await replica.loaded()
        await replica.look()
        await empty(keyspace)
        await replica.look()
        await keyspace.workers(1, flags=0, scheme=8)
        scheme = wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor", "another seed"), 32)
        record = wire.dumps({"nonce": "n2", "server_id": "w1", "slot": 1, "scheme": scheme.as_dict()})
        await store.hset(keyspace.keys.workers, "w1.0", record)
        await replica.look()
        assert [hasher.scheme.scheme_id for hasher in replica.pool.view.hashers] == [scheme.scheme_id]
        assert "adapter" in replica.pool.view.names.paths, "none of its workers has told its adapters yet"
        await keyspace.change(1, flags=7)
        await replica.look()
        assert replica.pool.view.names.paths == {}


@pytest.mark.parametrize("readable", [True, False])
async def test_workers_are_probed_by_the_reading_that_finds_them(readable: bool) -> None:
    done: list[str] = []

    async def refresh() -> None:
        done.append("read")
        if not readable:
            raise FleetUnavailable("Redis is away.")

    async def probes() -> None:
        done.append("probe")

    look = main._look(refresh, cast("Prober", SimpleNamespace(round=probes)))
    with nullcontext() if readable else pytest.raises(FleetUnavailable):
        await look
    assert done == ["read", "probe"]


async def test_a_pool_at_rest_is_read_every_other_round(store: aioredis.Redis, fleet: Fleet) -> None:
    keyspace = Keyspace(store, fleet)
    await healthy(keyspace)
    async with stepped_replica(fleet) as replica:
        reader, pool = replica.reader, replica.pool
        assert await reader.round(), "it was never read"
        assert await reader.round(), "a start is no rest"
        pool.idle = Idle(0.0)
        assert not await reader.round()
        pool.view = replace(pool.view, read_at=pool.view.read_at - 1.6)
        assert await reader.round(), "the next round would come too late"
        pool.idle = Idle()
        pool.idle.wake()
        assert await reader.round(), "a request has come"


async def test_a_worker_that_misses_heartbeats_is_looked_at_in_every_round(store: aioredis.Redis, fleet: Fleet) -> None:
    """The worker is checked over HTTP 12.5 s after its last heartbeat, before it expires."""
    keyspace = Keyspace(store, fleet)
    await healthy(keyspace)
    now_ms = 1_000 * int((await store.time())[0])
    async with stepped_replica(fleet) as replica:
        replica.pool.idle = Idle(0.0)
        for key, name in ((fleet.keys.alive, "w1.0"), (fleet.keys.alive_servers, "w1")):
            await replica.reader.refresh()
            assert not await replica.reader.round()
            await store.zadd(key, {name: now_ms - 10_600})
            await replica.reader.refresh()
            assert await replica.reader.round()
            await store.zadd(key, {name: now_ms})


async def test_nothing_is_kept_of_a_pool_that_has_left(store: aioredis.Redis, fleet: Fleet) -> None:
    await healthy(Keyspace(store, fleet))
    async with stepped_replica(fleet) as replica:
        await replica.look()
        await replica.loaded()
        await replica.look()
        reader = replica.reader
        kept = (reader._groupings, reader._derived, reader._agreement._last, reader._agreement._unhashed)
        assert all(kept)
        other = Pool("another", Fleet(store, "another", timeouts=PATIENT), DegradedMode(1.0))
        replica.pools.change(ServedModel(replica.pool.name, [other]))
        late = await replica.pool.fleet.workers.reading()
        replica.pools.forget(replica.pool)
        reader._metrics.forget_pool(replica.pool.tag)
        reader._derived.clear()  # as if a worker had changed
        await reader._refresh(replica.pool, late)
        page = reader._metrics.render().decode()
        assert f'warmfleet_workers{{model="{replica.pool.tag}"' not in page, "a late reading tells of it again"
        await reader.refresh()
        kept = (reader._groupings, reader._derived, reader._agreement._last, reader._agreement._unhashed)
        assert not any(replica.pool.tag in str([*held]) for held in kept)


async def test_a_server_whose_files_are_not_what_it_announced_is_passed_over_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = {"artifacts": {"tokenizer.json": {"sha256": "aa", "bytes": 1, "chunks": ["bb"]}}}
    workers = [SimpleNamespace(record={"server_id": name}, server=server) for name in ("liar", "honest")]
    built: list[object] = []

    async def artifact(server_id: str, _entry: object) -> bytes:
        if server_id == "liar":
            raise BadArtifact("artifact aa of liar: other digests")
        return b"text"

    async def build(_key: str, files: object, _facts: object) -> None:
        built.append(files)

    pool = SimpleNamespace(tag="m", fleet=SimpleNamespace(artifacts=SimpleNamespace(read=artifact)))
    identities = SimpleNamespace(build=build)
    pools, settings = cast("Pools", None), Settings(models=("m",))
    reader = ViewReader(pools, cast("Identities", identities), settings, Timing(), Metrics())
    await reader._from_workers(cast("Pool", pool), "key", cast("list[WorkerView]", workers))
    assert built == [{"tokenizer.json": b"text"}]
    assert [line.getMessage() for line in caplog.records] == [
        "m: the files of liar cannot be used, another server is asked: artifact aa of liar: other digests"
    ]


async def test_a_pool_that_is_away_makes_no_failed_load_of_an_identity_that_was_loaded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def away() -> list[object]:
        raise FleetUnavailable("its Redis is away")

    async def loaded() -> None: ...

    workers = SimpleNamespace(reading=lambda: asyncio.ensure_future(away()), records=SimpleNamespace(unreadable=0))
    fleet = SimpleNamespace(workers=workers)
    pools = Pools([Pool("m", cast("Fleet", fleet), DegradedMode(1.0))])
    identities, metrics = SimpleNamespace(keep=lambda _: None), Metrics()
    reader = ViewReader(pools, cast("Identities", identities), Settings(models=("m",)), Timing(), metrics)
    caplog.set_level("INFO", "warmfleet")
    reader._begin("key", loaded())
    await reader._loads["key"]
    assert (reader._loads, reader._not_before) == ({}, {})
    assert metrics.task_failures.labels("identity")._value.get() == 0
    assert [line for line in caplog.messages if "routed by load" in line] == []
    assert len([line for line in caplog.messages if "its Redis is away" in line]) == 1


async def test_pools_learn_images_side_by_side_and_a_page_at_a_time() -> None:
    together, pages, taken = asyncio.Barrier(3), dict[str, int](), dict[str, list[int]]()

    def pool(tag: str) -> Pool:
        async def news() -> dict[bytes, float]:
            await together.wait()
            pages[tag] = pages.get(tag, 0) + 1
            taken.setdefault(tag, []).append(len(made.learned))
            return {b'["%s %d",[7,1]]' % (tag.encode(), pages[tag] * AT_ONCE + each): 9e9 for each in range(AT_ONCE)}

        async def no_answer() -> list[object]:
            raise FleetUnavailable("its Redis is away")

        workers = SimpleNamespace(
            reading=lambda: asyncio.ensure_future(no_answer()), records=SimpleNamespace(unreadable=0)
        )
        fleet = SimpleNamespace(workers=workers, images=SimpleNamespace(news=news))
        made = Pool(tag, cast("Fleet", fleet), DegradedMode(1.0))
        made.view = replace(made.view, images=rules(made=""))
        return made

    pools = [pool(tag) for tag in ("a", "b", "c")]
    identities, metrics = SimpleNamespace(keep=lambda _: None), Metrics()
    reader = ViewReader(Pools(pools), cast("Identities", identities), Settings(models=("m",)), Timing(), metrics)
    with pytest.raises(FleetUnavailable):
        await asyncio.wait_for(reader.refresh(), 20)
    assert taken == {tag: [AT_ONCE * page for page in range(IMAGE_PAGES)] for tag in "abc"}
