"""An engine is a single worker whatever URLs lead to it and however it has joined; two engines are two workers."""

from __future__ import annotations

import json
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.engines.scripted import Engine, answer_well, engine, reply
from tests.support.replicas.stock_checks import Checks, asked, metrics

from warmfleet.background.stock.engine_facts import identity_of
from warmfleet.background.stock.known_engines import EngineKey
from warmfleet.engines.engine_client import Place
from warmfleet.fleet import Flag
from warmfleet.fleet.rows import LoadRow
from warmfleet.settings import engine_url

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Callable

    from warmfleet.fleet import Fleet

#: The first lines of the metrics of two processes that started in the same hundredth of a second.
PAGE = b"process_start_time_seconds 1.79579631192e+09\n"
CREATED = b'vllm:num_preemptions_created{engine="0"} 1.79579634877704%de+09\nhttp_created 1.7957999e+09\n'
ONE, OTHER = PAGE + CREATED % 26, PAGE + CREATED % 37
EXACT = Flag.SERVER | Flag.URL | Flag.PROVEN | Flag.CLOSED


# ---------------------------------------------------------------- the engine's page, and the spelling of its URL


@pytest.mark.parametrize(
    ("page", "told"),
    [
        (ONE, True),
        (b"process_start_time_seconds 1795796311.9284\n", True),
        (PAGE, False),
        (b"vllm:num_preemptions_created 1.7957963e+09\n", False),
        (ONE + b'process_start_time_seconds{pid="8"} 1.8e+09\n', False),
        (b"sglang:num_running_reqs 0\n", False),
        (b"process_start_time_seconds nan\nx_created nan\n", False),
        (b"<html>", False),
    ],
    ids=[
        "python's client",
        "microseconds",
        "hundredths only",
        "no process",
        "several processes",
        "sglang",
        "nonsense",
        "no page",
    ],
)
def test_only_what_no_other_process_tells_is_an_identity(page: bytes, told: bool) -> None:
    assert bool(identity_of(page)) is told


def test_processes_that_begin_together_differ_and_one_stays_the_same() -> None:
    assert identity_of(ONE) != identity_of(OTHER)
    assert identity_of(ONE) == identity_of(ONE + b'late_created{path="/x"} 1.7958e+09\n'), "counters are added later"


@pytest.mark.parametrize(
    "spelled",
    [
        "http://gpu1",
        "HTTP://GPU1",
        "http://gpu1:80",
        "http://gpu1/",
        "http://gpu1/v1",
        "http://gpu1./v1/",
        " http://gpu1:80/v1/ ",
    ],
)
def test_a_url_has_one_spelling(spelled: str) -> None:
    assert engine_url(spelled) == "http://gpu1"


@pytest.mark.parametrize(
    ("spelled", "known"),
    [
        ("https://h:443/a/v1", "https://h/a"),
        ("https://h:80", "https://h:80"),
        ("http://[0:0::1]:8000", "http://[::1]:8000"),
        ("http://[::ffff:10.0.0.7]:8000", "http://10.0.0.7:8000"),
        ("http://User:Pass@H:80", "http://User:Pass@h"),
        ("http://h/Path", "http://h/Path"),
    ],
)
def test_what_differs_in_a_url_stays(spelled: str, known: str) -> None:
    assert engine_url(spelled) == known


def place(host: str, address: str = "10.0.0.7", port: int = 8000, path: str = "") -> Place:
    return Place((address, port, path), host, named=not host[0].isdigit() and host != "localhost")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (EngineKey("a", place("svc")), EngineKey("a", place("10.9.9.9", "10.9.9.9")), True),
        (EngineKey("a", None), EngineKey("a", None), True),
        (EngineKey("a", place("10.0.0.7")), EngineKey("b", place("10.0.0.7")), False),
        (EngineKey("", place("gpu1")), EngineKey("", place("10.0.0.7")), True),
        (EngineKey("a", place("gpu1")), EngineKey("", place("10.0.0.7")), True),
        (EngineKey("", place("a.example")), EngineKey("", place("b.example")), False),
        (EngineKey("a", place("a.example")), EngineKey("a", place("b.example")), True),
        (EngineKey("", place("10.0.0.7")), EngineKey("", place("10.0.0.7", port=8001)), False),
        (EngineKey("", place("10.0.0.7", path="/a")), EngineKey("", place("10.0.0.7", path="/b")), False),
        (EngineKey("", None), EngineKey("", None), False),
    ],
    ids=[
        "a service and a pod",
        "names with several addresses",
        "two processes took turns at a port",
        "a name and its address",
        "one of them tells nothing",
        "two names at one proxy",
        "two names of one process",
        "two ports",
        "two paths",
        "nothing is known",
    ],
)
def test_which_urls_lead_to_one_engine(one: EngineKey, other: EngineKey, same: bool) -> None:
    assert one.same(other) is other.same(one) is same


