"""The port of a chooser: requests go where it says and wait for their turn; who hangs up is forgotten."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.conftest import poll
from tests.loadtest.engines import DEMO, config, identity, running

from warmfleet_loadtest.engine import listening, main
from warmfleet_loadtest.simulator.choosers.chooser_port import ChooserApi, ChosenCore
from warmfleet_loadtest.simulator.step_costs import StepCosts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from warmfleet_loadtest.engine import Engine

SLOW = config(StepCosts(base_s=0.0, prefill_token_s=4e-4), mode="fcfs")


@asynccontextmanager
async def chosen(name: str) -> AsyncIterator[tuple[httpx.AsyncClient, list[Engine]]]:
    async with running(SLOW) as first, running(SLOW) as second:
        engines = [first.engine, second.engine]
        core = ChosenCore([engine.core for engine in engines], name)
        front = await listening(ChooserApi(core, identity(), DEMO).app(), "127.0.0.1", 0)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{front.addresses[0][1]}") as client:
            try:
                yield client, engines
            finally:
                await front.cleanup()


async def ask(client: httpx.AsyncClient, tokens: int, first: int | None = None) -> int:
    """Ask for one token; returns the cached tokens of the prompt, which is new unless ``first`` is given."""
    start = uuid.uuid4().int % 3_000 if first is None else first
    body: dict[str, Any] = {"model": "demo", "prompt": list(range(300 + start, 300 + start + tokens)), "max_tokens": 1}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_the_oracle_goes_where_the_prefix_is_and_around_who_is_busy() -> None:
    async with chosen("oracle") as (client, engines):
        await ask(client, 320, first=0)
        assert await ask(client, 320, first=0) == 304
        await asyncio.gather(*(ask(client, 320, first=1_000 + one) for one in range(2)))
        assert all(engine.core.busy_s > 0.1 for engine in engines)


async def test_the_shortest_that_waits_goes_first_and_who_hangs_up_is_forgotten() -> None:
    async with chosen("central") as (client, engines):
        ended: list[int] = []

        async def noted(tokens: int) -> None:
            await ask(client, tokens)
            ended.append(tokens)

        async with asyncio.TaskGroup() as group:
            group.create_task(noted(900))
            group.create_task(noted(901))
            await poll(lambda: all(engine.core.scheduler.running for engine in engines))
            group.create_task(noted(700))
            impatient = asyncio.create_task(ask(client, 650))
            group.create_task(noted(80))
            group.create_task(noted(90))
            await asyncio.sleep(0.1)
            assert not any(engine.core.scheduler.waiting for engine in engines)
            impatient.cancel()
        assert ended[-1] == 700
        assert set(ended) == {900, 901, 700, 80, 90}
        assert sum(engine.core.scheduler.totals.prompt_tokens for engine in engines) == 900 + 901 + 700 + 80 + 90


async def test_a_prompt_that_fits_nowhere_is_refused_at_once() -> None:
    async with chosen("central") as (client, _engines):
        body = {"model": "demo", "prompt": [300] * 2_000, "max_tokens": 1}
        assert (await client.post("/v1/completions", json=body)).status_code == 400


def test_a_chooser_beside_routers_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--chooser", "oracle", "--redis", "unix:///nowhere"])
    assert ended.value.code == 2
    assert "--chooser" in capsys.readouterr().err
