"""A real Redis in which the scripts of lua/ read a virtual time, which the bench sets.

Each script gets one line of Lua in front, which replaces the table ``redis`` by one of its own. The ``call`` of that
table answers TIME with the microseconds that the bench passes as an additional last key, and hands every other command
to Redis. Stream entries get the virtual time in their ids. This module knows nothing else about the scripts.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import redis
from redis.connection import UnixDomainSocketConnection as Connection
from tests.support.redis.packed_commands import words_of
from tests.support.redis.servers import server, valkey_binary

from warmfleet.fleet import Constants, Fleet, Timeouts, Weights
from warmfleet.fleet.connection.multiplexed import Multiplexed
from warmfleet.fleet.connection.redis_connections import RouterRedis
from warmfleet.fleet.connection.reply_errors import refusal
from warmfleet_loadtest.simulator.virtual_clock import Clock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from warmfleet.fleet.connection.multiplexed import OnAnswer
    from warmfleet.fleet.connection.packing import PackedScript

BEGINNING_US = 1_700_000_000_000_000
#: One line only, so that the line numbers of errors are off by one.
SHADOW = (
    "local real, clock = redis, table.remove(KEYS) local redis = setmetatable({ call = function(name, ...) "
    'if name == "TIME" then return { clock:sub(1, -7), clock:sub(-6) } end return real.call(name, ...) end }, '
    "{ __index = real })\n"
)


def stamp_us(clock: Clock) -> int:
    return BEGINNING_US + round(clock.now * 1e6)


class _Script:
    """The result of ``register_script``. It adds the time to each call and waits for the answer in place."""

    def __init__(self, text: str, connection: Any, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        connection.send_command("SCRIPT", "LOAD", SHADOW + text)
        self._sha: Any = connection.read_response()

    async def __call__(self, keys: Sequence[str], args: Sequence[Any]) -> Any:
        return self.execute(keys, args)

    def execute(self, keys: Sequence[str | bytes], args: Sequence[Any]) -> Any:
        stamped = (len(keys) + 1, *keys, str(stamp_us(self._clock)))
        self._connection.send_command("EVALSHA", self._sha, *stamped, *args, check_health=False)
        return self._connection.read_response()


class _VirtualMultiplexed(Multiplexed):
    """Takes packed calls, unpacks them, and answers each before ``send`` returns."""

    def __init__(self, pool: Any, connection: Any, clock: Clock) -> None:
        super().__init__(pool)
        self._made = cache(lambda script: _Script(words_of(script.load)[2].decode(), connection, clock))

    def send(
        self,
        script: PackedScript | None,
        command: bytes,
        limit_s: float,
        on_answer: OnAnswer,
        *,
        patient: bool = False,
        moved: bool = False,
    ) -> None:
        assert script is not None, "the bench calls scripts only"
        _, _, count, *rest = words_of(command)
        try:
            answer = self._made(script).execute(rest[: int(count)], rest[int(count) :])
        except redis.ResponseError as error:
            on_answer(None, refusal(str(error)))
        else:
            on_answer(answer, None)


class _RouterClient(RouterRedis):
    clock: Clock
    connection_of_scripts: Any

    def register_script(self, script: Any) -> Any:
        return _Script(script, self.connection_of_scripts, self.clock)


def _tag(key: str | bytes) -> str:
    """Return the pool whose key this is."""
    text = key.decode() if isinstance(key, bytes) else key
    return text[text.index("{") + 1 : text.index("}")]


class _WorkerPipeline(redis.client.Pipeline):
    store: VirtualStore

    def xadd(self, name: Any, fields: Any, id: Any = "*", **options: Any) -> Any:  # type: ignore[override]  # noqa: A002
        self.store.written[_tag(name)] += 1
        return super().xadd(name, fields, f"{stamp_us(self.store.clock) // 1000}-*" if id == "*" else id, **options)


class WorkerClient(redis.Redis):
    """The client of publishers, which writes their entries at the bench's time."""

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
    """A private server, emptied for each run. fleet: the client of a replica. worker: the client of a plugin."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.clock = Clock()
        self.written: Counter[str] = Counter()  # entries of all workers, by pool
        self._fleets: list[Fleet] = []
        self._connections: list[Any] = []
        self.sync: Any = WorkerClient.of(self)
        self.sync.flushall()

    def fleet(self, model: str, weights: Weights) -> Fleet:
        connection: Any = Connection  # redis-py does not type it
        client: Any = _RouterClient.from_url(self.url)
        client.clock = self.clock
        client.connection_of_scripts = connection(path=self.url.removeprefix("unix://"))
        client.multiplexed = _VirtualMultiplexed(client.connection_pool, client.connection_of_scripts, self.clock)
        self._connections.append(client.connection_of_scripts)
        made = Fleet(client, model, timeouts=Timeouts(10, 10), constants=Constants(weights=weights))
        self._fleets.append(made)
        return made

    def cpu_s(self) -> float:
        """Return the CPU seconds of the server so far."""
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
    """Start a private server. ``$WARMFLEET_BENCH_STORE`` names another binary."""
    with server(os.environ.get("WARMFLEET_BENCH_STORE") or valkey_binary()) as url:
        yield url
