"""A fleet of one pool becomes one of two while it serves: engines move with their caches, and no request fails."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from typing import TYPE_CHECKING

import pytest
import redis
from tests.support.engines.simulated import simulated
from tests.support.polling import poll
from tests.support.replicas.replica import replica

from warmfleet.__main__ import main
from warmfleet.cli.pools import command
from warmfleet.cli.terminal.output import show
from warmfleet.cli.workers import parts_of
from warmfleet.protocol.wire import Keys
from warmfleet_worker import pool_assignment
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from tests.support.replicas.replica import Replica


class Clients:
    """Clients that send one request after another. ``served``: the answers' pools; ``statuses``: their statuses."""

    def __init__(self, router: Replica, model: str, count: int) -> None:
        self.served: set[str] = set()
        self.statuses: list[int] = []
        self._router = router
        self._model = model
        self._ended = asyncio.Event()
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(count)]

    async def _client(self, first: int) -> None:
        for number in itertools.count():
            if self._ended.is_set():
                return
            prompt = [3 + first, *divmod(number, 100), *range(10, 200)]  # a new one each time: no engine is preferred
            asked = {"model": self._model, "prompt": prompt, "max_tokens": 2}
            status, headers, _ = await self._router.post(asked)
            self.statuses.append(status)
            self.served.add(headers.get("x-warmfleet-pool", ""))
            await asyncio.sleep(0.01)

    async def end(self) -> None:
        self._ended.set()
        await asyncio.gather(*self._tasks)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines and commands follow the registry of pools at once."""
    for module, name, seconds in (
        (pool_assignment, "ASK_SECONDS", 0.2),
        (pool_assignment, "SETTLE_MS", 1_000),
        (wire, "HEARTBEAT_SECONDS", 0.2),
        (command, "LET_GO_S", 0.5),
    ):
        monkeypatch.setattr(module, name, seconds)


async def told_of(router: Replica, model: str) -> bool:
    """Whether a replica shows all workers of the old pool as moved instead of dead."""
    answers = [json.loads((await router.get(path))[1])["models"] for path in ("/workers", "/status.json")]
    old, page = [next(pool for pool in answer if pool["model"] == model) for answer in answers]
    if {old["pool_state"], page["pool_state"]} != {"moving"}:
        return False
    rows = [*old["workers"], *({**row, "why": row["reason"]} for row in page["workers"])]
    if len(rows) < 6 or any(row["state"] != "left" or not row["why"].startswith("moved to") for row in rows):
        return False
    assert {row["why"] for row in rows} <= {f"moved to {model}#1", f"moved to {model}#2"}
    assert {row["remedy"] for row in rows} == {""}
    shown = io.StringIO()
    show(shown, parts_of({"models": [old]}))
    assert "0 of 0 workers take requests" in shown.getvalue()
    assert "its workers move to other pools" in shown.getvalue()
    assert "a.0: moved to" in shown.getvalue()
    return True


def only(clients: Clients, *pools: str) -> bool:
    """Whether all of these pools have served, and no other since this was last called."""
    if not clients.served <= {*pools}:
        clients.served.clear()
    return clients.served == {*pools}


@pytest.mark.usefixtures("soon")
async def test_a_fleet_is_split_while_it_serves(
    valkey_url: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    new = (f"{model}#1", f"{model}#2")

    async def pools(*words: str) -> bool:
        done = await asyncio.to_thread(main, ["pools", *words, "--redis", valkey_url, "--model", model]) == 0
        capsys.readouterr()
        return done

    async with (
        simulated(valkey_url, model, "a"),
        simulated(valkey_url, model, "b"),
        simulated(valkey_url, model, "c"),
        replica(valkey_url, model, pools_interval_s=0.1, leave_s=1.0) as router,
    ):
        await router.routable(3)
        clients = Clients(router, model, 8)
        try:
            assert await pools("add", *new)
            assert await pools("drain", model, "--move")
            await poll(lambda: told_of(router, model), 60, "the workers are told to have moved")
            await poll(lambda: pools("remove", model), 60, "all engines have moved: the pool may go", every_s=0.3)
            await poll(lambda: only(clients, *new), 30, "both new pools serve, and no other")
        finally:
            await clients.end()
        assert {*clients.statuses} == {200}
        with redis.Redis.from_url(valkey_url) as store:
            left = {Keys(model).pools.encode(), Keys(model).placement.encode()}
            pattern = Keys(model).prefix + "*"
            await poll(lambda: {*store.scan_iter(pattern, count=1_000)} == left, 20, "no key of it is left")
