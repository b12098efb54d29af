"""Where Redis is, read from one URL: a server, the master behind Sentinels, or the owner of a slot in a Cluster.

    redis://user:password@host:6379/0                    unix:///path; rediss:// is TLS
    redis+sentinel://host1:26379,host2:26379/service/0   rediss+sentinel:// is TLS to the Sentinels, too
    redis+cluster://host1:6379,host2:6379                rediss+cluster:// likewise

User, password and options are those of the data servers; the options ``sentinel_username`` and ``sentinel_password``
are those of the Sentinels. This module only reads the URL and a node's answer, and opens no connection.
"""

from __future__ import annotations

import binascii
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

if TYPE_CHECKING:
    from collections.abc import Iterable

Kind = Literal["single", "sentinel", "cluster"]
HostPort = tuple[str, int]
SlotRange = tuple[int, int, HostPort]  # the first and the last slot of a range, and the master that owns it

MAX_NODES = 16
CLUSTER_SLOTS = 16_384
DEFAULT_PORTS = {"single": 6379, "sentinel": 26379, "cluster": 6379}
FILE_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
ASK_AGAIN_SECONDS = 0.05  # time for which an answer is reused: connections that break together ask once
LOOK_SECONDS = 1.0  # time between questions while all is well: after a planned failover the old master still answers
_NODE = re.compile(r"(\[[^\]@/]+\]|[^:\[\]/@\s]+)(?::(\d{1,5}))?\Z")


class RedisAddressError(ValueError):
    """The URL cannot be read, or names a file that is not there. The text holds no password."""


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where Redis is.

    url: as redis-py understands it; with Sentinels or a Cluster the address in it is only a placeholder.
    nodes: the Sentinels or Cluster nodes to ask for the master; else the single server, or nothing for a unix socket.
    service: the name under which Sentinels know the master.
    """

    kind: Kind
    url: str
    nodes: tuple[HostPort, ...] = ()
    service: str = ""
    sentinel_username: str | None = None
    sentinel_password: str | None = None

    @property
    def tls(self) -> bool:
        return self.url.startswith("rediss:")

    @property
    def node_timeout_s(self) -> float:
        """The time after which a Sentinel or Cluster node that does not answer is passed over."""
        return 1.0 if self.tls else 0.3

    @property
    def question(self) -> tuple[str, ...]:
        """The Redis command that asks a node for the master."""
        if self.kind == "sentinel":
            return ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
        return ("CLUSTER", "SLOTS")

    def master_in(self, answer: Any, tag: str, asked: str) -> HostPort | None:
        """Read from a node's raw answer the master for the keys with this hash tag; None if it names none.

        asked: the host that answered; a node that does not know its own name writes an empty one.
        """
        if self.kind == "sentinel":
            return (_text(answer[0]), int(answer[1])) if answer else None
        return owner_of(slot_of(tag), slot_ranges(answer, asked))


def slot_of(tag: str) -> int:
    """Compute the slot of a Cluster in which all keys with this hash tag are."""
    return binascii.crc_hqx(tag.encode(), 0) % CLUSTER_SLOTS


def slot_ranges(answer: Any, asked: str) -> tuple[SlotRange, ...]:
    """Read the ranges of slots from a node's raw answer to ``CLUSTER SLOTS``. asked: see ``RedisAddress.master_in``."""
    return tuple(
        (int(first), int(last), (_text(host) or asked, int(port)))
        for first, last, (host, port, *_), *_replicas in answer or ()
        if port
    )


def all_nodes(answer: Any, asked: str) -> tuple[HostPort, ...]:
    """List every master and replica in a raw answer to ``CLUSTER SLOTS``, each once. asked: as in ``slot_ranges``."""
    named = ((_text(host) or asked, int(port)) for _, _, *nodes in answer or () for host, port, *_ in nodes if port)
    return tuple(dict.fromkeys(named))


def owner_of(slot: int, ranges: Iterable[SlotRange]) -> HostPort | None:
    """Find the master that owns ``slot``; None if none does."""
    return next((owner for first, last, owner in ranges if first <= slot <= last), None)


