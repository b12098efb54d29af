"""Split requests while engines hang, die and leave, links are slow and clients hang up: no answer is wrong."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.app.routing.test_split_requests import PATHS, TEXT, streamed_text, text_of
from tests.support.engines.simulated import identity
from tests.support.engines.transferring import CONSUMER, PRODUCER, transferring
from tests.support.fleet.split_requests import SplitFleet, split_fleet

from warmfleet.errors import WarmfleetError
from warmfleet.routing import prefill_booking, prefills
from warmfleet_loadtest.simulator.step_costs import load_costs

if TYPE_CHECKING:
    from tests.support.engines.transferring import Transferring

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.long(
        minutes=4,
        shows=(
            "with NIXL and with Mooncake, 400 requests over three prefill and three decode engines that hang, die and "
            "have slow links, while clients hang up: every answer is right, and no engine sees parameters used twice, "
            "late or for another prompt"
        ),
    ),
]
REQUESTS, AT_ONCE, PROMPTS = 400, 8, 400


async def ask(fleet: SplitFleet, right: Transferring, rng: random.Random) -> str:
    """Ask for one of a few prompts; return what became of it. Asserts that an answer is that of one engine."""
    path, stream = rng.choice([*PATHS]), rng.random() < 0.6
    body = PATHS[path](f"{rng.randrange(PROMPTS)} {TEXT}") | {"max_tokens": rng.choice((4, 30))}
    leaves_after_s = rng.uniform(0.0, 0.8) if rng.random() < 0.15 else 60.0
    try:
        async with asyncio.timeout(leaves_after_s):
            status, headers, said = await fleet.router.post(body | {"stream": stream}, path)
    except TimeoutError:
        assert leaves_after_s < 60.0, "nobody answers"
        return "left"
    assert status == 200, said
    if b'"error"' in said and stream:
        return "cut"
    expected = (await right.http.post(path, json=body | {"model": "demo"})).json()
    assert (streamed_text(said) if stream else text_of(json.loads(said))) == text_of(expected)
    return "split" if "x-warmfleet-prefill-worker" in headers else "alone"


async def strike(fleet: SplitFleet, rng: random.Random, ends: asyncio.Event) -> None:
    """Order faults until the requests have ended; of each role one engine dies."""
    number = 0
    while not ends.is_set():
        number += 1
        with suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0.2, 0.8)):
                await ends.wait()
        if number % 15 == 1:
            with suppress(WarmfleetError):  # on a busy machine
                await fleet.busy("d0.0", "d1.0")
        if number == 8:
            fleet.decode[2].engine.die()
        if number == 14:
            fleet.prefill[2].engine.die()
        engine, hangs = rng.choice(fleet.prefill[:2]), rng.random() < 0.3
        if not hangs:
            await engine.order(bytes_per_s=rng.choice((1e8, 1e10)), handshake_s=rng.choice((0.0, 0.2)))
            continue
        await engine.order(hang=rng.choice(("prefill", "answered", "read")))
        await asyncio.sleep(rng.uniform(0.1, 1.0))
        await engine.order(resume=True)


@pytest.mark.parametrize("connector", ["NixlConnector", "MooncakeConnector"])
async def test_no_answer_is_wrong(valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch, connector: str) -> None:
    monkeypatch.setattr(prefills, "LEAST_S", 0.5)
    monkeypatch.setattr(prefill_booking, "MOVED_S", 1.0)
    rng, ends, places = random.Random(5), asyncio.Event(), asyncio.Semaphore(AT_ONCE)
    async with (
        transferring(None, load_costs("fast"), 1_024, tokenizer=identity()) as right,
        split_fleet(
            *(valkey_url, model, 3, 3),
            producer=replace(PRODUCER, connector=connector),
            consumer=replace(CONSUMER, connector=connector),
            max_engine_wait_s=0,
        ) as fleet,
    ):

        async def one() -> str:
            async with places:
                return await ask(fleet, right, rng)

        striking = asyncio.create_task(strike(fleet, rng, ends))
        found = await asyncio.gather(*[one() for _ in range(REQUESTS)])
        ends.set()
        await striking
        counts = {word: found.count(word) for word in set(found)}
        print("\n", counts, await fleet.results())
        assert counts["split"] > REQUESTS / 10, counts
        assert counts.get("cut", 0) <= AT_ONCE, counts
        await fleet.given_back(40)
