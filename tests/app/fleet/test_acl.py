"""Each Redis user of ``warmfleet acl`` has the commands and keys that its process needs, and no others."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import redis
from redis.exceptions import NoPermissionError
from tests.support.engines.scripted import engine
from tests.support.polling import poll
from tests.support.redis.servers import PATIENT, redis7_binary, server, valkey_binary
from tests.support.replicas.replica import replica

from warmfleet.cli.acl import lines, rules_of
from warmfleet.cli.parser import build_parser
from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import Fleet, Proof, Question, Renewal, connect
from warmfleet.fleet.inspection.acl import ROUTER_COMMANDS, SCRIPT_COMMANDS, WORKER_COMMANDS, user, worker_rules
from warmfleet.fleet.pool_registry import PoolRegistry, clear
from warmfleet.prompt.block_hashes import Chain
from warmfleet_worker.config import PublisherConfig
from warmfleet_worker.pool_assignment import server_assignment
from warmfleet_worker.protocol import wire
from warmfleet_worker.protocol.pools import PoolEntry
from warmfleet_worker.server_publisher import ServerConfig, ServerPublisher
from warmfleet_worker.tracker import Tracker
from warmfleet_worker.worker_publisher import WorkerPublisher

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL, OTHER = "org/model#pool", "other"
KEYS, OTHERS = wire.Keys(MODEL), wire.Keys(OTHER)
LUA = Path(__file__).parents[3] / "lua"
SCHEME = wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor"), 16)


def rules(line: str) -> dict[str, Any]:
    return dict(rules_of(build_parser().parse_args(["acl", *line.split()])))


@dataclass
class Guarded:
    """A server that only ``admin``, ``router`` (MODEL), ``worker-w1`` (two ranks) and ``worker-w2`` may use."""

    socket: str

    def url(self, name: str) -> str:
        return f"unix://{name}:secret-{name}@{self.socket}"

    def client(self, name: str) -> redis.Redis:
        return redis.Redis.from_url(self.url(name))


@pytest.fixture(scope="module", params=[valkey_binary, redis7_binary], ids=["valkey", "redis7"])
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server whose aclfile is the output of ``warmfleet acl``."""
    users = rules(f"{MODEL} --worker w1 --worker w2 --ranks 2 --cluster")
    file = tmp_path_factory.mktemp("acl") / "users.acl"
    file.touch()
    dangerous = ("--enable-module-command", "yes", "--enable-debug-command", "yes")  # the ACL alone refuses these
    with server(request.param(), "--aclfile", str(file), *dangerous) as url:
        file.write_text("\n".join(lines(users, {name: f"secret-{name}" for name in users}, commands=False)) + "\n")
        with redis.Redis.from_url(url) as client:
            assert client.acl_load()
        yield Guarded(url.removeprefix("unix://"))


def attempt(client: redis.Redis, *words: object) -> str:
    """``refused`` if the user has no right to the command, or ``allowed``."""
    try:
        client.execute_command(*words)  # type: ignore[no-untyped-call]
    except NoPermissionError:
        return "refused"
    except redis.RedisError as error:
        return "refused" if "NOPERM" in str(error) else f"allowed, {error}"  # EXEC wraps the error
    return "allowed"


# ------------------------------------------------ command by command


@pytest.mark.parametrize("name", ["router", "worker-w1"])
def test_every_command_that_is_not_listed_is_refused(guarded: Guarded, name: str) -> None:
    allowed = {"cluster|slots"} | set(
        (*SCRIPT_COMMANDS, *ROUTER_COMMANDS)
        if name == "router"
        else (*WORKER_COMMANDS, "xadd", "get", "lpop", "setnx", "expire", "hgetall", "hget", "watch", "hset", "hdel")
    )
    admin = guarded.client("admin")
    admin.response_callbacks.clear()  # the server's own format
    asked = []
    with guarded.client(name) as client:
        for command, arity in every_command(cast("list[Any]", admin.execute_command("COMMAND"))):  # type: ignore[no-untyped-call]
            if command not in allowed:  # an allowed MULTI would change all later answers
                words = command.split("|")
                answer = attempt(client, *words, *["x"] * (abs(arity) - len(words)))
                assert answer == "refused", command
                asked.append(command)
    assert len(asked) > 250
    assert {"flushall", "config|set", "eval", "script|flush", "acl|setuser", "xreadgroup", "del", "keys", "scan"} < set(
        asked
    )
    admin.close()


