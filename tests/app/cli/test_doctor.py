"""``warmfleet doctor`` on set-ups that are broken on purpose: it names the fault, and what to do about it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import socket
import time
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import redis
from tests.support.engines.simulated import LIMITS, SCHEME, identity, simulated
from tests.support.polling import poll
from tests.support.redis.gate import gate
from tests.support.redis.servers import redis7_binary, server, valkey_binary
from tests.support.redis.topology import SLOTS, cluster, sentinels, tls_server
from tests.support.replicas import fixed_answers
from tests.support.replicas.doctor import doctor, guarded
from tests.support.replicas.replica import replica

from warmfleet.__main__ import main
from warmfleet.cli.doctor import cluster_checks, fleet_checks, pool_checks, redis_checks, router_checks
from warmfleet.cli.doctor.command import plan_of
from warmfleet.cli.doctor.finding import Finding, Report, State
from warmfleet.cli.doctor.parity_checks import Subject, handoff
from warmfleet.cli.local.ports import free_port
from warmfleet.cli.local.running_stack import RunningStack, announced
from warmfleet.cli.local.store import SOCKET_NAME
from warmfleet.cli.parser import build_parser
from warmfleet.engines.engine_tls import engine_tls
from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import Flag, Fleet, Proof, Truth, WorkerState, WorkerTruth, connect
from warmfleet.fleet.inspection.acl import ROUTER_COMMANDS, SCRIPT_COMMANDS
from warmfleet.fleet.inspection.rights import router_rights
from warmfleet.fleet.inspection.server import Inspection
from warmfleet.fleet.pool_registry import PoolEntry, PoolRegistry
from warmfleet.protocol.pools import Placement
from warmfleet.protocol.redis_address import parse, slot_of
from warmfleet.protocol.wire import Scheme
from warmfleet_loadtest.engine import Engine, EngineConfig
from warmfleet_loadtest.simulator import answers, api, exposition
from warmfleet_loadtest.simulator.api import Served
from warmfleet_loadtest.simulator.fleet_membership import Membership
from warmfleet_loadtest.simulator.step_costs import PRESETS
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    import redis.asyncio as aioredis
    from tests.support.redis.topology import Secured

SECRET = "geheim-only-the-fleet-knows"


def test_the_quiet_doctor_prints_faults_only() -> None:
    out = io.StringIO()
    report = Report(out=out, faults_only=True)
    report.part("Redis")
    report.add([Finding("server", State.OK, "well"), Finding("server", State.NOTE, "odd", "mind it")])
    report.part("Workers")
    report.add([Finding("worker", State.SKIPPED, "not asked"), Finding("worker", State.FAULT, "dead", "start it")])
    report.add([Finding("worker", State.BROKEN, "a bug")])
    report.part("Router")
    report.add([Finding("ready", State.FAULT, "503", "wait")])
    assert out.getvalue().splitlines() == [
        "Workers",
        "  FAULT   worker: dead",
        "          -> start it",
        "  broken  worker: a bug",
        "",
        "Router",
        "  FAULT   ready: 503",
        "          -> wait",
    ]
    assert len(report.found) == 6, "--json tells all"


@asynccontextmanager
async def applied(url: str, model: str) -> AsyncIterator[Fleet]:
    """A fleet whose streams are applied, as a router does, without the rest of a router."""
    fleet = Fleet(connect(url, timeout_s=5), model)

    async def for_ever() -> None:
        while True:
            await fleet.upkeep.step()
            await asyncio.sleep(0.02)

    task = asyncio.create_task(for_ever())
    try:
        yield fleet
    finally:
        task.cancel()
        await asyncio.wait([task])
        await fleet.close()


@asynccontextmanager
async def stock(served: Served = Served(("demo",)), joins: str = "") -> AsyncIterator[str]:  # noqa: B008  it is frozen
    """The URL of an engine, without the plugin unless it joins the fleet in this Redis."""
    made = Engine(EngineConfig(SCHEME, LIMITS, 1_024, PRESETS["fast"]), identity(), served)
    await made.start("127.0.0.1", 0)
    url, model = f"http://127.0.0.1:{made.port}", served.models[0]
    try:
        if joins:
            made.join(Membership(joins, model, served.models, "eng", url), identity().artifacts())
        yield url
    finally:
        await made.stop()


async def complete(fleet: Fleet, count: int = 1) -> None:
    """Return when so many workers have joined with both halves."""

    async def there() -> bool:
        return sum(worker.server is not None for worker in await fleet.workers.read()) == count

    await poll(there, 30, f"{count} workers have joined")


async def silent(fleet: Fleet) -> None:
    """Return when no worker is heard any more."""

    async def gone() -> bool:
        return {worker.state for worker in await fleet.workers.read()} == {WorkerState.LEFT}

    await poll(gone, 30, "the goodbye is applied")


# ---------------------------------------------------------------- all is well


async def test_nothing_is_wrong(valkey_url: str, model: str) -> None:
    async with replica(valkey_url, model) as router, simulated(valkey_url, model) as engine:
        await router.proven()
        keys = set(redis.Redis.from_url(valkey_url).scan_iter(f"*{wire.model_tag(model)}*"))
        result = await doctor(valkey_url, model, engine.url, routers=(router.operators,))
        assert result.report.status == 0, result.printed
        assert result.of("prefix caching", State.OK)[0].detail.endswith("as predicted")
        for check in ("version", "eviction", "clock", "latency", "router rights", "routers", "worker", "scheme", "url"):
            assert result.of(check, State.OK), (check, result.printed)
        for check in ("plugin", "tokenizer", "template", "token ids", "index", "token hand-off", "ready", "workers"):
            assert result.of(check, State.OK), (check, result.printed)
        now = set(redis.Redis.from_url(valkey_url).scan_iter(f"*{wire.model_tag(model)}*"))
        assert {key for key in now - keys if b":b:" not in key and b":s:" not in key} == set(), "it wrote keys"


async def test_the_gap_that_a_step_full_of_prompts_makes_is_told(valkey_url: str, model: str) -> None:
    async with replica(valkey_url, model) as router, simulated(valkey_url, model):
        await router.proven()
        assert (await router.post({"model": model, "prompt": "word " * 1_000, "max_tokens": 1}))[0] == 200

        async def told() -> list[Finding]:
            result = await doctor(valkey_url, model)
            return result.of("gap", State.OK) or result.of("gap", State.NOTE)  # the latter on a busy machine

        found: Any = await poll(told, 30, "the engine's speed is known")
        assert f"a step with {LIMITS.step_tokens:,} tokens of prompts takes about " in found[0].detail


# ---------------------------------------------------------------- Redis


async def test_redis_is_down(model: str) -> None:
    port = free_port()
    result = await doctor(f"redis://router:{SECRET}@127.0.0.1:{port}/0", model)
    result.names(
        "reachable", f"127.0.0.1:{port}: no connection (connection refused)", "start Redis there, or correct host"
    )
    assert SECRET not in result.printed
    assert {"server", "clock", "latency", "router rights", "worker rights", "workers"} == {
        finding.check for _, finding in result.report.found if finding.state is State.SKIPPED
    }
    assert f"Workers of {model}" in result.printed
    result = await doctor("redis://no-such-host.invalid/0", model)
    result.names("reachable", "the name cannot be resolved", "correct the host in WARMFLEET_REDIS_URL")
    result = await doctor("redis://no-such-host.invalid/0", model, url_from="--redis")
    result.names("reachable", "the name cannot be resolved", "correct the host in --redis")
    assert "WARMFLEET_REDIS_URL" not in result.printed
    result = await doctor("unix:///no/such/socket", model)
    result.names("reachable", "there is no socket /no/such/socket", "start Redis with `unixsocket`")


async def test_the_password_is_wrong(valkey_url: str, model: str) -> None:
    result = await doctor(valkey_url.replace("://", f"://nobody:{SECRET}@", 1), model)
    result.names(
        "login", "refuses the user or the password of WARMFLEET_REDIS_URL", "put user and password of `warmfleet acl`"
    )
    assert SECRET not in result.printed


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    with tls_server() as made:
        yield made


async def test_the_authority_is_wrong(secured: Secured, model: str) -> None:
    result = await doctor(secured.url, model, redis_ca=str(secured.other_ca))
    result.names("tls", "shows a certificate that is not trusted", "set WARMFLEET_REDIS_CA to the PEM file")
    assert (await doctor(secured.url, model, redis_ca=str(secured.ca))).of("login", State.OK)


async def test_redis_evicts_and_is_full(model: str) -> None:
    with server(valkey_binary(), "--maxmemory-policy", "allkeys-lru") as url, redis.Redis.from_url(url) as client:
        result = await doctor(url, model)
        result.names("eviction", "maxmemory-policy is allkeys-lru", "CONFIG SET maxmemory-policy noeviction")
        assert "maxmemory is not set" in result.of("memory", State.NOTE)[0].detail
        client.config_set("maxmemory-policy", "noeviction")
        client.setrange("ballast", 10_000_000, "x")  # no buffer of a large command counts for a moment
        client.config_set("maxmemory", client.info("memory")["used_memory"] * 10 // 9)
        result = await doctor(url, model)
        result.names("memory", "are used: from 85% on no new block is indexed", "raise maxmemory")
        assert result.of("eviction", State.OK)
        client.config_set("maxmemory", 1_000_000)
        (await doctor(url, model)).names("memory", "Redis is full", "raise maxmemory")


async def test_the_clock_is_off(valkey_url: str, model: str) -> None:
    result = await doctor(valkey_url, model, wall=lambda: time.time() + 90)
    result.names(
        "clock", "this machine's clock is 90.0 s ahead of Redis'", "let chrony or systemd-timesyncd set the clocks"
    )


async def test_redis_is_far_away(valkey_url: str, model: str) -> None:
    async with gate(valkey_url) as door:
        door.delay_s = 0.03
        result = await doctor(f"redis://127.0.0.1:{door.port}", model, decide_timeout_s=0.05)
        result.names("latency", "after 50 ms a request goes by the last known fleet", "put Redis near the routers")


async def test_a_server_that_only_reads(model: str) -> None:
    with server(valkey_binary(), "--replicaof", "127.0.0.1", str(free_port())) as url:
        result = await doctor(url, model)
    result.names(
        "role", "read-only replica, and its link to the master is down", "name the master in WARMFLEET_REDIS_URL"
    )


LONG = pytest.mark.long(
    minutes=1, shows="`warmfleet doctor` on broken Sentinels and a Cluster with slots that nobody owns"
)


@LONG
async def test_sentinels_that_are_down_and_a_master_without_a_replica(model: str) -> None:
    with sentinels() as watched:
        result = await doctor(watched.url, model)
        assert result.of("master", State.OK), result.printed
        assert result.of("replication", State.OK), result.printed
        watched.sentinels[0].kill()
        watched.cut()
        result = await doctor(watched.url, model)
        port = watched.sentinels[0].port
        result.names("reachable", f"127.0.0.1:{port}: no connection (connection refused)", "start Redis there")
        result.names("nodes", f"the Sentinel 127.0.0.1:{port} does not answer", "start it, or take it out of the URL")
        result.names("replication", "no replica follows the master", "start a replica")
        result = await doctor(watched.url.replace("/kv", "/nobody"), model)
        result.names("login", "no node says where the Redis master is", "compare the SERVICE at the end of the URL")


@LONG
async def test_a_cluster(model: str) -> None:
    with cluster(wire.model_tag(model)) as clustered:
        nodes = (*clustered.masters, clustered.replica)
        number, other = next(
            (number, node) for number, node in enumerate(clustered.masters) if node is not clustered.owner
        )
        client = other.client()
        await poll(lambda: str(clustered.replica.port) in str(client.cluster("SLOTS")), 10, "the replica is known")
        result = await doctor(clustered.url, model)
        assert result.of("slots", State.OK), result.printed
        assert result.of("replication", State.OK), result.printed
        result.names(
            "coverage", "cluster-require-full-coverage is yes on", "CONFIG SET cluster-require-full-coverage no"
        )
        named = result.of("coverage", State.FAULT)[0].detail
        assert all(f"127.0.0.1:{node.port}" in named for node in nodes), "every node is looked at, also replicas"
        result = await doctor(f"redis://127.0.0.1:{clustered.owner.port}", model)
        result.names("cluster", "this server is a node of a Cluster", "redis+cluster://")
        share = -(-SLOTS // len(clustered.masters))
        first, last = number * share, min((number + 1) * share, SLOTS) - 1
        for node in nodes:
            node.client().config_set("cluster-require-full-coverage", "no")
            node.client().acl_setuser(
                "plain", True, passwords=["+plain-secret"], keys=["*"], categories=["+@all"], commands=["-config"]
            )
        result = await doctor(clustered.url, model)
        assert "within 1 s" in result.of("coverage", State.OK)[0].detail
        plain = clustered.url.replace("://", "://plain:plain-secret@")
        result = await doctor(plain, model)
        assert "WARMFLEET_ADMIN_REDIS_URL" in result.of("coverage", State.SKIPPED)[0].detail, result.printed
        assert (await doctor(plain, model, admin_url=clustered.url)).of("coverage", State.OK)
        for node in nodes:
            node.client().cluster("DELSLOTSRANGE", first, last)
        result = await doctor(clustered.url, model)
        result.names("slots", f"{last - first + 1} of 16384 slots have no owner", "redis-cli --cluster fix")
        other.kill()


def test_the_coverage_of_nodes_of_which_some_cannot_be_read() -> None:
    places = [("a", 1), ("b", 2), ("c", 3)]
    loose = {"cluster-require-full-coverage": "no", "cluster-node-timeout": "15000"}
    (well,) = cluster_checks.of_settings(dict.fromkeys(places, loose))
    assert (well.state, "within 15 s" in well.detail) == (State.OK, True)
    strict = loose | {"cluster-require-full-coverage": "yes"}
    found = cluster_checks.of_settings({places[0]: loose, places[1]: strict, places[2]: FleetUnavailable("away")})
    assert [(finding.state, "b:2" in finding.detail, "c:3" in finding.detail) for finding in found] == [
        (State.FAULT, True, False),
        (State.NOTE, False, True),
    ]
    (nothing,) = cluster_checks.of_settings({})
    assert (nothing.state, "no node answers" in nothing.detail) == (State.SKIPPED, True)


# ---------------------------------------------------------------- rights


@pytest.mark.parametrize("binary", [valkey_binary, redis7_binary], ids=["valkey", "redis7"])
async def test_users_with_too_few_rights(binary: Any, model: str) -> None:
    with guarded(model, binary(), " +xadd", " +zscore") as url_of:
        result = await doctor(url_of("router"), model, admin_url=url_of("admin"))
        result.names("router rights", "may not: ZSCORE", "print the user again (`warmfleet acl")
        prefix = wire.Keys(model).prefix
        missing = f"worker-eng may not: XADD to {prefix}events:eng.0, XADD to {prefix}server:eng, XADD to {prefix}hello"
        result.names("worker rights", missing, f"warmfleet acl {model} --worker eng --no-router")


async def test_a_user_with_the_rules_of_an_older_version(model: str) -> None:
    with guarded(model, valkey_binary(), " +expire") as url_of:
        result = await doctor(url_of("router"), model, admin_url=url_of("admin"))
        missing = f"it may not EXPIRE of {wire.Keys(model).artifact('eng', '*')}"
        result.names("worker rights", missing, f"warmfleet acl {model} --worker eng --no-router", State.NOTE)


async def test_whoever_may_not_look_at_users_is_told_how(model: str) -> None:
    with guarded(model, valkey_binary()) as url_of:
        result = await doctor(url_of("router"), model)
        assert result.of("router rights", State.OK), result.printed
        assert "WARMFLEET_ADMIN_REDIS_URL" in result.of("worker rights", State.SKIPPED)[0].detail
        result = await doctor(url_of("router"), model, admin_url=url_of("admin"))
        assert result.of("worker rights", State.OK), result.printed
        assert result.of("default user", State.OK)
        result = await doctor(url_of("worker-eng"), model)
        result.names("router rights", "this user may not run scripts at all", "ACL LOAD")


async def test_each_missing_command_of_a_router_is_named(model: str) -> None:
    """Otherwise a call of ``rights`` would ask for something else than the command that it stands for."""
    with guarded(model, valkey_binary()) as url_of:
        admin = redis.Redis.from_url(url_of("admin"))
        fleet = Fleet(connect(url_of("router"), timeout_s=5), model)
        look = Inspection(fleet.scripts)
        for command in sorted({*SCRIPT_COMMANDS, *ROUTER_COMMANDS} - {"evalsha", "script|load"}):
            admin.execute_command("ACL", "SETUSER", "router", f"-{command}")  # type: ignore[no-untyped-call]
            missing = [right.words[0] for right in await look.refused(router_rights(model))]
            assert set(missing) == {command.partition("|")[0]}, command
            admin.execute_command("ACL", "SETUSER", "router", f"+{command}")  # type: ignore[no-untyped-call]
        await fleet.close()
        admin.close()


# ---------------------------------------------------------------- workers


async def test_no_router_and_no_engine(valkey_url: str, model: str) -> None:
    result = await doctor(valkey_url, model)
    result.names(
        "routers", f"no router has looked at the streams of {model}", f"WARMFLEET_MODELS={model} and this Redis"
    )
    result.names("workers", f"no engine has joined {model}", "install the plugin beside vLLM")


async def test_a_mistyped_model_is_told_which_there_are(valkey_url: str, model: str) -> None:
    async with applied(valkey_url, model) as fleet, simulated(valkey_url, model):
        await complete(fleet)
        result = await doctor(valkey_url, f"{model}-nope")
        result.names(
            "workers", f"no engine has joined {model}-nope", "which this Redis has: --model NAME; else install"
        )
        [finding] = result.of("workers", State.FAULT)
        assert model in re.split(r"[ ,]+", finding.remedy)


async def test_a_pool_that_only_the_settings_name(valkey_url: str, model: str) -> None:
    """Routers that name such a pool serve it while it has workers. A registry with a single pool is enough."""
    client = connect(valkey_url, timeout_s=5)
    await PoolRegistry(client, model).write([PoolEntry(f"{model}#1")])
    await client.aclose()
    result = await doctor(valkey_url, f"{model}#2")
    text = f"{model}#2 is named here, but the registry of {model} has no such pool: only routers that name it serve it"
    result.names("pools", text, f"warmfleet pools add {model}#2", State.NOTE)


async def test_a_server_in_a_pool_that_the_registry_lacks(valkey_url: str, model: str) -> None:
    """The server's WARMFLEET_MODEL names a pool that no router serves."""
    there, lost = f"{model}#1", f"{model}#77"
    client = connect(valkey_url, timeout_s=5)
    await PoolRegistry(client, model).write([PoolEntry(there)])
    seen_ms = int(time.time() * 1000)
    for name, place in {
        "pin-77": Placement(lost, seen_ms=seen_ms, pinned=True),
        "well": Placement(there, seen_ms=seen_ms),
        "gone": Placement(lost, seen_ms=seen_ms - 600_000, pinned=True),
    }.items():
        await client.hset(wire.Keys(model).placement, name, place.encode())
    await client.aclose()
    result = await doctor(valkey_url, model)
    result.names("pools", f"pin-77: in {lost}, which the registry lacks", f"WARMFLEET_MODEL={model}", State.NOTE)
    assert not result.of("pools", State.FAULT)


