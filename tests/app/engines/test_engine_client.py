"""Small calls to engines: where they may go, what limits them, and what becomes of a dead connection."""

from __future__ import annotations

import asyncio
import base64
import socket
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from tests.support.engines.scripted import Engine, Seen, chunk, engine, freezing, reply, reset

from warmfleet.engines.allowed_addresses import Addresses
from warmfleet.engines.engine_client import EngineClient
from warmfleet.errors import UpstreamError, UpstreamGone

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LOOPBACK = Addresses(("127.0.0.0/8", "::1/128"))


@asynccontextmanager
async def small_calls(addresses: Addresses = LOOPBACK) -> AsyncIterator[EngineClient]:
    client = EngineClient(addresses, 1.0)
    try:
        yield client
    finally:
        await client.close()


def by_name(url: str, name: str = "localhost") -> str:
    return f"http://{name}:{urlsplit(url).port}"


async def answer_ok(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
    reply(writer, b"ok")


async def test_connections_are_used_again() -> None:
    async with engine("m", answer_ok) as server, small_calls() as client:
        assert await client.get(server.url + "/", "/v1/models", {}, 5) == (
            200,
            b'{"object": "list", "data": [{"id": "m"}]}',
        )
        for _ in range(3):
            assert await client.post(server.url, "/tokenize", b"{}", {"X-Name": "value"}) == (200, b"ok")
        assert server.connections["opened"] == 1
    assert [seen.path for seen in server.seen] == ["/tokenize"] * 3
    assert server.seen[0].headers == {"host": urlsplit(server.url).netloc, "content-length": "2", "x-name": "value"}


async def test_the_user_in_an_address_is_sent() -> None:
    async with engine("m", answer_ok) as server, small_calls() as client:
        address = server.url.replace("http://", "http://me:s%20ecret@")
        await client.post(address, "/x", b"{}", {})
        with pytest.raises(UpstreamError, match="names a user"):  # as on the hot path: requests would fail there
            await client.post(address, "/x", b"{}", {"Authorization": "Bearer key"})
    expected = "Basic " + base64.b64encode(b"me:s ecret").decode()
    assert [seen.headers["authorization"] for seen in server.seen] == [expected]


async def test_a_header_of_a_client_need_not_be_ascii() -> None:
    async with engine("m", answer_ok) as server, small_calls() as client:
        assert await client.post(server.url, "/x", b"{}", {"Authorization": "Bearer é"}) == (200, b"ok")
    assert [seen.headers["authorization"] for seen in server.seen] == ["Bearer é"]


# ------------------------------------------------ where they may go


@pytest.mark.parametrize("url", ["http://8.8.8.8:1", "file:///etc/passwd", "http://127.1:1", "http://", "http://a b"])
async def test_an_address_outside_the_ranges_is_not_connected_to(url: str) -> None:
    async with small_calls() as client:
        with pytest.raises(UpstreamError):
            await client.get(url, "/health", {}, 5)


async def test_a_name_that_resolves_outside_the_ranges_is_not_connected_to() -> None:
    async with engine("m", answer_ok) as server, small_calls(Addresses(("10.0.0.0/8",))) as client:
        with pytest.raises(UpstreamGone):
            await client.post(by_name(server.url), "/x", b"{}", {})
    assert not server.connections["opened"]


async def test_a_host_of_the_settings_is_always_allowed() -> None:
    async with (
        engine("m", answer_ok) as server,
        small_calls(Addresses((), [server.url, by_name(server.url)])) as client,
    ):
        for url in (server.url, by_name(server.url)):
            assert (await client.post(url, "/x", b"{}", {}))[0] == 200


async def test_addresses_of_a_name_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        kind, any_protocol = socket.SOCK_STREAM, (0, "")
        return [
            (socket.AF_INET6, kind, *any_protocol, ("::1", port, 0, 0)),
            (socket.AF_INET, kind, *any_protocol, ("8.8.8.8", port)),
            (socket.AF_INET, kind, *any_protocol, ("127.0.0.1", port)),
        ]

    async with engine("m", answer_ok) as server, small_calls() as client:
        with monkeypatch.context() as patched:
            patched.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
            for _ in range(3):
                assert await client.post(by_name(server.url, "engine.test"), "/x", b"{}", {}) == (200, b"ok")
    assert asked == ["engine.test"], "a name is not resolved anew for every call"
    assert server.seen[0].headers["host"] == f"engine.test:{urlsplit(server.url).port}"


async def test_a_redirect_is_an_answer_like_others() -> None:
    async def moved(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 302 Found\r\nlocation: http://8.8.8.8/\r\nset-cookie: a=b\r\ncontent-length: 0\r\n\r\n")

    async with engine("m", moved) as server, small_calls() as client:
        for _ in range(2):
            assert await client.post(server.url, "/x", b"{}", {}) == (302, b"")
    assert "cookie" not in server.seen[1].headers


# ------------------------------------------------ limits


async def test_a_body_is_cut_off_behind_its_limit() -> None:
    async def endless(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while not writer.is_closing():
            chunk(writer, b"x" * 10_000)
            await writer.drain()

    async with engine("m", endless) as server, small_calls() as client:
        status, body = await client.post(server.url, "/x", b"{}", {}, 50_000)
        assert status == 200
        assert 50_000 <= len(body) < 200_000


async def test_an_answer_is_not_waited_for_longer_than_its_limit() -> None:
    async with (
        engine("m", freezing(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n")) as server,
        small_calls() as client,
    ):
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.post(server.url, "/x", b"{}", {})
    async with silent_server() as url, small_calls() as client:
        with pytest.raises(UpstreamGone, match="TimeoutError"):
            await client.get(url, "/health", {}, 0.1)
    assert time.monotonic() - began < 5


@asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """Takes connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(("answer", "error"), [(b"nonsense\r\n\r\n", UpstreamError), (b"", UpstreamGone)])
async def test_an_answer_that_is_none_is_an_error_of_ours(answer: bytes, error: type[Exception]) -> None:
    async def bad(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with engine("m", bad) as server, small_calls() as client:
        with pytest.raises(error):
            await client.post(server.url, "/x", b"{}", {})
    assert len(server.seen) == 1, "an engine that may have died of a request does not get it again"


async def test_an_engine_that_is_not_there_has_refused() -> None:
    with socket.socket() as bound:  # not listening
        bound.bind(("127.0.0.1", 0))
        async with small_calls() as client:
            with pytest.raises(UpstreamGone) as caught:
                await client.get(f"http://127.0.0.1:{bound.getsockname()[1]}", "/health", {}, 5)
    assert caught.value.refused


# ------------------------------------------------ dead connections


async def test_a_connection_that_was_dead_is_replaced_once() -> None:
    """The engine reads the second request of a connection and resets: as if its close had crossed that request."""

    async def once(server: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        if len(server.seen) % 2:
            reply(writer, b"ok")
        else:
            reset(writer)

    async with engine("m", once) as server, small_calls() as client:
        for _ in range(2):
            assert await client.post(server.url, "/x", b"{}", {}) == (200, b"ok")
        assert (server.connections["opened"], len(server.seen)) == (2, 3)


async def test_a_request_is_sent_twice_at_most() -> None:
    async def first_only(server: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        if len(server.seen) == 1:
            reply(writer, b"ok")
        else:
            reset(writer)

    async with engine("m", first_only) as server, small_calls() as client:
        await client.post(server.url, "/x", b"{}", {})
        with pytest.raises(UpstreamGone):
            await client.post(server.url, "/x", b"{}", {})
        assert len(server.seen) == 3
