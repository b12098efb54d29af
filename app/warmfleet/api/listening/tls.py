"""TLS for clients: reads the certificate of this replica and its key, again whenever their files change."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from warmfleet.errors import BadArgument

if TYPE_CHECKING:
    from warmfleet.metrics import Metrics
    from warmfleet.settings import Settings

MAX_FILE_BYTES = 1_048_576
HTTP, HTTP2 = ["http/1.1"], ["h2"]


class ServerTls:
    """TLS contexts, for TLS 1.2 and newer. Open connections keep the certificate of their handshake."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        """Read the files. Raises BadArgument that says which file cannot be used, and why."""
        self._files = {"TLS_CERT": settings.tls_cert, "TLS_KEY": settings.tls_key}
        if settings.tls_client_ca:
            self._files["TLS_CLIENT_CA"] = settings.tls_client_ca
        self._expires = metrics.tls_certificate_expiry
        self._seen = self._state()
        self._current, self._http2 = self._read()
        self.for_clients = self._listening(requires_certificate=bool(settings.tls_client_ca))
        self.for_operators = self._listening(requires_certificate=False)
        self.for_gateways = self._listening(HTTP2, requires_certificate=False)

    async def follow(self) -> None:
        """Read the files if one changed. Raises BadArgument if they cannot be used; the last good ones stay in use."""
        await asyncio.to_thread(self._read_if_changed)

    def _read_if_changed(self) -> None:
        state = self._state()
        if state != self._seen:
            self._current, self._http2 = self._read()
            self._seen = state

    def _listening(self, protocols: list[str] = HTTP, *, requires_certificate: bool) -> ssl.SSLContext:
        """Make a listener's context, whose handshakes use the certificate and the clients' authority last read."""
        context = _server_context(protocols)
        if requires_certificate:
            context.verify_mode = ssl.CERT_REQUIRED
            # A resumed session would not ask for the client's certificate, even if its authority has lost trust since.
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
        context.sni_callback = self._use_http2 if protocols is HTTP2 else self._use_current
        return context

    def _use_http2(self, handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        handshake.context = self._http2

    def _use_current(self, handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        handshake.context = self._current

    def _state(self) -> tuple[tuple[int, ...], ...]:
        """Return a value that changes whenever a file changes. Raises BadArgument."""
        states = []
        for name, path in self._files.items():
            try:
                found = Path(path).stat()
            except OSError as error:
                raise BadArgument(f"WARMFLEET_{name} cannot be read: {error}") from error
            states.append((found.st_mtime_ns, found.st_size, found.st_ino))
        return tuple(states)

    def _read(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """Make a context of the files as they are now for HTTP/1.1, and another for HTTP/2. Raises BadArgument."""
        marks = {
            "TLS_CERT": b"-BEGIN CERTIFICATE-",
            "TLS_CLIENT_CA": b"-BEGIN CERTIFICATE-",
            "TLS_KEY": b"PRIVATE KEY-",
        }
        for name, path in self._files.items():
            try:
                with Path(path).open("rb") as file:
                    text = file.read(MAX_FILE_BYTES)
            except OSError as error:
                raise BadArgument(f"WARMFLEET_{name} cannot be read: {error}") from error
            if marks[name] not in text:
                kind = "private key" if name == "TLS_KEY" else "certificate"
                raise BadArgument(f"WARMFLEET_{name}={path!r} has no {kind} in PEM form")
        context, http2, certificate = _server_context(HTTP), _server_context(HTTP2), self._files["TLS_CERT"]
        try:
            for each in (context, http2):
                each.load_cert_chain(certificate, self._files["TLS_KEY"], password=_no_password)
            if "TLS_CLIENT_CA" in self._files:
                context.load_verify_locations(self._files["TLS_CLIENT_CA"])
        except ssl.SSLError as error:
            raise BadArgument(self._why(error)) from error
        try:
            self._expires.set(_end_of(context, certificate))
        except ssl.SSLCertVerificationError as error:
            why = error.verify_message
            raise BadArgument(f"WARMFLEET_TLS_CERT={certificate!r} would be refused by clients: {why}") from error
        return context, http2

    def _why(self, error: ssl.SSLError) -> str:
        if error.reason == "KEY_VALUES_MISMATCH":
            return (
                f"WARMFLEET_TLS_KEY={self._files['TLS_KEY']!r} is not the key of the certificate in WARMFLEET_TLS_CERT"
            )
        return f"WARMFLEET_TLS_CERT, WARMFLEET_TLS_KEY or WARMFLEET_TLS_CLIENT_CA cannot be used: {error}"


def _server_context(protocols: list[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(protocols)
    return context


def _no_password() -> str:
    raise BadArgument("WARMFLEET_TLS_KEY is encrypted: a replica cannot ask for a password")


def _end_of(context: ssl.SSLContext, certificate: str) -> float:
    """Return the Unix time at which the certificate of ``context`` ends, by a handshake in memory.

    Raises SSLCertVerificationError if a client would refuse the certificate, whatever authority it trusts.
    """
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(certificate)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):  # after its second step the client has the certificate
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    told = client.getpeercert() or {}
    return ssl.cert_time_to_seconds(str(told["notAfter"]))
