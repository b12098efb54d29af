"""The connections (lines) to the masters of a Cluster: one for each master, whatever the number of pools on it.

A call goes to the master that owns the slot of its keys by the last answer of a Cluster node. Nodes are asked once a
second, and at once when a master does not answer. If a slot has moved since that answer, the call is sent on to the
master that the reply MOVED names. When a master is lost, only calls for its slots fail. While a slot migrates, some of
its keys are at one master and some at another (ASK, TRYAGAIN). A script cannot run on both, so such calls fail, and
requests fall back to a degraded choice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from warmfleet.errors import FleetUnavailable
from warmfleet.fleet.connection.multiplexed import MOST_WAITING, NO_MASTER, Multiplexed
from warmfleet.protocol.redis_address import LOOK_SECONDS, slot_of

if TYPE_CHECKING:
    from warmfleet.errors import WarmfleetError
    from warmfleet.fleet.connection.failover import Nodes
    from warmfleet.fleet.connection.multiplexed import Call, Channel, OnAnswer
    from warmfleet.fleet.connection.packing import PackedScript
    from warmfleet.protocol.redis_address import HostPort

logger = logging.getLogger("warmfleet.fleet.connection.masters")

DOUBT_SECONDS = 0.1  # least time between two questions to nodes while a master does not answer


class MasterLine(Multiplexed):
    """The connection for calls to one master; it stays open if the master loses a slot, for its other slots."""

    leaves_on = frozenset[str]()

    def __init__(self, masters: Masters, place: HostPort) -> None:
        super().__init__(masters.nodes.node_pool(place))
        self.place = place
        self._masters = masters

    @property
    def open(self) -> bool:
        return self._channel is not None

    @property
    def idle(self) -> bool:
        """Whether no call waits for an answer on this line."""
        return not self._early and (self._channel is None or not self._channel.waiting)

    def _refused(self, channel: Channel, call: Call, reply: str) -> None:
        word, _, rest = reply.partition(" ")
        on_answer = call.on_answer
        if word == "MOVED" and on_answer is not None and not call.moved:
            owner = self._masters.moved(rest, self.place[0])
            owner.send(call.script, call.command, call.due - self._clock, on_answer, moved=True)
            return
        if word in NO_MASTER:
            self._masters.doubt()
        super()._refused(channel, call, reply)

    def _lost(self, channel: Channel, why: str) -> None:
        super()._lost(channel, why)
        if not self._closed:
            self._masters.doubt()

    async def _connect(self) -> None:
        try:
            await super()._connect()
        except Exception:
            self._masters.doubt()
            raise

    def _log(self, text: str) -> None:
        logger.warning("the connection to the Redis master %s:%d: %s", *self.place, text)


class Held:
    """A call for a slot whose owner is not known yet. ``timer``: fails the call at its time limit."""

    __slots__ = ("command", "on_answer", "script", "slot", "timer")

    def __init__(
        self, slot: int, script: PackedScript | None, command: bytes, limit_s: float, on_answer: OnAnswer
    ) -> None:
        self.slot = slot
        self.script = script
        self.command = command
        self.on_answer = on_answer
        self.timer = asyncio.get_running_loop().call_later(limit_s, self.fail)

    def fail(self) -> None:
        on_answer, self.on_answer = self.on_answer, _ignore
        on_answer(None, FleetUnavailable("Redis is away or slow: no node of the Cluster has told who owns the slot"))

    def send(self, line: MasterLine) -> None:
        left_s = self.timer.when() - asyncio.get_running_loop().time()
        if not self.timer.cancelled() and left_s > 0:
            self.timer.cancel()
            line.send(self.script, self.command, left_s, self.on_answer)


def _ignore(_answer: object, _error: WarmfleetError | None) -> None:
    """Drop an answer that comes after the call has ended."""


class SlotLine:
    """Sends calls for keys with one hash tag on the MasterLine of the master that owns their slot at that moment."""

    def __init__(self, masters: Masters, tag: str) -> None:
        self._masters = masters
        self._tag = tag
        self._slot = masters.follow(tag)
        self._left = False

    def send(
        self,
        script: PackedScript | None,
        command: bytes,
        limit_s: float,
        on_answer: OnAnswer,
        *,
        patient: bool = False,
    ) -> None:
        """Send as ``Multiplexed.send`` does. While the slot's owner is unknown, the call waits for the nodes."""
        if self._masters.knows(self._slot):
            self._masters.line(self._slot).send(script, command, limit_s, on_answer, patient=patient)
        else:
            self._masters.hold(Held(self._slot, script, command, limit_s, on_answer))

    @property
    def master(self) -> object:
        """The owner of the slot as the nodes said last; this line while none is known."""
        return self._masters.owner(self._slot) or self

    def leave(self) -> None:
        """End the use of this line. Another line may have the same tag."""
        if not self._left:
            self._left = True
            self._masters.leave(self._tag)


