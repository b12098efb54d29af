"""Engines watched from outside while a trace runs: their own counters, every second."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Sequence

PERIOD_S = 1.0
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
    """at_s: since the first sample; per engine: requests that run or wait, and counters since the engine's start."""

    at_s: float
    requests: tuple[float, ...]
    prompt: tuple[float, ...]
    cached: tuple[float, ...]
    busy_s: tuple[float, ...]
    evicted: tuple[float, ...]


class Sampler:
    """Samples at the begin and end of an ``async with`` block, and in between."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.samples: list[Sample] = []
        self._urls = urls
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10))
        self._began = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._began = time.monotonic()
        await self._sample()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._sample()
        await self._session.close()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            with suppress(aiohttp.ClientError, TimeoutError):  # a sample less: the last one must succeed
                await self._sample()

    async def _sample(self) -> None:
        texts = await asyncio.gather(*(self._text(url) for url in self._urls))
        values = {name: tuple(sum(map(float, line.findall(text))) for text in texts) for name, line in _LINES.items()}
        self.samples.append(Sample(time.monotonic() - self._began, **values))

    async def _text(self, url: str) -> str:
        async with self._session.get(f"{url}/metrics") as answer:
            return await answer.text()


def spent(samples: Sequence[Sample], name: str) -> list[float]:
    """What a counter of each engine gained over the run."""
    return [end - begin for begin, end in zip(getattr(samples[0], name), getattr(samples[-1], name), strict=True)]
