"""Limits of clients over pools on the three masters of a real Cluster, also while one master is lost under load."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.engines.scripted import Engine, Seen, engine, reply
from tests.support.polling import poll
from tests.support.redis.topology import whole_cluster
from tests.support.replicas.replica import replica
from tests.support.requests.client_keys import line

from warmfleet.fleet import ClientLimits
from warmfleet.fleet.connection.pool_masters import next_tag
from warmfleet.pools.home_pools import in_order
from warmfleet.protocol.wire import model_tag

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from tests.support.redis.topology import WholeCluster
    from tests.support.replicas.replica import Replica

LIMIT, ENGINES, AT_ONCE = 4, 6, 8
SERVED_S = 0.03  # duration of each answer of an engine
KEPT_S = 12.0  # a running request is counted in another pool within 10 s
STEADY_S = 4.0
ALL_PLACES_S = 8.0  # too short for leases to expire: 10 s of them would be left

pytestmark = [
    pytest.mark.long(
        minutes=2,
        shows=(
            "the limits of clients over three pools on three masters of a Cluster, of which one is killed under load: "
            "the client that the lost pool counted for has its limit once more at most, and soon all its places again; "
            "no other client notices"
        ),
    ),
    pytest.mark.timeout(300),
]


class Fleet:
    """Two replicas and the engines of three pools, one on each master. ``clients``: one for each master that counts."""

    def __init__(self, cluster: WholeCluster, model: str) -> None:
        self.cluster, self.model = cluster, model
        self.tags: list[str] = []
        for _ in cluster.masters:
            self.tags.append(next_tag(model, self.tags, cluster.ranges))
        names = [f"team-{number}" for number in range(200)]
        self.clients = {cluster.number_of(model_tag(self.counting_pool(name))): name for name in names}
        self.routers: list[Replica] = []
        self.running: Counter[str] = Counter()  # simultaneous requests at engines, by client
        self.most: Counter[str] = Counter()  # the largest number so far
        self.answers: Counter[tuple[str, int]] = Counter()  # answers by client and status
        self.over = False

    def counting_pool(self, client: str) -> str:
        """The pool that counts for a client while all pools work."""
        return next(iter(in_order(ClientLimits(client).tag.encode(), dict.fromkeys(self.tags, 1))))

    async def serve(self, _engine: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        client = seen.json["prompt"].partition(" ")[0]
        self.running[client] += 1
        self.most[client] = max(self.most[client], self.running[client])
        try:
            await asyncio.sleep(SERVED_S)
        finally:
            self.running[client] -= 1
        reply(writer, b'{"choices": [{"index": 0, "text": "x"}]}')

    async def press(self, client: str, number: int) -> None:
        """Send a client's requests one after another, whatever the answers are, until the test is over."""
        count = 0
        while not self.over:
            count += 1
            body = {"model": self.model, "prompt": f"{client} {number} {count} " + "word " * 40, "max_tokens": 1}
            status, _, _ = await self.routers[number % 2].post(body, authorization=f"Bearer key-{client}")
            self.answers[client, status] += 1
            await asyncio.sleep(0.01)

    async def unchecked(self, client: str) -> int:
        """The number of a client's requests that no pool counted."""
        sample = f'warmfleet_limited_requests_total{{client="{client}",result="unchecked"}}'
        return int(sum([await router.metric(sample) for router in self.routers]))

    def counted(self) -> list[str]:
        """The keys of clients with requests in flight, on all masters."""
        nodes = [*self.cluster.masters, *self.cluster.replicas]
        nodes = [node for node in nodes if node.process.poll() is None and node.client().info()["role"] == "master"]
        return [key for node in nodes for key in node.client().scan_iter("wf:*:client:*", count=1_000)]


@asynccontextmanager
async def fleet_of(model: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    with whole_cluster() as cluster:
        made = Fleet(cluster, model)
        assert sorted(made.clients) == [0, 1, 2]
        path = tmp_path / "keys.jsonl"
        path.write_text("".join(line(name, f"key-{name}", concurrency=LIMIT) for name in made.clients.values()))
        async with AsyncExitStack() as stack:
            urls = [(await stack.enter_async_context(engine(model, made.serve))).url for _ in range(ENGINES)]
            settings: dict[str, Any] = {"models": tuple(made.tags), "client_keys_file": str(path), "admin_port": 1}
            for _ in range(2):
                replicas = replica(cluster.url, model, *urls, look_url=valkey_url, **settings)
                made.routers.append(await stack.enter_async_context(replicas))
            yield made


async def full(fleet: Fleet, clients: Sequence[str]) -> None:
    """Return when each client has reached its limit of simultaneous requests at engines, from now on."""
    fleet.most.clear()
    await poll(lambda: all(fleet.most[client] >= LIMIT for client in clients), 60, "all that limits let in")


async def test_limits_hold_over_pools_on_different_masters(model: str, valkey_url: str, tmp_path: Path) -> None:
    async with fleet_of(model, valkey_url, tmp_path) as fleet:
        hit, *others = clients = [fleet.clients[number] for number in (0, 1, 2)]
        running = [asyncio.create_task(fleet.press(team, number)) for team in clients for number in range(AT_ONCE)]
        await full(fleet, clients)
        await asyncio.sleep(STEADY_S)
        before = fleet.most.copy()
        fleet.cluster.masters[0].kill()
        await poll(lambda: fleet.cluster.promoted(0), 30, "its replica takes over")
        await asyncio.sleep(KEPT_S)
        during, unchecked = fleet.most.copy(), {client: await fleet.unchecked(client) for client in clients}
        began = time.monotonic()
        await full(fleet, clients)
        full_s = time.monotonic() - began
        await asyncio.sleep(STEADY_S)
        after = fleet.most.copy()
        fleet.over = True
        await asyncio.gather(*running)
        print(f"\nat once before, during, after: {before}, {during}, {after}; unchecked {unchecked}")
        print(f"answers {fleet.answers}; after {KEPT_S + full_s:.1f} s {hit} has all its places")
        assert {status for _, status in fleet.answers} <= {200, 429}
        assert before == after == dict.fromkeys(clients, LIMIT)
        assert during[hit] <= 2 * LIMIT + unchecked[hit]
        for client in others:
            assert during[client] <= LIMIT + unchecked[client]
        assert full_s < ALL_PLACES_S
        await poll(lambda: fleet.counted() == [], 60, "no request counts any more")