def every_command(table: list[Any]) -> list[tuple[str, int]]:
    """The names (subcommands as ``config|get``) and arities of the commands that need rights."""
    found = []
    for entry in table:
        name, arity, flags, subcommands = entry[0], entry[1], entry[2], entry[9] if len(entry) > 9 else []
        if subcommands:
            found += every_command(subcommands)
        elif b"no_auth" not in flags and b"no-auth" not in flags and name not in (b"auth", b"hello", b"quit", b"reset"):
            found.append((name.decode(), arity))
    return found


def test_the_list_is_what_the_scripts_call() -> None:
    with server(valkey_binary()) as url, redis.Redis.from_url(url) as client:
        known = {str(name) for name in client.command()}
    text = "".join(path.read_text() for path in LUA.rglob("*.lua"))
    called = {word.lower() for word in re.findall(r'"([A-Z]{3,})"', text)} & known
    assert called == {name.partition("|")[0] for name in SCRIPT_COMMANDS}


# ------------------------------------------------ key by key

STREAMS = [KEYS.events("w1.0"), KEYS.events("w1.1"), KEYS.server("w1"), KEYS.hello]
COMMANDS = [KEYS.command("w1.0"), KEYS.command("w1.1")]
YIELDS = [KEYS.yields("w1.0"), KEYS.yields("w1.1")]
ARTIFACTS = [KEYS.artifact("w1", "0" * 64)]
#: Keys of the model that workers do not need, and keys of other workers and models.
FOREIGN = [
    *(getattr(KEYS, name) for name in sorted(wire.SINGLE_KEYS - {"hello"})),
    *(KEYS.block(b"12345678").decode(), KEYS.speculative(b"12345678").decode(), KEYS.slot(7)),
    *(KEYS.events("w2.0"), KEYS.events("w1.2"), KEYS.events("w1.0.0"), KEYS.events("w1"), KEYS.events("w1.0x")),
    *(KEYS.server("w2"), KEYS.server("w1.0"), KEYS.command("w2.0"), KEYS.command("w1"), KEYS.command("w1.0.0")),
    *(KEYS.yields("w2.0"), KEYS.yields("w1"), KEYS.yields("w1.0.0"), OTHERS.yields("w1.0")),
    *(KEYS.artifact("w2", "0" * 64), KEYS.artifact("w1.0", "0" * 64), f"{KEYS.prefix}artifact:w1", KEYS.prefix, "x"),
    *(OTHERS.events("w1.0"), OTHERS.server("w1"), OTHERS.hello, OTHERS.command("w1.0"), OTHERS.artifact("w1", "0")),
]
#: Keys of the served model, named without `#`: its pools, and the places of its servers.
PLACES = [wire.Keys("org/model").placement]
POOLS = [wire.Keys("org/model").pools, *PLACES]
VERBS: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "XADD": (("MAXLEN", "~", "9", "*", "f", "v"), STREAMS),
    "GET": ((), COMMANDS),
    "LPOP": (("9",), YIELDS),
    "RPUSH": (("v",), []),
    "SETNX": (("v",), ARTIFACTS),
    "EXPIRE": (("60",), ARTIFACTS),
    "HGETALL": ((), POOLS),
    "HGET": (("f",), POOLS),
    "WATCH": ((), POOLS),
    "HSET": (("f", "v"), PLACES),
    "HDEL": (("f",), PLACES),
}


@pytest.mark.parametrize("verb", list(VERBS))
def test_a_worker_does_one_thing_with_each_of_its_keys(guarded: Guarded, verb: str) -> None:
    arguments, own = VERBS[verb]
    with guarded.client("worker-w1") as client:
        for key in [*STREAMS, *COMMANDS, *YIELDS, *ARTIFACTS, *POOLS, *FOREIGN]:
            assert attempt(client, verb, key, *arguments) == ("allowed" if key in own else "refused"), key


def test_an_artifact_is_never_overwritten(guarded: Guarded) -> None:
    with guarded.client("worker-w2") as client:
        key = KEYS.artifact("w2", "1" * 64)
        assert (client.setnx(key, "first"), client.setnx(key, "second")) == (True, False)
        assert attempt(client, "GET", key) == "refused"


