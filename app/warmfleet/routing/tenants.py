"""Tenants kept apart, in our index and in the engines' caches: every request gets a ``cache_salt`` of its tenant."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import TYPE_CHECKING

import orjson

from warmfleet.prompt.json_splice import with_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from warmfleet.prompt.request import Request

FLOW_BYTES = 8
SALT_BYTES = 16  # nobody guesses another's, and two tenants never share one by chance


class Tenancy:
    """``key``: the operator's secret, empty = off. ``header``: whose value names the tenant."""

    def __init__(self, key: str, header: str) -> None:
        self._key = key.encode()
        self._header = header.lower().encode("latin-1")

    def name(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """The tenant of a request: all values of the header, so that a second one makes nobody somebody else."""
        return self._told(headers) if self._key else b""

    def _told(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        return b"\0".join([value for name, value in headers if name == self._header])

    def flow(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Whose turn a request takes in the queue: the same header, key or not, in 8 bytes that tell nobody its value.

        Two tenants of one flow share its turns, which one in 10^19 pairs does by chance.
        """
        return hashlib.blake2b(self._told(headers), digest_size=FLOW_BYTES, key=self._key[:64]).digest()

    def isolate(self, request: Request, body: bytes, tenant: bytes) -> bytes:
        """Give ``request`` the tenant's salt; returns the body that tells the engine so."""
        salt = self.salt(tenant, request.salt)
        if salt == request.salt:
            return body
        request.use_salt(salt)
        return with_key(body, "cache_salt", orjson.dumps(salt))

    def salt(self, tenant: bytes, own: str | None) -> str | None:
        """The tenant's salt; ``own`` is what the client asked for, so that a tenant can divide itself further."""
        if not self._key:
            return own
        told = b"%d:%s%s" % (len(tenant), tenant, (own or "").encode("utf-8", "surrogatepass"))
        digest = hmac.digest(self._key, told, hashlib.sha256)[:SALT_BYTES]
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
