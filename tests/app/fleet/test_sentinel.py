"""A master dies under load; Sentinels promote its replica; routers and workers follow, and nothing stays booked."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any, cast

import pytest
from tests.support.engines.scripted import engine
from tests.support.fleet.busy_fleet import BusyFleet
from tests.support.fleet.publishing import SCHEME
from tests.support.polling import poll
from tests.support.redis.topology import AGREED_S, free_ports, sentinels
from tests.support.replicas.replica import replica

from warmfleet.cli.acl import lines, rules_of
from warmfleet.cli.parser import build_parser
from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import Fleet, Timeouts, connect
from warmfleet_worker import stream
from warmfleet_worker.config import PublisherConfig
from warmfleet_worker.protocol import wire
from warmfleet_worker.server_publisher import ServerConfig, ServerPublisher
from warmfleet_worker.tracker import Tracker
from warmfleet_worker.worker_publisher import WorkerPublisher

LONG = pytest.mark.long(minutes=1, shows="a master of Redis that freezes under load is replaced, as a killed one is")


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="frozen", marks=LONG)],
)
async def test_a_failover_under_load(model: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.2)
    with sentinels() as watched:
        async with BusyFleet(watched.url, model) as fleet:
            await fleet.hold()
            decided_s, indexed_s = await fleet.struck(lambda: watched.master.kill(number), watched.agreed)
            assert watched.promoted()
            assert decided_s < 10
            assert indexed_s < 10
            assert fleet.core.state.stopped is None
            await fleet.consistent()


async def test_what_the_replica_had_not_heard_comes_right(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second of writes is lost: events, decisions and settles that the old master had acknowledged."""
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.2)
    with sentinels(lost_ms=3_000) as watched:  # on a busy machine the writes to be lost take seconds
        async with BusyFleet(watched.url, model) as fleet:
            watched.cut()
            await fleet.hold()  # leases that the new master must learn from the replicas
            count, number = len(fleet.answered), fleet.core.state.number
            await poll(lambda: len(fleet.answered) > count + 30 and fleet.core.state.number > number + 5)
            decided_s, indexed_s = await fleet.struck(watched.master.kill, watched.agreed)
            assert decided_s < 10
            assert indexed_s < 20
            assert {"gap", "resync_gap"} <= (await fleet.fleet.index.counts()).keys()
            await fleet.consistent()


