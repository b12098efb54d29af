"""``warmfleet pools``: what it lists, enters, drains and removes, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import pytest
import redis
from tests.support.fleet.publishing import SCHEME
from tests.support.polling import poll, until
from tests.support.redis.servers import PATIENT, redis7_binary, valkey_binary
from tests.support.redis.topology import whole_cluster
from tests.support.replicas.doctor import guarded

from warmfleet.__main__ import main
from warmfleet.cli.pools import command
from warmfleet.fleet import Fleet, Proof, Question, RedisConnections, connect
from warmfleet.fleet.connection.pool_masters import master_of, next_tag
from warmfleet.fleet.pool_registry import PoolRegistry
from warmfleet.prompt.block_hashes import Chain
from warmfleet.protocol.pools import served_model
from warmfleet.protocol.wire import Keys
from warmfleet_worker import pool_assignment
from warmfleet_worker.config import PublisherConfig
from warmfleet_worker.pool_assignment import core_assignment, server_assignment
from warmfleet_worker.protocol import wire
from warmfleet_worker.server_publisher import ServerConfig, ServerPublisher
from warmfleet_worker.tracker import Tracker
from warmfleet_worker.worker_publisher import WorkerPublisher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCKS = [bytes([number]) * 8 for number in range(64)]
FILES = {"tokenizer.json": b"{}"}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LET_GO_S", 0.01)
    monkeypatch.setattr(pool_assignment, "ASK_SECONDS", 0.1)
    monkeypatch.setattr(pool_assignment, "SETTLE_MS", 100)
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.2)


@contextmanager
def engines(url: str, model: str, *names: str) -> Iterator[None]:
    """Servers that know only the model's name, or a pool's tag; each holds BLOCKS."""
    halves: list[Any] = []
    for name in names:
        tracker = Tracker()
        tracker.stored(BLOCKS)
        core = PublisherConfig(url, model, f"{name}.0", name, 0, SCHEME, 100, 4_096, "test")
        halves.append(WorkerPublisher(core, tracker, assignment=core_assignment(core)))
        server = ServerConfig(url, model, name, "http://127.0.0.1:9", (served_model(model),), "test", FILES)
        halves.append(ServerPublisher(server, server_assignment(url, model, name)))
    for half in halves:
        half.start()
    try:
        yield
    finally:
        for half in halves:
            half.stop(2)


def applied(url: str, expected: dict[str, int]) -> None:
    """Do the routers' upkeep until each pool has so many live workers with all their blocks."""

    async def wait() -> None:
        fleets = {tag: Fleet(connect(url, timeout_s=2), tag, PATIENT) for tag in expected}
        try:
            await poll(lambda: _equal(fleets, expected), 20)
        finally:
            for fleet in fleets.values():
                await fleet.close()

    asyncio.run(wait())


async def _equal(fleets: dict[str, Fleet], expected: dict[str, int]) -> bool:
    return {tag: await _there(fleet) for tag, fleet in fleets.items()} == expected


async def _there(fleet: Fleet) -> int:
    await fleet.upkeep.step()
    return sum(
        worker.heard and not worker.said_goodbye and worker.server is not None and worker.load.blocks == len(BLOCKS)
        for worker in await fleet.workers.read()
    )


def booked(url: str, tag: str, worker_id: str) -> None:
    """A request that is open, with a checkpoint and a chain of its own, on a worker that takes requests."""

    async def book() -> None:
        fleet = Fleet(connect(url, timeout_s=2), tag, PATIENT)
        try:
            [worker] = [worker for worker in await fleet.workers.read() if worker.worker_id == worker_id]
            assert await fleet.probes.prove(worker_id, worker.record["nonce"], Proof("proven", "")) == "OK"
            chain = Chain(SCHEME.scheme_id, 16, b"".join(BLOCKS[:8]) + b"\xff" * 64)
            assert (
                await fleet.bookings.decide(Question("wf-0aaaaaaaaaaaaaaaaaaaaa", (chain,), 256, 64))
            ).worker_id == worker_id
        finally:
            await fleet.close()

    asyncio.run(book())