@pytest.mark.parametrize("rights", ["today's", "of an older version"])
async def test_files_of_a_worker_expire_as_far_as_its_rights_let_them(guarded: Guarded, rights: str) -> None:
    """With older rules without EXPIRE the server still joins, and its files stay until the server is forgotten."""
    name = "w8" if rights == "today's" else "w9"
    told = user(f"worker-{name}", [f"secret-worker-{name}"], worker_rules(MODEL, name)).split(" ", 2)
    rules = told[2].replace(" +expire", "") if name == "w9" else told[2]
    with guarded.client("admin") as admin:
        admin.execute_command("ACL", "SETUSER", f"worker-{name}", *_words(rules))
        files = {"chat_template.jinja": b"{{ messages }}"}
        half = ServerPublisher(
            ServerConfig(guarded.url(f"worker-{name}"), MODEL, name, "http://127.0.0.1:9", ("org/model",), "v1", files)
        )
        half.start()
        try:
            await poll(lambda: half.joined, what="it joined")
        finally:
            half.stop(5)
        [key] = list(admin.scan_iter(KEYS.artifact(name, "*").replace("{", "\\{")))
        assert (admin.ttl(key) > 0) == (name == "w8")


@pytest.mark.parametrize("rights", ["today's", "of an older version"])
async def test_a_worker_takes_a_place_in_a_pool_as_far_as_its_rights_let_it(guarded: Guarded, rights: str) -> None:
    """With older rules without pools the worker joins the pool with the model's name, as an older plugin does."""
    name = {"today's": "w8", "of an older version": "w9"}[rights]
    model, tag = f"of-{name}", f"of-{name}#1"
    told = _words(user(f"worker-{name}", [f"secret-worker-{name}"], worker_rules(model, name)).split(" ", 2)[2])
    if rights != "today's":
        told = [word for word in told if "placement" not in word and word not in ("+time", "+multi", "+exec")]
    with guarded.client("admin") as admin:
        admin.execute_command("ACL", "SETUSER", f"worker-{name}", *told)
        admin.hset(wire.Keys(model).pools, tag, PoolEntry(tag).encode())
        said = ServerConfig(guarded.url(f"worker-{name}"), model, name, "http://127.0.0.1:9", (model,), "v1")
        half = ServerPublisher(said, server_assignment(said.redis_url, model, name))
        half.start()
        try:
            await poll(lambda: half.joined, what="it joined")
        finally:
            half.stop(5)
        joined = {pool for pool in (model, tag) if admin.exists(wire.Keys(pool).server(name))}
        assert joined == {tag if rights == "today's" else model}
        assert bool(admin.exists(wire.Keys(model).placement)) == (rights == "today's")


