"""While some engine can serve, no request fails before its first byte, however its engines die.

Engines are processes, killed by SIGKILL: the kernel then ends a connection with FIN if the process had read all bytes,
and with RST if it had not. A request that kills every engine that reads it is given up after some deaths.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import aiohttp
import pytest
from tests.support.engines.killable import EngineProcess, EngineProcesses, Way, engine_processes
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.support.replicas.replica import Replica, replica

from warmfleet.pools import fleet_view as view
from warmfleet.prompt.request import TOKEN_BYTES
from warmfleet.routing.recovery.retries import BUDGET_MOST

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PROMPT = "a prompt that is long enough to have blocks of its own " * 20

#: The moment of an engine's death. ``reads``: after reading the request. ``unread``: the kernel has the request, which
#: the process never reads. ``refuses``: before the request, unnoticed. ``core``: only the engine's core dies.
Death = Literal["reads", "unread", "refuses", "core"]


class Case(NamedTuple):
    """``deaths``: of the engines that the request meets, in order. ``apart_s``: the time from reading to each death.

    ``kept``: each engine has a connection that another request left open.
    """

    name: str
    deaths: tuple[Death, ...]
    engines: int = 4
    apart_s: float = 0.0
    kept: bool = False
    way: Way = "silent"
    stream: bool = True
    settings: tuple[tuple[str, Any], ...] = ()
    redis: bool = True  # False: Redis is unreachable


SERVED = [
    Case("two at once", ("reads", "unread")),
    Case("two at once, over kept connections", ("reads", "unread"), kept=True),
    Case("two at once, a plain answer", ("reads", "unread"), stream=False),
    Case("two of three at once", ("reads", "unread"), engines=3),
    Case("three of four at once", ("reads", "unread", "unread")),
    Case("three of four, one unread, one refuses", ("unread", "refuses", "reads"), kept=True),
    Case("50 ms apart", ("reads", "reads"), apart_s=0.05),
    Case("500 ms apart", ("reads", "reads"), apart_s=0.5),
    Case("after the head of the stream", ("reads", "reads"), way="head"),
    Case("three of four, two of them read", ("reads", "reads", "refuses")),
    Case("two cores at once", ("core", "core"), way="core"),
    Case("two cores at once, a plain answer", ("core", "core"), way="core", stream=False),
    Case("a core and a process", ("core", "reads"), way="core"),
    Case("with hedging", ("reads", "unread"), settings=(("hedge_after_s", 0.3),)),
    Case("with continuation", ("reads", "unread"), settings=(("continue_greedy", True),)),
    Case("without Redis", ("reads", "unread"), redis=False),
    Case("without Redis, 50 ms apart", ("reads", "reads"), apart_s=0.05, redis=False),
    Case("nine of ten, which nobody knows", ("refuses",) * 9, engines=10),
]


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name.replace(" ", "-"))
async def test_a_request_is_served_while_an_engine_can(valkey_url: str, model: str, tmp_path: Path, case: Case) -> None:
    async with fleet_of(valkey_url, model, tmp_path, case) as (router, engines):
        status, _, answer = await under_deaths(router, engines, model, case)
        assert status == 200, answer
        if case.redis:
            await router.unloaded()


@pytest.mark.parametrize(("count", "deaths"), [(2, 2), (3, 2), (4, 3), (6, 3)])
async def test_a_request_that_kills_the_engines_that_read_it_is_stopped(
    valkey_url: str, model: str, tmp_path: Path, count: int, deaths: int
) -> None:
    case = Case("", tuple[Death, ...](["reads"] * deaths), engines=count)
    async with fleet_of(valkey_url, model, tmp_path, case) as (router, engines):
        status, _, answer = await under_deaths(router, engines, model, case)
        assert (status, json.loads(answer)["error"]["code"]) == (502, "upstream_gone")
        assert sum(upstream.alive and upstream.got == 0 for upstream in engines) == count - deaths


async def test_all_that_is_under_way_at_half_of_a_fleet_is_served_elsewhere(
    valkey_url: str, model: str, tmp_path: Path
) -> None:
    """The requests under way are more than a replica's saved budget of retries."""
    body = {"model": model, "prompt": PROMPT, "stream": True}
    async with fleet_of(valkey_url, model, tmp_path, Case("", ())) as (router, engines):
        engines.hold()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

            async def ask() -> int:
                async with http.post(f"{router.url}/v1/completions", json=body) as answer:
                    await answer.read()
                    return answer.status

            asked = [asyncio.create_task(ask()) for _ in range(4 * int(BUDGET_MOST))]
            await poll(lambda: sum(upstream.got for upstream in engines) == len(asked), 60, "all are under way")
            assert sum(upstream.got for upstream in engines[:2]) > 1.2 * BUDGET_MOST
            for upstream in engines[:2]:
                upstream.kill()
            engines.answer()
            assert Counter(await asyncio.gather(*asked)) == {200: len(asked)}


