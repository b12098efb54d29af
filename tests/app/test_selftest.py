"""A worker that is not what it says it is gives itself away when it joins; and so does one that says that it differs."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
from tests.app.replica import Replica, replica
from tests.app.simulated import Kind, simulated
from tests.conftest import poll

from warmfleet import probe

if TYPE_CHECKING:
    from warmfleet.fleet import WorkerView

LIARS: dict[Kind, str] = {
    "template": "does not render a chat",
    "tokenizer": "does not make token ids of a text",
    "seed": "not hashed as its scheme says",
    "algorithm": "not hashed as its scheme says",
    "block size": "not hashed as its scheme says",
}


async def seen(router: Replica, wanted: int) -> dict[str, WorkerView]:
    """Every worker by the name of its server, once as many have a result of a probe."""

    async def tested() -> dict[str, WorkerView] | None:
        found = {str(view.record["server_id"]): view for view in await router.fleet.workers()}
        return found if sum(view.proof != "pending" for view in found.values()) == wanted else None

    found = await poll(tested, 30, f"{wanted} workers tested")
    assert isinstance(found, dict)
    return found


async def test_liars_are_routed_by_load_only_and_the_reason_is_told(valkey_url: str, model: str) -> None:
    async with AsyncExitStack() as stack:
        right = await stack.enter_async_context(simulated(valkey_url, model, "right"))
        await stack.enter_async_context(simulated(valkey_url, model, "elsewhere", url=right.url))
        for kind in LIARS:
            await stack.enter_async_context(simulated(valkey_url, model, kind.split()[0], kind, lies=True))
        router = await stack.enter_async_context(replica(valkey_url, model, probe_timeout_s=1.0))
        workers = await seen(router, 7)
        assert workers.pop("right").proof == "proven"
        assert "its stream tells nothing of a probe" in workers.pop("elsewhere").record["reason"]
        for kind, reason in LIARS.items():
            view = workers[kind.split()[0]]
            assert (view.proof, view.routable) == ("identity", True), kind
            assert reason in view.record["reason"], view.record["reason"]
        await router.routable(7)
        assert await router.metric('warmfleet_workers{state="identity"}') == 6
        assert "does not render a chat" in (await router.get("/workers"))[1].decode()
        await router.unloaded()
