"""Takes over a connection that redis-py has opened and authenticated, to read and write with another protocol class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redis.exceptions import ConnectionError as RedisConnectionError

if TYPE_CHECKING:
    import asyncio

    from redis.asyncio.connection import ConnectionPool


@dataclass(frozen=True, slots=True)
class TakenOver:
    """An open connection. address: the server's host and port; None for a socket in the file system.

    writer: keep a reference to it as long as the transport is used, because a deleted writer closes its transport.
    """

    transport: asyncio.Transport
    address: tuple[str, int] | None
    writer: asyncio.StreamWriter


async def take_over(pool: ConnectionPool, protocol: asyncio.Protocol) -> TakenOver:
    """Open a connection as ``pool`` does, and let ``protocol`` read what comes on it. Raises what redis-py raises."""
    connection: Any = pool.make_connection()  # type: ignore[no-untyped-call]  # redis-py
    try:
        await connection.connect()
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
    reader, writer = connection._reader, connection._writer  # noqa: SLF001  redis-py has no public name for them
    connection._reader = connection._writer = None  # noqa: SLF001  redis-py must not close the connection
    if reader.at_eof() or writer.transport.is_closing():
        writer.close()
        raise RedisConnectionError("Redis closed the new connection at once")
    writer.transport.set_protocol(protocol)
    address = (connection.host, connection.port) if hasattr(connection, "host") else None
    return TakenOver(writer.transport, address, writer)