async def test_pools_beside_each_other(valkey_url: str, model: str) -> None:
    """By the registry, whatever the settings name: an empty pool, a drained one, one that nobody serves, a stranger."""
    tags = [f"{model}#{number}" for number in range(1, 6)]
    client = connect(valkey_url, timeout_s=5)
    await PoolRegistry(client, model).write([PoolEntry(tag, draining=tag == tags[3]) for tag in tags[:4]])
    await client.aclose()
    async with AsyncExitStack() as stack:
        for tag in tags[:2]:
            fleet = await stack.enter_async_context(applied(valkey_url, tag))
            await stack.enter_async_context(simulated(valkey_url, model, pool=tag))
            await complete(fleet)
            [worker] = await fleet.workers.read()
            assert await fleet.probes.prove(worker.worker_id, worker.record["nonce"], Proof("proven", "")) == "OK"
        result = await doctor(valkey_url, tags[4])
        move = f"warmfleet pools drain {tags[0]} --move"
        result.names(
            "workers", f"no engine has joined {tags[2]}, while {tags[0]}, {tags[1]} have some", move, State.NOTE
        )
        assert not [finding for finding in result.of("pools", State.FAULT) if tags[2] in finding.detail]
        result.names(
            "pools", f"{tags[3]} is drained and has no worker", f"warmfleet pools remove {tags[3]}", State.NOTE
        )
        for check in ("router rights", "default user"):
            assert [finding.check for _, finding in result.report.found].count(check) == 1, "four pools have one Redis"
        result.names("pools", f"{tags[4]} is named here", f"warmfleet pools add {tags[4]}", State.NOTE)
        assert [finding.detail for finding in result.of("pools", State.OK)] == [
            "2 pools with workers, which announce the same"
        ]
        workers = {tag: await Fleet(fleet.redis, tag).workers.read() for tag in tags[:2]}
    alone = {tags[0]: workers[tags[0]]}
    for moving, state, remedy in ((False, State.FAULT, "--undo"), (True, State.NOTE, "wait while its workers move")):
        entries = [PoolEntry(tags[0], draining=True, moving=moving), PoolEntry(tags[1])]
        [drained] = pool_checks.beside_each_other(entries, alone)
        assert drained.state is state
        assert f"{tags[0]} is drained, and no pool that serves has a worker" in drained.detail
        assert remedy in drained.remedy
    pools = [PoolEntry(tag) for tag in tags[:2]]
    [worker] = workers[tags[1]]
    odd = replace(worker, record=worker.record | {"scheme": {}}, load=replace(worker.load, capacity_blocks=9_999))
    uneven, other = pool_checks.beside_each_other(pools, workers | {tags[1]: [odd]})
    assert (uneven.state, "the smaller ones are full sooner" in uneven.detail) == (State.NOTE, True)
    [even] = pool_checks.beside_each_other(pools, workers | {tags[1]: workers[tags[1]] * 3})
    assert even.state is State.OK, "each engine gets as many prompts, however many its pool has"
    assert (other.state, f"{tags[1]} announces another hash scheme than {tags[0]}" in other.detail) == (
        State.FAULT,
        True,
    )


