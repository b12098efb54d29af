"""The API-server half: address, artifacts and stream."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
from tests.support.polling import poll

from warmfleet_worker import server_publisher
from warmfleet_worker.protocol import artifacts, wire
from warmfleet_worker.server_address import (
    Bound,
    UrlRefusedError,
    default_server_id,
    healthy,
    redis_is_local,
    worker_url,
)
from warmfleet_worker.server_publisher import ServerConfig, ServerPublisher

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import redis.asyncio as aioredis

    from warmfleet.fleet import Fleet

LOCAL, REMOTE = "unix:///run/redis.sock", "redis://10.9.8.7:6379"
#: Incompressible, so that it takes several chunks.
ARTIFACTS = {"tokenizer.json": os.urandom(200_000), "chat_template.jinja": b"{{ messages }}"}


@pytest.fixture(autouse=True)
def no_address_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARMFLEET_WORKER_URL", raising=False)
    monkeypatch.delenv("POD_IP", raising=False)


@pytest.mark.parametrize(
    ("redis_url", "host", "environment", "url"),
    [
        (LOCAL, "127.0.0.1", {}, "http://127.0.0.1:8000"),
        (LOCAL, None, {}, "http://127.0.0.1:8000"),
        (LOCAL, "0.0.0.0", {}, "http://127.0.0.1:8000"),
        (REMOTE, "10.1.2.3", {}, "http://10.1.2.3:8000"),
        (REMOTE, "::", {"POD_IP": "fd00::7"}, "http://[fd00::7]:8000"),
        (REMOTE, None, {"POD_IP": "10.1.2.3"}, "http://10.1.2.3:8000"),
        (REMOTE, "127.0.0.1", {"WARMFLEET_WORKER_URL": "https://vllm-0.svc:1/"}, "https://vllm-0.svc:1"),
        ("redis://localhost", "localhost", {}, "http://localhost:8000"),
    ],
)
def test_the_address_that_is_announced(
    monkeypatch: pytest.MonkeyPatch, redis_url: str, host: str | None, environment: dict[str, str], url: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert worker_url(redis_url, host, 8000) == url


@pytest.mark.parametrize(
    ("redis_url", "host", "port", "environment"),
    [
        (REMOTE, "127.0.0.1", 8000, {}),
        (REMOTE, "localhost", 8000, {}),
        (REMOTE, "::1", 8000, {}),
        (REMOTE, None, 8000, {"WARMFLEET_WORKER_URL": "http://0.0.0.0:8000"}),
        (REMOTE, None, 8000, {"WARMFLEET_WORKER_URL": "http://127.0.0.1:8000"}),
        (LOCAL, "127.0.0.1", 0, {}),
    ],
)
def test_an_address_that_leads_nowhere_is_refused(
    monkeypatch: pytest.MonkeyPatch, redis_url: str, host: str | None, port: int, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UrlRefusedError, match="WARMFLEET_WORKER_URL"):
        worker_url(redis_url, host, port)


def test_a_redis_is_local_by_socket_or_loopback() -> None:
    local = ["unix:///s", "redis://127.0.0.1", "redis://:secret@localhost:1", "rediss://[::1]:6379"]
    assert [redis_is_local(url) for url in [*local, REMOTE, "redis://redis.svc"]] == [True] * 4 + [False] * 2


def test_a_server_id_survives_a_restart_and_differs_between_servers_of_a_host() -> None:
    first, again, other = (default_server_id(["vllm", "--port", port]) for port in ("1", "1", "2"))
    assert first == again != other
    assert wire.worker_id_of(first, 65_535)


@pytest.mark.parametrize("status", [200, 503])
async def test_a_server_is_ready_when_its_health_is_fine(status: int, tmp_path: Path) -> None:
    """A port that is only bound, a silent port and an answering port, each by TCP and by unix socket."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /health HTTP/1.1\r\n")
        writer.write(b"HTTP/1.1 %d x\r\ncontent-length: 0\r\n\r\n" % status)
        await writer.drain()
        writer.close()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert not await asyncio.to_thread(healthy, Bound("127.0.0.1", port))
        async with await asyncio.start_server(answer, sock=listener):
            assert await asyncio.to_thread(healthy, Bound("0.0.0.0", port)) is (status == 200)
    path = str(tmp_path / "socket")
    assert not healthy(Bound(None, 0, path))
    async with await asyncio.start_unix_server(answer, path):
        assert await asyncio.to_thread(healthy, Bound(None, 0, path)) is (status == 200)


@pytest.fixture
def server(redis_url: str, model: str) -> Iterator[ServerPublisher]:
    config = ServerConfig(
        redis_url, model, "s1", "http://127.0.0.1:8000", ("m", "m2"), "v1", ARTIFACTS, {"max_model_len": 4_096}
    )
    publisher = ServerPublisher(config)
    yield publisher
    publisher.stop()