class Masters:
    """The masters that own the hash slots of this replica's pools, and the connection (MasterLine) to each of them.

    If no node names the owner of a slot, its calls go to the first node of the URL, which refuses them.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self._slots: dict[str, int] = {}  # hash tag of a pool's keys -> its slot
        self._followers: Counter[str] = Counter()  # tag -> number of clients: a pool and its registry may share it
        self._owners: dict[int, HostPort] = {}  # slot -> its master, where that is known
        self._lines: dict[HostPort, MasterLine] = {}
        self._held: list[Held] = []
        self._looked_at = float("-inf")
        self._looking: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def follow(self, tag: str) -> int:
        """Keep looking up the owner of this tag's slot; return the slot. Ends after as many calls of ``leave``."""
        self._followers[tag] += 1
        self._slots[tag] = slot = slot_of(tag)
        return slot

    def leave(self, tag: str) -> None:
        self._followers[tag] -= 1
        if self._followers[tag]:
            return
        del self._followers[tag]
        slot = self._slots.pop(tag)
        if slot not in self._slots.values():
            self._owners.pop(slot, None)

    def knows(self, slot: int) -> bool:
        return slot in self._owners

    def owner(self, slot: int) -> HostPort | None:
        return self._owners.get(slot)

    def hold(self, one: Held) -> None:
        """Send this call once a node has named the owner of its slot."""
        if self._closed or len(self._held) >= MOST_WAITING:
            one.timer.cancel()
            one.fail()
            return
        self._held.append(one)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look(0.0))

    def line(self, slot: int) -> MasterLine:
        """Return the line to the owner of this slot, which is known."""
        owner = self._owners[slot]
        line = self._lines.get(owner) or self._open(owner)
        self.look(LOOK_SECONDS if line.open else DOUBT_SECONDS)
        return line

    def _open(self, place: HostPort) -> MasterLine:
        self._lines[place] = made = MasterLine(self, place)
        return made

    def moved(self, rest: str, asked: str) -> MasterLine:
        """Return the line to the master that a reply MOVED names. rest: of the reply, ``SLOT HOST:PORT``."""
        slot, _, place = rest.partition(" ")
        host, _, port = place.rpartition(":")
        self._owners[int(slot)] = (host if host not in ("", "?") else asked, int(port))
        self.doubt()
        return self.line(int(slot))

    def look(self, every_s: float) -> None:
        """Ask a node in the background who owns the slots, unless that was asked within ``every_s``."""
        now = time.monotonic()
        if now < self._looked_at + every_s or self._closed or (self._looking is not None and not self._looking.done()):
            return
        self._looked_at = now
        self._looking = asyncio.ensure_future(self._look(every_s / 2))

    def doubt(self) -> None:
        """Ask for the owners of slots again soon, because a master has refused a call or has not answered."""
        self.look(DOUBT_SECONDS)

    async def _look(self, max_age_s: float) -> None:
        try:
            await self._ask(max_age_s)
            # Ask again if a pool was added while the nodes were asked. Slots of pools that have left are not looked up.
            while any(call.slot in self._slots.values() and call.slot not in self._owners for call in self._held):
                await self._ask(max_age_s)
        finally:
            held, self._held = self._held, []
            for call in held:
                call.send(self.line(call.slot)) if call.slot in self._owners else call.fail()
        used = set(self._owners.values())
        for place, line in list(self._lines.items()):
            if place not in used and line.idle:
                self._close_soon(self._lines.pop(place))

    async def _ask(self, max_age_s: float) -> None:
        for tag, slot in list(self._slots.items()):
            owner = self._owners.get(slot, self.nodes.address.nodes[0])
            with suppress(RedisError, OSError):  # the master that was last named stays valid
                owner = await self.nodes.locator.discover_master(tag, max_age_s)
            if tag in self._slots:
                self._owners[slot] = owner

    def _close_soon(self, line: MasterLine) -> None:
        task = asyncio.ensure_future(line.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Close every line for good; calls that wait fail."""
        self._closed = True
        tasks: set[asyncio.Task[Any]] = set(self._closing)
        if self._looking is not None:
            self._looking.cancel()
            tasks.add(self._looking)
        if tasks:
            await asyncio.wait(tasks)
        for line in self._lines.values():
            await line.aclose()