# ---------------------------------------------------------------- an engine that is listed twice


@dataclass
class Spelled:
    """A list of engine URLs for each replica, where {port} is the engine's port; ``page``: the engine's /metrics."""

    lists: list[list[str]]
    page: bytes = b""


TWICE = {
    "localhost and its address": Spelled([["http://127.0.0.1:{port}", "http://localhost:{port}"]]),
    "large letters, and a path": Spelled([["{proxy}/gpu1", "HTTP:{proxy_host}/gpu1/v1"]]),
    "all addresses of this machine": Spelled([["http://127.0.0.1:{port}", "http://0.0.0.0:{port}"]]),
    "an address of IPv4 as one of IPv6": Spelled([["http://127.0.0.1:{port}", "http://[::ffff:127.0.0.1]:{port}"]]),
    "a user in one of them": Spelled([["http://127.0.0.1:{port}", "http://user:secret@localhost:{port}"]]),
    "a name as it is, and for DNS": Spelled([["http://localhost:{port}", "http+dns://localhost:{port}"]]),
    "three spellings": Spelled([["http://localhost:{port}", "http://127.0.0.1:{port}", "http://0.0.0.0:{port}"]]),
    "another address of the machine": Spelled([["http://127.0.0.1:{port}", "http://127.0.0.2:{port}"]], ONE),
    "behind a proxy": Spelled([["http://127.0.0.1:{port}", "{proxy}/gpu1"]], ONE),
    "one spelling in each replica": Spelled([["http://127.0.0.1:{port}"], ["http://localhost:{port}"]]),
    "one URL in each replica": Spelled([["http://127.0.0.1:{port}"], ["{proxy}/gpu1"]], ONE),
}