async def test_what_no_server_uses_any_more_expires(
    fleet: Fleet, store: aioredis.Redis, server: ServerPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored but never announced files expire, too: the server ends before any router learns of it."""
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.02)
    server.start()
    await poll(lambda: server.joined)
    keys = [key async for key in store.scan_iter(f"{fleet.keys.artifact('s1', '*')}".replace("{", "\\{"))]
    assert len(keys) > 4
    for key in keys:
        assert server_publisher.ARTIFACT_SECONDS - 60 < await store.ttl(key) <= server_publisher.ARTIFACT_SECONDS
    # Files are kept while the server lives.
    await store.expire(keys[0], 100)
    monkeypatch.setattr(server_publisher, "IN_USE_SECONDS", 0.0)
    await poll(lambda: _lives(store, keys[0]))
    monkeypatch.setattr(server_publisher, "IN_USE_SECONDS", 3_600.0)
    # A file that routers emptied stays empty; a lost file, or one that they want again, is stored without a join.
    nonce = server._stream.nonce
    await store.set(keys[1], b"", keepttl=True)
    await store.delete(keys[0])
    monkeypatch.setattr(server_publisher, "IN_USE_SECONDS", 0.0)
    await poll(lambda: _lives(store, keys[0]))
    assert (await store.strlen(keys[0]) > 0, await store.get(keys[1]), server._stream.nonce) == (True, b"", nonce)
    await store.expire(keys[1], 100)
    await poll(lambda: _lives(store, keys[1]))


async def _lives(store: aioredis.Redis, key: bytes) -> bool:
    return bool(await store.ttl(key) > 1_000)


class TestPublisher:
    """The join waits for the port and holds everything, and the server joins again when its stream is lost."""

    async def applied(self, fleet: Fleet, store: aioredis.Redis) -> dict[bytes, bytes]:
        await fleet.upkeep.step()
        return cast("dict[bytes, bytes]", await store.hgetall(fleet.keys.servers))

    async def test_it_joins_with_what_routers_need(
        self, fleet: Fleet, store: aioredis.Redis, server: ServerPublisher
    ) -> None:
        server.start()
        records = await poll(lambda: self.applied(fleet, store))
        assert isinstance(records, dict)
        record = json.loads(records[b"s1"])
        assert (record["url"], record["models"]) == ("http://127.0.0.1:8000", ["m", "m2"])
        assert record["facts"]["max_model_len"] == 4_096
        assert len(record["artifacts"]["tokenizer.json"]["chunks"]) > 1
        for name, content in ARTIFACTS.items():
            assert await fleet.artifacts.read("s1", record["artifacts"][name]) == content

    async def test_it_joins_again_when_redis_came_back_empty(
        self, fleet: Fleet, store: aioredis.Redis, server: ServerPublisher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.1)
        server.start()
        await poll(lambda: self.applied(fleet, store))
        await store.delete(*[key async for key in store.scan_iter(f"{fleet.keys.prefix}*")])
        await poll(lambda: self.applied(fleet, store))
        pieces = [key async for key in store.scan_iter(f"{fleet.keys.prefix}artifact:*")]
        assert len(pieces) == 5

    async def test_it_joins_again_when_its_adapters_change(
        self, fleet: Fleet, store: aioredis.Redis, redis_url: str, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.1)
        loaded = {"one": "/adapters/one"}
        config = ServerConfig(redis_url, model, "s3", "http://127.0.0.1:1", (model,), "v1", adapters=lambda: loaded)
        publisher = ServerPublisher(config)

        async def announced() -> object:
            records = await self.applied(fleet, store)
            return records and json.loads(records[b"s3"])["facts"]["loras"] == loaded

        publisher.start()
        try:
            await poll(announced)
            nonce = publisher._stream.nonce
            await asyncio.sleep(0.3)
            assert publisher._stream.nonce == nonce, "heartbeats alone do not make it join"
            loaded["two"] = "/adapters/two"
            await poll(announced)
            del loaded["one"]
            await poll(announced)
        finally:
            publisher.stop()

    async def test_it_waits_until_the_server_listens(
        self, fleet: Fleet, store: aioredis.Redis, redis_url: str, model: str
    ) -> None:
        listening: list[bool] = []
        config = ServerConfig(redis_url, model, "s2", "http://127.0.0.1:1", (model,), "v1")
        publisher = ServerPublisher(replace(config, ready=lambda: bool(listening)))
        publisher.start()
        try:
            await poll(lambda: publisher._thread.is_alive())
            assert not await self.applied(fleet, store)
            listening.append(True)
            await poll(lambda: self.applied(fleet, store))
        finally:
            publisher.stop()

    async def test_it_says_goodbye(self, fleet: Fleet, store: aioredis.Redis, server: ServerPublisher) -> None:
        server.start()
        await poll(lambda: self.applied(fleet, store))
        assert await store.zscore(fleet.keys.alive_servers, "s1")
        server.stop()
        await fleet.upkeep.apply_server("s1")
        assert await store.zscore(fleet.keys.alive_servers, "s1") is None


class TestArtifacts:
    """Split content can be joined again; changed chunks and entries are refused."""

    entry, chunks = artifacts.split(b"x" * 1_000_000)
    pieces = (chunks[entry["chunks"][0]],)

    def test_round_trip(self) -> None:
        assert artifacts.join(self.entry, self.pieces, 1_000_000) == b"x" * 1_000_000

    @pytest.mark.parametrize(
        ("change", "limit"),
        [
            ({"bytes": 999_999}, 1_000_000),  # a bomb announces less than it holds
            ({}, 999_999),
            ({"sha256": "0" * 64}, 1_000_000),
            ({"chunks": ["0" * 64]}, 1_000_000),
            ({"bytes": -1}, 1_000_000),
        ],
    )
    def test_anything_else_is_refused(self, change: dict[str, object], limit: int) -> None:
        with pytest.raises(wire.WireError):
            artifacts.join(self.entry | change, self.pieces, limit)

    def test_what_is_not_zlib_is_refused(self) -> None:
        junk = b"not a zlib stream"
        entry = self.entry | {"chunks": [hashlib.sha256(junk).hexdigest()]}
        with pytest.raises(wire.WireError, match="zlib"):
            artifacts.join(entry, [junk], 1_000_000)