def parse(url: str) -> RedisAddress:
    """Read a Redis URL. Certificate files that it names must exist. Raises RedisAddressError."""
    try:
        parts = urlsplit(url)
    except ValueError:  # the error's text may contain the password
        raise RedisAddressError(
            "the Redis URL cannot be read (% : / @ ? # [ ] and letters beyond ASCII are written as %XX in a password)"
        ) from None
    scheme, _, more = parts.scheme.partition("+")
    if (
        scheme not in ("redis", "rediss", "unix")
        or more not in ("", "sentinel", "cluster")
        or (more and scheme == "unix")
    ):
        raise RedisAddressError(
            f"a Redis URL begins with redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://,"
            f" not with {parts.scheme[:20]!r}"
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for option in FILE_OPTIONS:
        if option in options and not Path(options[option]).is_file():
            raise RedisAddressError(f"{option}={options[option]}: there is no such file")
    if scheme == "unix":
        return RedisAddress("single", url)
    kind: Kind = "sentinel" if more == "sentinel" else "cluster" if more else "single"
    user, at, hosts = parts.netloc.rpartition("@")
    nodes = _nodes(hosts, DEFAULT_PORTS[kind])
    if kind == "single":
        if len(nodes) > 1:
            raise RedisAddressError("several addresses: begin the URL with redis+sentinel:// or redis+cluster://")
        return RedisAddress(kind, url, nodes)
    service, database = _path(kind, parts.path)
    names = (options.pop("sentinel_username", None), options.pop("sentinel_password", None))
    host, port = nodes[0]
    netloc = f"{user}{at}{f'[{host}]' if ':' in host else host}:{port}"
    data_url = urlunsplit((scheme, netloc, f"/{database}", urlencode(options), ""))
    return RedisAddress(kind, data_url, nodes, service, *names)


def with_ca(url: str, ca_file: str) -> str:
    """Add to ``url`` the ``ca_file`` (PEM) of the authority that must have signed Redis' certificate; "" adds nothing.

    An ``ssl_ca_certs`` in the URL is kept. Raises RedisAddressError for a URL without TLS: its data go unencrypted.
    """
    if not ca_file:
        return url
    parts = urlsplit(url)
    if parts.scheme.partition("+")[0] != "rediss":
        raise RedisAddressError("WARMFLEET_REDIS_CA is set, but WARMFLEET_REDIS_URL does not begin with rediss")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    options.setdefault("ssl_ca_certs", ca_file)
    return urlunsplit(parts._replace(query=urlencode(options)))


def _nodes(hosts: str, default_port: int) -> tuple[HostPort, ...]:
    found = []
    for text in hosts.split(","):
        match = _NODE.match(text)
        if match is None or not 0 < int(match[2] or default_port) <= 65_535:
            if hosts == "":
                return (("localhost", default_port),)
            raise RedisAddressError(
                "an address in the Redis URL is not HOST or HOST:PORT (% : / @ ? # of a password are written as %XX)"
            )
        found.append((match[1].strip("[]"), int(match[2] or default_port)))
    if len(found) > MAX_NODES:
        raise RedisAddressError(f"{len(found)} addresses in the Redis URL: at most {MAX_NODES}")
    return tuple(found)


def _path(kind: Kind, path: str) -> tuple[str, int]:
    """Read (service, database) from the path of a Sentinel or Cluster URL."""
    first, _, second = path.strip("/").partition("/")
    if kind == "sentinel":
        if not first or not (second or "0").isdecimal():
            raise RedisAddressError(
                "a Sentinel URL ends with /SERVICE or /SERVICE/DATABASE, as in redis+sentinel://s:26379/mymaster"
            )
        return first, int(second or 0)
    if (first or "0") != "0" or second:
        raise RedisAddressError("Redis Cluster has only database 0")
    return "", 0


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")


def outgoing_address(redis_url: str) -> str:
    """Find this machine's address on the way to Redis; loopback if Redis is a unix socket. Raises OSError.

    A connected UDP socket sends nothing, but has the address that the routing table chooses.
    """
    nodes = parse(redis_url).nodes
    if not nodes:
        return "127.0.0.1"
    host, port = nodes[0]
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
