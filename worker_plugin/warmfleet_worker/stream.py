"""A writer's Redis stream: numbered entries, sent in order, and each applied at most once.

An entry keeps its number until Redis has answered it, and the reader drops a number that it has seen before. After a
broken connection the unanswered entries are therefore sent again as they are: nothing is lost and nothing counts twice.
An entry that Redis refuses (full memory, read-only, no permission, busy) is kept and tried again, too. Only an entry
that was refused while a later one was written is lost; the reader sees the loss as a gap in the numbers.
"""

from __future__ import annotations

import logging
import random
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, RedisError
from redis.retry import Retry

from warmfleet_worker.master_client import master_client
from warmfleet_worker.protocol import redis_address, wire

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

logger = logging.getLogger("vllm.warmfleet")

BACKOFF_SECONDS = (0.1, 3.0)  # first and longest wait between tries; even with jitter less than a heartbeat period
SOCKET_TIMEOUT_SECONDS = 2.0
MAX_PENDING = 64  # most entries that Redis has not answered yet
UNUSABLE_KEY = ("WRONGTYPE", "The stream has exhausted")  # errors of a key that no writer can use any more


class StreamGone(Exception):  # noqa: N818 - not an error: Redis came back empty, or the fleet forgot this worker
    """The stream is gone, or its key holds something that takes no entry: join again."""


class Refused(Exception):  # noqa: N818 - the entry is kept, so nothing has gone wrong yet
    """Redis answered with an error; the entries that were not written are kept for the next try."""


def connect(url: str, tag: str = "", *, timeout_seconds: float = SOCKET_TIMEOUT_SECONDS) -> redis.Redis:
    """Make a client for ``url`` (see ``protocol.redis_address``) that never retries by itself, connecting on first use.

    tag: the hash tag of all its keys; only a Cluster needs it. timeout_seconds: for connecting and for each call,
    unless the URL sets another. Raises RedisAddressError.
    """
    where = redis_address.parse(url)
    options: dict[str, Any] = {
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        "retry": Retry(NoBackoff(), 0),
    }
    if where.kind != "single":
        return master_client(where, tag, **options)
    return redis.Redis.from_url(url, **options)


class Outage:
    """Waits between tries, longer each time, and logs one line when an outage begins and one when it ends."""

    def __init__(self, stopping: threading.Event) -> None:
        self.errors = 0  # since the start
        self._stopping = stopping
        self._wait = 0.0  # seconds; 0 while there is no outage

    def wait(self, error: Exception) -> None:
        """Log ``error`` if it begins an outage, and wait; returns at once when the publisher stops."""
        self.errors += 1
        if not self._wait:
            if isinstance(error, RedisError | Refused | OSError):
                hint = " (see WARMFLEET_REDIS_CA)" if "CERTIFICATE" in str(error).upper() else ""
                logger.warning("warmfleet: Redis is away or refuses: %s%s; will try again", error, hint)
            else:  # a bug of ours, hence the traceback
                logger.error("warmfleet: unexpected error; will try again", exc_info=error)
        self._wait = min(2 * self._wait or BACKOFF_SECONDS[0], BACKOFF_SECONDS[1])
        self._stopping.wait(self._wait * random.uniform(0.75, 1.25))

    def over(self) -> None:
        """Note that a try has succeeded, which ends an outage."""
        if self._wait:
            logger.info("warmfleet: Redis answers again")
        self._wait = 0.0


@dataclass(slots=True)
class Entry:
    """A numbered stream entry. blocks: the number of block hashes that are lost if the entry is lost."""

    number: int
    operation: str
    data: bytes | str = b""
    blocks: int = 0


