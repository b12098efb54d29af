"""Keeps tenants apart, in the index and in the engines' caches: every request gets a ``cache_salt`` made for its
tenant, and ids made for its tenant in place of the ids by which it names cached media.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from functools import partial
from typing import TYPE_CHECKING

import orjson

from warmfleet.errors import BadRequest
from warmfleet.prompt import media_ids
from warmfleet.prompt.json_splice import with_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from warmfleet.prompt.request import Request

FLOW_BYTES = 8
SALT_BYTES = 16  # length of salts and media ids: with 128 bits none is guessed, and no two tenants get the same


class Tenancy:
    """Derives the tenant of a request from its headers, and gives the request that tenant's salt."""

    def __init__(self, key: str, header: str) -> None:
        """key: the operator's secret; without one, tenants are not kept apart. header: its value names the tenant."""
        self._key = key.encode()
        self._header = header.lower().encode("latin-1")
        self._no_flow = self.flow_of(b"")

    def of(self, headers: Sequence[tuple[bytes, bytes]], client: str = "") -> tuple[bytes, bytes]:
        """Return a request's tenant (b"" if tenants are not kept apart), and its flow, by which the queue is fair.

        client: the name of the request's key, if any. The tenant is made of all values of the tenant header, so a
        client cannot become another tenant by a second header. If that header is Authorization, the name of a named
        key is the tenant, and X-Api-Key, by which clients of Anthropic's API send their key, counts as Authorization
        if there is none.

        The flow has 8 bytes that do not reveal the tenant header's value. Every request has a flow, whether tenants are
        kept apart or not. Two tenants with the same flow share its place in the queue; by chance this happens to one
        pair of tenants in 10^19.
        """
        values = self._values(headers, client)
        return values if self._key else b"", self.flow_of(values) if values else self._no_flow

    def _values(self, headers: Sequence[tuple[bytes, bytes]], client: str) -> bytes:
        if client and self._header == b"authorization":
            return client.encode()
        names = dict(headers)  # a look into it costs less than a loop
        if self._header in names:
            given = b"\0".join([value for name, value in headers if name == self._header])
            if given:
                return given
        if self._header != b"authorization" or b"x-api-key" not in names:
            return b""
        return b"\0".join([b"Bearer " + value for name, value in headers if name == b"x-api-key"])

    def flow_of(self, values: bytes) -> bytes:
        """Return the flow of the tenant header's values."""
        return hashlib.blake2b(values, digest_size=FLOW_BYTES, key=self._key[:64]).digest()

    def isolate(self, request: Request, body: bytes, tenant: bytes) -> bytes:
        """Give ``request`` the tenant's salt; return the body for the engine, with this salt and the tenant's media
        ids.

        A body in which the engine reads no salt gets none. Raises BadRequest, TooLarge: see ``media_ids.renamed``.
        """
        if not self._key:
            return body
        if _may_name_media(request):
            request.media_id = self.media_names(tenant)
            body = media_ids.renamed(body, partial(self.media_id, tenant))
        salt = self.salt(tenant, request.salt) if request.takes_salt else request.salt
        if salt == request.salt:
            return body
        request.salt = salt
        return with_key(body, "cache_salt", orjson.dumps(salt))

    def may_stay(self, body: bytes) -> None:
        """Check a body that reaches an engine unchanged, as it does from a gateway. Raises BadRequest, TooLarge."""
        if self._key and (found := media_ids.places(body)):
            field = found[0].field
            text = (
                "is not accepted by /route where tenants are kept apart: it names media that an engine keeps, and the"
            )
            raise BadRequest(f"{field} {text} gateway would send it unchanged.", field)

    def salt(self, tenant: bytes, own: str | None) -> str | None:
        """Return the salt of a tenant's request. own: the client's own salt, which divides the tenant further."""
        return self._derived(b"", tenant, own or "") if self._key else own

    def media_names(self, tenant: bytes) -> Callable[[str], str] | None:
        """Return ``media_id`` of this tenant; None if tenants are not kept apart."""
        return partial(self.media_id, tenant) if self._key else None

    def media_id(self, tenant: bytes, own: str) -> str:
        """Return the id by which engines know the image, audio or video that the tenant calls ``own``."""
        return self._derived(b"media:", tenant, own)

    def _derived(self, use: bytes, tenant: bytes, own: str) -> str:
        message = b"%b%d:%b%b" % (use, len(tenant), tenant, own.encode("utf-8", "surrogatepass"))
        digest = hmac.digest(self._key, message, hashlib.sha256)[:SALT_BYTES]
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _may_name_media(request: Request) -> bool:
    """Return whether the body may name media; a completion, or a chat whose messages are texts, cannot."""
    if request.endpoint == "unread" or request.dialect != "chat":
        return True
    return any(isinstance(message.get("content"), list) for message in request.messages)
