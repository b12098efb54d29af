"""A replica asks an engine for token ids that only engines can make, if this pays; otherwise load decides."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web
from tests.support.engines.simulated import simulated
from tests.support.polling import poll
from tests.support.replicas.replica import Replica, replica

from warmfleet_loadtest.simulator.api import Api

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest


LONG = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 80}]
CHAT = "/v1/chat/completions"
BOTH = {"jinja": False, "render": True, "tokenize": True}


@asynccontextmanager
async def two(
    redis_url: str, model: str, renders: dict[str, bool], *, bare: bool = False, **settings: Any
) -> AsyncIterator[Replica]:
    """A replica and two engines without templates, and if ``bare`` without tokenizers."""
    left = ("chat_template.jinja", "tokenizer.json") if bare else ("chat_template.jinja",)
    facts = {"renders": renders}
    async with (
        simulated(redis_url, model, "s1", facts=facts, leave_out=left),
        simulated(redis_url, model, "s2", facts=facts, leave_out=left),
        replica(redis_url, model, **({"tokenize_timeout_s": 5.0} | settings)) as router,
    ):

        async def proven() -> bool:
            return await router.metric('warmfleet_workers{state="proven"}') == 2

        await poll(proven, 60, "both are proven")  # a replica without an identity is ready much later
        if not bare:
            await router.exact()
        yield router


async def asked(router: Replica, result: str) -> float:
    return await router.metric(f'warmfleet_asked_engines_total{{result="{result}"}}')


async def same_place(router: Replica, body: dict[str, Any], path: str) -> None:
    """Assert that a repeated request goes to the same worker, with as many cached tokens as were foreseen."""
    status, first, _ = await router.post(body, path)
    assert (status, first["x-warmfleet-matched-tokens"]) == (200, "0")
    status, again, answer = await router.post(body, path)
    usage = json.loads(answer)["usage"]
    assert (status, again["x-warmfleet-worker"]) == (200, first["x-warmfleet-worker"])
    assert int(again["x-warmfleet-prompt-tokens"]) == usage["prompt_tokens"]
    assert int(again["x-warmfleet-matched-tokens"]) == usage["prompt_tokens_details"]["cached_tokens"] > 512


async def test_a_chat_without_a_template_here(valkey_url: str, model: str) -> None:
    async with two(valkey_url, model, BOTH) as router:
        await same_place(router, {"model": model, "messages": LONG, "max_tokens": 1}, CHAT)
        assert (
            await asked(router, "answered")
            == await router.metric('warmfleet_identified_requests_total{kind="engine"}')
            == 2
        )
        # A short prompt is not worth the call to the engine.
        await router.post({"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}, CHAT)
        assert await asked(router, "answered") == 2
        assert await router.metric('warmfleet_load_only_requests_total{reason="no_template"}') == 1


async def test_tokenize_is_asked_only_what_it_sees(valkey_url: str, model: str) -> None:
    async with two(valkey_url, model, {"render": False, "tokenize": True}, bare=True) as router:
        chat = {"model": model, "messages": LONG, "max_tokens": 1}
        await same_place(router, chat, CHAT)
        for more in {"documents": [{"text": "a"}]}, {"tool_choice": "none"}, {"reasoning_effort": "low"}:
            assert (await router.post(chat | more, CHAT))[0] == 200
        assert await asked(router, "answered") == 2
        assert await router.metric('warmfleet_load_only_requests_total{reason="no_identity"}') == 3


async def test_a_model_without_a_tokenizer_here(valkey_url: str, model: str) -> None:
    async with two(valkey_url, model, BOTH, bare=True) as router:
        await same_place(router, {"model": model, "messages": LONG, "max_tokens": 1}, CHAT)
        await same_place(router, {"model": model, "prompt": LONG[0]["content"], "max_tokens": 1}, "/v1/completions")
        assert await asked(router, "answered") == 4
        await same_place(router, {"model": model, "prompt": list(range(900)), "max_tokens": 1}, "/v1/completions")
        assert await asked(router, "answered") == 4  # a prompt of token ids needs no call


#: An engine's failed answer -> its count. No such answer means that the engine cannot tokenize other prompts.
ANSWERS = {
    "wrong": (400, "{}", "refused"),
    "unauthorized": (401, "{}", "refused"),
    "forbidden": (403, "{}", "refused"),
    "no such adapter": (404, "{}", "refused"),
    "too large": (413, "{}", "refused"),
    "it stumbled": (500, "{}", "failed"),
    "not json": (200, "<html>", "failed"),
    "no ids": (200, '{"token_ids": [1, "a"]}', "failed"),
    "not an object": (200, "[]", "failed"),
    "endless": (200, '{"token_ids": [' + "1," * 600_000, "failed"),
}


async def test_after_any_failure_load_decides(valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, pause = ANSWERS["wrong"], 0.0

    async def render(_self: Api, _http: web.Request) -> web.Response:
        await asyncio.sleep(pause)
        return web.Response(status=answer[0], text=answer[1])

    monkeypatch.setattr(Api, "render", render)
    body = {"model": model, "messages": LONG, "max_tokens": 1}
    async with two(valkey_url, model, BOTH, bare=True, tokenize_timeout_s=0.2) as router:
        counted = {"refused": 0, "failed": 0}
        for count, (wrong, answer) in enumerate(ANSWERS.items(), 1):
            status, headers, _ = await router.post(body, CHAT)
            assert (status, headers["x-warmfleet-matched-tokens"]) == (200, "0"), wrong
            assert await router.metric('warmfleet_load_only_requests_total{reason="no_identity"}') == count
            counted[answer[2]] += 1
            assert {result: await asked(router, result) for result in counted} == counted, f"nobody rests after {wrong}"
        answer, pause = (
            (200, '{"token_ids": [' + "100000," * 160_000 + "7]}", ""),
            0.3,
        )  # a late answer is right for a long prompt
        long = [{"role": "user", "content": "jumps over " * 9_000}]
        await router.post(body | {"messages": long}, CHAT)
        assert await asked(router, "answered") == 1
        await router.post(body | {"user": "x" * 600_000}, CHAT)
        assert sum([await asked(router, result) for result in ("answered", *counted)]) == len(ANSWERS) + 1, (
            "too long to ask"
        )
        for _ in range(3):
            assert (await router.post(body, CHAT))[0] == 200
        assert await asked(router, "failed") == counted["failed"] + 2, "slow: each is asked once more, then left alone"


async def test_an_engine_that_is_away_is_left_alone(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(_self: Api, _http: web.Request) -> web.Response:
        return web.Response(status=503)

    monkeypatch.setattr(Api, "render", away)
    body = {"model": model, "messages": LONG, "max_tokens": 1}
    async with two(valkey_url, model, BOTH, bare=True) as router:
        for _ in range(4):
            assert (await router.post(body, CHAT))[0] == 200
        assert await asked(router, "failed") == 2