async def test_engines_that_have_moved_to_another_pool_are_no_fault(valkey_url: str, model: str) -> None:
    """The old pool knows them for ten minutes. An empty pool's remedy is the model's name: a tag would pin engines."""
    old, new, empty = (f"{model}#{number}" for number in (1, 2, 3))
    client = connect(valkey_url, timeout_s=5)
    await PoolRegistry(client, model).write(
        [PoolEntry(old, draining=True, moving=True), PoolEntry(new), PoolEntry(empty)]
    )
    await client.aclose()
    async with applied(valkey_url, old) as left, applied(valkey_url, new) as joined:
        for pool, fleet in ((old, left), (new, joined)):
            async with simulated(valkey_url, model, pool=pool):
                await complete(fleet)
                if fleet is left:
                    continue
                await silent(left)
                await left.scripts.ask("UNLINK", wire.Keys(model).placement)  # not only because it moved just now
                result = await doctor(valkey_url, model)
                assert not result.of("worker", State.FAULT), result.printed
                [moved] = result.of("moved", State.OK)
                assert moved.detail.startswith(f"eng.0 moved to {new}")
                result.names("workers", f"no engine has joined {empty}", f"WARMFLEET_MODEL={model} they", State.NOTE)
                result.names("routers", f"the streams of {empty}", f"WARMFLEET_MODELS={model} and this Redis")
        await silent(joined)
        await left.scripts.ask("UNLINK", wire.Keys(model).placement)
        result = await doctor(valkey_url, model)
        assert not result.of("worker", State.FAULT), "it said goodbye to both"
        result.names("workers", f"no engine of {new} is left: eng.0 said goodbye", "start an engine")


