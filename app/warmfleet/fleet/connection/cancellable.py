"""redis-py's connections, changed so that a cancelled call always ends.

redis-py writes each command under ``asyncio.wait_for``. Before Python 3.12 that function returns its result, in place
of raising the cancellation, if both come in the same turn of the event loop. The caller then never learns that it was
cancelled: a request goes on although its client has hung up, and a background task runs for ever.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.exceptions import TimeoutError as RedisTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from redis.asyncio.connection import AbstractConnection

    Base = AbstractConnection
else:
    Base = object


class Cancellable(Base):
    """The first base of a connection class: limits writes by ``asyncio.timeout``, as ``wait_for`` may lose a cancel."""

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        """Write one command; connect first if need be. Raises redis-py's TimeoutError and ConnectionError."""
        if not self.is_connected:
            await self.connect_check_health(check_health=False)
        if check_health:
            await self.check_health()  # type: ignore[no-untyped-call]  # redis-py
        limit, self.socket_timeout = self.socket_timeout, None  # redis-py uses wait_for only under a limit of its own
        try:
            async with asyncio.timeout(limit):
                await super().send_packed_command(command, check_health=False)
        except TimeoutError:  # the connection is closed already, as after every write that was not completed
            raise RedisTimeoutError("Timeout writing to socket") from None
        finally:
            self.socket_timeout = limit


class CancellableTCP(Cancellable, Connection):
    pass


class CancellableTLS(Cancellable, SSLConnection):
    pass


class CancellableUnix(Cancellable, UnixDomainSocketConnection):
    pass


def connection_options(url: str) -> dict[str, Any]:
    """Return the options of a connection pool for a redis://, rediss:// or unix:// URL, with the connection's class."""
    options: dict[str, Any] = dict(parse_url(url))
    classes = {SSLConnection: CancellableTLS, UnixDomainSocketConnection: CancellableUnix}
    options["connection_class"] = classes.get(options.get("connection_class"), CancellableTCP)  # type: ignore[arg-type]  # None: TCP
    return options
