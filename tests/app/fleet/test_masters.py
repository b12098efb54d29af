"""A replica has one connection to each master of a Cluster, and trouble with one master leaves the others alone."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import hiredis
import pytest
from tests.support.polling import poll
from tests.support.redis.servers import PATIENT

from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import Fleet, RedisConnections, Timeouts
from warmfleet.fleet.first_contact import first_contact
from warmfleet.protocol.redis_address import CLUSTER_SLOTS, slot_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from warmfleet.fleet.connection.masters import MasterLine, Masters

TAGS = ("alpha", "beta", "gamma", "delta")


@dataclass
class Node:
    """A stand-in for a Cluster's node. refusals: the errors for calls by tag. calls: the tags of all calls."""

    cluster: Nodes
    port: int = 0
    refusals: dict[str, str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    lines: int = 0  # connections on which scripts were called
    listening: asyncio.Server | None = None
    answers: asyncio.Event = field(default_factory=asyncio.Event)  # the node sends nothing while the event is not set

    async def start(self) -> None:
        self.listening = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self.listening.sockets[0].getsockname()[1]
        self.answers.set()

    async def kill(self) -> None:
        assert self.listening is not None
        self.listening.close()
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        parser, scripts = hiredis.Reader(), False
        with suppress(OSError):
            while data := await reader.read(65_536):
                parser.feed(data)
                while (words := parser.gets()) is not False:
                    self.lines += words[0] == b"EVALSHA" and not scripts
                    scripts = scripts or words[0] == b"EVALSHA"
                    await self.answers.wait()
                    writer.write(self._answer(words))
        writer.close()

    def _answer(self, words: list[bytes]) -> bytes:
        if words[0] == b"CLUSTER":
            return self.cluster.slots()
        if words[0] == b"HELLO":
            return b"%1\r\n+proto\r\n:3\r\n"
        if words[0] != b"EVALSHA":
            return b"+OK\r\n"
        tag = words[3].split(b"{")[1].partition(b"}")[0].decode()
        self.calls.append(tag)
        owner = self.cluster.owners[tag]
        if refusal := self.refusals.get(tag):
            return f"-{refusal}\r\n".encode()
        if owner is not self:
            return f"-MOVED {slot_of(tag)} 127.0.0.1:{owner.port}\r\n".encode()
        return b"*1\r\n$7\r\nUNKNOWN\r\n"


class Nodes:
    """The nodes of a Cluster. ``owners``: the real owner of each tag. ``told``: the owner that CLUSTER SLOTS names."""

    def __init__(self) -> None:
        self.all = [Node(self) for _ in range(3)]
        self.owners = dict(zip(TAGS, [*self.all, self.all[0]], strict=True))
        self.told = dict(self.owners)

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.all)

    def slots(self) -> bytes:
        entry = "*3\r\n:{0}\r\n:{0}\r\n*2\r\n$9\r\n127.0.0.1\r\n:{1}\r\n"
        told = "".join(entry.format(slot_of(tag), node.port) for tag, node in self.told.items())
        return f"*{len(self.told)}\r\n{told}".encode()

    def give(self, tag: str, node: Node) -> None:
        self.owners[tag] = self.told[tag] = node


@dataclass
class Router:
    nodes: Nodes
    redis: RedisConnections
    fleets: dict[str, Fleet]

    @property
    def masters(self) -> Masters:
        return cast("Any", self.redis)._masters  # type: ignore[no-any-return]

    @property
    def lines(self) -> dict[int, MasterLine]:
        """The router's connections by the ports of their masters."""
        return {port: line for (_, port), line in self.masters._lines.items()}

    async def settle(self, tag: str) -> str:
        return await self.fleets[tag].bookings.settle("wf-1", "finished")

    async def learned(self) -> None:
        """Call every tag once, so that the router knows all owners and no later call is moved."""
        for tag in TAGS:
            assert await self.settle(tag) == "UNKNOWN"
        await poll(lambda: len(self.masters._owners) == len(TAGS), 10, "the owners are known")
        for node in self.nodes.all:
            node.calls.clear()


