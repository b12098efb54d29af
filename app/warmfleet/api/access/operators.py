"""Access to the paths for operators.

With ``WARMFLEET_ADMIN_KEY`` all these paths need that key. Without this setting the paths are open, unless clients are
kept apart (by keys, tenants or hidden headers): in that case sums over all requests stay open, as for Prometheus, but
paths that show single requests or change something answer only processes on the replica's own host, not through a
proxy, and not for a page of another origin in a browser on this host.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from warmfleet.errors import Forbidden, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request as HTTPRequest

    from warmfleet.settings import Settings

#: Addresses of clients on the replica's host. Other loopback addresses (Istio: 127.0.0.6) belong to sidecar proxies.
OWN_ADDRESSES = frozenset(("127.0.0.1", "::1", "::ffff:127.0.0.1"))
#: Prefixes of headers that show that a proxy passed the request on, or that a page of another origin sent it.
PASSED_ON = (b"forwarded", b"x-forwarded-", b"x-real-ip", b"x-envoy-", b"l5d-", b"via", b"cf-connecting-ip", b"origin")
OWN_HOST_ONLY = (
    "Without WARMFLEET_ADMIN_KEY only the replica's own host is answered here (http://127.0.0.1), because this fleet "
    "keeps clients apart: set that key and send it as bearer token, or ask from there."
)
NOT_SHOWN = (
    "Without WARMFLEET_ADMIN_KEY single requests are not shown here, because this fleet keeps clients apart; on the "
    "replica's own host they are."
)
NOBODY = "Without WARMFLEET_ADMIN_KEY nobody is answered here, because clients use this port, too: set that key."


class Operators:
    """Checks requests to the paths for operators. ``hides``: whether clients must not see facts of single requests."""

    def __init__(self, settings: Settings) -> None:
        self._key = settings.admin_key
        self._own_port = bool(settings.admin_port)
        self.hides = settings.explain_key is None

    def may_read_sums(self, request: HTTPRequest) -> None:
        """Check a request for figures summed over all requests, such as /metrics. Raises Unauthorized."""
        given = next((value for name, value in request.headers.raw if name == b"authorization"), b"")
        if self._key and not hmac.compare_digest(given, f"Bearer {self._key}".encode()):
            raise Unauthorized("This is the operator's: it takes WARMFLEET_ADMIN_KEY as bearer token.")

    def may_act(self, request: HTTPRequest) -> None:
        """Check a request that changes something or asks about single requests. Raises Unauthorized, Forbidden."""
        self.may_read_sums(request)
        if not self.sees_requests(request):
            raise Forbidden(OWN_HOST_ONLY if self._own_port else NOBODY)

    def sees_requests(self, request: HTTPRequest) -> bool:
        """Whether a request that may read sums may also read about single requests."""
        return not self.hides or (self._own_port and _from_own_host(request))


def _from_own_host(request: HTTPRequest) -> bool:
    client = request.client
    near = client is not None and client.host in OWN_ADDRESSES and _direct(request.headers.raw)
    return near and _asked_as_own(request.headers.raw)


def _direct(raw: Sequence[tuple[bytes, bytes]]) -> bool:
    return not any(name.startswith(PASSED_ON) for name, _ in raw)


def _asked_as_own(raw: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether the Host header names the replica's own host; after DNS rebinding it has the attacker's name."""
    host = next((value for name, value in raw if name == b"host"), b"")
    try:
        name = urlsplit(f"//{host.decode('latin-1')}").hostname or ""
    except ValueError:
        return False
    return name == "localhost" or is_loopback(name)


def without_requests(model: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a model, of ``/workers`` or the status page, without the fields about single requests."""
    shown = {name: [] if name == "decisions" else value for name, value in model.items()}
    if model["queue"] is not None:
        shown["queue"] = model["queue"] | {"next": None}
    if model["ledger"] is not None:
        shown["ledger"] = model["ledger"] | {"line": []}
    return shown


def is_loopback(host: str) -> bool:
    """Whether this is a loopback address, also if it is an IPv4 address in the form of IPv6."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # the host of a unix socket is no IP address
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
