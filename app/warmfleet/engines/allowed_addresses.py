"""The addresses that a replica may send requests to: the ranges of the settings, and hosts that the operator named.

Workers announce their own URLs, so a URL is checked twice: here if its host is a literal address, and again when a host
name was resolved. Neither a forged join nor a name that changes its address then sends requests outside the ranges.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from warmfleet.errors import UpstreamError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
#: Addresses at which clouds give any process the machine's credentials; only a range of one address allows them.
METADATA = frozenset(
    ipaddress.ip_address(text) for text in ("169.254.169.254", "100.100.100.200", "192.0.0.192", "fd00:ec2::254")
)


def gives_credentials(address: str) -> bool:
    """Return whether this literal address is one of METADATA. Raises ValueError for a name."""
    return _plain(address) in METADATA


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address; an address of IPv4 that is written as IPv6 becomes IPv4 again. Raises ValueError."""
    parsed = ipaddress.ip_address(address)
    return (parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None) or parsed


class Addresses:
    """The ranges of ``WARMFLEET_WORKER_ADDRESSES``, and the hosts that the operator named, which are always allowed."""

    def __init__(self, ranges: Sequence[str], named_urls: Iterable[str] = ()) -> None:
        self._ranges: list[Network] = [ipaddress.ip_network(text, strict=False) for text in ranges]
        self.name(named_urls)

    def name(self, urls: Iterable[str]) -> None:
        """Let the hosts of these URLs, and no others, count as named by the operator from now on."""
        self._named = {(urlsplit(url).hostname or "").lower() for url in urls}

    def named(self, host: str) -> bool:
        """Return whether the operator named this host."""
        return host.lower() in self._named

    def allows(self, host: str) -> bool:
        """Return whether the operator named this host or a range has its address. Raises ValueError for other names."""
        if self.named(host):
            return True
        address = _plain(host)
        if address in METADATA:
            return any(address in network and network.num_addresses == 1 for network in self._ranges)
        return any(address in network for network in self._ranges)

    def check(self, url: str) -> None:
        """Raise UpstreamError unless the URL is http(s) and its host a name or an allowed literal address."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UpstreamError(f"{url!r} is not an http address")
        try:
            allowed = self.allows(parts.hostname)
        except ValueError:
            if not any(letter.isalpha() for letter in parts.hostname.lower().removeprefix("0x")):
                # 127.1 and 2130706433 are addresses as well, which connect without a resolver.
                raise UpstreamError(f"{url!r}: not a canonical address") from None
            return  # the addresses of a host name are checked when the name is resolved
        if not allowed:
            raise UpstreamError(f"{parts.hostname} is outside WARMFLEET_WORKER_ADDRESSES")

    def allowed_of(self, host: str, resolved: Iterable[str]) -> list[str]:
        """Return those resolved addresses of ``host`` that are allowed. Raises OSError if none is allowed.

        A METADATA address that DNS gives for a named host needs a range of one address, or must be named itself.
        """
        named = self.named(host)
        allowed = [
            address for address in resolved if (named and not gives_credentials(address)) or self.allows(address)
        ]
        if not allowed:
            raise OSError(f"no address of {host} is inside WARMFLEET_WORKER_ADDRESSES")
        return allowed
