"""Calls of the scripts on one pool of workers. Errors of redis-py become those of ``warmfleet.errors`` here."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from redis.exceptions import RedisError

from warmfleet.fleet.connection.masters import SlotLine
from warmfleet.fleet.connection.packing import Argument, PackedScript, pack_command
from warmfleet.fleet.connection.redis_connections import CONNECT_S, UPKEEP_S, RedisConnections, RouterRedis
from warmfleet.fleet.connection.reply_errors import failure
from warmfleet.fleet.constants import Constants
from warmfleet.fleet.script_loader import SCRIPT_ARGS, SCRIPT_KEYS, script_text
from warmfleet.protocol.wire import Keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import redis.asyncio as aioredis

    from warmfleet.errors import WarmfleetError
    from warmfleet.fleet.connection.multiplexed import OnAnswer

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits of calls to Redis, in seconds.

    request_s: of calls that a request waits for, in replicas WARMFLEET_DECIDE_TIMEOUT_S; after that the request is
    placed without Redis, or goes on waiting in the queue. upkeep_s: of all other calls, which are tried again.
    """

    request_s: float = 0.25
    upkeep_s: float = UPKEEP_S


def connect(url: str, tag: str = "", *, timeout_s: float = CONNECT_S, max_connections: int = 256) -> aioredis.Redis:
    """Make a client with connections of its own; arguments as in ``RedisConnections``. tag: hash tag of its keys."""
    made = RedisConnections(url, timeout_s=timeout_s, max_connections=max_connections)
    client = made.of(tag)
    client.owned = made
    return client


def argv(script: str, rest: Iterable[Argument] = (), /, **values: Argument) -> list[Argument]:
    """Return the ARGV of a script, from its arguments by name and then ``rest``, the list of varying length.

    Raises TypeError if a name is missing or unknown.
    """
    names = SCRIPT_ARGS[script]
    if len(values) != len(names) or any(name not in values for name in names):
        raise TypeError(f"{script} takes {', '.join(names)}, not {', '.join(values)}")
    return [*[values[name] for name in names], *rest]


@contextmanager
def redis_errors() -> Iterator[None]:
    """Translate what redis-py raises into the error tree of ``warmfleet.errors``."""
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise failure(error) from error


class Scripts:
    """Runs the scripts of one model; fills in KEYS by name, and raises the errors of ``warmfleet.errors``."""

    def __init__(
        self,
        redis: aioredis.Redis,
        model: str,
        timeouts: Timeouts | None = None,
        constants: Constants | None = None,
    ) -> None:
        """redis: as ``connect`` makes it. Raises TypeError for another client."""
        if not isinstance(redis, RouterRedis):
            raise TypeError("a fleet needs a client of warmfleet.fleet.connect")
        self.redis = redis
        self.keys = Keys(model)
        self.prefix = self.keys.prefix.encode()
        self.timeouts = timeouts or Timeouts()
        self.constants = constants or Constants()  # only ``Fleet.use`` replaces them
        self.packed = {
            name: PackedScript(name, script_text(name), [getattr(self.keys, key) for key in keys])
            for name, keys in SCRIPT_KEYS.items()
        }
        self._multiplexed = redis.multiplexed

    @property
    def line(self) -> object:
        """A value that is equal for pools on one Redis server: the scripts' connection, or in a Cluster the master."""
        line = self._multiplexed
        return line.master if isinstance(line, SlotLine) else line

    def send(self, name: str, command: bytes, limit_s: float, on_answer: OnAnswer, *, patient: bool = False) -> None:
        """Call a script by its packed command; ``on_answer`` is called once, perhaps before this returns.

        Calls of one client are executed in the order in which they were sent. patient: the call may wait a moment for
        other calls, to go to Redis with them.
        """
        self._multiplexed.send(self.packed[name], command, limit_s, on_answer, patient=patient)

    async def call(self, name: str, command: bytes, limit_s: float) -> Any:
        """Send a packed call and return its answer. Raises FleetUnavailable or the class of the script's error code."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._multiplexed.send(self.packed[name], command, limit_s, partial(_resolve, future))
        return await future

    async def ask(self, *words: Argument) -> Any:
        """Send a Redis command on the scripts' connection, in one write with other calls of this event loop turn.

        The answer must be small, because answers to decisions wait behind it. Raises FleetUnavailable.
        """
        return await asked(self.redis, pack_command(*words), lambda answer: answer, self.timeouts.upkeep_s)

    def together(self, calls: Sequence[tuple[str, bytes]]) -> asyncio.Future[list[Any]]:
        """Send several calls in one write; the future becomes their answers in the same order.

        calls: name and packed command of each script; the name is empty for a command of Redis itself. Raises the first
        error, once all have been answered.
        """
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        answers: list[Any] = [None] * len(calls)
        errors: list[WarmfleetError] = []
        left = len(calls)

        def take(at: int, answer: Any, error: WarmfleetError | None) -> None:
            nonlocal left
            left, answers[at] = left - 1, answer
            if error is not None:
                errors.append(error)
            if not left:
                _resolve(future, answers, errors[0] if errors else None)

        for at, (name, command) in enumerate(calls):
            script = self.packed[name] if name else None
            self._multiplexed.send(script, command, self.timeouts.upkeep_s, partial(take, at))
        return future

    async def block(self, command: bytes, seconds: float) -> Any:
        """Send a packed command that blocks in Redis for ``seconds`` at most. Raises FleetUnavailable."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        limit_s = seconds + self.timeouts.upkeep_s
        self.redis.blocking.send(None, command, limit_s, partial(_resolve, future))
        return await future

    async def run(self, name: str, *args: Argument, timeout_s: float | None = None) -> Any:
        """EVALSHA of ``lua/<name>.lua`` with ``args`` as ARGV (see ``argv``); the script is loaded on NOSCRIPT.

        Default time limit: ``timeouts.request_s``. Raises FleetUnavailable or the class of the script's error code.
        """
        return await self.call(name, self.packed[name].call(args), timeout_s or self.timeouts.request_s)

    async def keep(self, name: str, rest: Iterable[Argument] = (), /, **values: Argument) -> Any:
        """Call a script as ``run`` does, with arguments by name and the longer time limit ``timeouts.upkeep_s``."""
        return await self.run(name, *argv(name, rest, **values), timeout_s=self.timeouts.upkeep_s)


def asked(
    redis: RouterRedis, command: bytes, read: Callable[[Any], Answer], limit_s: float = UPKEEP_S
) -> asyncio.Future[Answer]:
    """Send a packed command of Redis itself on the connection of the scripts.

    The future becomes what ``read`` makes of the answer, or FleetUnavailable.
    """
    future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def take(answer: Any, error: WarmfleetError | None) -> None:
        try:
            _resolve(future, None if error is not None else read(answer), error)
        except Exception as unreadable:  # noqa: BLE001  the stored value may be malformed
            future.set_exception(unreadable)

    redis.multiplexed.send(None, command, limit_s, take)
    return future


def pairs(answer: Any) -> dict[bytes, Any]:
    """Return the pairs in Redis' answer for a hash, or a sorted set with scores, in either version of its protocol."""
    if isinstance(answer, dict):
        return answer
    if answer and isinstance(answer[0], list):
        return dict(answer)
    return dict(zip(answer[::2], answer[1::2], strict=True))


def _resolve(future: asyncio.Future[Any], answer: Any, error: WarmfleetError | None) -> None:
    if future.done():
        return  # the caller was cancelled
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(answer)
