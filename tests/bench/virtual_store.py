"""A real store whose clock is virtual: our scripts read the time that the bench has, entries carry it in their ids.

The text of every script gets a line in front that shadows ``redis``: its ``call`` answers TIME from one key more, the
last, which is the bench's microseconds; all else goes through. Nothing of the scripts is known here.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import redis
import redis.asyncio as aioredis
from redis.connection import UnixDomainSocketConnection as Connection
from tests.conftest import server, valkey_binary

from warmfleet.fleet import Fleet, Timeouts, Weights
from warmfleet_loadtest.simulator.virtual_clock import Clock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BEGINNING_US = 1_700_000_000_000_000
#: One line, so that an error's line number is one too many at most.
SHADOW = (
    "local real, clock = redis, table.remove(KEYS) local redis = setmetatable({ call = function(name, ...) "
    'if name == "TIME" then return { clock:sub(1, -7), clock:sub(-6) } end return real.call(name, ...) end }, '
    "{ __index = real })\n"
)


def stamp_us(clock: Clock) -> int:
    return BEGINNING_US + round(clock.now * 1e6)


class _Script:
    """What ``register_script`` answers: it stamps each call and waits for it in place, as nobody else is about."""

    def __init__(self, text: str, connection: Any, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        connection.send_command("SCRIPT", "LOAD", SHADOW + text)
        self._sha: Any = connection.read_response()

    async def __call__(self, keys: Sequence[str], args: Sequence[Any]) -> Any:
        stamped = (len(keys) + 1, *keys, str(stamp_us(self._clock)))
        self._connection.send_command("EVALSHA", self._sha, *stamped, *args, check_health=False)
        return self._connection.read_response()


class _RouterClient(aioredis.Redis):
    clock: Clock
    connection_of_scripts: Any

    def register_script(self, script: Any) -> Any:
        return _Script(script, self.connection_of_scripts, self.clock)


class _WorkerPipeline(redis.client.Pipeline):
    store: VirtualStore

    def xadd(self, name: Any, fields: Any, id: Any = "*", **options: Any) -> Any:  # type: ignore[override]  # noqa: A002
        self.store.written += 1
        return super().xadd(name, fields, f"{stamp_us(self.store.clock) // 1000}-*" if id == "*" else id, **options)


class WorkerClient(redis.Redis):
    """For publishers: their entries are written at the bench's time."""

    store: VirtualStore

    @classmethod
    def of(cls, store: VirtualStore) -> Any:
        made: Any = cls.from_url(store.url)
        made.store = store
        return made

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Any:
        made = _WorkerPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)
        made.store = self.store
        return made


class VirtualStore:
    """One private server, emptied for each run. ``fleet``: what a replica has of it; ``worker``: what a plugin has."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.clock = Clock()
        self.written = 0  # entries, by all workers
        self._fleets: list[Fleet] = []
        self._connections: list[Any] = []
        self.sync: Any = WorkerClient.of(self)
        self.sync.flushall()

    def fleet(self, model: str, weights: Weights) -> Fleet:
        connection: Any = Connection  # redis-py does not type it
        client: Any = _RouterClient.from_url(self.url)
        client.clock = self.clock
        client.connection_of_scripts = connection(path=self.url.removeprefix("unix://"))
        self._connections.append(client.connection_of_scripts)
        made = Fleet(client, model, timeouts=Timeouts(10, 10), weights=weights)
        self._fleets.append(made)
        return made

    def cpu_s(self) -> float:
        """CPU seconds of the server so far."""
        used = self.sync.info("cpu")
        return float(used["used_cpu_user"] + used["used_cpu_sys"])

    async def close(self) -> None:
        for fleet in self._fleets:
            await fleet.close()
        for connection in self._connections:
            connection.disconnect()
        self.sync.close()


@contextmanager
def private_server() -> Iterator[str]:
    """A store of one's own; ``$WARMFLEET_BENCH_STORE`` names another binary."""
    with server(os.environ.get("WARMFLEET_BENCH_STORE") or valkey_binary()) as url:
        yield url