class StreamWriter:
    """Writes the stream ``key``, from one thread only. ``nonce``: a random name that each join gets.

    hello: the key of the stream ``hello``, in which routers read the names of new streams, and this stream's name.
    """

    def __init__(self, client: redis.Redis, key: str, hello: tuple[str, str], maxlen: int) -> None:
        self.client = client
        self.key = key
        self.nonce = ""
        self.number = 0  # number of the last entry made
        self.joined = (0, 0)  # stream id of the join
        self.lost_entries = 0
        self.lost_blocks = 0
        self._hello_key, self._hello_name = hello
        self._maxlen = maxlen
        self._pending: list[Entry] = []
        self._joined_master: object = None  # the master that took the join
        self._refused = ""  # the list that this user may not read

    @property
    def pending(self) -> int:
        """The number of entries that Redis has not answered yet."""
        return len(self._pending)

    @property
    def moved(self) -> bool:
        """True if Redis has failed over since the join, which may not have reached the new master."""
        return self._joined_master != self._master()

    def _master(self) -> object:
        return getattr(self.client.connection_pool, "master_address", None)  # a single server has no such attribute

    def join(self, data: str) -> None:
        """Write a join with a new nonce. Raises RedisError if Redis is away or refuses; then call ``join`` again."""
        nonce, number = secrets.token_hex(8), self.number + 1
        pipeline = self.client.pipeline(transaction=False)
        fields = wire.entry(nonce, number, "join", data)
        pipeline.xadd(self.key, fields, maxlen=self._maxlen, approximate=True)  # type: ignore[arg-type]  # dict is invariant
        pipeline.xadd(self._hello_key, {b"s": self._hello_name}, maxlen=wire.HELLO_MAXLEN, approximate=True)
        # If the entry in ``hello`` fails, no router reads the stream, and the publisher joins again after a while.
        joined, _hint = pipeline.execute(raise_on_error=False)
        if isinstance(joined, RedisError):
            raise joined
        self.joined = wire.entry_id(joined)
        self._pending.clear()  # entries from before this join
        self._refused = ""
        self._joined_master = self._master()
        self.nonce, self.number = nonce, number

    def put(self, operation: str, data: bytes | str = b"", blocks: int = 0) -> None:
        """Number an entry and keep it for ``flush``. The caller keeps ``pending`` below MAX_PENDING."""
        self.number += 1
        self._pending.append(Entry(self.number, operation, data, blocks))

    def skip(self) -> None:
        """Skip a number, so that the reader notices a lost entry and asks for a snapshot."""
        self.number += 1

    def flush(self, read: str = "") -> list[str]:
        """Send all pending entries in one pipeline; return what it takes from the list ``read`` besides.

        A list alone sends nothing. Raises StreamGone, Refused, or RedisError when the connection fails. Unwritten
        entries stay pending.
        """
        if not self._pending:
            return []
        pipeline = self.client.pipeline(transaction=False)
        for entry in self._pending:
            fields = wire.entry(self.nonce, entry.number, entry.operation, entry.data)
            pipeline.xadd(self.key, fields, maxlen=self._maxlen, approximate=True, nomkstream=True)  # type: ignore[arg-type]  # dict is invariant
        reads = bool(read) and read != self._refused
        if reads:
            pipeline.lpop(read, wire.YIELDS_PER_READING)
        answers = pipeline.execute(raise_on_error=False)
        found = self._texts(read, answers.pop()) if reads else []
        self._settle(answers)
        return found

    def _texts(self, key: str, answer: object) -> list[str]:
        """Return the elements of a list that was read. If the user lacks the right, the next join tries again."""
        if isinstance(answer, NoPermissionError):
            self._refused = key
            logger.warning("warmfleet: %s is not read, so paused sessions are evicted like others: %s", key, answer)
        return [item.decode("ascii", "replace") for item in answer] if isinstance(answer, list) else []

    def _settle(self, answers: Sequence[object]) -> None:
        if any(answer is None or _is_unusable(answer) for answer in answers):
            raise StreamGone(self.key)
        written = [not isinstance(answer, RedisError) for answer in answers]
        last = max((index for index, ok in enumerate(written) if ok), default=-1)
        for entry, ok in zip(self._pending[: last + 1], written, strict=False):
            if not ok:  # a later number was written, so this one can never be applied in order
                self.lost_entries += 1
                self.lost_blocks += entry.blocks
        del self._pending[: last + 1]
        if self._pending:
            raise Refused(str(answers[last + 1]))

    def close(self) -> None:
        self.client.close()


def _is_unusable(answer: object) -> bool:
    """Return True if the key takes no entry, now or later.

    Redis refuses a join on this key, too, but not the entry in ``hello`` that names the stream: by that entry routers
    find the key and delete it.
    """
    return isinstance(answer, RedisError) and any(text in str(answer) for text in UNUSABLE_KEY)