async def test_engines_that_said_goodbye_are_no_fault_while_others_serve(valkey_url: str, model: str) -> None:
    async with applied(valkey_url, model) as fleet, stock(Served((model,)), valkey_url):
        await complete(fleet)
        async with simulated(valkey_url, model, name="old"):
            await complete(fleet, 2)

        async def left() -> bool:
            return WorkerState.LEFT in {worker.state for worker in await fleet.workers.read()}

        await poll(left, 30, "the goodbye is applied")
        result = await doctor(valkey_url, model)
        [gone] = result.of("left", State.OK)
        assert gone.detail == "old.0 said goodbye"
        assert not result.of("halves", State.FAULT), result.printed
        assert [finding for finding in result.of("worker", State.FAULT) if "old" in finding.detail] == []


async def test_halves_that_move_one_after_the_other_are_no_fault(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = f"{model}#1", f"{model}#2"
    monkeypatch.setattr("warmfleet_worker.worker_publisher.WorkerPublisher.start", lambda _self: None)
    client = connect(valkey_url, timeout_s=5)
    await PoolRegistry(client, model).write([PoolEntry(old, draining=True, moving=True), PoolEntry(new)])
    async with applied(valkey_url, new) as fleet, simulated(valkey_url, model, pool=new):
        await poll(lambda: fleet.scripts.ask("HGET", wire.Keys(new).servers, "eng"), 30, "the API server has joined")
        for moved_s, count in ((300.0, 1), (5.0, 0)):
            place = Placement(new, moved_ms=int((time.time() - moved_s) * 1000))
            await client.hset(wire.Keys(model).placement, "eng", place.encode())
            assert len((await doctor(valkey_url, model)).of("halves", State.FAULT)) == count
    await client.aclose()


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Tags of pools whose master is lost from now on, as one of several of a Cluster may be."""
    tags: set[str] = set()

    def of_master(url: str, tag: str, **options: Any) -> aioredis.Redis:
        return connect("redis://127.0.0.1:1/0" if tag in tags else url, tag, **options)

    monkeypatch.setattr("warmfleet.cli.doctor.command.connect", of_master)
    monkeypatch.setattr("warmfleet.cli.pools.served.connect", of_master)
    return tags


async def test_a_lost_master_hides_its_own_pools_only(valkey_url: str, model: str, away: set[str]) -> None:
    one, two, three = (f"{model}#{number}" for number in (1, 2, 3))
    client = connect(valkey_url, timeout_s=5)
    await PoolRegistry(client, model).write([PoolEntry(tag) for tag in (one, two, three)])
    await client.aclose()
    async with applied(valkey_url, two) as fleet, simulated(valkey_url, model, pool=two):
        await complete(fleet)
        away.add(wire.model_tag(one))
        result = await doctor(valkey_url, model)
        result.names("reachable", f"the Redis that has the keys of {one} cannot be reached", "start Redis there")
        result.names("workers", f"no engine has joined {three}", f"WARMFLEET_MODEL={model} they", State.NOTE)
        assert result.of("version", State.OK), result.printed
        assert result.of("worker", State.NOTE)[0].detail.startswith("eng.0 is pending")
        assert len(result.of("workers", State.SKIPPED)) == 1
        assert not [found for found in result.of("pools", State.FAULT) if one in found.detail]
        away.add(wire.model_tag(model))
        result = await doctor(valkey_url, two)
        result.names("registry", f"the registry of {model}'s pools cannot be read", "with --model")
        assert result.of("worker", State.NOTE), result.printed


@pytest.mark.parametrize(
    ("serves", "registered", "remedy"),
    [
        ("m#1", True, "it does not follow the registry of m's pools"),
        ("other", True, "add m to its WARMFLEET_MODELS"),
        ("m#1", False, "add m#2 to its WARMFLEET_MODELS"),
    ],
)
async def test_a_router_without_a_pool(serves: str, registered: bool, remedy: str) -> None:
    answers = {"/readyz": (200, {}), "/workers": (200, {"models": [{"model": serves, "workers": []}]})}
    with fixed_answers.replica(answers) as (url, _):
        found = await router_checks.replica(
            url, {"m#2": []}, "", time.time, engine_tls(""), registered=["m#2"] if registered else []
        )
    [model_fault] = [finding for finding in found if finding.check == "models"]
    assert (model_fault.state, remedy in model_fault.remedy) == (State.FAULT, True)


async def test_a_template_that_is_not_approved_is_told_of_once_for_all_pools() -> None:
    models = [{"model": f"m#{number}", "workers": [], "template": "sandbox"} for number in (1, 2)]
    with fixed_answers.replica({"/readyz": (200, {}), "/workers": (200, {"models": models})}) as (url, _):
        for registered, named in ((["m#1", "m#2"], ["m"]), ([], ["m#1", "m#2"])):
            found = await router_checks.replica(
                url, {"m#1": [], "m#2": []}, "", time.time, engine_tls(""), registered=registered
            )
            remedies = [finding.remedy for finding in found if finding.check == "template"]
            assert [remedy.split(";")[0] for remedy in remedies] == [
                f"read it, then approve it: warmfleet artifacts --model {name}" for name in named
            ]


def test_two_busy_pools_on_one_master() -> None:
    half = 8_192
    ranges = ((0, half - 1, ("north", 1)), (half, 16_383, ("south", 2)))
    same = [tag for tag in (f"m#{number}" for number in range(40)) if slot_of(tag) < half][:2]
    [finding] = pool_checks.masters(same, same, ranges)
    assert f"{' and '.join(sorted(same))} are on the Redis master north:1" in finding.detail
    assert slot_of(finding.remedy.removeprefix("add a pool there and drain one of these: warmfleet pools add ")) >= half
    assert pool_checks.masters(same[:1], same, ranges) == []


async def test_who_may_not_scan_is_told_no_models(model: str) -> None:
    with guarded(model, valkey_binary()) as url_of:
        result = await doctor(url_of("router"), model)
        assert result.of("workers", State.FAULT)[0].remedy.startswith("install the plugin")


async def test_a_worker_that_is_not_heard_is_not_told_to_wait(valkey_url: str, model: str) -> None:
    async with applied(valkey_url, model) as fleet, simulated(valkey_url, model):
        await complete(fleet)
        [worker] = await fleet.workers.read()
        assert worker.state is WorkerState.PENDING
        assert fleet_checks.worker_finding(worker, model).state is State.NOTE
        vouched = replace(worker, heartbeat_age_s=40.0)
        finding = fleet_checks.worker_finding(vouched, model)
        assert (finding.state, finding.detail) == (State.FAULT, "eng.0 is pending, last heard 40 s ago")
        assert "the engine's way to Redis" in finding.remedy


async def test_an_engine_without_tokenizer_is_looked_for_where_its_messenger_logs(valkey_url: str, model: str) -> None:
    async with applied(valkey_url, model) as fleet, simulated(valkey_url, model):
        await complete(fleet)
        [worker] = await fleet.workers.read()
        assert worker.server is not None
        facts = dict(worker.server["facts"])
        for reports, message in ((True, "vLLM's log"), (False, "the log of `warmfleet bridge`")):
            server = worker.server | {"artifacts": {}, "facts": facts | {"reports_prefills": reports}}
            found = fleet_checks.identities([replace(worker, server=server)])
            [remark] = [finding for finding in found if finding.state is State.NOTE]
            assert message in remark.remedy


async def test_half_a_worker(valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmfleet_worker.server_publisher.ServerPublisher.start", lambda _self: None)
    async with applied(valkey_url, model) as fleet, simulated(valkey_url, model):
        await poll(fleet.workers.read, 30, "the core has joined")
        result = await doctor(valkey_url, model)
        text = "the engine core eng.0 has joined, its API server eng has not"
        result.names("halves", text, "look for `warmfleet: server ... joined` in vLLM's log")
        result.names("halves", text, "WARMFLEET_WORKER_URL")


async def test_the_other_half_of_a_worker(valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmfleet_worker.worker_publisher.WorkerPublisher.start", lambda _self: None)
    keys = wire.Keys(model)
    async with applied(valkey_url, model) as fleet, simulated(valkey_url, model):
        await poll(lambda: fleet.scripts.ask("HGET", keys.servers, "eng"), 30, "the API server has joined")
        result = await doctor(valkey_url, model)
        result.names("halves", "the API server eng has joined, its engine core has not", "engine core's process")


async def test_a_loopback_url_of_another_host(valkey_url: str, model: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with applied(valkey_url, model) as fleet, simulated(valkey_url, model, url=url):
        await complete(fleet)
        result = await doctor(valkey_url, model)
        result.names("url", f"eng.0 announces {url}", "set WARMFLEET_WORKER_URL=http://ITS_HOST:PORT")
        result.names("url", "connection refused", "127.0.0.1 means each machine itself")


async def test_what_gateways_must_grant_a_picker(valkey_url: str, model: str) -> None:
    result = await doctor(valkey_url, model, epp_port=9002, queue_timeout_s=40.0)
    result.names("picker", "gateways ask port 9002", "max_message_timeout of at least 45 s", State.NOTE)
    result.names("picker", "without TLS", "set WARMFLEET_TLS_CERT", State.NOTE)
    assert (await doctor(valkey_url, model)).of("picker", State.NOTE) == []


async def test_an_announced_url_is_asked_for_its_health_only_and_gets_no_key(valkey_url: str, model: str) -> None:
    with fixed_answers.replica({"/health": (200, {})}) as (url, requests):
        async with applied(valkey_url, model) as fleet, simulated(valkey_url, model, url=url):
            await complete(fleet)
            result = await doctor(valkey_url, model, worker_api_key=SECRET)
    assert result.of("url", State.OK), result.printed
    assert len(requests) == 1
    assert "authorization" not in requests[0][0]


@pytest.mark.parametrize("ranges", [("10.0.0.0/8",), ("127.0.0.0/8",)])
async def test_an_announced_url_that_routers_would_not_use_is_not_connected_to(
    ranges: tuple[str, ...], valkey_url: str, model: str
) -> None:
    connected: list[object] = []
    async with await asyncio.start_server(lambda *got: connected.append(got), "127.0.0.1", 0) as port:
        url = (
            f"http://127.0.0.1:{port.sockets[0].getsockname()[1]}"
            if ranges[0][:2] == "10"
            else "http://169.254.169.254"
        )
        async with applied(valkey_url, model) as fleet, simulated(valkey_url, model, url=url):
            await complete(fleet)
            result = await doctor(valkey_url, model, worker_addresses=ranges)
    result.names("allowed", "is outside WARMFLEET_WORKER_ADDRESSES", "add the engines' addresses")
    assert not result.of("url", State.OK)
    assert connected == []


@pytest.mark.parametrize("url", ["http://[::1", "http://engine:port"])
async def test_an_announced_url_that_cannot_be_read(url: str, valkey_url: str, model: str) -> None:
    async with applied(valkey_url, model) as fleet, simulated(valkey_url, model, url=url), stock() as other:
        await complete(fleet)
        result = await doctor(valkey_url, model, other)
    result.names("allowed", "routers with this environment send nothing there", "WARMFLEET_WORKER_ADDRESSES")


async def test_workers_that_hash_in_different_ways(valkey_url: str, model: str) -> None:
    async with (
        applied(valkey_url, model) as fleet,
        simulated(valkey_url, model),
        simulated(valkey_url, model, "two", "seed"),
        simulated(valkey_url, model, "three", "algorithm"),
    ):
        await complete(fleet, 3)
        result = await doctor(valkey_url, model)
        result.names(
            "schemes",
            "workers hash blocks in 3 ways",
            "the same --prefix-caching-hash-algo (sha256_cbor), --block-size",
        )
        result.names("seed", "two.0: the hash seed is random (vLLM 0.28", "set PYTHONHASHSEED=0 for every engine")
        assert "sha256, blocks of 16 tokens, tagged keys, unknown seed: three.0" in result.printed


async def test_one_worker_with_a_random_seed(valkey_url: str, model: str) -> None:
    async with applied(valkey_url, model) as fleet, simulated(valkey_url, model, kind="seed"):
        await complete(fleet)
        result = await doctor(valkey_url, model)
        result.names("seed", "each restart makes a scheme of its own", "set PYTHONHASHSEED=0", State.NOTE)


async def test_workers_with_different_templates(valkey_url: str, model: str) -> None:
    async with (
        applied(valkey_url, model) as fleet,
        simulated(valkey_url, model),
        simulated(valkey_url, model, "two", "template"),
    ):
        await complete(fleet, 2)
        result = await doctor(valkey_url, model)
        result.names(
            "identity", "two.0 announce other files or facts than eng.0: chat_template.jinja", "--chat-template"
        )


def test_a_seed_of_the_operator_is_recognised() -> None:
    scheme = Scheme("sha256", wire.default_none_hash("sha256", "42"), 16)
    assert fleet_checks.seed_of(scheme) == "PYTHONHASHSEED=42"


async def test_an_index_that_lags_differs_and_lacks_blocks(valkey_url: str, model: str) -> None:
    async with applied(valkey_url, model) as fleet, simulated(valkey_url, model):
        await complete(fleet)
        (worker,) = await fleet.workers.read()
    partial = replace(worker, load=replace(worker.load, flags=worker.load.flags | Flag.PARTIAL))
    late = WorkerTruth(lag_batches=7, lag_s=31.0, cause="gap", found=3, healed=2)
    found = {finding.check: finding for finding in fleet_checks.index(partial, Truth(workers={"eng.0": late}))}
    assert "7 entries of its stream wait, the oldest for 31 s" in found["lag"].detail
    assert "whether routers run" in found["lag"].remedy
    assert "differs from the engine's table (gap); 2 of 3 are mended" in found["digest"].detail
    assert "lua/README.md" in found["digest"].remedy
    assert "raise maxmemory" in found["partial"].remedy
    (anew,) = fleet_checks.fights([worker], [replace(worker, record=worker.record | {"nonce": "other"})])
    assert "eng.0 joined anew while this was checked" in anew.detail
    assert "two engines have this WARMFLEET_WORKER_ID" in anew.remedy
    assert fleet_checks.fights([worker], [worker]) == []
    (twice,) = fleet_checks.shared_urls([worker, replace(worker, record=worker.record | {"server_id": "b"})])
    assert "b, eng announce the same address" in twice.detail
    (counted,) = fleet_checks.dropped(Truth(counts={"nonce": 12}))
    assert "12 entries came from other processes" in counted.detail
    differing = {**worker.record, "reason": "its chat_template.jinja differs from the fleet's", "cause": "differs"}
    finding = fleet_checks.worker_finding(replace(worker, state=WorkerState.LOAD_ONLY, record=differing), model)
    assert "its chat_template.jinja differs" in finding.detail
    assert "--chat-template" in finding.remedy


# ---------------------------------------------------------------- engines


async def test_an_engine_that_cannot_be_reached(valkey_url: str, model: str) -> None:
    port = free_port()
    result = await doctor(valkey_url, model, f"http://user:{SECRET}@127.0.0.1:{port}")
    result.names(
        "reachable", f"http://127.0.0.1:{port}: no connection (connection refused)", "start the engine on this machine"
    )
    assert SECRET not in result.printed


async def test_an_engine_that_has_not_joined_this_fleet(valkey_url: str, model: str) -> None:
    async with applied(valkey_url, model), simulated(valkey_url, f"{model}-other") as engine:
        result = await doctor(valkey_url, model, engine.url)
        result.names("plugin", f"no worker of {model} announces this URL", "pip install ./worker_plugin")
        result.names("plugin", "the engine runs without the plugin", "VLLM_PLUGINS")
        assert result.of("prefix caching", State.OK), "its cache is examined all the same"


async def test_another_template_and_tokenizer_than_announced(valkey_url: str, model: str) -> None:
    async with applied(valkey_url, model) as fleet:
        async with simulated(valkey_url, model, kind="template", lies=True) as engine:
            await complete(fleet)
            result = await doctor(valkey_url, model, engine.url)
            result.names("template", "another chat template or tokenizer than it announced", "the same --chat-template")
            assert result.of("tokenizer", State.OK)
        async with simulated(valkey_url, model, "two", kind="tokenizer", lies=True) as engine:
            await complete(fleet, 2)
            result = await doctor(valkey_url, model, engine.url)
            result.names("tokenizer", "another tokenizer than it announced", "restart the engine")
            result.names("token ids", "the announced tokenizer makes", "--tokenizer")


async def test_an_engine_that_hashes_otherwise_than_announced(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmfleet.cli.doctor.parity_checks.INDEXED_S", 0.5)
    async with applied(valkey_url, model) as fleet, simulated(valkey_url, model, kind="seed", lies=True) as engine:
        await complete(fleet)
        result = await doctor(valkey_url, model, engine.url)
        result.names("index", "0 came into the index", "hashed otherwise than announced")


async def test_prefix_caching_is_off(valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmfleet.cli.doctor.parity_checks.INDEXED_S", 0.2)
    async with applied(valkey_url, model) as fleet, simulated(valkey_url, model) as engine:
        await complete(fleet)
        engine.engine.core.scheduler.pool.insert = lambda *_: None  # type: ignore[method-assign]
        result = await doctor(valkey_url, model, engine.url)
        result.names("prefix caching", "was not cached the second time", "without --no-enable-prefix-caching")
        page = exposition.metrics_text
        monkeypatch.setattr(
            api, "metrics_text", lambda *words: page(*words).replace('caching="True"', 'caching="False"')
        )
        result = await doctor(valkey_url, model, engine.url)
        result.names("prefix caching", "the engine says so in its metrics", "without --no-enable-prefix-caching")


async def test_an_engine_that_does_not_tell_cached_tokens(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = answers.usage
    monkeypatch.setattr(answers, "usage", lambda *words: usage(*words) | {"prompt_tokens_details": None})
    async with applied(valkey_url, model) as fleet, simulated(valkey_url, model) as engine:
        await complete(fleet)
        result = await doctor(valkey_url, model, engine.url)
        off = "prompt_tokens_details is off"
        result.names("prompt_tokens_details", off, "start vLLM with --enable-prompt-tokens-details", State.NOTE)
        assert result.of("prefix caching", State.OK)


async def test_an_engine_that_tells_nothing_of_its_cache(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = answers.usage
    monkeypatch.setattr(answers, "usage", lambda *words: usage(*words) | {"prompt_tokens_details": None})
    monkeypatch.setattr(api, "metrics_text", lambda *_: "sglang:num_running_reqs 0\n")
    async with stock() as url:
        result = await doctor(valkey_url, model, url)
    result.names("prefix caching", "neither answers nor metrics tell", "SGLang with --enable-cache-report", State.NOTE)


async def test_engines_that_are_listed_and_not_registered(valkey_url: str, model: str, tmp_path: Path) -> None:
    async with stock(Served((model,))) as url, replica(valkey_url, model, url):
        other = "http://127.0.0.1:9"
        result = await doctor(valkey_url, model, static_workers=(url, other, "http+dns://no-such-host.invalid:80"))
        result.names("listed", f"{other}: no connection (connection refused)", "start the engine on this machine")
        result.names("listed", "no-such-host.invalid cannot be resolved", "mend that entry")
        assert [finding.detail.partition(" is ")[0] for finding in result.of("listed", State.OK)] == [url]
        result = await doctor(valkey_url, model, url)
        assert "without the plugin" in result.of("plugin", State.NOTE)[0].detail


async def test_each_listed_engine_is_told_its_own_fault(valkey_url: str, model: str) -> None:
    """Of engines that no router has: wrong name, a key, none there, no engine at all, and one that is well."""
    async with (
        applied(valkey_url, model),
        simulated(valkey_url, model),
        stock(Served(("other",))) as misnamed,
        stock(Served((model,), SECRET)) as locked,
        stock(Served((model,))) as well,
    ):
        with (
            fixed_answers.replica({"/health": (200, "")}) as (page, _),
            fixed_answers.replica({"/health": (503, "")}) as (ill, _),
        ):
            result = await doctor(valkey_url, model, static_workers=(misnamed, locked, well, page, ill))
    result.names("listed", f"{misnamed}: it serves other, but the fleet is of {model}", "--served-model-name")
    result.names("listed", f"{locked}: the engine wants an API key (401), and none is set here", "WORKER_API_KEY")
    result.names("listed", f"{page}: /v1/models names no model", "OpenAI's API")
    result.names("listed", f"{ill}: /health answers 503", "its core may be dead")
    result.names("listed", f"{well} answers, but no router has registered it", "give every router this list")
    assert len(result.of("listed", State.FAULT)) == 5, result.printed


async def test_an_engine_that_is_listed_is_not_told_to_announce_another_url(valkey_url: str, model: str) -> None:
    """A listed engine has no plugin; and an engine that hangs is not to be started, either."""
    async with applied(valkey_url, model) as fleet:
        with fixed_answers.replica({"/health": (503, "")}) as (ill, _):
            away = f"http://127.0.0.1:{free_port()}"
            for name, url in (("away", away), ("ill", ill)):
                await fleet.workers.register(name, {"scheme_id": 7, "url": url, "models": [model]}, 50)
            result = await doctor(valkey_url, model, static_workers=(away,))
    result.names(
        "url", f"away is listed as {away}: no connection", "start the engine on this machine, or correct the URL"
    )
    result.names("url", f"ill is listed as {ill}: /health answers 503", "its core may be dead")
    assert "WARMFLEET_WORKER_URL" not in result.printed


async def test_an_engine_that_is_listed_twice_is_told_its_one_name(valkey_url: str, model: str) -> None:
    async with stock(Served((model,))) as url:
        other = url.replace("127.0.0.1", "localhost")
        async with replica(valkey_url, model, url) as router:
            await router.routable(1)
            result = await doctor(valkey_url, model, static_workers=(url, other))
            listed = [finding.detail for finding in result.of("listed", State.OK)]
            assert [" is the worker 127.0.0.1-" in detail for detail in listed] == [True, True]
            assert listed[1].endswith(f"which is listed as {url}, too")
            assert result.of("address", State.FAULT) == []
            record = {"scheme_id": 7, "url": other, "models": [model], "identity": ""}
            await router.fleet.workers.register("a-router-of-before", record, 50)
            result = await doctor(valkey_url, model)
            result.names("address", "are one engine, which gets twice its share", f"take {other} off")


async def test_an_engine_that_has_joined_and_is_listed_is_one_worker(valkey_url: str, model: str) -> None:
    async with stock(Served((model,)), joins=valkey_url) as url, applied(valkey_url, model) as fleet:
        await complete(fleet)
        other = url.replace("127.0.0.1", "localhost")
        result = await doctor(valkey_url, model, static_workers=(other,))
        (finding,) = result.of("listed", State.OK)
        assert f"{other} is the worker eng.0 (" in finding.detail
        assert "joined by itself" in finding.detail


async def test_a_list_of_engines_that_cannot_be_used(valkey_url: str, model: str, tmp_path: Path) -> None:
    bad, away = tmp_path / "bad", tmp_path / "away"
    bad.write_text("http://user:hidden@a:1?x=1")
    result = await doctor(valkey_url, model, static_workers=(f"file://{bad}", f"file://{away}"))
    result.names("listed", "line 1: 'http://a:1?x=1' is not the URL of an engine", "mend that entry")
    result.names("listed", f"{away} cannot be read", "mend that entry")
    assert "hidden" not in result.printed
    assert result.of("router rights", State.OK), result.printed


async def test_an_engine_with_a_key_and_another_model(valkey_url: str, model: str) -> None:
    async with stock(Served(("other",), SECRET)) as url:
        result = await doctor(valkey_url, model, url)
        result.names("key", "the engine wants an API key (401), and none is set", "into WARMFLEET_WORKER_API_KEY")
        result = await doctor(valkey_url, model, url, worker_api_key="wrong-key")
        result.names(
            "key", "the engine refuses the key of WARMFLEET_WORKER_API_KEY (401)", "WARMFLEET_WORKER_API_KEY_FILE"
        )
        async with applied(valkey_url, model), simulated(valkey_url, model):
            result = await doctor(valkey_url, model, url, worker_api_key=SECRET)
        result.names("models", f"it serves other, but the fleet is of {model}", "--served-model-name")
        assert result.of("key", State.OK)
        assert SECRET not in result.printed


async def test_a_key_that_routers_would_not_give(valkey_url: str, model: str) -> None:
    async with applied(valkey_url, model) as fleet, stock(Served((model,), SECRET), valkey_url) as url:
        await complete(fleet)
        result = await doctor(valkey_url, model, url, worker_api_key=SECRET)
        result.names("key", "routers give a key to no unproved worker", "set WARMFLEET_WORKER_ADDRESSES=127.0.0.1")
        result = await doctor(valkey_url, model, url, worker_api_key=SECRET, worker_addresses=("127.0.0.1/32",))
        assert not result.of("key", State.FAULT)
        assert result.of("prefix caching", State.OK)


async def test_an_engine_outside_of_the_allowed_addresses(valkey_url: str, model: str) -> None:
    async with stock() as url:
        result = await doctor(valkey_url, model, url, worker_addresses=("10.0.0.0/8",))
    result.names("allowed", "127.0.0.1 is outside WARMFLEET_WORKER_ADDRESSES", "add the engines' addresses")


@pytest.mark.parametrize(
    ("version", "state", "detail"),
    [
        ("0.27.1", State.FAULT, "older than the plugin can follow (0.28 to 0.33)"),
        ("0.34.0", State.NOTE, "newer than what the plugin was tested with (0.28 to 0.33)"),
        ("0.32.0+cpu", State.OK, "vLLM 0.32.0+cpu"),
        ("", State.NOTE, "it does not tell a version of vLLM"),
    ],
)
async def test_versions_of_engines(
    version: str, state: State, detail: str, valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "VERSION", version)
    async with stock() as url:
        result = await doctor(valkey_url, model, url)
    assert detail in result.of("version", state)[-1].detail


# ---------------------------------------------------------------- routers


async def test_a_router_of_another_redis(valkey_url: str, redis7_url: str, model: str) -> None:
    async with (
        replica(redis7_url, model, admin_key=SECRET) as router,
        applied(valkey_url, model) as fleet,
        simulated(valkey_url, model),
    ):
        await complete(fleet)
        result = await doctor(valkey_url, model, routers=(router.url,), admin_key=SECRET)
        result.names("workers", "it lacks eng.0", "give it the WARMFLEET_REDIS_URL that was checked here")
        result.names("ready", "/readyz answers 503", "mend what it says")
        assert SECRET not in result.printed
        result = await doctor(valkey_url, model, routers=(router.url,))
        assert "WARMFLEET_ADMIN_KEY" in result.of("workers", State.SKIPPED)[0].detail
        port = free_port()
        result = await doctor(valkey_url, model, routers=(f"http://127.0.0.1:{port}",))
        result.names("reachable", "no replica answers", "start one (warmfleet serve)")


# ---------------------------------------------------------------- the command


def test_exit_status_and_json(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARMFLEET_REDIS_URL", "redis://127.0.0.1:1/0")
    assert main(["doctor", "--json", "--redis", valkey_url, "--model", model]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == 1
    faults = {finding["check"]: finding["remedy"] for finding in document["findings"] if finding["state"] == "fault"}
    assert faults.keys() == {"routers", "workers"}
    assert all(faults.values()), "every fault has a remedy"
    assert main(["doctor", "--model", model]) == 1
    assert capsys.readouterr().out.endswith("\n1 fault, 6 skipped.\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no local fleet runs (`warmfleet up` starts one); for another fleet name the model with --model"),
        (["--model", "a{b}"], "a{b}"),
        (["--model", "m", "--redis", "http://127.0.0.1"], "begins with redis://"),
        (["--model", "m", "gpu1:8000"], "is not the URL of an engine"),
        (["--model", "m", "--env-file", "/no/such/file"], "--env-file cannot be read"),
    ],
)
def test_what_it_cannot_do_it_says(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WARMFLEET_MODELS", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["doctor", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_an_environment_the_stack_of_this_machine_is_checked(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    stack = RunningStack("http://127.0.0.1:8080", "unix:///tmp/store", ("demo",), os.getpid(), ("http://h:9090",))
    with announced(stack, environment):
        plan = plan_of(build_parser().parse_args(["doctor"]), environment)
        assert (plan.url, plan.settings.models, plan.routers) == ("unix:///tmp/store", ("demo",), stack.operators)
        url = {"WARMFLEET_REDIS_URL": stack.redis_url}
        for words, environ in (["doctor"], environment | url), (["doctor", "--redis", stack.redis_url], environment):
            same = plan_of(build_parser().parse_args(words), environ)
            assert (same.settings.models, same.routers) == (("demo",), stack.operators), "its own URL, named"
        elsewhere = plan_of(build_parser().parse_args(["doctor", "--redis", "redis://r", "--model", "m"]), environment)
        assert (elsewhere.url, elsewhere.settings.models, elsewhere.routers) == ("redis://r", ("m",), ())


async def test_a_check_that_fails_by_itself_hides_no_other(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_checks, "all_of", lambda _reading: 1 // 0)
    monkeypatch.setattr(fleet_checks, "fights", lambda *_: [Finding("names", State.OK, "reached")])
    result = await doctor(valkey_url, model)
    assert result.of("workers", State.BROKEN)[0].remedy == "please report this"
    assert result.of("names", State.OK)
    assert result.report.status == 2


def test_nothing_that_a_worker_wrote_steers_the_terminal() -> None:
    out = io.StringIO()
    report = Report(out=out, secrets=(SECRET,))
    report.part("Engine http://x\x1b[2J")
    report.add([Finding("worker", State.FAULT, f"reason\x1b]0;{SECRET}\x07", "do")])
    assert "\x1b" not in out.getvalue()
    assert SECRET not in out.getvalue()
    assert SECRET not in report.as_json()


async def test_a_dead_store_of_up_is_told_so(tmp_path: Path) -> None:
    url = f"unix://{tmp_path / SOCKET_NAME}"
    client = connect(url, timeout_s=1)
    with closing(socket.socket(socket.AF_UNIX)) as left:
        for _ in range(2):  # without its socket, and with the socket that a killed store leaves
            found = await redis_checks.reachable(client, parse(url), url, redis_checks.OF_UP)
            assert found[-1].remedy == "its store died; start `warmfleet up` again"
            assert "died" not in (await redis_checks.reachable(client, parse(url), url))[-1].remedy
            if not (tmp_path / SOCKET_NAME).exists():
                left.bind(str(tmp_path / SOCKET_NAME))
    await client.aclose()


@pytest.mark.parametrize(
    ("facts", "why"), [({"token_handoff": []}, "its vLLM takes none"), ({"x": 1}, "as for a bridge")]
)
def test_why_an_engine_tokenises_again(facts: dict[str, Any], why: str) -> None:
    engine: Any = None  # the checks ask no engine
    worker: Any = SimpleNamespace(approximate=False, server={"facts": facts}, state=WorkerState.PROVEN)
    (finding,) = handoff(Subject(engine, "m", None, worker), wanted=True)
    assert finding.detail.endswith(why)