async def test_a_failover_where_everybody_has_least_rights(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The users of ``warmfleet acl --sentinel`` may replicate, promote, and afterwards route and publish."""
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.2)
    users = rules_of(build_parser().parse_args(["acl", model, "--worker", "w1", "--sentinel"]))
    with sentinels("\n".join(lines(users, {name: name for name in users}, commands=False)) + "\n") as watched:
        router, worker = watched.url_of("router:router@"), watched.url_of("worker-w1:worker-w1@")
        async with BusyFleet(router, model, worker) as fleet:
            await fleet.hold()
            decided_s, indexed_s = await fleet.struck(watched.master.kill, watched.agreed)
            assert max(decided_s, indexed_s) < 10
            await fleet.consistent()
            assert "NOPERM" not in " ".join(why for _, why in fleet.failures)


async def test_no_request_fails_meanwhile(model: str) -> None:
    with sentinels() as watched:
        async with engine(model) as upstream, replica(watched.url, model, upstream.url) as router:
            seen: list[str] = []

            async def ask() -> str:
                status, headers, _ = await router.post({"model": model, "prompt": "some words " * 50})
                assert status == 200
                seen.append(headers["x-warmfleet-reservation"])
                return seen[-1]

            assert await ask() == "booked"
            watched.master.kill()
            started = time.monotonic()
            await poll(lambda: ask_is(ask, "fallback"), 10, "Redis is away")
            await poll(lambda: asyncio.to_thread(watched.agreed), AGREED_S, "there is another master")
            await poll(lambda: ask_is(ask, "booked"), 10, "Redis is back")
            print(f"booked again after {time.monotonic() - started:.2f} s, {len(seen)} requests")
            await router.unloaded()


async def ask_is(ask: object, what: str) -> bool:
    return bool(await ask() == what)  # type: ignore[operator]


async def test_sentinels_that_are_away_or_know_nothing(model: str) -> None:
    [nobody] = free_ports(1)
    with sentinels() as watched:
        for sentinel in watched.sentinels[:2]:
            sentinel.kill()
        one = watched.sentinels[2].port
        fleet = Fleet(connect(watched.url.replace("//", f"//127.0.0.1:{nobody},"), timeout_s=2), model)
        assert await fleet.index.counts() == {}  # the last of the four listed Sentinels knows the master
        await fleet.close()
        for url, why in ((f"127.0.0.1:{one}/other", "no node knows it"), (f"127.0.0.1:{nobody}/kv", str(nobody))):
            fleet = Fleet(connect(f"redis+sentinel://{url}"), model)
            with pytest.raises(FleetUnavailable, match=why):
                await fleet.index.counts()
            await fleet.close()


async def test_scripts_that_the_new_master_does_not_know_are_loaded(model: str) -> None:
    with sentinels() as watched:
        fleet = Fleet(connect(watched.url, timeout_s=2), model)
        assert await fleet.bookings.settle("wf-1", "finished") == "UNKNOWN"
        watched.replica.client().script_flush()  # the script cache of a promoted replica may be empty
        watched.master.kill()

        async def settled() -> bool:
            try:
                return await fleet.bookings.settle("wf-2", "finished") == "UNKNOWN"
            except FleetUnavailable:
                return False

        await poll(settled, 90)
        assert watched.promoted()
        await fleet.close()


async def test_joins_that_the_old_master_kept_to_itself_are_made_again(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new master has older streams, so no answer is nil: only the change of master hints at lost writes."""
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.2)
    with sentinels() as watched:
        half = ServerPublisher(
            ServerConfig(watched.url, model, "w1", "http://127.0.0.1:9", (model,), "test", {"tokenizer.json": b"{}"})
        )
        tracker = Tracker()
        core = WorkerPublisher(PublisherConfig(watched.url, model, "w1.0", "w1", 0, SCHEME, 999, 999, "test"), tracker)
        half.start()
        core.start()
        await poll(lambda: half.joined and core.state.joined)  # no replica applies the entries
        nonces = half._stream.nonce, core._stream.nonce
        watched.sentinels[0].client().execute_command("SENTINEL", "FAILOVER", "kv")  # type: ignore[no-untyped-call]
        await poll(lambda: half._stream.nonce != nonces[0] and core._stream.nonce != nonces[1], 90)
        assert watched.promoted()
        assert core.state.joins == 2
        await asyncio.to_thread(half.stop, 5)
        await asyncio.to_thread(core.stop, 5)


async def test_a_frozen_master_costs_one_call_however_many_connections_it_holds(model: str) -> None:
    with sentinels() as watched:
        fleet = Fleet(connect(watched.url), model, Timeouts(request_s=1.0))
        await asyncio.gather(fleet.bookings.settle("wf-before", "finished"), *(fleet.index.counts() for _ in range(30)))
        idle = len(cast("Any", fleet.redis.connection_pool)._available_connections)
        assert idle > 5
        watched.master.kill(signal.SIGSTOP)
        await poll(watched.agreed, AGREED_S, "there is another master")

        async def settle() -> object:
            return await fleet.bookings.settle("wf-after", "finished")

        for call in (settle, fleet.index.counts):
            failed = 0
            while True:
                try:
                    await call()
                    break
                except FleetUnavailable:
                    failed += 1
            assert failed <= 1
        await fleet.close()


async def test_without_sentinels_the_last_master_is_still_the_master(model: str) -> None:
    with sentinels() as watched:
        fleet = Fleet(connect(watched.url, timeout_s=2), model, Timeouts(request_s=2))
        client = stream.connect(watched.url)
        assert client.ping()
        await fleet.bookings.settle("wf-1", "finished")
        for sentinel in watched.sentinels:
            sentinel.kill()
        for _ in range(3):
            await fleet.redis.connection_pool.disconnect()
            client.connection_pool.disconnect()
            assert await fleet.bookings.settle("wf-1", "finished") == "UNKNOWN"
            assert client.ping()
        client.close()
        await fleet.close()
