"""Where Redis is, read from one URL: a server, the master behind Sentinels, or the owner of a slot in a Cluster.

    redis://user:password@host:6379/0                    unix:///path; rediss:// is TLS
    redis+sentinel://host1:26379,host2:26379/service/0   rediss+sentinel:// is TLS to the Sentinels, too
    redis+cluster://host1:6379,host2:6379                rediss+cluster:// likewise

User, password and options belong to the data servers; ``?sentinel_username=`` and ``sentinel_password=`` to the
Sentinels. A leaf like ``wire``: stdlib only, shared with the routers, never asks anybody anything.
"""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

Kind = Literal["single", "sentinel", "cluster"]
HostPort = tuple[str, int]

MAX_NODES = 16
CLUSTER_SLOTS = 16_384
DEFAULT_PORTS = {"single": 6379, "sentinel": 26379, "cluster": 6379}
FILE_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
ASK_AGAIN_SECONDS = 0.05  # an answer is good for this long: a lost master costs one question, not one per connection
LOOK_SECONDS = 1.0  # between two questions while all is well: a planned failover leaves the old master answering
_NODE = re.compile(r"(\[[^\]@/]+\]|[^:\[\]/@\s]+)(?::(\d{1,5}))?\Z")


class RedisAddressError(ValueError):
    """The URL cannot be read, or names a file that is not there. The text holds no password."""


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """url: as redis-py understands it; of Sentinel and Cluster its address is only a placeholder.

    nodes: whom to ask where the master is; of a single server its address, none for a unix socket.
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
        """A Sentinel or node that does not answer within this is passed over."""
        return 1.0 if self.tls else 0.3

    @property
    def question(self) -> tuple[str, ...]:
        """What to ask a node."""
        if self.kind == "sentinel":
            return ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
        return ("CLUSTER", "SLOTS")

    def master_in(self, answer: Any, tag: str, asked: str) -> HostPort | None:
        """The master in a node's raw answer, for the keys with this hash tag; None if it knows none.

        asked: the host that answered; a node that does not know its own name means itself by an empty one.
        """
        if self.kind == "sentinel":
            return (_text(answer[0]), int(answer[1])) if answer else None
        slot = binascii.crc_hqx(tag.encode(), 0) % CLUSTER_SLOTS
        for first, last, (host, port, *_), *_replicas in answer or ():
            if first <= slot <= last:
                return (_text(host) or asked, int(port)) if port else None
        return None


def parse(url: str) -> RedisAddress:
    """Raises RedisAddressError. Reads no file, but looks whether those named are there."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise RedisAddressError(f"the Redis URL cannot be read: {error}") from error
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
    """``url`` with ``ca_file`` (PEM) as the authority that Redis' certificate must come from; "" changes nothing.

    An ``ssl_ca_certs`` in the URL wins. Raises RedisAddressError for a URL without TLS: the data would go in clear.
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
    """(service, database) in the path of a Sentinel's or Cluster's URL."""
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
