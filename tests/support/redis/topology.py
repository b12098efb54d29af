"""Real servers on loopback ports: with TLS, behind Sentinels, as a Cluster. Every process is killed at the end."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry
from tests.support.certificates import certificate
from tests.support.polling import until
from tests.support.redis.servers import KEEPS_ENVIRONMENT, redis7_binary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from warmfleet.protocol.redis_address import SlotRange

IN_MEMORY = ("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction")
QUIET = (*IN_MEMORY, "--bind", "127.0.0.1", *KEEPS_ENVIRONMENT)
BUS = 10_000  # the bus of a Cluster's node listens this far above its port
#: Both below the ports that routers and engines of other tests choose (cli/local/ports.py).
PORTS = range(4_000, 10_000)
AGREED_S = 180.0  # longest time until Sentinels agree: on a busy machine a late timer makes them look on for 30 s


@dataclass
class Node:
    """A process, its port, and the Redis user that tests use there."""

    port: int
    process: subprocess.Popen[bytes]
    user: tuple[str | None, str | None] = (None, None)

    def client(self) -> redis.Redis:
        retry = Retry(NoBackoff(), 0)
        name, password = self.user
        options = {"retry": retry, "socket_timeout": 1, "decode_responses": True}
        return redis.Redis(port=self.port, username=name, password=password, **options)  # type: ignore[arg-type]

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()


def free_ports(count: int) -> list[int]:
    """Return ports that are free, as are those of their buses, and of which no outgoing connection takes one."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        with suppress(OSError), _listening(port), _listening(port + BUS):
            found.append(port)
    return found


