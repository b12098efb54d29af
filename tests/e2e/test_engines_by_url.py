"""Engines that joined by themselves, as real processes, are listed by their URLs, too, in several spellings."""

from __future__ import annotations

import asyncio
import json
from itertools import cycle
from typing import TYPE_CHECKING

from tests.support.replicas.doctor import doctor
from tests.support.replicas.replica import replica

if TYPE_CHECKING:
    from warmfleet.cli.local.stack import Stack

SPELLINGS = ("http://127.0.0.1:{}", "http://localhost:{}", "HTTP://0.0.0.0:{}/v1")
ROUND_S = 0.2


async def test_engines_with_the_plugin_that_are_listed_are_booked_once(stack: Stack) -> None:
    ports = [engine.url.rpartition(":")[2] for engine in stack.engines]
    engines = [spelling.format(port) for spelling, port in zip(cycle(SPELLINGS), ports, strict=False)]
    async with replica(stack.redis_url, "demo", *engines, health_interval_s=ROUND_S, decide_timeout_s=2.0) as router:
        seen = set[tuple[str, str]]()
        for _ in range(20):
            workers = json.loads((await router.get("/workers"))[1])["models"][0]["workers"]
            seen.update((worker["worker_id"], worker["state"]) for worker in workers)
            await asyncio.sleep(ROUND_S / 2)  # several rounds of checks
        assert {state for _, state in seen} == {"proven"}
        assert len(seen) == len(ports)
        told = await doctor(stack.redis_url, "demo", static_workers=tuple(engines))
        listed = [line for line in told.printed.splitlines() if " listed: " in line]
        assert len(listed) == len(ports), told.printed
        assert all("is the worker sim-" in line and "joined by itself" in line for line in listed), listed
