"""TLS of clients' connections: certificates of clients, renewal while connections are open, and errors of bad files."""

from __future__ import annotations

import asyncio
import ssl
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.certificates import Pair, certificate, encrypted
from tests.support.engines.scripted import engine
from tests.support.polling import poll
from tests.support.replicas.replica import replica

from warmfleet.api.listening.tls import ServerTls
from warmfleet.engines.engine_tls import engine_tls
from warmfleet.errors import BadArgument
from warmfleet.metrics import Metrics
from warmfleet.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


def files(pair: Pair, client_ca: Path | None = None) -> dict[str, Any]:
    """The settings of a replica with this certificate."""
    found = {"tls_cert": str(pair.certificate), "tls_key": str(pair.key)}
    return found | ({"tls_client_ca": str(client_ca)} if client_ca else {})


def trusting(authority: Pair, shown: Pair | None = None) -> ssl.SSLContext:
    """A client's TLS context with the authority that it trusts and the certificate that it presents."""
    context = ssl.create_default_context(cafile=str(authority.certificate))
    if shown is not None:
        context.load_cert_chain(shown.certificate, shown.key)
    return context


class Client:
    """A connection over TLS that stays open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        shown: Any = writer.get_extra_info("peercert")
        self.subject = shown["subject"][0][0][1]
        self.version = writer.get_extra_info("ssl_object").version()

    async def ask(self) -> bytes:
        """Return the status line of /livez. Raises OSError or EOFError if the server has closed the connection."""
        self._writer.write(GET)
        head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 10)
        await self._reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
        return head.split(b"\r\n")[0]


@asynccontextmanager
async def connected(url: str, context: ssl.SSLContext) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("localhost", int(url.rsplit(":", 1)[1]), ssl=context)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


async def served(url: str, context: ssl.SSLContext) -> bool:
    """Whether a new connection of this client gets an answer. A refused certificate fails the first read."""
    try:
        async with connected(url, context) as client:
            return await client.ask() == b"HTTP/1.1 200 OK"
    except (OSError, EOFError):
        return False


async def test_a_certificate_is_renewed_under_open_connections(valkey_url: str, model: str, tmp_path: Path) -> None:
    used, renewed = certificate(tmp_path, "first"), certificate(tmp_path, "second", days=60)
    trusts_both = ssl.create_default_context(cafile=str(used.certificate))
    trusts_both.load_verify_locations(str(renewed.certificate))
    async with replica(valkey_url, model, admin_port=1, **files(used)) as router:
        for url in (router.url, router.operators):
            async with connected(url, trusts_both) as kept:
                assert (kept.subject, kept.version, await kept.ask()) == ("first", "TLSv1.3", b"HTTP/1.1 200 OK")
        ends = ServerTls(Settings(**files(used)), Metrics())._expires._value.get()
        assert 29 < (ends - time.time()) / 86_400 < 31
        async with connected(router.url, trusts_both) as kept:
            used.certificate.write_bytes(renewed.certificate.read_bytes())  # the certificate's key is written later
            await asyncio.sleep(1.5)
            assert await served(router.url, trusts_both), "the last good pair stays in use"
            used.replace(renewed)

            async def is_new() -> bool:
                async with connected(router.url, trusts_both) as client:
                    return bool(client.subject == "second")

            await poll(is_new, 10, "new connections get the new certificate")
            assert await kept.ask() == b"HTTP/1.1 200 OK"


async def test_clients_need_a_certificate_of_the_authority(valkey_url: str, model: str, tmp_path: Path) -> None:
    ours = certificate(tmp_path, "ours")
    authority, stranger = certificate(tmp_path, "authority"), certificate(tmp_path, "stranger")
    known, unknown = certificate(tmp_path, "known", authority), certificate(tmp_path, "unknown", stranger)
    settings = files(ours, authority.certificate)
    async with replica(valkey_url, model, admin_port=1, **settings) as router:
        assert await served(router.url, trusting(ours, known))
        assert not await served(router.url, trusting(ours, unknown))
        assert not await served(router.url, trusting(ours))
        assert await served(router.operators, trusting(ours)), "the operators' door asks for none"
        context = trusting(ours, known)
        async with connected(router.url, context) as kept:
            assert await kept.ask() == b"HTTP/1.1 200 OK"
            authority.replace(stranger)
            await poll(lambda: served(router.url, trusting(ours, unknown)), 10, "the new authority counts")
            assert not await served(router.url, context), "the old one counts no more, also with a session of before"
            assert await kept.ask() == b"HTTP/1.1 200 OK"


async def test_old_versions_and_plain_http_are_refused(valkey_url: str, model: str, tmp_path: Path) -> None:
    ours = certificate(tmp_path, "ours")
    async with replica(valkey_url, model, admin_port=1, **files(ours)) as router:
        old = trusting(ours)
        old.set_ciphers("DEFAULT@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="deprecated"):
            old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        assert not await served(router.url, old)
        reader, writer = await asyncio.open_connection("localhost", int(router.url.rsplit(":", 1)[1]))
        writer.write(GET)
        assert not (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP")
        writer.close()
        assert await served(router.url, trusting(ours))


async def test_a_handshake_has_a_time_limit(valkey_url: str, model: str, tmp_path: Path) -> None:
    settings = {"admin_port": 1, "handshake_timeout_s": 0.3, **files(certificate(tmp_path, "ours"))}
    async with replica(valkey_url, model, **settings) as router:
        for sent in (b"", b"\x16\x03\x01\x02\x00\x01"):
            reader, writer = await asyncio.open_connection("localhost", int(router.url.rsplit(":", 1)[1]))
            writer.write(sent)
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()


def test_files_at_fault_are_named(tmp_path: Path) -> None:
    ours, other, past = (
        certificate(tmp_path, "ours"),
        certificate(tmp_path, "other"),
        certificate(tmp_path, "past", days=-1),
    )
    faults = {
        "WARMFLEET_TLS_CERT cannot be read: .*No such file": Pair(tmp_path / "none", ours.key),
        "WARMFLEET_TLS_KEY cannot be read: .*No such file": Pair(ours.certificate, tmp_path / "none"),
        "is not the key of the certificate": Pair(ours.certificate, other.key),
        "WARMFLEET_TLS_CERT.*has no certificate in PEM form": Pair(ours.key, ours.key),
        "WARMFLEET_TLS_KEY.*has no private key in PEM form": Pair(ours.certificate, ours.certificate),
        "WARMFLEET_TLS_KEY is encrypted": encrypted(ours),
        "would be refused by clients: certificate has expired": past,
    }
    for said, pair in faults.items():
        with pytest.raises(BadArgument, match=said):
            ServerTls(Settings(**files(pair)), Metrics())
    with pytest.raises(BadArgument, match=r"WARMFLEET_TLS_CLIENT_CA.*has no certificate"):
        ServerTls(Settings(**files(ours, ours.key)), Metrics())
    for settings in ({"TLS_CERT": "x"}, {"TLS_KEY": "x"}, {"TLS_CLIENT_CA": "x"}):
        with pytest.raises(BadArgument, match="WARMFLEET_TLS_"):
            Settings.from_environment({f"WARMFLEET_{name}": value for name, value in settings.items()})
    with pytest.raises(BadArgument, match=r"WARMFLEET_WORKER_CA.*cannot be used"):
        engine_tls(str(tmp_path / "none"))


async def test_engines_with_a_private_authority(valkey_url: str, model: str, tmp_path: Path) -> None:
    authority = certificate(tmp_path, "authority")
    issued = certificate(tmp_path, "issued", authority)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(issued.certificate, issued.key)
    async with engine(model) as upstream:
        wrapped = await asyncio.start_server(upstream.serve, "127.0.0.1", 0, limit=2**24, ssl=context)
        url = f"https://localhost:{wrapped.sockets[0].getsockname()[1]}"
        body = {"model": model, "prompt": "hi"}
        async with wrapped, replica(valkey_url, model, url, worker_ca=str(authority.certificate)) as router:
            assert (await router.post(body))[0] == 200