def _listening(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


@dataclass
class Servers:
    """The processes of one test and the folder that holds their files. All are killed at the end."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="wf-topology-")))
    nodes: list[Node] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.process.kill()
            node.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, port: int, *options: str, user: tuple[str | None, str | None] = (None, None)) -> Node:
        """Start a data server, without waiting for it."""
        home = self.folder / str(port)
        home.mkdir()
        return self.run(port, [*QUIET, "--port", str(port), "--dir", str(home), *options], user)

    def run(self, port: int, arguments: list[str], user: tuple[str | None, str | None] = (None, None)) -> Node:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        node = Node(port, subprocess.Popen([redis7_binary(), *arguments], **quiet), user)  # type: ignore[call-overload]
        self.nodes.append(node)
        return node


# ---------------------------------------------------------------- TLS


@dataclass
class Secured:
    """A Redis and a Sentinel that speak only TLS and ask for a client certificate signed by their own authority."""

    port: int
    sentinel: int
    ca: Path
    other_ca: Path
    certificate: Path
    key: Path

    @property
    def url(self) -> str:
        """The address, without the option that names the certificate authority."""
        return f"rediss://127.0.0.1:{self.port}/0?{self._options}"

    @property
    def sentinel_url(self) -> str:
        return f"rediss+sentinel://127.0.0.1:{self.sentinel}/kv?{self._options}"

    @property
    def _options(self) -> str:
        return f"ssl_certfile={self.certificate}&ssl_keyfile={self.key}"


@contextmanager
def tls_server() -> Iterator[Secured]:
    with Servers() as servers:
        folder = servers.folder
        authority, other = certificate(folder, "ca"), certificate(folder, "other")
        server, client = certificate(folder, "redis", authority), certificate(folder, "client", authority)
        ca = authority.certificate
        port, sentinel = free_ports(2)
        tls = ["--port", "0", "--tls-cert-file", str(server.certificate), "--tls-key-file", str(server.key)]
        tls += ["--tls-ca-cert-file", str(ca), "--tls-replication", "yes", "--dir", str(folder)]
        servers.run(port, [*QUIET, *tls, "--tls-port", str(port)])
        file = folder / "sentinel.conf"
        file.write_text(f"sentinel monitor kv 127.0.0.1 {port} 1\n")
        servers.run(sentinel, [str(file), "--sentinel", *tls, "--tls-port", str(sentinel)])
        made = Secured(port, sentinel, ca, other.certificate, client.certificate, client.key)
        with redis.Redis.from_url(f"{made.url}&ssl_ca_certs={ca}", retry=Retry(NoBackoff(), 0)) as store:
            until(store.ping, "Redis speaks TLS")
        yield made


# ---------------------------------------------------------------- Sentinel


@dataclass
class Watched:
    """A master, its replica and three Sentinels that promote the replica soon after they lost the master."""

    master: Node
    replica: Node
    sentinels: list[Node]

    @property
    def url(self) -> str:
        return self.url_of("")

    def url_of(self, user: str) -> str:
        return f"redis+sentinel://{user}" + ",".join(f"127.0.0.1:{node.port}" for node in self.sentinels) + "/kv"

    def cut(self) -> None:
        """Cut the replica off from the master for good."""
        self.replica.client().config_set("masterauth", "wrong")
        self.master.client().execute_command("CLIENT", "KILL", "TYPE", "replica")  # type: ignore[no-untyped-call]
        until(lambda: self.replica.client().info("replication")["master_link_status"] == "down", "the link is cut")

    def agreed(self) -> bool:
        """Whether every Sentinel names the replica as the master, within AGREED_S."""
        question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "kv")
        try:
            named = [node.client().execute_command(*question)[1] for node in self.sentinels]  # type: ignore[no-untyped-call]
        except redis.TimeoutError:  # on a busy machine
            return False
        return named == [str(self.replica.port)] * len(named)

    def promoted(self) -> bool:
        return bool(self.replica.client().info("replication")["role"] == "master")


@contextmanager
def sentinels(users: str = "", lost_ms: int = 1_000) -> Iterator[Watched]:
    """users: lines of an ACL file with `replica`, `sentinel` and `admin`. Each name is also the password.

    lost_ms: silence after which a master is lost. Sentinels promote no replica that its master lost ten times
    as long before.
    """
    with Servers() as servers:
        first, second, *three = free_ports(5)
        options = ["--repl-diskless-sync-delay", "0"]
        if users:
            (servers.folder / "users.acl").write_text(users)
            options += ["--aclfile", str(servers.folder / "users.acl"), "--masteruser", "replica"]
            options += ["--masterauth", "replica"]
        user = ("admin", "admin") if users else (None, None)
        master = servers.start(first, *options, user=user)
        replica = servers.start(second, *options, "--replicaof", "127.0.0.1", str(first), user=user)
        until(lambda: replica.client().info("replication")["master_link_status"] == "up", "the replica follows")
        watched = Watched(
            master,
            replica,
            [servers.run(port, _sentinel(servers, port, first, lost_ms, bool(users))) for port in three],
        )
        for node in watched.sentinels:
            until(lambda node=node: _complete(node), "the Sentinels know each other")  # type: ignore[misc]
        yield watched


def _sentinel(servers: Servers, port: int, master: int, lost_ms: int, guarded: bool) -> list[str]:
    file = servers.folder / f"sentinel-{port}.conf"
    lines = [f"port {port}", "bind 127.0.0.1", f"sentinel monitor kv 127.0.0.1 {master} 2"]
    lines += [f"sentinel down-after-milliseconds kv {lost_ms}", "sentinel failover-timeout kv 2000"]
    lines += ["sentinel auth-user kv sentinel", "sentinel auth-pass kv sentinel"] if guarded else []
    file.write_text("\n".join([*lines, f"dir {servers.folder}"]) + "\n")
    return [str(file), "--sentinel"]


def _complete(node: Node) -> bool:
    state = node.client().info("sentinel")["master0"]
    return bool((state["sentinels"], state["slaves"]) == (3, 1))


# ---------------------------------------------------------------- Cluster

SLOTS = 16_384


@dataclass
class Clustered:
    """Three masters, and a replica of the master that owns a tag's slot. It takes over 1 s after its master is lost."""

    owner: Node
    replica: Node
    masters: list[Node]

    @property
    def url(self) -> str:
        """The address, whose first node does not own the slot."""
        others = [node for node in self.masters if node is not self.owner]
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in [*others, self.owner])

    def hand_over(self) -> None:
        """Let the replica take over in a planned failover, and ask again for an election that fails."""
        asked = [0.0]

        def promoted() -> bool:
            if self.promoted():
                return True
            if time.monotonic() - asked[0] > 3:
                asked[0] = time.monotonic()
                self.replica.client().cluster("FAILOVER")
            return False

        until(promoted, "the replica owns the slot", 20)

    def promoted(self) -> bool:
        return bool(self.replica.client().info("replication")["role"] == "master")


