"""Clients' requests to engines: where they may go, how they are sent, and what becomes of a dead connection."""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from tests.support.certificates import certificate
from tests.support.engines.scripted import Engine, Seen, engine, hang_up, reply, reset
from tests.support.polling import poll
from tests.support.replicas.replica import replica

from warmfleet.background.stock.checks import worker_id
from warmfleet.engines import engine_connection
from warmfleet.engines.allowed_addresses import Addresses
from warmfleet.engines.engine_connection import TCP_OPTIONS
from warmfleet.engines.request_headers import header_fields, header_lines, header_value
from warmfleet.engines.upstream import Upstream
from warmfleet.errors import UpstreamError, UpstreamGone
from warmfleet.pools import fleet_view as view
from warmfleet.prompt.request import TOKEN_BYTES
from warmfleet.settings import Settings
from warmfleet_worker.protocol.wire import check_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://10.1.2.3:8000", True),
        ("https://192.168.1.1", True),
        ("http://[::1]:8000", True),
        ("http://[::ffff:127.0.0.1]:8000", True),
        ("http://engine.example:8000", True),  # a name: the resolver decides
        ("http://8.8.8.8:8000", False),
        ("http://169.254.169.254/latest", False),
        ("http://[::ffff:8.8.8.8]:1", False),
        ("file:///etc/passwd", False),
        ("http://", False),
    ],
)
def test_addresses(url: str, allowed: bool) -> None:
    addresses = Addresses(Settings().worker_addresses)
    if allowed:
        addresses.check(url)
    else:
        with pytest.raises(UpstreamError):
            addresses.check(url)


def test_hosts_of_the_settings_are_always_allowed() -> None:
    Addresses((), ["http://8.8.8.8:1", "http://Gpu1:8000"]).check("http://8.8.8.8:1")
    assert Addresses((), ["http://Gpu1:8000"]).allows("gpu1")


@pytest.mark.parametrize("host", ["100.100.100.200", "169.254.169.254", "fd00:ec2::254", "::ffff:100.100.100.200"])
def test_metadata_services_are_asked_only_if_a_range_names_them_alone(host: str) -> None:
    address = host.removeprefix("::ffff:")
    assert not Addresses(Settings().worker_addresses).allows(host)
    assert not Addresses(("0.0.0.0/0", "::/0")).allows(host)
    assert Addresses((address,)).allows(host)


@pytest.mark.parametrize("host", ["169.254.169.254", "fd00:ec2::254", "::ffff:100.100.100.200"])
def test_a_name_of_the_operator_leads_to_no_metadata_service(host: str) -> None:
    named = Addresses((), ["http://gpu1:8000"])
    assert named.allowed_of("gpu1", ["8.8.8.8", host]) == ["8.8.8.8"]
    with pytest.raises(OSError, match="gpu1"):
        named.allowed_of("gpu1", [host])
    assert Addresses((), [f"http://[{host}]" if ":" in host else f"http://{host}"]).allowed_of(host, [host]) == [host]


# ------------------------------------------------ the client


@asynccontextmanager
async def client(*named: str, ranges: tuple[str, ...] = ("127.0.0.0/8",), **more: Any) -> AsyncIterator[Upstream]:
    made = Upstream(Addresses(ranges, named), 1.0, **more)
    await made.open()
    try:
        yield made
    finally:
        await made.close()


async def exchange(upstream: Upstream, url: str, body: bytes = b"{}", headers: bytes = b"") -> tuple[int, bytes]:
    answer = await upstream.send("POST", url, "/v1/completions", body, headers)
    try:
        whole = b""
        while not answer.at_eof:
            whole += await answer.read_any()
        return answer.status, whole
    finally:
        answer.close()


def by_name(url: str) -> str:
    return url.replace("127.0.0.1", "localhost")


async def answer_ok(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
    reply(writer, b"ok")


async def test_a_name_that_resolves_elsewhere_is_not_asked() -> None:
    async with engine("m", answer_ok) as server, client(ranges=("10.0.0.0/8",)) as upstream:
        with pytest.raises(UpstreamGone) as raised:
            await exchange(upstream, by_name(server.url))
        assert raised.value.refused
        assert not server.connections["opened"]


async def test_a_name_is_resolved_once_and_the_checked_address_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        await asyncio.sleep(0.01)
        found = ["8.8.8.8", "127.0.0.9", "127.0.0.1"]  # nobody is allowed, nobody listens, the engine
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port)) for address in found]

    async with engine("m", answer_ok) as server, client() as upstream:
        url = server.url.replace("127.0.0.1", "engine.test")
        with monkeypatch.context() as patched:
            patched.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
            assert await asyncio.gather(*(exchange(upstream, url) for _ in range(4))) == [(200, b"ok")] * 4
        assert asked == ["engine.test"]
        assert server.seen[0].headers["host"] == f"engine.test:{urlsplit(server.url).port}"


