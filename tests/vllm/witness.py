"""A Redis that can be killed, and a witness of every command in it.

The witness is MONITOR. It lists the commands of the scripts in Redis' own order and with its times, so the test knows
the index at each decision without any of our code.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.support.redis.servers import redis7_binary, wait_for_server

from warmfleet.fleet import SCRIPT_KEYS
from warmfleet.fleet.rows import LEASE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from warmfleet_worker.protocol.wire import Keys

ARGUMENT = re.compile(rb'"((?:[^"\\]|\\.)*)"')
#: The lines of MONITOR that are kept: forward index, reservations, progress, whole decisions and ticks.
DECIDE_KEYS, TICK_KEYS = (len(SCRIPT_KEYS[name]) for name in ("decide", "tick"))
KEPT = (
    rb'^\+.*\] "(?:(?:SADD|SREM)" "PREFIXb:|H(?:SET|DEL)" "PREFIXlease"|EVALSHA" "[0-9a-f]+" "(?:%d|%d)"'
    rb'|XADD" .*"progress").*$' % (DECIDE_KEYS, TICK_KEYS)
)


@dataclass
class Life:
    """A run of the server: the lines of MONITOR, the index at its start, its first and last moment."""

    lines: list[bytes] = field(default_factory=list)
    held: dict[int, set[bytes]] = field(default_factory=dict)
    leases: set[str] = field(default_factory=set)
    began: float = 0.0
    ended: float = 0.0


class MortalRedis:
    """A server with dumps, on a unix socket. The witness connects to each new run before any other client."""

    def __init__(self, keys: Keys) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="wf-mortal-"))  # short: a socket path may have 107 bytes
        self._keys = keys
        self._door = self._folder / "s"
        self.url = f"unix://{self._door}"
        self.lives: list[Life] = []
        self._clocks = time.time() - time.monotonic()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()
        self._process.wait()
        self._door.unlink(missing_ok=True)
        self.lives[-1].ended = time.monotonic()
        self._reader.join(30)

    def save(self) -> None:
        """Write the only dump, which the next start will find."""
        with redis.Redis.from_url(self.url) as client:
            client.save()

    def start(self) -> None:
        """Start the server with the dump, if there is one."""
        back = self._folder / f"back{len(self.lives)}"
        options = ["--port", "0", "--unixsocket", str(back), "--dir", str(self._folder), "--appendonly", "no"]
        options += ["--maxmemory-policy", "noeviction", "--save", ""]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen([redis7_binary(), *options], stdout=quiet, stderr=quiet)
        wait_for_server(f"unix://{back}", self._process)
        life = Life()
        with redis.Redis(unix_socket_path=str(back), retry=Retry(NoBackoff(), 0)) as client:
            for key in client.scan_iter(self._keys.prefix + "s:*", 1_000):
                life.held[int(key.rpartition(b":")[2])] = set(client.smembers(key))
            life.leases = {
                reservation.decode()
                for reservation, lease in client.hgetall(self._keys.lease).items()
                if credits_blocks(lease)
            }
        self._watch(back, life)
        self.lives.append(life)
        life.began = time.monotonic()
        back.rename(self._door)

    def _watch(self, path: Path, life: Life) -> None:
        monitor = socket.socket(socket.AF_UNIX)
        monitor.connect(str(path))
        monitor.sendall(b"MONITOR\r\n")
        assert monitor.recv(5) == b"+OK\r\n"
        kept = re.compile(KEPT.replace(b"PREFIX", re.escape(self._keys.prefix.encode())), re.MULTILINE)

        def read() -> None:
            rest = b""
            with monitor:
                while chunk := monitor.recv(1 << 20):
                    whole, _, rest = (rest + chunk).rpartition(b"\r\n")
                    life.lines += kept.findall(whole.replace(b"\r", b""))

        self._reader = threading.Thread(target=read, name="witness", daemon=True)
        self._reader.start()

    def commands(self, life: Life) -> Iterator[tuple[float, list[bytes]]]:
        """Return the commands of one run: (CLOCK_MONOTONIC seconds, command and arguments)."""
        drift = time.time() - time.monotonic() - self._clocks
        assert abs(drift) < 0.02, f"the wall clock was set by {drift} s: Redis' times mean nothing"
        for line in life.lines:
            stamp = float(line[1 : line.index(b" ")])
            yield stamp - self._clocks, [unescape(argument) for argument in ARGUMENT.findall(line)]


def credits_blocks(lease: bytes) -> bool:
    """Whether the lease counts for blocks that its request will make, which were not reported yet."""
    name: int = LEASE.unpack_from(lease)[7]  # bytes of the worker_id, behind which the checkpoints stand
    return len(lease) > LEASE.size + name


def unescape(text: bytes) -> bytes:
    return text.decode("unicode_escape").encode("latin-1") if b"\\" in text else text
