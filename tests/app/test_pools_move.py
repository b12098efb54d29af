"""A fleet of one pool becomes one of two while it serves: engines move with their caches, and no request fails."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import redis
from tests.app.replica import replica
from tests.app.simulated import simulated
from tests.conftest import poll

from warmfleet.__main__ import main
from warmfleet.background import pool_changes
from warmfleet.cli.pools import command
from warmfleet.protocol.wire import Keys
from warmfleet_worker import seat as seats
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    import pytest


async def test_a_fleet_is_split_while_it_serves(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, name, seconds in (
        (seats, "ASK_SECONDS", 0.2),
        (seats, "SETTLE_MS", 1_000),
        (wire, "HEARTBEAT_SECONDS", 0.2),
        (command, "LET_GO_S", 0.5),
        (pool_changes, "FOLLOW_INTERVAL_S", 0.1),
        (pool_changes, "LEAVE_S", 1.0),
    ):
        monkeypatch.setattr(module, name, seconds)
    new = (f"{model}#1", f"{model}#2")

    async def pools(*words: str) -> bool:
        done = await asyncio.to_thread(main, ["pools", *words, "--redis", valkey_url, "--model", model]) == 0
        capsys.readouterr()
        return done

    async with (
        simulated(valkey_url, model, "a"),
        simulated(valkey_url, model, "b"),
        simulated(valkey_url, model, "c"),
        replica(valkey_url, model) as router,
    ):
        await router.routable(3)
        served: set[str] = set()
        statuses: list[int] = []
        ended = asyncio.Event()

        async def client(first: int) -> None:
            for number in itertools.count():
                if ended.is_set():
                    return
                prompt = [3 + first, *range(10, 200), 3 + number % 5]
                status, headers, _ = await router.post({"model": model, "prompt": prompt, "max_tokens": 2})
                statuses.append(status)
                served.add(headers.get("x-warmfleet-pool", ""))
                await asyncio.sleep(0.01)

        clients = [asyncio.create_task(client(number)) for number in range(8)]
        try:
            assert await pools("add", *new)
            assert await pools("drain", model, "--move")
            await poll(lambda: pools("remove", model), 60, "all engines have moved: the pool may go", every_s=0.3)
            served.clear()
            await poll(lambda: served == {*new}, 30, "both new pools serve")
        finally:
            ended.set()
            await asyncio.gather(*clients)
        assert set(statuses) == {200}
        with redis.Redis.from_url(valkey_url) as client_of_redis:
            left = {Keys(model).pools.encode(), Keys(model).placement.encode()}
            pattern = Keys(model).prefix + "*"
            await poll(lambda: {*client_of_redis.scan_iter(pattern, count=1_000)} == left, 20, "no key of it is left")