@asynccontextmanager
async def running() -> AsyncIterator[Router]:
    nodes = Nodes()
    for node in nodes.all:
        await node.start()
    redis = RedisConnections(nodes.url)
    fleets = {tag: Fleet(redis.of(tag), tag, timeouts=PATIENT) for tag in TAGS}
    try:
        yield Router(nodes, redis, fleets)
    finally:
        for fleet in fleets.values():
            await fleet.close()
        await redis.aclose()
        for node in nodes.all:
            await node.kill()


async def test_pools_on_one_master_share_one_connection() -> None:
    async with running() as router:
        await router.learned()
        answers = await asyncio.gather(*(router.settle(tag) for tag in TAGS * 20))
        assert answers == ["UNKNOWN"] * 80
        assert [node.lines for node in router.nodes.all] == [1, 1, 1]
        assert len(router.lines) == 3
        assert [sorted(set(node.calls)) for node in router.nodes.all] == [["alpha", "delta"], ["beta"], ["gamma"]]


async def test_a_call_for_a_slot_that_has_moved_is_sent_on_and_the_next_goes_straight() -> None:
    async with running() as router:
        await router.learned()
        first, second, _ = router.nodes.all
        router.nodes.give("alpha", second)
        assert await asyncio.gather(*(router.settle("alpha") for _ in range(5))) == ["UNKNOWN"] * 5
        assert (first.calls, second.calls) == (["alpha"] * 5, ["alpha"] * 5)
        assert await router.settle("alpha") == "UNKNOWN"
        assert (len(first.calls), len(second.calls)) == (5, 6)
        assert await router.settle("delta") == "UNKNOWN", "the line to the former master serves its other slots"
        assert first.lines == 1


async def test_masters_that_name_each_other_end_a_call_and_no_more() -> None:
    async with running() as router:
        await router.learned()
        first, second, _ = router.nodes.all
        slot = slot_of("alpha")
        first.refusals["alpha"] = f"MOVED {slot} 127.0.0.1:{second.port}"
        second.refusals["alpha"] = f"MOVED {slot} 127.0.0.1:{first.port}"
        with pytest.raises(FleetUnavailable, match="MOVED"):
            await asyncio.wait_for(router.settle("alpha"), 10)
        assert first.calls + second.calls == ["alpha", "alpha"]
        assert await asyncio.gather(*map(router.settle, TAGS[1:])) == ["UNKNOWN"] * 3


@pytest.mark.parametrize("refusal", ["ASK 1 127.0.0.1:1", "TRYAGAIN slot migrates", "CLUSTERDOWN Hash slot not served"])
async def test_a_slot_that_cannot_be_served_fails_its_calls_and_no_others(refusal: str) -> None:
    async with running() as router:
        await router.learned()
        first = router.nodes.all[0]
        first.refusals["alpha"] = refusal
        others = [asyncio.create_task(router.settle("delta")) for _ in range(5)]
        with pytest.raises(FleetUnavailable, match=refusal.split()[0]):
            await router.settle("alpha")
        assert await asyncio.gather(*others) == ["UNKNOWN"] * 5
        assert first.lines == 1


async def test_a_lost_master_is_left_when_the_nodes_name_another_and_others_notice_nothing() -> None:
    async with running() as router:
        await router.learned()
        first, second, _ = router.nodes.all
        lost = router.lines[first.port]
        await first.kill()
        for _ in range(3):
            with pytest.raises(FleetUnavailable):
                await router.settle("alpha")
            assert [await router.settle(tag) for tag in ("beta", "gamma")] == ["UNKNOWN"] * 2
        router.nodes.give("alpha", second)
        router.nodes.give("delta", second)

        async def served() -> bool:
            with suppress(FleetUnavailable):
                return await router.settle("alpha") == "UNKNOWN" == await router.settle("delta")
            return False

        await poll(served, 10, "the other master serves")
        await poll(lambda: first.port not in router.lines and lost._closed, 10, "the line to the lost one is closed")
        assert second.lines == 1


