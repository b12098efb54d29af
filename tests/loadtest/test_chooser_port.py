"""The port of a chooser: requests go where it says and wait for their turn; who hangs up is forgotten."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.support.engines.simulated import DEMO, config, demo_identity, running
from tests.support.polling import poll

from warmfleet_loadtest.engine import listening, main
from warmfleet_loadtest.simulator import engine_core
from warmfleet_loadtest.simulator.choosers import chooser_port
from warmfleet_loadtest.simulator.choosers.chooser_port import ChooserApi, ChosenCore
from warmfleet_loadtest.simulator.step_costs import StepCosts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from warmfleet_loadtest.simulator.scheduler import Output, Request

SLOW = config(StepCosts(base_s=0.0, prefill_token_s=4e-4), mode="fcfs")


class Held:
    """asyncio as the simulator sees it: no time passes, and no step ends, until ``go_on`` is called."""

    def __init__(self) -> None:
        self._goes_on = asyncio.Event()
        self._began = asyncio.get_running_loop().time()
        self._stood_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def get_running_loop(self) -> Held:
        return self

    def time(self) -> float:
        return asyncio.get_running_loop().time() - self._stood_s if self._goes_on.is_set() else self._began

    async def sleep(self, seconds: float) -> None:
        await self._goes_on.wait()
        await asyncio.sleep(seconds)

    def go_on(self) -> None:
        self._stood_s = asyncio.get_running_loop().time() - self._began
        self._goes_on.set()


@asynccontextmanager
async def chosen(name: str) -> AsyncIterator[tuple[httpx.AsyncClient, ChosenCore]]:
    async with running(SLOW) as first, running(SLOW) as second:
        core = ChosenCore([first.engine.core, second.engine.core], name)
        front = await listening(ChooserApi(core, demo_identity(), DEMO).app(), "127.0.0.1", 0)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{front.addresses[0][1]}", timeout=60) as client:
            try:
                yield client, core
            finally:
                await front.cleanup()


async def ask(client: httpx.AsyncClient, tokens: int, first: int | None = None) -> int:
    """Ask for one token; returns the cached tokens of the prompt, which is new unless ``first`` is given."""
    start = uuid.uuid4().int % 3_000 if first is None else first
    body: dict[str, Any] = {"model": "demo", "prompt": list(range(300 + start, 300 + start + tokens)), "max_tokens": 1}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_the_oracle_goes_where_the_prefix_is_and_around_who_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with chosen("oracle") as (client, core):
        await ask(client, 320, first=0)
        assert await ask(client, 320, first=0) == 304
        monkeypatch.setattr(engine_core, "asyncio", held := Held())
        async with asyncio.TaskGroup() as group:
            for number in range(2):
                group.create_task(ask(client, 320, first=1_000 + number))
            await poll(lambda: all(engine.scheduler.running for engine in core._cores), what="each engine has one")
            held.go_on()


async def test_the_shortest_that_waits_goes_first_and_who_hangs_up_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent, put = list[int](), engine_core.EngineCore.put

    def noted(core: engine_core.EngineCore, request: Request, sink: asyncio.Queue[Output]) -> None:
        sent.append(request.prompt_tokens)
        put(core, request, sink)

    monkeypatch.setattr(engine_core.EngineCore, "put", noted)
    for _ in range(10):
        sent.clear()
        await _seven_hundred_wait_longest(monkeypatch)
        assert sorted(sent[:2]) == [900, 901]
        assert sorted(sent[2:]) == [80, 90, 700]
        if sent[2:] == [80, 90, 700]:  # the chooser thinks otherwise of an engine whose step ends late
            return
    pytest.fail(f"sent in this order: {sent}")


async def _seven_hundred_wait_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    for module in (engine_core, chooser_port):
        monkeypatch.setattr(module, "asyncio", held)
    async with chosen("central") as (client, core), asyncio.TaskGroup() as group:
        for tokens in (900, 901):
            group.create_task(ask(client, tokens))
        await poll(lambda: all(engine.scheduler.running for engine in core._cores), what="each engine has one")
        impatient = group.create_task(ask(client, 650))
        for tokens in (700, 80, 90):
            group.create_task(ask(client, tokens))
        await poll(lambda: len(core._sinks) == 4, what="the others are kept back")
        assert not any(engine.scheduler.waiting for engine in core._cores)
        impatient.cancel()
        await poll(lambda: len(core._sinks) == 3, what="it is forgotten")
        held.go_on()
    assert sum(engine.scheduler.totals.prompt_tokens for engine in core._cores) == 900 + 901 + 700 + 80 + 90


async def test_a_prompt_that_fits_nowhere_is_refused_at_once() -> None:
    async with chosen("central") as (client, _engines):
        body = {"model": "demo", "prompt": [300] * 2_000, "max_tokens": 1}
        assert (await client.post("/v1/completions", json=body)).status_code == 400


def test_a_chooser_beside_routers_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--chooser", "oracle", "--redis", "unix:///nowhere"])
    assert ended.value.code == 2
    assert "--chooser" in capsys.readouterr().err