@asynccontextmanager
async def everywhere(model: str) -> AsyncIterator[Engine]:
    """An engine that listens on every address of IPv4, as behind ``--host 0.0.0.0``."""
    import asyncio

    made = Engine(model, answer_well)
    made.server = await asyncio.start_server(made.serve, "0.0.0.0", 0)
    made.url = f"http://127.0.0.1:{made.server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def proxy(behind: Engine) -> AsyncIterator[str]:
    """A proxy that removes the first part of the path and passes the request on to the engine."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                reply(writer, behind._page(head.split(" ")[1].removeprefix("/gpu1")))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    import asyncio

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize("case", TWICE.values(), ids=TWICE)
async def test_an_engine_that_is_listed_twice_is_one_worker(
    case: Spelled, replica: Callable[..., Checks], model: str
) -> None:
    async with everywhere(model) as one, proxy(one) as front:
        metrics(one, case.page or b"nothing\n")
        words = {"port": one.url.rpartition(":")[2], "proxy": front, "proxy_host": front.partition(":")[2]}
        replicas = [replica(*(entry.format(**words) for entry in entries)) for entries in case.lists]
        for _ in range(3):
            for checks in replicas:
                await checks.round()
        workers = await replicas[0].fleet.workers.read()
        assert [worker.state for worker in workers] == ["approximate"], [worker.url for worker in workers]
        slot = workers[0].load.slot
        for checks in replicas * 2:
            await checks.round()
        (worker,) = await replicas[0].fleet.workers.read()
        assert worker.load.slot == slot, "it stays the same worker"


DIFFERENT = {
    "processes that began together": (ONE, OTHER),
    "engines that tell nothing": (b"nothing\n", b"nothing\n"),
    "engines that tell only when they began": (PAGE, PAGE),
    "SGLang, without the time of its processes": (b"sglang:num_running_reqs 0\n",) * 2,
    "one tells, one does not": (ONE, b"nothing\n"),
}


@pytest.mark.parametrize("pages", DIFFERENT.values(), ids=DIFFERENT)
async def test_two_engines_are_two_workers(
    pages: tuple[bytes, bytes], replica: Callable[..., Checks], model: str
) -> None:
    async with engine(model) as one, engine(model) as two:
        metrics(one, pages[0])
        metrics(two, pages[1])
        checks = replica(one.url, two.url)
        for _ in range(3):
            await checks.round()
        assert set(await checks.workers()) == {one.url, two.url}


async def test_what_stands_back_is_read_as_seldom_as_a_worker(replica: Callable[..., Checks], model: str) -> None:
    async with engine(model) as one:
        read: list[str] = []

        def page(path: str) -> bytes:
            read.append(path)
            return ONE if path == "/metrics" else json.dumps({"data": [{"id": model}]}).encode()

        cast("Any", one)._page = page
        checks = replica(one.url)
        await join(checks.fleet, one.url)
        for _ in range(5):
            await checks.round()
        assert (read.count("/metrics"), read.count("/v1/models")) == (2, 5), "once for each of the two URLs"


async def test_another_spelling_takes_over_where_the_first_ends(replica: Callable[..., Checks], model: str) -> None:
    async with everywhere(model) as one, proxy(one) as front:
        metrics(one, ONE)
        a, b = replica(f"{front}/gpu1"), replica(one.url)
        for checks in (a, b, a, b):
            await checks.round()
        assert set(await b.workers()) == {f"{front}/gpu1"}
        (name,) = (worker.worker_id for worker in (await b.workers()).values())
        await b.fleet.redis.zadd(b.fleet.keys.alive, {name: (time.time() - 11) * 1000})  # the other replica is gone
        await b.round()
        assert one.url in {url for url, worker in (await b.workers()).items() if worker.routable}


async def test_a_new_process_at_one_url_is_no_more_the_worker_of_the_other(
    replica: Callable[..., Checks], model: str
) -> None:
    """Two URLs that lead to one engine now, as behind a proxy, may lead to two engines later."""
    async with engine(model) as one, engine(model) as two:
        metrics(one, ONE)
        metrics(two, ONE)
        checks = replica(one.url, two.url, facts_interval_s=0.0)
        for _ in range(2):
            await checks.round()
        assert len(await checks.workers()) == 1
        metrics(two, OTHER)
        for _ in range(2):
            await checks.round()
        assert set(await checks.workers()) == {one.url, two.url}


# ---------------------------------------------------------------- an engine that is listed and has joined


async def join(fleet: Fleet, url: str, flags: int = EXACT, *, age_s: float = 0.0, nonce: str = "n1") -> None:
    """Write a worker with the plugin into Redis, as its streams would have made it."""
    now, row = time.time() * 1000, LoadRow(epoch=1, slot=77, flags=flags, scheme=7, speed_tps=9, capacity_blocks=9)
    record = {"nonce": nonce, "proof": "proven", "server_id": "gpu1", "slot": 77}
    server = {"nonce": nonce, "url": url, "models": ["m"], "version": "1"}
    keys, redis = fleet.keys, cast("Any", fleet.redis)
    await redis.hset(keys.load, "gpu1.0", row.pack("gpu1.0"))
    await redis.hset(keys.workers, "gpu1.0", json.dumps(record))
    await redis.hset(keys.servers, "gpu1", json.dumps(server))
    for key, name in ((keys.alive, "gpu1.0"), (keys.alive_servers, "gpu1")):
        await redis.zadd(key, {name: now - age_s * 1000})


async def states(checks: Checks) -> dict[str, str]:
    return {worker.worker_id: str(worker.state) for worker in await checks.fleet.workers.read()}


JOINED = {
    "it announces the URL that is listed": ("http://127.0.0.1:{port}", "http://127.0.0.1:{port}"),
    "it announces its host otherwise": ("http://localhost:{port}/", "http://127.0.0.1:{port}"),
    "it announces a pod's address, a service is listed": ("http://127.0.0.2:{port}", "{proxy}/gpu1"),
    "it is behind a bridge, with another spelling": ("http://127.0.0.1:{port}", "http://LOCALHOST:{port}/v1"),
}


@pytest.mark.parametrize("case", JOINED.values(), ids=JOINED)
async def test_an_engine_that_joined_is_no_second_worker_by_its_url(
    case: tuple[str, str], replica: Callable[..., Checks], model: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "warmfleet")
    async with everywhere(model) as one, proxy(one) as front:
        metrics(one, ONE)
        announced, listed = (url.format(port=one.url.rpartition(":")[2], proxy=front) for url in case)
        checks = replica(listed)
        checks.addresses._ranges = [
            *checks.addresses._ranges,
            *cast("Any", type(checks.addresses))(("127.0.0.0/8",))._ranges,
        ]
        await checks.round()
        assert list((await states(checks)).values()) == ["approximate"], "nothing has joined yet"
        await join(checks.fleet, announced)
        await checks.round()
        assert await states(checks) == {"gpu1.0": "proven"}
        await checks.round()
        assert caplog.text.count("is the worker gpu1.0") == 1
        assert await states(checks) == {"gpu1.0": "proven"}


HELD = {
    "the operator drains it": (EXACT | Flag.DRAINING, 0.0, "draining"),
    "it is paused": (EXACT | Flag.PAUSED, 0.0, "paused"),
    "it is ejected": (EXACT | Flag.EJECTED, 0.0, "ejected"),
    "its identity is wrong": (EXACT & ~Flag.PROVEN, 0.0, "load-only"),
    "its heartbeats are cut off": (EXACT | Flag.UNHEARD, 60.0, "unheard"),
}


@pytest.mark.parametrize(("flags", "age_s", "state"), HELD.values(), ids=HELD)
async def test_what_holds_a_joined_worker_holds_its_url(
    flags: int, age_s: float, state: str, replica: Callable[..., Checks], model: str
) -> None:
    async with engine(model) as one:
        checks = replica(one.url)
        await join(checks.fleet, one.url, flags, age_s=age_s)
        for _ in range(2):
            await checks.round()
        assert await states(checks) == {"gpu1.0": state}


LACKING = {
    "it is not proved yet": (EXACT & ~(Flag.URL | Flag.PROVEN), 0.0, "pending"),
    "its API server is gone": (EXACT & ~Flag.SERVER, 0.0, "joining"),
    "it is silent": (EXACT, 60.0, "silent"),
}


@pytest.mark.parametrize(("flags", "age_s", "state"), LACKING.values(), ids=LACKING)
async def test_a_url_serves_while_the_plugin_does_not(
    flags: int, age_s: float, state: str, replica: Callable[..., Checks], model: str
) -> None:
    async with engine(model) as one:
        checks = replica(one.url)
        await join(checks.fleet, one.url)
        await checks.round()
        assert await states(checks) == {"gpu1.0": "proven"}
        await join(checks.fleet, one.url, flags, age_s=age_s)
        await checks.round()
        found = await states(checks)
        assert found.pop("gpu1.0") == state
        assert list(found.values()) == ["approximate"]
        await join(checks.fleet, one.url, nonce="n2")
        await checks.round()
        assert await states(checks) == {"gpu1.0": "proven"}


async def test_requests_that_run_when_the_plugin_joins_end_under_their_worker(
    replica: Callable[..., Checks], model: str
) -> None:
    async with engine(model) as one:
        checks = replica(one.url)
        await checks.round()
        await checks.fleet.upkeep.step()
        ask = asked(b"word " * 100)
        (name,) = await states(checks)
        assert (await checks.fleet.bookings.decide(ask)).worker_id == name
        await join(checks.fleet, one.url)
        for _ in range(2):
            await checks.round()
            assert await states(checks) == {name: "draining", "gpu1.0": "proven"}
        await checks.fleet.bookings.settle(ask.reservation, "finished")
        await checks.round()
        assert await states(checks) == {"gpu1.0": "proven"}


async def test_several_replicas_agree_that_it_has_joined(replica: Callable[..., Checks], model: str) -> None:
    async with engine(model) as one:
        replicas = [replica(one.url), replica(one.url), replica(one.url.replace("127.0.0.1", "localhost"))]
        for checks in replicas * 2:
            await checks.round()
        assert len(await states(replicas[0])) == 1
        await join(replicas[0].fleet, one.url)
        for checks in replicas:
            await checks.round()
        for checks in replicas:
            await checks.round()
        assert await states(replicas[0]) == {"gpu1.0": "proven"}
