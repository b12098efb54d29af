"""Samples of the engines' own counters, taken every second while a trace runs."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from warmfleet_loadtest.stacks.processes import StackError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

PERIOD_S = 1.0  # time between two samples
ANSWER_S = 10.0  # longest time for the answer of an engine
#: Field of a Sample → the begin of the lines of ``/metrics`` whose values are summed for this field.
FIELDS = {
    "requests": r"^vllm:num_requests_(?:running|waiting)\{",
    "prompt": r"^vllm:prompt_tokens_total\{",
    "cached": r"^vllm:prompt_tokens_cached_total\{",
    "busy_s": r"^sim:busy_seconds_total\{",
    "evicted": r"^sim:evicted_blocks_total\{",
}
_LINES = {name: re.compile(rf"{start}[^}}]*\}} (\S+)$", re.MULTILINE) for name, start in FIELDS.items()}


@dataclass(frozen=True, slots=True)
class Sample:
    """at_s: wall seconds since the first sample.

    The other fields have one value per engine. requests: number of running and waiting requests. The rest are counters
    since the engine's start: prompt tokens, cached prompt tokens, seconds in steps, evicted blocks.
    """

    at_s: float
    requests: tuple[float, ...]
    prompt: tuple[float, ...]
    cached: tuple[float, ...]
    busy_s: tuple[float, ...]
    evicted: tuple[float, ...]


@asynccontextmanager
async def sampled(urls: Sequence[str]) -> AsyncIterator[list[Sample]]:
    """Sample the engines at these URLs at the begin and at the end of the block, and every PERIOD_S between them.

    Raises StackError if an engine does not answer at the begin or at the end.
    """
    samples: list[Sample] = []
    began = time.monotonic()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session:

        async def sample() -> None:
            try:
                texts = await asyncio.gather(*(_text(session, url) for url in urls))
            except (aiohttp.ClientError, TimeoutError) as error:
                raise StackError(f"an engine does not answer with its counters: {error!r}") from error
            samples.append(Sample(time.monotonic() - began, **_values(texts)))

        async def keep_sampling() -> None:
            while True:
                await asyncio.sleep(PERIOD_S)
                with suppress(StackError):  # only the first and the last sample must succeed
                    await sample()

        await sample()
        task = asyncio.create_task(keep_sampling())
        try:
            yield samples
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await sample()


async def _text(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/metrics") as answer:
        return await answer.text()


def _values(texts: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Return the fields of a Sample, from the text of each engine's ``/metrics``."""
    return {name: tuple(sum(map(float, line.findall(text))) for text in texts) for name, line in _LINES.items()}


def spent(samples: Sequence[Sample], name: str) -> list[float]:
    """Return for each engine by how much its counter ``name`` has grown over the run."""
    return [end - begin for begin, end in zip(getattr(samples[0], name), getattr(samples[-1], name), strict=True)]
