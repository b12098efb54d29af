"""A server joins, keeps and leaves pools on a real Redis."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.fleet.publishing import config, equal, upkeep
from tests.support.polling import poll
from tests.support.redis.servers import PATIENT

from warmfleet.fleet import Fleet, connect
from warmfleet.fleet.pool_registry import clear
from warmfleet_worker import pool_assignment
from warmfleet_worker.pool_assignment import (
    AWAY_MS,
    SETTLE_MS,
    Member,
    PoolAssignment,
    core_assignment,
    host_name,
    server_assignment,
    take,
)
from warmfleet_worker.protocol.pools import Placement, PoolEntry, read_placement
from warmfleet_worker.protocol.wire import Keys
from warmfleet_worker.server_publisher import ServerConfig, ServerPublisher
from warmfleet_worker.tracker import Tracker
from warmfleet_worker.worker_publisher import WorkerPublisher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCKS = 1_000


class Town:
    """A served model's registry, and servers that join it. present: by server, the pool where it believes to be."""

    def __init__(self, url: str, name: str) -> None:
        self.name, self.url = name, url
        self.client = redis.Redis.from_url(url)
        self.keys = Keys(name)
        self.present: dict[str, str] = {}

    def pool(self, number: int | str) -> str:
        return f"{self.name}#{number}"

    def register(self, number: int | str, *, draining: bool = False, moving: bool = False) -> str:
        tag = self.pool(number)
        self.client.hset(self.keys.pools, tag, PoolEntry(tag, draining, moving).encode())
        return tag

    def remove(self, number: int | str) -> None:
        self.client.hdel(self.keys.pools, self.pool(number))

    def sit(self, server: str, host: str = "", blocks: int = BLOCKS) -> str:
        """Let the server's core look up its pool."""
        member = Member(server, host, 0, blocks)
        self.present[server] = take(self.client, self.name, member, self.present.get(server, ""))
        return self.present[server]

    def place(self, server: str) -> Placement:
        found = read_placement(self.client.hget(self.keys.placement, server))
        assert found is not None
        return found

    def away(self, server: str, ms: int = AWAY_MS + 10_000) -> None:
        """Let the server have ended this long ago."""
        self.present.pop(server, None)
        place = self.place(server)
        self.client.hset(self.keys.placement, server, replace(place, seen_ms=place.seen_ms - ms).encode())

    def restart(self, server: str, blocks: int = BLOCKS) -> str:
        self.away(server)
        return self.sit(server, blocks=blocks)

    def capacities(self, servers: list[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for server in servers:
            place = self.place(server)
            found[place.pool] = found.get(place.pool, 0) + place.capacity_blocks
        return found


@pytest.fixture
def town(redis_url: str, model: str) -> Iterator[Town]:
    made = Town(redis_url, model)
    yield made
    made.client.close()


def test_without_a_registry_every_server_joins_the_one_pool_and_nothing_is_written(town: Town) -> None:
    assert {town.sit(server) for server in ("a", "b", "c")} == {town.name}
    assert not town.client.exists(town.keys.placement)


def test_servers_go_where_the_least_capacity_is(town: Town) -> None:
    one, two = town.register(1), town.register(2)
    first = town.sit("big", blocks=3 * BLOCKS)
    other = two if first == one else one
    assert [town.sit(server) for server in ("a", "b", "c")] == [other] * 3
    assert town.sit("d") in (one, two)


def test_a_server_that_has_not_told_its_capacity_counts_as_others_do(town: Town) -> None:
    """API servers start before their cores: if they did not count, all would see an empty pool."""
    town.register(1), town.register(2)
    for number in range(8):
        take(town.client, town.name, Member(f"s{number}"), "")
    servers = [f"s{number}" for number in range(8)]
    pools = [town.place(server).pool for server in servers]
    assert {pools.count(pool) for pool in pools} == {4}
    town.sit("s0"), town.sit("s1")
    for number in range(8, 12):
        take(town.client, town.name, Member(f"s{number}"), "")
    pools = [town.place(f"s{number}").pool for number in range(12)]
    assert {pools.count(pool) for pool in pools} == {6}


def test_engines_of_one_host_are_spread(town: Town) -> None:
    """Capacities that differ by a few blocks count as equal: then the host decides."""
    town.register(1), town.register(2)
    for host in ("north", "south", "east"):
        assert len({town.sit(f"{host}-{n}", host, BLOCKS + n) for n in range(2)}) == 2


def test_both_halves_and_all_ranks_of_a_server_are_in_one_pool(town: Town) -> None:
    for number in range(3):
        town.register(number)
    for server in "abcdef":
        halves = [Member(server, "h", rank, BLOCKS) for rank in (0, 1)] + [Member(server, "h")]
        assert len({take(town.client, town.name, half, "") for half in halves}) == 1
        assert town.place(server).blocks == {"0": BLOCKS, "1": BLOCKS}
    assert set(town.capacities(list("abcdef")).values()) == {4 * BLOCKS}


def test_a_server_that_is_started_again_comes_back(town: Town) -> None:
    for number in range(4):
        town.register(number)
    before = {server: town.sit(server) for server in "abcdefgh"}
    for server in "abcdefgh":
        town.away(server, 3_600_000)  # all of them, for an hour
    assert {server: town.sit(server) for server in "hgfedcba"} == before


def test_a_new_pool_fills_up_as_servers_are_started_again(town: Town) -> None:
    town.register(1)
    servers = [f"s{n}" for n in range(9)]
    for server in servers:
        town.sit(server)
    town.register(2), town.register(3)
    assert {town.sit(server) for server in servers} == {town.pool(1)}, "nobody moves while it serves"
    for server in servers:
        town.restart(server)
    assert sorted(town.capacities(servers).values()) == [3 * BLOCKS] * 3


def test_a_drained_pool_is_left_at_the_next_start(town: Town) -> None:
    town.register(1), town.register(2)
    servers = list("abcd")
    for server in servers:
        town.sit(server)
    there = [server for server in servers if town.present[server] == town.pool(1)]
    town.register(1, draining=True)
    assert {town.sit(server) for server in there} == {town.pool(1)}
    town.present.pop(there[0])  # started again at once
    assert town.sit(there[0]) == town.pool(2)
    assert town.sit("new") == town.pool(2)


def test_a_pool_moves_a_few_servers_at_a_time(town: Town) -> None:
    """All other servers serve meanwhile: a server that moves takes no requests until it is proved in its new pool."""
    servers = [f"s{n}" for n in range(17)]
    for server in servers:
        assert town.sit(server) == town.name
        town.present[server] = town.pool(1)  # as if that had been the only pool: no place is known yet
    town.register(2), town.register(1, draining=True, moving=True)
    moved = 0
    while moved < len(servers):
        for server in servers:
            town.sit(server)
        now = [server for server in servers if town.present[server] == town.pool(2)]
        assert len(now) - moved == min(2, len(servers) - moved), "an eighth of 17"
        for server in servers:
            other_half = take(town.client, town.name, Member(server), town.present[server])
            assert other_half == town.present[server]
        moved = len(now)
        for server in now:  # the servers have settled in
            place = town.place(server)
            settled = replace(place, moved_ms=place.moved_ms - SETTLE_MS)
            town.client.hset(town.keys.placement, server, settled.encode())


def test_servers_of_a_removed_pool_go_elsewhere_at_once(town: Town) -> None:
    town.register(1), town.register(2), town.register(3)
    servers = [f"s{n}" for n in range(6)]
    for server in servers:
        town.sit(server)
    town.remove(2)
    for server in servers:
        assert town.sit(server) != town.pool(2)
    assert set(town.capacities(servers).values()) == {3 * BLOCKS}


def test_when_all_pools_are_drained_a_server_stays_or_takes_one_of_them(town: Town) -> None:
    town.register(1), town.register(2)
    old = town.sit("a")
    for number in (1, 2):
        town.register(number, draining=True, moving=True)
    assert town.sit("a") == old
    town.restart("a")
    assert town.sit("b") in (town.pool(1), town.pool(2))


def test_a_registry_that_was_lost_moves_nobody(town: Town) -> None:
    town.register(1), town.register(2)
    before = {server: town.sit(server) for server in "abcd"}
    town.client.unlink(town.keys.pools)
    assert {server: town.sit(server) for server in "abcd"} == before


def test_places_of_servers_that_are_gone_for_good_are_struck_out(town: Town) -> None:
    town.register(1)
    town.sit("old")
    town.away("old", 25 * 3_600_000)
    town.sit("new")
    assert town.client.hkeys(town.keys.placement) == [b"new"]


def test_servers_that_join_together_are_spread_evenly(town: Town) -> None:
    """All servers begin at once, each with its own connection."""
    for number in range(4):
        town.register(number)

    def one(number: int) -> str:
        with redis.Redis.from_url(town.url) as client:
            return take(client, town.name, Member(f"s{number}", "", 0, BLOCKS), "")

    with ThreadPoolExecutor(24) as threads:
        pools = list(threads.map(one, range(24)))
    assert {pools.count(town.pool(number)) for number in range(4)} == {6}


OPERATIONS = st.one_of(
    st.tuples(st.just("join"), st.integers(0, 11)),
    st.tuples(st.just("join"), st.integers(0, 11)),
    st.tuples(st.just("restart"), st.integers(0, 11)),
    st.tuples(st.just("look"), st.integers(0, 11)),
    st.tuples(st.sampled_from(["add", "drain", "move", "remove"]), st.integers(0, 4)),
)


@given(st.lists(OPERATIONS, min_size=5, max_size=40))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_happens_nobody_is_in_a_removed_pool_and_capacity_is_even(
    town: Town, operations: list[tuple[str, int]]
) -> None:
    town.client.unlink(town.keys.pools, town.keys.placement)
    town.present.clear()
    states: dict[str, str] = {town.register(0): "add"}
    for word, number in operations:
        server, pool = f"s{number}", town.pool(number)
        if word == "add" or (word in ("drain", "move") and pool in states):
            others = [tag for tag, state in states.items() if state == "add" and tag != pool]
            if word == "add" or others:
                town.register(number, draining=word != "add", moving=word == "move")
                states[pool] = word
        elif word == "remove" and any(state == "add" for tag, state in states.items() if tag != pool):
            town.remove(number)
            states.pop(pool, None)
        elif word in ("join", "restart", "look"):
            _one_server(town, states, word, server)
    servers = sorted(town.present)
    for server in servers:
        assert town.sit(server) in states
    for server in servers * 2:
        assert states[town.restart(server)] == "add"
    capacities = town.capacities(servers)
    even = [capacities.get(tag, 0) for tag, state in states.items() if state == "add"]
    assert sum(even) == len(servers) * BLOCKS
    assert max(even) - min(even) <= BLOCKS


def _one_server(town: Town, states: dict[str, str], word: str, server: str) -> None:
    old = town.present.get(server)
    if word == "look" and old:
        new = town.sit(server)
        assert new != old or old in states, "nobody stays in a removed pool"
        assert new == old or states.get(old) not in ("add", "drain"), "kept while it serves"
    elif word == "restart" and old:
        town.restart(server)
        assert states[town.present[server]] == "add"
    elif not old:
        counted = {tag: 0 for tag, state in states.items() if state == "add"}
        counted |= {tag: size for tag, size in town.capacities(sorted(town.present)).items() if tag in counted}
        assert counted[town.sit(server)] == min(counted.values())


# ---------------------------------------------------------------- pool_assignment and publishers


def test_a_pool_that_the_operator_names_is_not_asked_for(town: Town, caplog: pytest.LogCaptureFixture) -> None:
    assignment = PoolAssignment("redis://127.0.0.1:1", f"{town.name}#mine", Member("a"))
    assert assignment.look(0.0) == f"{town.name}#mine", "even while Redis is away"
    assignment = PoolAssignment(town.url, f"{town.name}#mine", Member("a", "h", 0, BLOCKS))
    town.register(1)
    assert assignment.look(0.0) == f"{town.name}#mine"
    assert town.place("a").capacity_blocks == BLOCKS, "its capacity counts for others"
    assert town.place("a").pinned
    assert not town.place(town.sit("b") and "b").pinned
    for now in (100.0, 200.0):
        assignment.look(now)
    lacking = [line for line in caplog.messages if "which the registry of" in line]
    assert len(lacking) == 1, "told once, not at every look"
    assert f"a: WARMFLEET_MODEL names the pool {town.name}#mine" in lacking[0]
    assignment.close()


def test_a_seat_that_was_never_told_its_pool_waits_for_redis_and_keeps_it_through_an_outage(
    town: Town, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tag = town.register(1)
    assignment = PoolAssignment(town.url, town.name, Member("a"))
    whole = pool_assignment.take

    def broken(*_: object, **__: object) -> str:
        raise redis.ConnectionError("away")

    monkeypatch.setattr(pool_assignment, "take", broken)
    with pytest.raises(redis.ConnectionError):
        assignment.look(0.0)
    monkeypatch.setattr(pool_assignment, "take", whole)
    assert assignment.look(0.1) == tag, "asked again at once"
    monkeypatch.setattr(pool_assignment, "take", broken)
    assert assignment.look(100.0) == tag
    assert caplog.messages[-1].endswith(f"the registry of pools cannot be read: away; it stays in {tag}")
    assignment.close()


def test_the_host_is_the_node_where_kubernetes_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_NAME", "node 7/a")
    assert host_name() == "node-7-a"
    monkeypatch.delenv("NODE_NAME")
    assert host_name()


@contextmanager
def halves(
    town: Town, tracker: Tracker, moved: Callable[[], None] = lambda: None
) -> Iterator[tuple[WorkerPublisher, ServerPublisher]]:
    told = config(town.url, town.name)
    core = WorkerPublisher(told, tracker, assignment=core_assignment(told), moved=moved)
    said = ServerConfig(town.url, town.name, "w1", "http://127.0.0.1:9", (town.name,), "test")
    server = ServerPublisher(said, server_assignment(town.url, town.name, "w1"))
    core.start()
    server.start()
    try:
        yield core, server
    finally:
        core.stop(5)
        server.stop(5)


@pytest.mark.usefixtures("short_periods")
async def test_a_worker_moves_with_its_blocks_while_it_serves(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both halves leave the pool that is drained, and the index of the new one equals the table."""
    monkeypatch.setattr(pool_assignment, "ASK_SECONDS", 0.2)
    old = town.register(1)
    tracker = Tracker()
    tracker.stored([os.urandom(8) for _ in range(500)])
    moves: list[None] = []
    first, second = (Fleet(connect(town.url), town.pool(number), PATIENT) for number in (1, 2))
    try:
        async with upkeep(first), upkeep(second):
            with halves(town, tracker, lambda: moves.append(None)) as (core, _):
                await equal(first, tracker)
                assert core.tag == old
                assert not moves, "to take a first pool is no move"
                await poll(lambda: _both(first), what="both halves are in the first pool")
                town.register(2), town.register(1, draining=True, moving=True)
                await equal(second, tracker)
                tracker.removed(list(tracker.table)[:100])
                await equal(second, tracker)
                await poll(lambda: _both(second), what="both halves are in the second pool")
                await poll(lambda: _gone(first), 10, "both halves said goodbye to the first pool")
                assert core.state.dropped == 0
                assert len(moves) == 1
    finally:
        await first.close()
        await second.close()


@pytest.mark.usefixtures("short_periods")
async def test_a_worker_whose_pool_is_removed_looks_for_another_at_once(town: Town) -> None:
    """The worker's stream is gone, so the worker moves before its next look, and does not revive the pool."""
    town.register(1)
    tracker = Tracker()
    tracker.stored([os.urandom(8) for _ in range(50)])
    first, second = (Fleet(connect(town.url), town.pool(number), PATIENT) for number in (1, 2))
    try:
        async with upkeep(second):
            with halves(town, tracker):
                async with upkeep(first):
                    await equal(first, tracker)
                    await poll(lambda: _both(first), what="both halves are in the first pool")
                town.register(2)
                town.remove(1)
                await clear(first, shared=False)
                await equal(second, tracker, deadline_s=pool_assignment.ASK_SECONDS / 2)
                await poll(lambda: _both(second), pool_assignment.ASK_SECONDS / 2, "both halves are in the second pool")
            assert not list(town.client.scan_iter(Keys(town.pool(1)).prefix + "*", count=1_000))
    finally:
        await first.close()
        await second.close()


async def _gone(fleet: Fleet) -> bool:
    return [(worker.heartbeat_age_s, worker.server_age_s) for worker in await fleet.workers.read()] == [(None, None)]


async def _both(fleet: Fleet) -> bool:
    return any(worker.heard and worker.server_age_s is not None for worker in await fleet.workers.read())
