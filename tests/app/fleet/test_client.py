"""Connection and scripts: errors are the router's own, a slow or absent Redis is noticed, lost scripts are reloaded."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
import redis.asyncio as aioredis
from redis.asyncio.connection import ConnectionPool
from redis.exceptions import ResponseError

from warmfleet.errors import BadArgument, CancelledReservation, FleetUnavailable, NoWorker
from warmfleet.fleet import Fleet, Question, Timeouts, connect
from warmfleet.fleet.client import redis_errors
from warmfleet.fleet.connection.cancellable import CancellableTCP, CancellableTLS, CancellableUnix
from warmfleet.fleet.script_loader import script_source

if TYPE_CHECKING:
    from pathlib import Path
from typing import Any, cast

ASK = Question("wf-1", (), 10, 20)


async def test_nobody_listens(tmp_path: Path, model: str) -> None:
    fleet = Fleet(connect(f"unix://{tmp_path}/nothing"), model)
    with pytest.raises(FleetUnavailable, match="away"):
        await fleet.bookings.decide(ASK)
    with pytest.raises(FleetUnavailable):
        await fleet.workers.read()
    await fleet.close()


async def test_a_redis_that_hangs_is_given_up_in_time(tmp_path: Path, model: str) -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(hang, tmp_path / "s")
    fleet = Fleet(connect(f"unix://{tmp_path}/s"), model, timeouts=Timeouts(request_s=0.05))
    started = time.monotonic()
    with pytest.raises(FleetUnavailable, match="slow"):
        await fleet.bookings.decide(ASK)
    assert time.monotonic() - started < 10
    await fleet.close()
    server.close()


async def test_a_call_that_was_given_up_does_not_answer_the_next_one(valkey_url: str, model: str) -> None:
    client = connect(valkey_url, max_connections=1)
    fleet = Fleet(client, model, timeouts=Timeouts(request_s=5))
    other = aioredis.Redis.from_url(valkey_url)
    await fleet.bookings.settle("wf-warm", "finished")
    await other.client_pause(60_000, all=False)  # every script waits
    with pytest.raises(FleetUnavailable):
        await fleet.scripts.run("settle", fleet.keys.prefix, "wf-a", "failed", 60_000, 0, timeout_s=0.05)
    await other.client_unpause()
    assert await fleet.bookings.settle("wf-b", "finished") == "UNKNOWN"
    assert await fleet.index.counts() == {}
    await other.aclose()
    await fleet.close()


async def test_a_script_that_redis_lost_is_loaded_again(fleet: Fleet, store: aioredis.Redis) -> None:
    assert await fleet.bookings.settle("wf-1", "finished") == "UNKNOWN"
    await store.script_flush()
    assert await fleet.bookings.settle("wf-1", "finished") == "UNKNOWN"


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ("NO_WORKER none", NoWorker),
        ("CANCELLED wf-1", CancelledReservation),
        ("BAD_ARGUMENT x", BadArgument),
        ("OOM command not allowed", FleetUnavailable),
        ("ERR anything", FleetUnavailable),
    ],
)
def test_error_codes(reply: str, error: type[Exception]) -> None:
    with pytest.raises(error), redis_errors():
        raise ResponseError(reply)


def test_a_script_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        script_source("nothing")


async def test_a_single_server_has_redis_pys_own_pool(valkey_url: str) -> None:
    for url, kind in (
        (valkey_url, CancellableUnix),
        ("redis://h", CancellableTCP),
        ("rediss://h", CancellableTLS),
    ):
        pool = cast("Any", connect(url).connection_pool)
        assert (type(pool), type(pool.make_connection())) == (ConnectionPool, kind)


async def test_no_retries_inside_redis_py(valkey_url: str) -> None:
    client = connect(valkey_url)
    assert cast("Any", client.connection_pool).make_connection().retry.get_retries() == 0
    await client.aclose()
