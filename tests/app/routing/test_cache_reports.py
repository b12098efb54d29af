"""Cached tokens in answers of engines without the plugin correct the fleet's mirror of their caches."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.engines.scripted import STREAM_HEAD, Engine, Seen, chunk, engine, event, reply
from tests.support.replicas.replica import replica

from warmfleet.pools.cache_reports import SILENT_ANSWERS

if TYPE_CHECKING:
    import asyncio

TOKENS = 800


@dataclass
class Cache:
    """An engine with an endless cache for prompts of token ids. ``tells``: the engine also reports 0 cached tokens."""

    known: list[list[int]] = field(default_factory=list)
    tells: bool = True
    silent: bool = False
    page_tokens: int = 16

    def cached(self, ids: list[int]) -> int:
        shared = [
            next((n for n, (a, b) in enumerate(zip(ids, known, strict=False)) if a != b), len(known))
            for known in self.known
        ]
        return min(max(shared, default=0), len(ids) - 1) // self.page_tokens * self.page_tokens

    async def answer(self, _engine: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        body = seen.json
        cached = self.cached(body["prompt"])
        self.known.append(body["prompt"])
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1}
        if not self.silent and (cached or self.tells):
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if not body.get("stream"):
            reply(writer, json.dumps({"choices": [{"index": 0, "text": "word"}], "usage": usage}).encode())
            return
        writer.write(STREAM_HEAD)
        chunk(writer, event("word"))
        if body.get("stream_options"):
            chunk(writer, b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        chunk(writer, b"data: [DONE]\n\n")
        chunk(writer, b"")


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def prompt(number: int) -> list[int]:
    return [number] * TOKENS


@pytest.mark.parametrize("how", [{}, STREAMED], ids=["plain", "streamed"])
@pytest.mark.parametrize("tells", [True, False], ids=["tells 0", "leaves 0 out"])
async def test_one_answer_corrects_what_is_known_of_an_engine_that_lost_its_cache(
    valkey_url: str, model: str, how: dict[str, Any], tells: bool
) -> None:
    cache = Cache(tells=tells)
    async with engine(model, cache.answer) as stock, replica(valkey_url, model, stock.url) as router:

        async def matched(number: int, **more: Any) -> int:
            body = {"model": model, "prompt": prompt(number), "max_tokens": 1, **how, **more}
            status, headers, _ = await router.post(body)
            assert status == 200
            await router.unloaded()
            return int(headers["x-warmfleet-matched-tokens"])

        async def results() -> dict[str, float]:
            words = ("as_predicted", "more", "fewer")
            line = 'warmfleet_cached_predictions_total{result="%s"}'
            return {word: await router.metric(line % word) for word in words}

        for number in (1, 2, 3):
            await matched(number)
        seen = [await matched(number) for number in (1, 2, 3)]
        assert min(seen) > TOKENS * 0.9
        assert (await results())["fewer"] == 0
        cache.known.clear()
        before = await results()
        assert await matched(3) > TOKENS * 0.9, "nobody knows yet"
        assert await results() == before | {"fewer": 1}
        assert [await matched(number) for number in (1, 2)] == [0, 0], "both were used before what is lost"
        assert await matched(3) > TOKENS * 0.9, "it was computed anew"
        cache.known.clear()
        await matched(3, prompt_logprobs=1)
        assert await matched(2) > TOKENS * 0.9, "such a request reads no cache, so it says nothing of it"


async def test_an_engine_with_larger_pages_keeps_its_mirror(valkey_url: str, model: str) -> None:
    """The engine finds whole pages only: 192 of 250 tokens, where the fleet expects 240."""
    cache = Cache(page_tokens=64)
    async with engine(model, cache.answer) as stock, replica(valkey_url, model, stock.url) as router:

        async def matched(number: int) -> int:
            body = {"model": model, "prompt": [number] * 250, "max_tokens": 1}
            _, headers, _ = await router.post(body)
            await router.unloaded()
            return int(headers["x-warmfleet-matched-tokens"])

        assert [await matched(number) for number in (1, 2)] == [0, 0]
        assert min([await matched(number) for number in (1, 2, 2, 1)]) > 192
        assert await router.metric('warmfleet_cached_predictions_total{result="fewer"}') == 0


async def test_an_engine_that_was_started_without_the_option_is_not_taken_for_empty(
    valkey_url: str, model: str
) -> None:
    cache = Cache(tells=False)
    async with engine(model, cache.answer) as stock, replica(valkey_url, model, stock.url) as router:

        async def matched(number: int) -> int:
            _, headers, _ = await router.post({"model": model, "prompt": prompt(number), "max_tokens": 1})
            await router.unloaded()
            return int(headers["x-warmfleet-matched-tokens"])

        for _ in range(2):
            await matched(1)
        cache.silent = True
        for number in range(2, 2 + SILENT_ANSWERS):
            await matched(number)
        assert await matched(2) > TOKENS * 0.9
        assert await matched(3) > TOKENS * 0.9
        assert await router.metric('warmfleet_cached_predictions_total{result="fewer"}') == 0


async def test_a_stream_that_was_not_asked_for_its_usage_says_nothing(valkey_url: str, model: str) -> None:
    cache = Cache()
    async with engine(model, cache.answer) as stock, replica(valkey_url, model, stock.url) as router:
        for _ in range(2):
            status, _, whole = await router.post({"model": model, "prompt": prompt(1), "max_tokens": 1, "stream": True})
            assert status == 200
            assert b"usage" not in whole
        words = ("as_predicted", "more", "fewer")
        line = 'warmfleet_cached_predictions_total{result="%s"}'
        assert [await router.metric(line % word) for word in words] == [0, 0, 0]