async def test_a_prompt_too_long_for_every_engine_passes_over_dead_ones(
    valkey_url: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "MAX_MODEL_LEN", 1_000)
    async with fleet_of(valkey_url, model, tmp_path, Case("", ())) as (router, engines):
        for upstream in engines[1:]:
            upstream.kill()
        status, _, _ = await router.post({"model": model, "prompt": "x" * (1_000 * TOKEN_BYTES + 1)})
        assert status == 200


async def under_deaths(
    router: Replica, engines: EngineProcesses, model: str, case: Case
) -> tuple[int, dict[str, str], bytes]:
    """The answer to a request under which engines die as the case says."""
    left = list[EngineProcess]()
    while case.kept and len(left) < len(engines):
        assert (await router.post({"model": model, "prompt": PROMPT}))[0] == 200
        left += [
            upstream for upstream in engines if upstream.got and upstream not in left
        ]  # in the order of round_robin
    left = left or [*engines]
    engines.hold()
    before = {upstream: upstream.got for upstream in engines}
    body = {"model": model, "prompt": PROMPT, "stream": case.stream, "temperature": 0}
    for upstream in left[: case.deaths.count("refuses")]:
        upstream.kill()
        left.remove(upstream)
    deaths = [death for death in case.deaths if death != "refuses"]
    frozen = [upstream for upstream in left if deaths[:1] == ["unread"]]
    for upstream in frozen:
        upstream.freeze()
    asked = asyncio.create_task(router.post(body))
    for number, death in enumerate(deaths):
        victim = await has_request(left, before, unread=death == "unread")
        left.remove(victim)
        if death != "unread":
            await asyncio.sleep(case.apart_s)
        if deaths[number + 1 : number + 2] == ["unread"]:
            for upstream in left:
                upstream.freeze()
        victim.kill_core() if death == "core" else victim.kill()
        if deaths[number + 1 : number + 2] != ["unread"]:
            for upstream in left:
                upstream.go_on()
    engines.answer()
    return await asked


async def has_request(engines: list[EngineProcess], before: dict[EngineProcess, int], *, unread: bool) -> EngineProcess:
    """The engine whose process or kernel has received the request."""
    found: list[EngineProcess] = []

    def has() -> bool:
        found[:] = [
            upstream for upstream in engines if (upstream.unread if unread else upstream.got > before[upstream])
        ]
        return bool(found)

    await poll(has, 20, "an engine has the request")
    return found[0]


@asynccontextmanager
async def fleet_of(
    valkey_url: str, model: str, folder: Path, case: Case
) -> AsyncIterator[tuple[Replica, EngineProcesses]]:
    async with AsyncExitStack() as stack:
        store = AsyncExitStack()
        if not case.redis:
            valkey_url = store.enter_context(server(valkey_binary()))
        engines = await stack.enter_async_context(engine_processes(model, folder, case.engines, case.way))
        settings = {"policy": "round_robin", "health_interval_s": 60.0, **dict(case.settings)}
        router = await stack.enter_async_context(
            replica(valkey_url, model, *(upstream.url for upstream in engines), **settings)
        )
        await store.aclose()
        yield router, engines