async def test_connections_are_kept_and_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine("m", answer_ok) as server, client() as upstream:
        for _ in range(3):
            assert await exchange(upstream, server.url) == (200, b"ok")
        assert server.connections["opened"] == 1
        await upstream.sweep()
        assert await exchange(upstream, server.url) == (200, b"ok")
        assert server.connections["opened"] == 1, "a young connection stays"
        monkeypatch.setattr(engine_connection, "KEEPALIVE_S", 0.0)  # not before: an exchange may take longer
        await upstream.sweep()
        await poll(lambda: server.connections["hung_up"] == 1, what="the idle connection is closed by its age")


async def test_connections_notice_a_machine_that_vanished(model: str) -> None:
    async with engine(model) as server, client() as upstream:
        answer = await upstream.send("POST", server.url, "/v1/completions", b'{"stream": true, "max_tokens": 500}', b"")
        assert answer._connection is not None
        made = answer._connection._transport.get_extra_info("socket")
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = [getattr(socket, name) for name in TCP_OPTIONS]
        assert [made.getsockopt(socket.IPPROTO_TCP, option) for option in options] == list(TCP_OPTIONS.values())
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        answer.close()
        await poll(lambda: server.connections["hung_up"], what="closing the answer closes the connection at once")


@pytest.mark.parametrize("read", [True, False], ids=["read", "unread"])
async def test_a_dead_kept_connection_is_replaced_once(read: bool) -> None:
    """A connection ends with RST if the engine had not read the request: then it did not die of that."""
    stale: list[bool] = []

    async def once_each(server: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        if len(server.seen) in (2, 4, 5):
            hang_up(writer) if read else reset(writer)
        else:
            reply(writer, b"ok")

    async with engine("m", once_each) as server, client(on_stale=lambda: stale.append(True)) as upstream:
        for _ in range(2):
            assert await exchange(upstream, server.url) == (200, b"ok")
        assert (len(server.seen), len(stale)) == (3, 1)
        with pytest.raises(UpstreamGone) as raised:
            await exchange(upstream, server.url)
        assert (len(server.seen), len(stale)) == (5, 2)
        assert raised.value.refused != read


async def test_an_engine_that_died_between_two_requests_may_have_died_of_the_second(model: str) -> None:
    async def dies(server: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        if len(server.seen) == 1:
            reply(writer, b"ok")
        else:
            await server.die()

    async with engine("m", dies) as server, client() as upstream:
        assert await exchange(upstream, server.url) == (200, b"ok")
        with pytest.raises(UpstreamGone) as raised:
            await exchange(upstream, server.url)
        assert not raised.value.refused, "the engine had the request, though the last connection was refused"
        with pytest.raises(UpstreamGone) as raised:
            await exchange(upstream, server.url)
        assert raised.value.refused


async def test_an_engine_that_died_before_a_request_was_sent_has_refused_it() -> None:
    """The replica had no time to notice the end of its kept connection. The request killed nobody, so it may go on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serves_one_and_dies() -> None:
            made, _ = listener.accept()
            made.recv(65_536)
            made.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            answered.wait()
            listener.close()
            made.close()

        answered, url = threading.Event(), f"http://127.0.0.1:{listener.getsockname()[1]}"
        lives = threading.Thread(target=serves_one_and_dies)
        lives.start()
        async with client() as upstream:
            assert await exchange(upstream, url) == (200, b"ok")
            answered.set()
            lives.join()  # the event loop stands still meanwhile
            with pytest.raises(UpstreamGone) as raised:
                await exchange(upstream, url)
            assert raised.value.refused


async def test_a_connection_that_nobody_accepts_is_given_up() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        with socket.create_connection(address):  # the queue of the socket is full now
            async with client() as upstream:
                upstream._connect_timeout_s = 0.1
                with pytest.raises(UpstreamGone, match="TimeoutError") as raised:
                    await exchange(upstream, f"http://127.0.0.1:{address[1]}")
                assert raised.value.refused


async def test_a_request_given_up_while_it_connects_is_not_sent() -> None:
    async with engine("m", answer_ok) as server, client() as upstream:
        answer = upstream.start("POST", server.url, "/x", b"{}", b"")
        answer.close()
        with pytest.raises(UpstreamError):
            await answer.head()
        assert await exchange(upstream, server.url) == (200, b"ok")
        assert len(server.seen) == 1


@pytest.mark.parametrize("size", [0, 200, 40_000, 9_000_000])
async def test_bodies_of_every_size_are_sent_as_they_are(size: int) -> None:
    async with engine("m", answer_ok) as server, client() as upstream:
        for byte in (b"a", b"b"):
            assert await exchange(upstream, server.url, byte * size) == (200, b"ok")
        assert [seen.body for seen in server.seen] == [b"a" * size, b"b" * size]


async def test_the_user_in_an_address_is_sent() -> None:
    async with engine("m", answer_ok) as server, client() as upstream:
        address = server.url.replace("http://", "http://me:s%20ecret@") + "/base/"
        assert await exchange(upstream, address) == (200, b"ok")
        assert server.seen[0].headers["authorization"] == "Basic " + base64.b64encode(b"me:s ecret").decode()
        assert server.seen[0].path == "/base/v1/completions"
        with pytest.raises(UpstreamError, match="names a user"):
            await exchange(upstream, address, headers=b"Authorization: Bearer key\r\n")


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "PUT"])
async def test_other_methods_and_paths_pass(method: str) -> None:
    lines: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (0 if method == "HEAD" else 2))
        writer.write(b"" if method == "HEAD" else b"ok")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, client() as upstream:
        answer = await upstream.send(method, url, "/v1/files/a%20b?after=1&x", b"", b"X-A: 1\r\n")
        assert answer.status == 200
        assert await answer.read_any() == (b"" if method == "HEAD" else b"ok")
        answer.close()
    length = b"Content-Length: 0\r\n" if method == "PUT" else b""
    line = f"{method} /v1/files/a%20b?after=1&x HTTP/1.1\r\nHost: {url[7:]}\r\n".encode()
    assert lines == [line + b"X-A: 1\r\n" + length + b"\r\n"]


# ------------------------------------------------ nothing that was given can end a line


def test_clients_headers_are_sent_byte_for_byte() -> None:
    assert [header_value(text) for text in ("Bearer \xe9\xff", "\u20ac")] == [b"Bearer \xe9\xff", b"\xe2\x82\xac"]
    lines = header_lines([(b"A", b"Bearer \xe9\xff"), (b"B", b"")])
    assert lines == b"A: Bearer \xe9\xff\r\nB: \r\n"
    assert header_fields(lines, "B", "A", "C") == {"A": "Bearer \xe9\xff", "B": ""}


@pytest.mark.parametrize("value", [b"a\r\nX-Evil: 1", b"a\nX-Evil: 1", b"a\rb", b"a\0b"])
def test_a_header_cannot_bring_another(value: bytes) -> None:
    with pytest.raises(UpstreamError):
        header_lines([(b"A", value)])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/x HTTP/1.1\r\nX-Evil: 1"), ("POST", "/a b"), ("POST", "/a\n"), ("POST", "/\xe9"),
        ("POST /evil HTTP/1.1\r\n", "/x"),
    ],
)  # fmt: skip
async def test_a_path_cannot_end_the_request_line(method: str, path: str) -> None:
    async with engine("m", answer_ok) as server, client() as upstream:
        with pytest.raises(UpstreamError):
            upstream.start(method, server.url, path, b"", b"")
        assert not server.connections["opened"]


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/a b", "http://127.0.0.1:99999", "http://127.0.0.1:1?x", "http://a b", "http://", "x"]
)
async def test_an_address_that_is_none_is_not_asked(url: str) -> None:
    async with client() as upstream:
        with pytest.raises(UpstreamError):
            upstream.start("POST", url, "/x", b"", b"")


# ------------------------------------------------ TLS


async def test_engines_are_asked_over_tls_and_must_prove_their_name(tmp_path: Path) -> None:
    authority = certificate(tmp_path, "ca")
    pair = certificate(tmp_path, "engine", authority)
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(pair.certificate, pair.key)
    made = Engine("m", answer_ok)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=ours)
    port = server.sockets[0].getsockname()[1]
    async with server, client() as upstream:
        with pytest.raises(UpstreamGone, match="SSLCertVerificationError") as raised:
            await exchange(upstream, f"https://localhost:{port}")
        assert raised.value.refused
        upstream._tls.load_verify_locations(authority.certificate)
        for _ in range(2):
            assert await exchange(upstream, f"https://localhost:{port}", b"x" * 300_000) == (200, b"ok")
        assert [len(seen.body) for seen in made.seen] == [300_000] * 2
        await upstream.close()
        await poll(lambda: not made.writers, what="the engine sees the end of the connection")


@pytest.mark.parametrize(
    ("url", "name"), [("http://gpu1:8000", "gpu1-8000"), ("https://a/", "a-443"), ("http://[::1]:80", "--1-80")]
)
def test_static_workers_are_named_by_host_and_port(url: str, name: str) -> None:
    assert worker_id(url) == name


def test_static_workers_that_host_and_port_do_not_tell_apart_have_names_of_their_own() -> None:
    urls = ["http://gpu1:8000/a", "http://gpu1:8000/b", *(f"http://{first * 60}.{'x' * 60}:8000" for first in "ab")]
    names = {check_name(worker_id(url)) for url in urls}
    assert len(names) == len(urls)


async def test_a_prompt_too_long_for_every_engine_is_tried_once(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt may be what killed the first engine."""
    monkeypatch.setattr(view, "MAX_MODEL_LEN", 1_000)

    async def fails(_: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        hang_up(writer)

    async with (
        engine(model, fails) as server,
        engine(model, fails) as other,
        replica(valkey_url, model, server.url, other.url) as router,
    ):
        status, _, _ = await router.post({"model": model, "prompt": "x" * (1_000 * TOKEN_BYTES + 1)})
        assert status == 502
        assert bool(server.seen) != bool(other.seen)
        assert await router.metric('warmfleet_retries_total{where="another"}') == 0
        assert await router.metric('warmfleet_load_only_requests_total{reason="too_long"}') == 1
        await router.unloaded()
