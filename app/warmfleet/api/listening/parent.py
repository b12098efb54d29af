"""The socket between a replica and the parent that runs several on the same ports (``warmfleet serve --workers``).

The replica reports once that it is ready, and from then on every second that it is alive: if its event loop hangs, the
reports end, and the parent replaces the replica. The parent sends the list of sockets on which the replica listens, and
again each change. If the list is empty, or the parent has ended, the replica stops as after SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

logger = logging.getLogger("warmfleet.api.listening")

READY, ALIVE = b"ready\n", b"alive\n"
HEARTBEAT_S = 1.0  # time between two reports that the replica is alive
READY_LOOK_S = 0.05
LAST_REQUESTS_S = 0.2  # time from closing the sockets to draining: connections accepted last are served in it


@dataclass(frozen=True, slots=True)
class Listening:
    """The sockets to listen on. clients: indices of clients' sockets. operators: whether on the operators', too."""

    clients: tuple[int, ...] = ()
    operators: bool = False

    def line(self) -> bytes:
        """Return the line of text by which the parent sends this message."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> Listening:
        """Parse a line that ``line`` made."""
        told = json.loads(line)
        return cls(tuple(told["clients"]), operators=told["operators"])


RETIRED = Listening()  # the order to stop, for a replica that another one replaces


class Parent:
    """The replica's end of the socket to its parent."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    async def obey(
        self, listen: Callable[[Listening], Awaitable[None]], stop: Callable[[], None], unready: Callable[[], str]
    ) -> None:
        """Report READY once ``unready()`` is ""; ``listen`` as the parent orders; ``stop`` if retired or orphaned."""
        reader, writer = await asyncio.open_unix_connection(sock=self._line)
        report = asyncio.create_task(self._report(writer, unready))
        try:
            while line := await reader.readline():
                told = Listening.read(line)
                await listen(told)
                if told == RETIRED:
                    await asyncio.sleep(LAST_REQUESTS_S)
                    break
        except OSError:
            logger.exception("the parent's orders cannot be followed: this replica stops")
        finally:
            report.cancel()
            writer.close()
        stop()

    async def _report(self, writer: asyncio.StreamWriter, unready: Callable[[], str]) -> None:
        while unready():  # noqa: ASYNC110  no single event makes a replica ready
            await asyncio.sleep(READY_LOOK_S)
        writer.write(READY)
        while True:
            writer.write(ALIVE)
            await asyncio.sleep(HEARTBEAT_S)
