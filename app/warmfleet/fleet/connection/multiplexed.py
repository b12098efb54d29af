"""A single connection for all calls of a client: many calls wait on it at a time, and answers come in their order.

redis-py takes a connection of its pool for each call, and drives it by a chain of coroutines that takes a request more
time than Redis itself. Here a call is bytes, written with the other calls of the same turn of the event loop, and a
function that gets the answer. redis-py's pool opens the connection, so URL, TLS, user, database, Sentinels and Cluster
mean the same as in redis-py. The connection is replaced when it is lost, when its server says that it is not the
master, when another server has become the master, or when the server was silent for SILENT_S. Calls that block
(``Upkeep.await_events``) have another such connection, whose time limits are checked less often.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import hiredis
from tenacity import AsyncRetrying, wait_random_exponential

from warmfleet.errors import FleetUnavailable
from warmfleet.fleet.connection.failover import MasterPool
from warmfleet.fleet.connection.reply_errors import failure, refusal
from warmfleet.fleet.connection.taken_over import take_over

if TYPE_CHECKING:
    from collections.abc import Callable

    from redis.asyncio.connection import ConnectionPool

    from warmfleet.errors import WarmfleetError
    from warmfleet.fleet.connection.packing import PackedScript
    from warmfleet.fleet.connection.taken_over import TakenOver

    #: Called once with the answer and None, or with None and the error, perhaps before ``send`` returns.
    OnAnswer = Callable[[Any, WarmfleetError | None], None]

logger = logging.getLogger("warmfleet.fleet.connection.multiplexed")

MOST_WAITING = 8_192  # most waiting calls; enough for 5,000 streams that end together, or for a second of calls
MOST_BYTES = 33_554_432  # most bytes of all waiting calls together; a decision about the longest prompt has 70 kB
MOST_S = 1.0  # longest time that is added to a time limit while the event loop is late
PATIENCE_S = 0.002  # longest wait of a patient call for other calls, to save reads and writes at both ends
STEP_S = 0.02  # time between two looks for calls whose time is up, while calls wait
BLOCKED_STEP_S = 1.0  # STEP_S for calls that block, because no request waits for them
SILENT_S = 1.0  # silence while calls wait after which a connection is closed, as a frozen server keeps it open
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0  # first and longest pause between attempts to open a connection
NEVER = float("inf")
#: First words of the error replies by which a server says that it is not the master, or cannot serve.
NO_MASTER = frozenset({"MOVED", "ASK", "CLUSTERDOWN", "READONLY", "LOADING", "MASTERDOWN"})
INCOMPLETE = object()  # what hiredis returns while a reply has not fully arrived


@dataclass(slots=True, eq=False)
class Call:
    """A call that waits for its answer. ``on_answer`` is None after the time limit; a late answer is dropped.

    due: when the call fails, by the clock of ``Multiplexed``; last: when it fails in any case, by the monotonic clock.
    moved: the call was sent again, to the master that a reply MOVED named.
    """

    script: PackedScript | None
    command: bytes
    on_answer: OnAnswer | None
    due: float
    last: float
    moved: bool = False
    again: bool = False  # the call was sent once more, behind its script


class Channel(asyncio.Protocol):
    """An open connection. on_reply gets each reply with its call; on_lost is called when the connection has ended."""

    def __init__(self, on_reply: Callable[[Channel, Call, Any], None], on_lost: Callable[[Channel, str], None]) -> None:
        self.waiting: deque[Call] = deque()
        self.heard = True  # bytes came since ``heard`` was last set to False
        self.loading: set[str] = set()  # names of scripts whose SCRIPT LOAD waits for its answer
        self.ended = asyncio.Event()
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._reader = hiredis.Reader(notEnoughData=INCOMPLETE)
        self._loop = asyncio.get_running_loop()
        self._out: list[bytes] = []
        self._flushing: asyncio.Handle | None = None  # the scheduled write of the calls in ``_out``
        self._patient = False  # all calls in ``_out`` are patient
        self._transport: asyncio.Transport | None = None
        self._taken: TakenOver | None = None

    def use(self, taken: TakenOver) -> None:
        """Use this opened connection from now on."""
        self._taken, self._transport = taken, taken.transport

    @property
    def address(self) -> tuple[str, int] | None:
        return self._taken.address if self._taken else None

    def send(self, call: Call, *, patient: bool = False) -> None:
        """Write the call at the end of this turn of the event loop, with all others of the turn.

        patient: the call may be written later, with the next call that is not patient, but within PATIENCE_S.
        """
        self.waiting.append(call)
        self._out.append(call.command)
        if self._flushing is None:
            self._patient = patient
            self._flushing = (
                self._loop.call_later(PATIENCE_S, self._flush) if patient else self._loop.call_soon(self._flush)
            )
        elif self._patient and not patient:
            self._flushing.cancel()
            self._patient, self._flushing = False, self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        out, self._out = self._out, []
        self._flushing = None
        if self._transport is not None:
            self._transport.write(b"".join(out))

    def data_received(self, data: bytes) -> None:
        self.heard = True
        try:
            self._reader.feed(data)
            while self._transport is not None:
                reply = self._reader.gets()
                if reply is INCOMPLETE:
                    return
                if not isinstance(reply, hiredis.PushNotification):
                    self._on_reply(self, self.waiting.popleft(), reply)
        except (hiredis.ProtocolError, IndexError) as error:  # IndexError: a reply that nobody asked for
            self._on_lost(self, f"its replies cannot be read: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.ended.set()
        self._on_lost(self, str(error or "closed by Redis"))

    def abort(self) -> None:
        """Close the connection at once. Bytes that arrive afterwards are not read."""
        transport, self._transport = self._transport, None
        if self._flushing is not None:
            self._flushing.cancel()
        if transport is not None:
            transport.abort()


class Multiplexed:
    """The one connection of a client, opened by the first call. A call waits for an answer, at most its time limit.

    The first call after the loss of the connection opens a new one, and waits for it. If opening fails, calls fail at
    once until one of the further attempts, which go on without calls, has succeeded.
    """

    leaves_on = NO_MASTER  # first words of error replies after which the connection is replaced

    def __init__(self, pool: ConnectionPool, step_s: float = STEP_S, silent_s: float = SILENT_S) -> None:
        self._pool = pool
        self._step_s = step_s
        self._most_silent_s = silent_s
        self._channel: Channel | None = None
        self._early: deque[Call] = deque()  # calls that wait for the connection that is being opened
        self._opening: asyncio.Task[None] | None = None
        self._away = ""  # why the last attempt to open a connection failed
        self._bytes = 0  # length of the commands of all calls that wait
        self._clock = 0.0  # seconds in which calls waited, without those in which the event loop was late
        self._timer: asyncio.TimerHandle | None = None
        self._silent_s = 0.0
        self._closed = False

    # ------------------------------------------------ calls

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
        """Send a call. command: its bytes, as ``PackedScript`` packs them. script: None for a plain Redis command.

        patient: no request waits for the answer, so the call may wait a moment to be written with others. moved: see
        ``Call``.
        """
        channel = self._channel
        waiting = self._early if channel is None else channel.waiting
        held = self._bytes + len(command)
        if self._closed or self._away or len(waiting) >= MOST_WAITING or held > MOST_BYTES:
            on_answer(None, FleetUnavailable(self._why_not()))
            return
        self._bytes = held
        due, last = self._clock + limit_s + self._step_s, time.monotonic() + limit_s + MOST_S
        call = Call(script, command, on_answer, due, last, moved)
        if self._timer is None:  # no other call waits
            self._silent_s = 0.0
            if channel is not None:
                channel.heard = False
                if why := self._is_over(channel):  # if all answers come quickly, the timer never checks this
                    self._lost(channel, why)
                    channel = None
            self._timer = asyncio.get_running_loop().call_later(self._step_s, self._tick)
        if channel is not None:
            channel.send(call, patient=patient)
            return
        self._early.append(call)
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())

    def _why_not(self) -> str:
        if self._closed:
            return "The connection to Redis is closed."
        return self._away or "Redis is away or slow: too many calls wait for it already."

    def _replied(self, channel: Channel, call: Call, reply: Any) -> None:
        self._bytes -= len(call.command)
        if isinstance(reply, hiredis.ReplyError):
            self._refused(channel, call, str(reply))
        elif call.on_answer is not None:
            call.on_answer(reply, None)
        if not channel.waiting and self._timer is not None and channel is self._channel:
            self._timer.cancel()  # no call waits: a replica at rest would wake for nothing
            self._timer = None

    def _refused(self, channel: Channel, call: Call, reply: str) -> None:
        word = reply.partition(" ")[0]
        if word == "NOSCRIPT" and call.script is not None and call.on_answer is not None and not call.again:
            self._load(channel, call, call.script)
            return
        if call.on_answer is not None:
            call.on_answer(None, refusal(reply))
        if word in self.leaves_on:
            self._lost(channel, reply)

    def _load(self, channel: Channel, call: Call, script: PackedScript) -> None:
        """Send SCRIPT LOAD for the call's script, unless it was sent just now, and then the call once more."""
        call.again = True
        if script.name not in channel.loading:
            channel.loading.add(script.name)
            self._bytes += len(script.load)
            channel.send(Call(script, script.load, lambda _, __: channel.loading.discard(script.name), NEVER, NEVER))
        self._bytes += len(call.command)
        channel.send(call)

    def _fail(self, call: Call, why: str) -> None:
        """Fail a call that was taken out of ``waiting``."""
        self._bytes -= len(call.command)
        if call.on_answer is not None:
            call.on_answer(None, FleetUnavailable(why))

    # ------------------------------------------------ time

    def _tick(self) -> None:
        """Fail calls whose time is up, and replace the connection if its server is silent or no master any more.

        The clock moves by one step even if the event loop is late, because a late loop also reads answers late.
        """
        self._timer = None
        now, channel = time.monotonic(), self._channel
        self._clock += self._step_s
        self._silent_s += self._step_s
        if channel is not None:
            if channel.heard:
                channel.heard, self._silent_s = False, 0.0
            if why := self._is_over(channel):
                self._lost(channel, why)
        self._give_up(now)
        if self._timer is None and (self._early or (self._channel is not None and self._channel.waiting)):
            self._timer = asyncio.get_running_loop().call_later(self._step_s, self._tick)

    def _is_over(self, channel: Channel) -> str:
        """Return why the connection should be replaced, else an empty string."""
        if self._silent_s >= self._most_silent_s:
            return f"not a byte for {self._most_silent_s:g} s while calls wait"
        if isinstance(self._pool, MasterPool):
            self._pool.look()
            if self._pool.master_address not in (None, channel.address):
                return "another server is the master"
        return ""

    def _give_up(self, now: float) -> None:
        clock = self._clock
        for call in [call for call in self._early if call.due <= clock or call.last <= now]:
            self._early.remove(call)
            self._fail(call, "Redis is away or slow: no connection within the time limit")
        if self._channel is None:
            return
        late = [call for call in self._channel.waiting if call.due <= clock or call.last <= now]
        for call in late:
            on_answer, call.on_answer = call.on_answer, None
            call.due = call.last = NEVER  # the call stays in ``waiting``, because its answer may still come
            if on_answer is not None:
                on_answer(None, FleetUnavailable("Redis is away or slow: no answer within the time limit"))

    # ------------------------------------------------ the connection

    async def _open(self) -> None:
        """Open a connection; if that fails, fail the calls that wait for it, and try again until it succeeds."""
        attempts = AsyncRetrying(wait=wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S))
        try:
            async for attempt in attempts:
                with attempt:
                    await self._connect()
        finally:
            self._opening = None

    async def _connect(self) -> None:
        channel = Channel(self._replied, self._lost)
        try:
            channel.use(await take_over(self._pool, channel))
        except Exception as error:
            self._away = str(failure(error))
            self._log(self._away)
            self._fail_early(self._away)
            raise
        self._away, self._channel = "", channel
        early, self._early = self._early, deque()
        for call in early:
            channel.send(call)

    def _lost(self, channel: Channel, why: str) -> None:
        """End this connection, and fail the calls that wait on it. The next call opens another connection."""
        channel.abort()
        if channel is not self._channel:
            return
        self._channel = None
        text = f"Redis is away or slow: the connection ended: {why}"
        if not self._closed:
            self._log(text)
        for call in channel.waiting:
            self._fail(call, text)
        channel.waiting.clear()

    def _fail_early(self, why: str) -> None:
        early, self._early = self._early, deque()
        for call in early:
            self._fail(call, why)

    def _log(self, text: str) -> None:
        logger.warning("the connection to Redis: %s", text)

    async def aclose(self) -> None:
        """Close the connection for good; calls that wait fail."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        self._fail_early(self._why_not())
        channel = self._channel
        if channel is not None:
            self._lost(channel, "closed")
            await channel.ended.wait()