async def test_a_replica_that_starts_while_a_master_is_down_serves_the_others() -> None:
    async with running() as router:
        await router.nodes.all[0].kill()
        clients = [fleet.redis for fleet in router.fleets.values()]
        await asyncio.wait_for(first_contact(clients, router.nodes.url), 10)
        assert [await router.settle(tag) for tag in ("beta", "gamma")] == ["UNKNOWN"] * 2
        with pytest.raises(FleetUnavailable):
            await router.settle("alpha")


async def test_a_call_before_the_owners_are_known_waits_for_them_within_its_limit() -> None:
    async with running() as router:
        for node in router.nodes.all:
            node.answers.clear()
        fleet = Fleet(router.redis.of("beta"), "beta", timeouts=Timeouts(upkeep_s=0.05))
        with pytest.raises(FleetUnavailable, match="owns the slot"):
            await fleet.bookings.settle("wf-1", "finished")
        for node in router.nodes.all:
            node.answers.set()
        assert await router.settle("beta") == "UNKNOWN"
        assert router.nodes.all[0].calls == [], "the first node of the URL is asked for nothing that is not its own"
        await fleet.close()


async def test_the_nodes_are_asked_once_for_all_pools_and_told_ranges_are_read() -> None:
    async with running() as router:
        await router.learned()
        ranges = await router.redis.slot_ranges()
        assert {(first, last) for first, last, _ in ranges} == {(slot_of(tag), slot_of(tag)) for tag in TAGS}
        assert all(0 <= first < CLUSTER_SLOTS for first, _, _ in ranges)


async def test_a_closed_pool_leaves_the_line_of_the_others_open() -> None:
    async with running() as router:
        await router.learned()
        await router.fleets["alpha"].close()
        assert await router.settle("delta") == "UNKNOWN"
        assert router.nodes.all[0].lines == 1
        assert slot_of("alpha") not in router.masters._owners


async def test_a_closed_pool_leaves_another_client_of_its_tag_its_slot() -> None:
    """The registry of a model's pools shares its tag with the pool that has the model's name."""
    async with running() as router:
        registry = Fleet(router.redis.of("alpha"), "alpha", timeouts=PATIENT)
        await router.learned()
        await router.fleets["alpha"].close()
        await router.fleets["alpha"].close()  # a second close must not release the slot again
        assert await registry.bookings.settle("wf-1", "finished") == "UNKNOWN"
        await registry.close()
        assert slot_of("alpha") not in router.masters._owners


async def test_a_call_of_a_pool_that_was_let_go_fails_and_no_node_is_asked_again_and_again() -> None:
    async with running() as router:
        await router.learned()
        await router.fleets["beta"].close()
        with pytest.raises(FleetUnavailable, match="owns the slot"):
            await router.settle("beta")
        looking = router.masters._looking
        assert looking is None or looking.done(), "nobody can tell the owner of a slot that no pool is in"
        assert await router.settle("alpha") == "UNKNOWN"


async def test_pools_on_a_single_server_share_its_connection(valkey_url: str, model: str) -> None:
    redis = RedisConnections(valkey_url)
    fleets = [Fleet(redis.of(tag), tag, timeouts=PATIENT) for tag in (model, f"{model}#2")]
    assert await asyncio.gather(*(fleet.bookings.settle("wf-1", "finished") for fleet in fleets)) == ["UNKNOWN"] * 2
    assert cast("Any", fleets[0].redis).multiplexed is cast("Any", fleets[1].redis).multiplexed
    await fleets[0].close()
    assert await fleets[1].bookings.settle("wf-2", "finished") == "UNKNOWN", (
        "closing a pool leaves the others' connection open"
    )
    await fleets[1].close()
    await redis.aclose()