@contextmanager
def cluster(tag: str) -> Iterator[Clustered]:
    with Servers() as servers:
        nodes = _nodes(servers, 4)
        *masters, replica = nodes
        owner = masters[key_slot(tag.encode()) // _share(masters)]
        _join(nodes, masters, {replica.port: owner})
        yield Clustered(owner, replica, masters)


@dataclass
class WholeCluster:
    """Three masters, and a replica of each, which takes over soon after its master is lost."""

    servers: Servers
    masters: list[Node]
    replicas: list[Node]

    @property
    def url(self) -> str:
        nodes = [*self.masters, *self.replicas]
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)

    @property
    def ranges(self) -> tuple[SlotRange, ...]:
        """Return the slots that each master owned at the start."""
        share = _share(self.masters)
        return tuple(
            (number * share, min((number + 1) * share, SLOTS) - 1, ("127.0.0.1", node.port))
            for number, node in enumerate(self.masters)
        )

    def number_of(self, tag: str) -> int:
        """The number of the master that owns this tag's slot."""
        return key_slot(tag.encode()) // _share(self.masters)

    def promoted(self, number: int) -> bool:
        """Whether the replica of this master is a master now."""
        return bool(self.replicas[number].client().info("replication")["role"] == "master")

    def move(self, tag: str, number: int, *, end: bool = True) -> None:
        """Move the slot of this tag, which has keys, to another master, as redis-cli does. end: all of its keys."""
        slot = key_slot(tag.encode())
        source, target = self.masters[self.number_of(tag)], self.masters[number]
        here, there = source.client(), target.client()
        names = {node.port: node.client().cluster("MYID") for node in (source, target)}
        there.cluster("SETSLOT", slot, "IMPORTING", names[source.port])
        here.cluster("SETSLOT", slot, "MIGRATING", names[target.port])
        with redis.Redis(port=source.port) as plain:  # names of keys hold block hashes, which are no text
            while keys := plain.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
                plain.migrate("127.0.0.1", target.port, keys, 0, 5_000)
                if not end:
                    return
        for node in (target, source, *self.masters):
            node.client().cluster("SETSLOT", slot, "NODE", names[target.port])


@contextmanager
def whole_cluster(node_timeout_ms: int = 1_000) -> Iterator[WholeCluster]:
    """The slots of the other masters are served while one is away, as app/docs/redis.md wants it."""
    with Servers() as servers:
        more = ("--cluster-require-full-coverage", "no", "--cluster-node-timeout", str(node_timeout_ms))
        nodes = _nodes(servers, 6, *more)
        masters, replicas = nodes[:3], nodes[3:]
        _join(nodes, masters, {replica.port: master for master, replica in zip(masters, replicas, strict=True)})
        yield WholeCluster(servers, masters, replicas)


def _share(masters: Sequence[Node]) -> int:
    return -(-SLOTS // len(masters))


def _nodes(servers: Servers, count: int, *more: str) -> list[Node]:
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--repl-diskless-sync-delay", "0", *more)
    nodes = [servers.start(port, *options, "--cluster-replica-validity-factor", "0") for port in free_ports(count)]
    for node in nodes:
        until(node.client().ping, "a node answers")
    return nodes


def _join(nodes: list[Node], masters: list[Node], replicas: dict[int, Node]) -> None:
    """Make a Cluster of these servers. replicas: by their ports, with their masters."""
    share = _share(masters)
    for number, node in enumerate(masters):
        node.client().cluster("ADDSLOTSRANGE", number * share, min((number + 1) * share, SLOTS) - 1)
        node.client().cluster("SET-CONFIG-EPOCH", number + 1)
    met = [0.0]

    def acquainted() -> bool:
        if all(len(node.client().cluster("NODES")) == len(nodes) for node in nodes):
            return True
        if time.monotonic() - met[0] > 3:  # nodes give a handshake up that a busy machine delays
            met[0] = time.monotonic()
            for node in nodes[1:]:
                nodes[0].client().cluster("MEET", "127.0.0.1", node.port)
        return False

    until(acquainted, "the nodes know each other", 30)
    followers = [node for node in nodes if node.port in replicas]
    for node in followers:
        node.client().cluster("REPLICATE", replicas[node.port].client().cluster("MYID"))
    for node in followers:
        until(lambda node=node: node.client().info("replication")["master_link_status"] == "up", "a replica follows")  # type: ignore[misc]
    for node in nodes:
        until(lambda node=node: node.client().cluster("INFO")["cluster_state"] == "ok", "the Cluster is up")  # type: ignore[misc]