@pytest.mark.parametrize("rights", ["today's", "of an older version"])
async def test_a_worker_reads_which_sessions_yield_as_far_as_its_rights_let_it(
    guarded: Guarded, rights: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With older rules without LPOP the worker reports as ever, and says once that it does not read them."""
    name, told = {"today's": "y8", "of an older version": "y9"}[rights], list[str]()
    words = _words(user(f"worker-{name}", [f"secret-worker-{name}"], worker_rules(MODEL, name)).split(" ", 2)[2])
    if rights != "today's":
        words = [word for word in words if "lpop" not in word]
    tracker = Tracker()
    with guarded.client("admin") as admin:
        admin.execute_command("ACL", "SETUSER", f"worker-{name}", *words)
        admin.rpush(KEYS.yields(f"{name}.0"), "wf-x")
        config = PublisherConfig(
            guarded.url(f"worker-{name}"), MODEL, f"{name}.0", name, 0, SCHEME, 9_999, 32_768, "test"
        )
        core = WorkerPublisher(config, tracker, yielded=told.extend)
        core.start()
        try:
            for _ in range(15):
                tracker.stored(os.urandom(8))
                await asyncio.sleep(0.1)
            assert core.state.errors == 0
        finally:
            core.stop(5)
        assert admin.llen(KEYS.yields(f"{name}.0")) == len(["wf-x"]) - len(told)
        admin.delete(KEYS.yields(f"{name}.0"))
    assert told == (["wf-x"] if rights == "today's" else [])
    refusals = [record for record in caplog.records if "is not read" in record.getMessage()]
    assert len(refusals) == (rights != "today's")


def _words(rules: str) -> list[str]:
    """The single rules of a user; brackets with their content are one rule."""
    return re.findall(r"\([^)]*\)|\S+", rules)


def test_a_router_has_the_keys_of_its_models_only(guarded: Guarded) -> None:
    others = {KEYS.prefix, KEYS.operator_approved, KEYS.operator_policy}  # the bare prefix, and the operator's keys
    own = [key for key in [*STREAMS, *COMMANDS, *YIELDS, *FOREIGN] if key.startswith(KEYS.prefix) and key not in others]
    with guarded.client("router") as client:
        for key in [*own, *FOREIGN]:
            answer = attempt(client, "TYPE", key)
            assert answer == ("allowed" if key in own else "refused"), key
        script = client.script_load("return redis.call('SET', ARGV[1], 'v')")
        declared = [client.evalsha, script, 1, OTHERS.load, OTHERS.load]
        assert attempt(client, "EVALSHA", *declared[1:]) == "refused"
        with pytest.raises(redis.ResponseError, match=r"(?i)permission|can't access"):
            client.evalsha(script, 1, KEYS.load + "-a", OTHERS.load)
        assert client.evalsha(script, 1, KEYS.load + "-a", KEYS.load + "-a") == b"OK"
        flush = client.script_load("return redis.call('FLUSHALL')")
        with pytest.raises(redis.ResponseError, match=r"(?i)permission|can't run"):
            client.evalsha(flush, 0)


def test_a_router_reads_what_the_operator_approved_and_cannot_write_it(guarded: Guarded) -> None:
    key, digest = KEYS.operator_approved, "0" * 64
    with guarded.client("admin") as admin, guarded.client("router") as client:
        admin.sadd(key, digest)
        assert client.smembers(key) == {digest.encode()}
        for words in (
            ("SADD", key, "x"),
            ("SREM", key, digest),
            ("SET", key, "x"),
            ("UNLINK", key),
            ("HSET", key, "f", "v"),
        ):
            assert attempt(client, *words) == "refused", words
        script = client.script_load("return redis.call(ARGV[1], KEYS[1], 'x')")
        for command in ("SADD", "SREM", "SET", "GET"):
            assert attempt(client, "EVALSHA", script, 1, key, command) == "refused"
        assert attempt(client, "SMEMBERS", OTHERS.operator_approved) == "refused"
        admin.set(KEYS.operator_policy, "sticky")
        assert client.get(KEYS.operator_policy) == b"sticky"
        for words in (("SET", KEYS.operator_policy, "cost"), ("UNLINK", KEYS.operator_policy)):
            assert attempt(client, *words) == "refused", words
        assert attempt(client, "GET", OTHERS.operator_policy) == "refused"
        assert admin.smembers(key) == {digest.encode()}


def test_nobody_comes_in_without_a_password(guarded: Guarded) -> None:
    for url in (f"unix://{guarded.socket}", f"unix://router:wrong@{guarded.socket}"):
        with redis.Redis.from_url(url) as client, pytest.raises(redis.AuthenticationError):
            client.ping()


# ------------------------------------------------ real workers and routers


async def test_a_worker_cannot_drain_anybody(guarded: Guarded) -> None:
    for name in ("admin", "router", "worker-w1"):
        fleet = Fleet(connect(guarded.url(name)), MODEL, timeouts=PATIENT)
        try:
            if name == "worker-w1":
                with pytest.raises(FleetUnavailable, match="permission"):
                    await fleet.workers.drain("w1.0", draining=True)
            else:
                assert not await fleet.workers.drain("w1.0", draining=True), "allowed, but there is no such worker yet"
        finally:
            await fleet.close()


async def test_the_write_path_and_the_read_path_need_no_more(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.2)
    tracker = Tracker()
    tracker.stored([os.urandom(8) for _ in range(600)])
    config = PublisherConfig(guarded.url("worker-w2"), MODEL, "w2.0", "w2", 0, SCHEME, 9_999, 32_768, "test")
    core = WorkerPublisher(config, tracker)
    files = {"tokenizer.json": os.urandom(200_000)}
    half = ServerPublisher(
        ServerConfig(guarded.url("worker-w2"), MODEL, "w2", "http://127.0.0.1:9", ("org/model",), "test", files)
    )
    fleet = Fleet(connect(guarded.url("router")), MODEL, timeouts=PATIENT)
    core.start()
    half.start()
    try:
        slot = await _settled_in(fleet, tracker)
        assert await fleet.index.holds(slot, list(tracker.table)[:9]) == [True] * 9
        tracker.removed(list(tracker.table)[:100])
        [view] = await poll_workers(fleet, tracker)
        manifest = view.server["artifacts"]["tokenizer.json"]
        assert await fleet.artifacts.read("w2", manifest) == files["tokenizer.json"]
        assert await fleet.probes.prove("w2.0", view.record["nonce"], Proof("proven", "")) == "OK"
        await _requests(fleet, next(iter(tracker.table)))
        assert (await fleet.index.memory()).used > 0
        assert await fleet.operator.approved() == frozenset({"0" * 64})
        assert (await fleet.index.truth(await fleet.workers.read())).entries > 0
        await poll(lambda: _audited(fleet), what="a piece of the index is audited")
        assert core.state.errors == 0
    finally:
        core.stop(5)
        half.stop(5)
    await fleet.upkeep.step()
    record = {"scheme_id": 1, "url": "http://127.0.0.1:8", "models": ["m"]}
    assert (await fleet.workers.register("static-1", record, 99)).slot
    for worker in ("w2.0", "static-1"):
        assert await fleet.upkeep.forget(worker)
    for _ in range(20):
        await fleet.upkeep.step()
    await fleet.close()


async def _audited(fleet: Fleet) -> int:
    return (await fleet.upkeep.audit(0.001)).blocks


async def _settled_in(fleet: Fleet, tracker: Tracker) -> int:
    [view] = await poll_workers(fleet, tracker)
    return int(view.record["slot"])


async def poll_workers(fleet: Fleet, tracker: Tracker) -> list[Any]:
    """The single worker, once the index has all blocks of its table and its API server has joined."""

    async def ready() -> list[Any]:
        await fleet.upkeep.step()
        views = await fleet.workers.read()
        return [view for view in views if view.load.blocks == len(tracker.table) and view.server]

    return cast("list[Any]", await poll(ready))


async def _requests(fleet: Fleet, block: bytes) -> None:
    ask = Question("wf-0aaaaaaaaaaaaaaaaaaaaa", (Chain(SCHEME.scheme_id, 16, block),), 32, 64)
    decision = await fleet.bookings.decide(ask)
    assert decision.matched_tokens == 16
    assert (await fleet.queue.explain(ask))[0] == "w2.0"
    renewal = Renewal(ask.reservation, "w2.0", decision.prefill_tokens, decision.decode_tokens)
    assert await fleet.bookings.renew([renewal]) == (1, 0, 0)
    assert await fleet.bookings.settle(ask.reservation, "started") == "STARTED"
    assert await fleet.bookings.settle(ask.reservation, "finished") == "SETTLED"
    await fleet.redis.zadd(fleet.keys.leases, {ask.reservation: 1})  # the lease is past its end
    assert await fleet.bookings.reap() >= 1


async def test_a_router_reads_the_registry_of_pools_and_reaches_pools_to_come(guarded: Guarded) -> None:
    """A rule for a model's name covers all its pools; a rule for a tag covers that pool and reading the registry."""
    rules_of_name = _words(" ".join(rules("org/model")["router"]))
    with guarded.client("admin") as admin:
        admin.execute_command("ACL", "SETUSER", "router-of-all", "reset", "on", ">secret-router-of-all", *rules_of_name)
        admin.hset(wire.Keys("org/model").pools, "org/model#1", PoolEntry("org/model#1").encode())
    for name in ("router", "router-of-all"):
        client = connect(guarded.url(name))
        try:
            registry = PoolRegistry(client, "org/model")
            assert [entry.tag for entry in await registry.read()] == ["org/model#1"]
            with guarded.client("admin") as admin:
                admin.unlink(wire.Keys("org/model").pools)
            assert [entry.tag for entry in await registry.read()] == ["org/model#1"], "written back"
        finally:
            await client.aclose()
        new = Fleet(connect(guarded.url(name)), "org/model#later", timeouts=PATIENT)
        try:
            if name == "router":
                with pytest.raises(FleetUnavailable):
                    await new.workers.read()
            else:
                assert await new.workers.read() == []
                await new.upkeep.step()
                assert (await new.operator.approved(), await new.operator.switched()) == (frozenset(), "")
                with pytest.raises(FleetUnavailable):
                    await new.operator.switch("cost")
        finally:
            await new.close()
    with guarded.client("admin") as admin:
        admin.unlink(wire.Keys("org/model").pools)  # a replica would follow it to pools that its user may not use


async def test_a_router_deletes_what_is_left_of_a_removed_pool_but_for_the_operators_keys(guarded: Guarded) -> None:
    with guarded.client("admin") as client:
        client.set(KEYS.tick, "left")
        client.set(KEYS.operator_policy, "random")
        for name in ("router", "admin"):
            fleet = Fleet(connect(guarded.url(name), timeout_s=2), MODEL)
            await clear(fleet, shared=False)
            await fleet.close()
            assert (client.exists(KEYS.tick), client.exists(KEYS.operator_policy)) == (0, name == "router")


async def test_a_replica_serves_as_the_router_user(guarded: Guarded) -> None:
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(engine("org/model"))
        router = await stack.enter_async_context(replica(guarded.url("router"), MODEL, upstream.url))
        for _ in range(3):
            status, headers, _ = await router.post({"model": "org/model", "prompt": "some words " * 50})
            assert (status, headers["x-warmfleet-reservation"]) == (200, "booked")
        await router.unloaded()
        _, page = await router.get("/metrics")
        assert re.findall(rb"warmfleet_task_failures_total\S* [1-9].*", page) == []
