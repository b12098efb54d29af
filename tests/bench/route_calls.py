"""The CPU of a replica per request of a gateway with code of its own, which calls ``/route`` and ``/settle``."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import TYPE_CHECKING

import aiohttp
from tests.bench.proxy_client import AnswerError
from tests.bench.proxy_requests import MODEL, body, small
from tests.bench.proxy_routers import cpu_s

if TYPE_CHECKING:
    from collections.abc import Iterator

AT_ONCE = 16


async def us_a_request(url: str, pids: tuple[int, ...], count: int, rounds: int, idle: float) -> float:
    """Return the median over rounds of the CPU µs of both calls. idle: share of a core that the processes use at rest.

    Raises AnswerError if a call is not answered as it should.
    """
    found = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=AT_ONCE)) as client:
        for number in range(rounds + 1):
            seeds = (f"route {number} {each}" for each in range(count))
            before, began = cpu_s(pids), time.perf_counter()
            await asyncio.gather(*(_calls(client, url, seeds) for _ in range(AT_ONCE)))
            found.append(1e6 * (cpu_s(pids) - before - idle * (time.perf_counter() - began)) / count)
    return statistics.median(found[1:])  # the first round makes connections


async def _calls(client: aiohttp.ClientSession, url: str, seeds: Iterator[str]) -> None:
    for seed in seeds:
        headers = {"content-type": "application/json"}
        async with client.post(f"{url}/route", data=body(small(seed)), headers=headers) as answer:
            placed = await answer.json() if answer.status == 200 else {}
        if not placed.get("reservation"):
            raise AnswerError(f"/route booked nothing: {answer.status} {placed}")
        told = {"reservation": placed["reservation"], "model": MODEL, "outcome": "finished"}
        async with client.post(f"{url}/settle", json=told) as answer:
            if answer.status != 200:
                raise AnswerError(f"/settle answers {answer.status}")