class Commands:
    def __init__(self, url: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url, self.model, self.capsys = url, model, capsys
        self.client = redis.Redis.from_url(url)

    def __call__(self, *words: str, status: int = 0) -> str:
        assert main(["pools", *words, "--redis", self.url, "--model", self.model]) == status
        printed = self.capsys.readouterr()
        return printed.err if status else printed.out

    def listed(self) -> dict[str, dict[str, Any]]:
        [pools] = json.loads(self("--json")).values()
        return {pool["pool"]: pool for pool in pools}

    def keys_of(self, tag: str) -> set[bytes]:
        pattern = Keys(tag).prefix.replace("[", "\\[")
        return set(self.client.scan_iter(f"{pattern}*", count=1_000))


@pytest.fixture
def pools(redis_url: str, model: str, capsys: pytest.CaptureFixture[str]) -> Iterator[Commands]:
    made = Commands(redis_url, model, capsys)
    yield made
    made.client.close()


def test_a_fleet_of_one_pool_is_listed_without_a_registry(pools: Commands, model: str) -> None:
    assert list(pools.listed()) == [model]
    assert pools.listed()[model]["state"] == "serving"
    assert f"{model}  1 pool\n" in pools("list")
    assert not pools.client.exists(Keys(model).pools)


def test_pools_are_added_beside_the_one_with_workers_drained_and_removed(pools: Commands, model: str) -> None:
    """The whole life: the old pool stays, its workers move, and nothing of it is left in Redis."""
    new = f"{model}#1"
    with engines(pools.url, model, "a", "b"):
        applied(pools.url, {model: 2})
        printed = pools("add", new)
        assert f"{model} has workers: it stays a pool" in printed
        assert list(pools.listed()) == [model, new]
        asyncio.run(poll(lambda: pools.client.hlen(Keys(model).placement) == 2, what="both know of the registry"))
        with engines(pools.url, model, "c", "d"):
            applied(pools.url, {model: 2, new: 2})
            assert f"{model} has 2 live workers" in pools("remove", model, status=2)
            assert "move to other pools" in pools("drain", model, "--move")
            assert pools.listed()[model]["state"] == "moving"
            applied(pools.url, {model: 0, new: 4})
            until(
                lambda: [pools.listed()[each]["known"] for each in (new, model)] == [4, 0],
                "those that moved are the other pool's",
            )
            assert pools("remove", model) == f"{model} is removed\n"
            assert pools.keys_of(model) == {Keys(model).pools.encode(), Keys(model).placement.encode()}
            assert list(pools.listed()) == [new]
            applied(pools.url, {new: 4})


def test_a_pool_in_use_is_removed_only_by_force_and_leaves_no_key(pools: Commands, model: str) -> None:
    one, two = f"{model}#1", f"{model}#2"
    pools("add", one, two)
    with engines(pools.url, one, "a"):
        applied(pools.url, {one: 1})
        booked(pools.url, one, "a.0")
    applied(pools.url, {one: 0})
    assert len(pools.keys_of(one)) > 20
    assert "1 requests in flight" in pools("remove", one, status=2)
    pools("remove", one, "--force")
    assert pools.keys_of(one) == set()
    again = f"no pool {one} in the registry; Redis has nothing of it either\n"
    assert pools("remove", one) == again


def test_the_pool_with_all_workers_stays_even_by_force(pools: Commands, model: str) -> None:
    """Another pool is registered but empty, or drained: until engines had joined it every request would fail."""
    one, two, three = (f"{model}#{number}" for number in (1, 2, 3))
    pools("add", one, two, three)
    with engines(pools.url, one, "a"), engines(pools.url, three, "c"):
        applied(pools.url, {one: 1, three: 1})
        booked(pools.url, one, "a.0")
        booked(pools.url, three, "c.0")
        pools("drain", three)
        printed = pools("remove", one, "--force", status=2)
        assert f"no pool that serves besides {one} has a worker that takes requests" in printed
        assert f"`warmfleet pools drain {one} --move`" in printed
        assert pools.listed()[one]["workers"] == 1
        pools("remove", two, "--force")
        pools("drain", three, "--undo")
        assert f"{one} is removed" in pools("remove", one, "--force")


def test_servers_that_are_pinned_to_a_pool_are_named_where_it_is_drained_or_removed(
    pools: Commands, model: str
) -> None:
    one, two = f"{model}#1", f"{model}#2"
    pools("add", one, two)
    with engines(pools.url, one, "pin"), engines(pools.url, two, "other"):
        applied(pools.url, {one: 1, two: 1})
        booked(pools.url, two, "other.0")
        stays = f"pin will not leave {one}, which WARMFLEET_MODEL names there"
        assert stays in pools("drain", one, "--move")
        assert "pin" not in pools("drain", one, "--undo")
        assert stays in pools("remove", one, status=2)
        assert stays in pools("remove", one, "--force")


def test_orders_of_the_operator_hold_in_a_new_pool_and_in_all_of_them(
    pools: Commands, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pools("add", f"{model}#1", f"{model}#2")
    assert main(["policy", "sticky", "--redis", pools.url, "--model", model]) == 0
    capsys.readouterr()
    pools("add", f"{model}#3")
    assert main(["policy", "--json", "--redis", pools.url, "--model", model]) == 0
    assert json.loads(capsys.readouterr().out) == {f"{model}#{number}": "sticky" for number in (1, 2, 3)}


@pytest.mark.parametrize("first", ["", "#1"])
def test_orders_of_the_operator_hold_from_the_first_registry_on(
    pools: Commands, model: str, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """first: the pool that routers have served so far, by their settings."""
    approved = "ab" * 32
    assert main(["policy", "sticky", "--redis", pools.url, "--model", f"{model}{first}"]) == 0
    pools.client.sadd(Keys(f"{model}{first}").operator_approved, approved)
    capsys.readouterr()
    pools("add", f"{model}#1", f"{model}#2")
    assert main(["policy", "--json", "--redis", pools.url, "--model", model]) == 0
    assert json.loads(capsys.readouterr().out) == {f"{model}#{number}": "sticky" for number in (1, 2)}
    for number in (1, 2):
        assert pools.client.smembers(Keys(f"{model}#{number}").operator_approved) == {approved.encode()}


@pytest.mark.parametrize("store", [valkey_binary, redis7_binary])
def test_a_user_who_may_not_copy_orders_enters_pools_all_the_same_and_is_told(
    store: Callable[[], str], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In Kubernetes routers enter the pools before they start, by their own user."""
    with guarded(model, store()) as url_of:
        assert main(["policy", "sticky", "--redis", url_of("admin"), "--model", model]) == 0
        assert main(["pools", "add", f"{model}#1", "--redis", url_of("router")]) == 0
        printed = capsys.readouterr()
        assert f"{model}#1 serves" in printed.out
        assert f"policy and approved templates of {model} do not hold in {model}#1" in printed.err


def test_draining_is_taken_back(pools: Commands, model: str) -> None:
    pools("add", f"{model}#1", f"{model}#2")
    pools("drain", f"{model}#2")
    assert pools.listed()[f"{model}#2"]["state"] == "draining"
    undo = f"`warmfleet pools drain {model}#2 --undo`"
    assert pools("add", f"{model}#2") == f"{model}#2 is there, but drained: {undo} lets it serve again\n"
    assert "serves again" in pools("drain", f"{model}#2", "--undo")
    assert {pool["state"] for pool in pools.listed().values()} == {"serving"}


def test_a_tag_for_one_more_pool_is_chosen(pools: Commands, model: str) -> None:
    """Without a Cluster the next number; the masters of a Cluster: tests/app/fleet/test_pool_masters.py."""
    pools("add", f"{model}#1", f"{model}#7")
    assert pools("add", model, "--spread").startswith(f"{model}#8 serves")
    assert list(pools.listed()) == [f"{model}#{number}" for number in (1, 7, 8)]


def test_a_tag_for_one_more_pool_keeps_away_from_pools_of_other_models(
    pools: Commands, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, half = f"{model}-other", 8_192
    halves = ((0, half - 1, ("north", 1)), (half, 16_383, ("south", 2)))
    monkeypatch.setattr(RedisConnections, "slot_ranges", AsyncMock(return_value=halves))
    mine = f"{model}#1"
    home = master_of(mine, halves)
    pools("add", mine)
    theirs = [tag for number in range(60) if master_of(tag := f"{other}#{number}", halves) != home][:2]
    pools("add", *theirs)
    printed = pools("add", model, "--spread", "--model", other)
    assert master_of(printed.split()[0], halves) == home, "one pool is there, and two are on the other master"


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["add"], "take at least one"),
        (["list", "m#1"], "list takes no pool"),
        (["add", "m#1", "n#1"], "pools of one model"),
        (["add", "m#a b"], "is not a name"),
        (["add", "{model}#"], "names no pool behind its '#'"),
        (["list", "--model", "{model}#"], "names no pool behind its '#'"),
        (["drain", "m#1", "--move", "--undo"], "choose one"),
        (["drain", "m#1", "--force"], "--force is for remove"),
        (["add", "m#1", "--spread"], "without #"),
        (["drain", "{model}#7"], "has no pool"),
        (["drain", "{model}#1", "{model}#2"], "no other pool"),
        (["remove", "{model}#1", "{model}#2"], "last one"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_reason(
    pools: Commands, model: str, words: list[str], refusal: str
) -> None:
    pools("add", f"{model}#1", f"{model}#2")
    assert refusal in pools(*[word.format(model=model) for word in words], status=2)
    assert {pool["state"] for pool in pools.listed().values()} == {"serving"}


def test_without_a_registry_no_pool_in_use_is_removed(pools: Commands, model: str) -> None:
    """The model's name is its only pool then, and pools that only the routers' settings name have live workers."""
    one = f"{model}#1"
    with engines(pools.url, model, "a"), engines(pools.url, one, "b"):
        applied(pools.url, {model: 1, one: 1})
        assert "has no registry" in pools("remove", model, status=2)
        assert "has no registry" in pools("remove", model, "--force", status=2)
        assert f"{one} has 1 live workers" in pools("remove", one, status=2)
        applied(pools.url, {model: 1, one: 1})
    assert pools("remove", f"{model}#9") == f"no pool {model}#9 in the registry; Redis has nothing of it either\n"


def test_what_an_interrupted_call_has_left_is_deleted(pools: Commands, model: str) -> None:
    with engines(pools.url, f"{model}#9", "a"):
        applied(pools.url, {f"{model}#9": 1})
    applied(pools.url, {f"{model}#9": 0})
    text = pools("remove", f"{model}#9", "--force")
    assert text == f"no pool {model}#9 in the registry; deleted what was left of it\n"
    assert pools.keys_of(f"{model}#9") == set()


def test_the_first_pools_are_added_to_those_of_the_settings(
    pools: Commands, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMFLEET_MODELS", f"other,{model}#1,{model}#2")
    one, three, four = (f"{model}#{number}" for number in (1, 3, 4))
    assert switched(pools.url, one, "sticky") == "sticky"
    with engines(pools.url, one, "a"):
        applied(pools.url, {one: 1})
        text = pools("add", three)
    assert text.startswith(f"{one} has workers: it stays a pool beside the others\n")
    assert {*pools.client.hkeys(Keys(model).pools)} == {one.encode(), three.encode()}
    assert switched(pools.url, three) == "sticky", "the order of the pool that was there"
    assert switched(pools.url, four, "chwbl") == "chwbl"
    pools("add", four)
    assert switched(pools.url, four) == "chwbl", "it had its own"


def test_spread_takes_no_tag_that_the_settings_name(
    pools: Commands, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMFLEET_MODELS", f"{model}#1,{model}#2")
    assert pools("add", model, "--spread").startswith(f"{model}#3 serves")


def switched(url: str, pool: str, policy: str = "") -> str:
    """The policy that the operator chose for this pool, after choosing ``policy``, if that is given."""

    async def switch() -> str:
        async with connect(url, timeout_s=2) as client:
            fleet = Fleet(client, pool)
            if policy:
                await fleet.operator.switch(policy)
            return await fleet.operator.switched()

    return asyncio.run(switch())


def test_options_may_stand_before_the_pools_and_an_undo_of_nothing_is_told(pools: Commands, model: str) -> None:
    pools("add", model, f"{model}#1")
    assert "move to other pools" in pools("drain", "--move", f"{model}#1")
    assert pools("drain", "--undo", f"{model}#1") == f"{model}#1 serves again\n"
    assert pools("drain", "--undo", f"{model}#1") == f"{model}#1 serves: it was not drained\n"


def test_a_model_that_nobody_knows_is_told_of_and_goes_by_force(
    pools: Commands, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    new = f"{model}#1"
    assert main(["pools", "--redis", pools.url, "--model", model]) == 0
    assert f"no worker and no registry of {model} is known" in capsys.readouterr().err
    assert main(["pools", "add", new, "--redis", pools.url]) == 0
    assert f"no worker and no registry of {model} is known" in capsys.readouterr().err
    assert main(["pools", "add", f"{model}#2", "--redis", pools.url]) == 0
    assert main(["pools", "--redis", pools.url, "--model", model]) == 0
    assert not capsys.readouterr().err, "it has a registry now"
    pools("remove", f"{model}#2")
    assert "its last one goes with --force" in pools("remove", new, status=2)
    with engines(pools.url, new, "a"):
        applied(pools.url, {new: 1})
        assert "stop its engines first" in pools("remove", new, "--force", status=2)
        applied(pools.url, {new: 1})


def test_the_last_pool_goes_by_force_with_the_registry(pools: Commands, model: str) -> None:
    new = f"{model}#1"
    pools("add", new)
    assert pools("remove", new, "--force") == f"{new} is removed\n"
    assert pools.keys_of(new) | pools.keys_of(model) == set()


def test_the_last_pool_of_a_model_that_a_router_serves_stays(
    pools: Commands, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = f"{model}#1"
    pools("add", new)
    [state] = pools.client.hvals(Keys(model).pools)
    removed = PoolRegistry.remove

    async def written_back(registry: PoolRegistry, tag: str) -> None:
        await removed(registry, tag)
        pools.client.hset(Keys(model).pools, tag, state)

    monkeypatch.setattr(PoolRegistry, "remove", written_back)
    assert "has written the registry back" in pools("remove", new, "--force", status=2)
    assert list(pools.listed()) == [new]


def test_each_pool_is_listed_with_its_master_of_a_cluster(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with whole_cluster() as cluster:
        tags: list[str] = []
        while len(tags) < 3:
            tags.append(next_tag(model, tags, cluster.ranges))
        assert main(["pools", "add", *tags, "--redis", cluster.url]) == 0
        capsys.readouterr()
        assert main(["pools", "--json", "--redis", cluster.url, "--model", model]) == 0
        [listed] = json.loads(capsys.readouterr().out).values()
        homes = {tag: "{}:{}".format(*(master_of(tag, cluster.ranges) or ())) for tag in tags}
        assert {pool["pool"]: pool["redis"] for pool in listed} == homes
        assert len({*homes.values()}) == 3, "each pool has a master of its own"
