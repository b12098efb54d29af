"""Lets pages of other origins call this replica from a browser, where the operator named their origins (CORS)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]

MAX_AGE_S = 600  # longest time for which a browser may keep the answer to a preflight
SHOWN = b"x-request-id, retry-after, x-warmfleet-worker, x-warmfleet-matched-tokens, x-warmfleet-prompt-tokens"


class Cors:
    """The allowed origins, by default none, and the headers that announce them to a browser."""

    def __init__(self, origins: Iterable[str]) -> None:
        """origins: each as a browser writes it, such as ``https://chat.example.com``; ``*`` allows every origin."""
        self._origins = frozenset(origin.encode("latin-1") for origin in origins)

    def allowed(self, raw: Headers) -> bytes:
        """Return the request's origin if pages of that origin may read the answer, else b""."""
        if not self._origins:
            return b""
        origin = next((value for name, value in raw if name == b"origin"), b"")
        return origin if origin and (origin in self._origins or b"*" in self._origins) else b""

    @staticmethod
    def preflight(method: bytes, raw: Headers, origin: bytes) -> Headers | None:
        """Return the headers of the answer to a browser that asks whether it may send a request; None for any other."""
        asked = dict(raw)
        if method != b"OPTIONS" or b"access-control-request-method" not in asked:
            return None
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
            (b"access-control-allow-headers", asked.get(b"access-control-request-headers", b"*")),
            (b"access-control-max-age", b"%d" % MAX_AGE_S),
            (b"vary", b"Origin"),
        ]

    @staticmethod
    def shown(origin: bytes) -> Headers:
        """Return the headers that let a page of ``origin`` read the answer."""
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", SHOWN),
            (b"vary", b"Origin"),
        ]
