"""A worker whose tokenizer changes while it runs is found out by its requests; no tenant can feign such a change."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.engines.simulated import Kind, simulated
from tests.support.polling import poll
from tests.support.replicas.replica import Replica, replica

from warmfleet.background.probe import random_text
from warmfleet.background.supervisor import stop

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.fleet import WorkerView

LONG = pytest.mark.long(
    minutes=1,
    shows=("a worker whose hash algorithm changes is found out, as one with another template, tokenizer or seed is"),
)
CHANGES = ("template", "tokenizer", "seed", pytest.param("algorithm", marks=LONG))
RESULTS = ("proven", "identity", "none")
CAUSES = {"template": ["chat"], "tokenizer": ["text", "chat"], "seed": ["tokens"], "algorithm": ["tokens"]}


async def the(router: Replica) -> WorkerView:
    (view,) = await router.fleet.workers.read()
    return view


async def proven(router: Replica) -> None:
    """Wait until the replica counts its worker as proven."""

    async def so() -> bool:
        return await router.metric('warmfleet_workers{state="proven"}') == 1

    await poll(so, 60, "the worker is proven")


async def chat(router: Replica, model: str, messages: list[dict[str, str]]) -> dict[str, str]:
    """Send one more turn of a conversation, and return the answer's headers."""
    messages.append({"role": "user", "content": random_text(12)})
    body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
    status, headers, answer = await router.post(body, "/v1/chat/completions")
    assert status == 200, answer
    messages.append(json.loads(answer)["choices"][0]["message"])
    return headers


@pytest.mark.parametrize("kind", CHANGES)
async def test_a_worker_that_changes_is_found_out_within_20_requests_and_comes_back(
    valkey_url: str, model: str, kind: Kind
) -> None:
    times: dict[str, Any] = {"backoff_s": (0.5, 1.0), "suspected_s": (0.1, 600.0)}
    async with simulated(valkey_url, model) as worker, replica(valkey_url, model, **times) as router:
        await proven(router)
        messages: list[dict[str, str]] = []
        # The 13th request ends a check of the token hand-off; the next request with text comes twelve requests later.
        matched = [int((await chat(router, model, messages))["x-warmfleet-matched-tokens"]) for _ in range(13)]
        assert matched[3] > matched[2] > matched[1] > 0
        worker.become(kind)
        worker.evict_at_once()
        for requests in itertools.count(1):
            await chat(router, model, messages)
            await asyncio.sleep(0.05)
            view = await the(router)
            if view.proof == "identity":
                break
            assert requests < 20
        print(f"{kind}: load only after {requests} requests: {view.record['reason']}")
        cause = view.record["cause"]
        assert cause in CAUSES[kind]
        assert view.routable
        assert await router.metric(f'warmfleet_downgrades_total{{cause="{cause}"}}') == 1
        assert view.record["reason"] in (await router.get("/workers"))[1].decode()
        headers = await chat(router, model, messages)
        assert headers["x-warmfleet-matched-tokens"] == "0"
        worker.become("right")
        await proven(router)
        await router.unloaded()


# ---------------------------------------------------------------- tenants

Body = dict[str, Any]


def completion(**fields: Any) -> Callable[[], Body]:
    return lambda: {"prompt": random_text(40)} | fields


def chatting(**fields: Any) -> Callable[[], Body]:
    return lambda: {"messages": [{"role": "user", "content": random_text(40)}]} | fields


SAME = random_text(60)
#: Requests of a tenant that engines answer with fewer cached tokens, with other prompt lengths, or not at all.
TRICKS: dict[str, Callable[[], Body]] = {
    "prompt_logprobs": lambda: {"prompt": SAME, "prompt_logprobs": 1},
    "prompt_logprobs of a chat": chatting(prompt_logprobs=0),
    "echo": lambda: {"prompt": SAME, "echo": True, "logprobs": 1},
    "truncation": completion(truncate_prompt_tokens=20),
    "truncation of a chat": chatting(truncate_prompt_tokens=9),
    "choices": completion(n=4),
    "several prompts": lambda: {"prompt": [SAME, random_text(30), SAME]},
    "token ids": lambda: {"prompt": [random.randrange(3, 900) for _ in range(70)]},
    "the same again": lambda: {"prompt": SAME},
    "a salt": completion(cache_salt="s"),
    "another salt each time": lambda: {"prompt": SAME, "cache_salt": random_text(1)},
    "own ids": chatting(kv_transfer_params={"prompt_token_ids": list(range(50, 90))}),
    "own ids in xargs": chatting(vllm_xargs={"kv_transfer_params": "x", "prompt_token_ids": [5, 6]}),
    "own template": chatting(chat_template="{{ messages }}{{ messages }}"),
    "special tokens": chatting(add_special_tokens=True),
    "special tokens in the text": lambda: {"prompt": "<|end|><|user|>" * 20 + random_text(20)},
    "no generation prompt": chatting(add_generation_prompt=False),
    "continued": lambda: {
        "messages": [{"role": "user", "content": random_text(20)}, {"role": "assistant", "content": random_text(9)}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "an image": lambda: {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    "too long": lambda: {"prompt": [5] * 5_000},
    "evictions": lambda: {"prompt": [random.randrange(3, 900) for _ in range(4_000)]},
}


async def ask(router: Replica, body: Body, *, hang_up: bool = False, headers: Body | None = None) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if not hang_up:
        await router.post(body, path, **(headers or {}))
        return
    async with router.client.post(router.url + path, json=body | {"stream": True}) as answer:
        await answer.content.readany()
        answer.close()


async def pester(router: Replica, make: Callable[[], Any], times: int) -> None:
    """Send ``times`` requests, eight at a time."""
    for start in range(0, times, 8):
        await asyncio.gather(*(make() for _ in range(min(8, times - start))))


async def suspicions(router: Replica) -> int:
    return sum(count for name, count in (await router.fleet.index.counts()).items() if name.startswith("suspect"))


async def no_tenant_talks_a_worker_down(redis_url: str, model: str, times: int) -> None:
    fields = ("kv_transfer_params", "chat_template")
    forged = {"X-Request-Id": "wf-0aaaaaaaaaaaaaaaaaaaaa.cmpl-wf-0aaaaaaaaaaaaaaaaaaaaa"}
    async with simulated(redis_url, model) as worker, replica(redis_url, model, allowed_fields=fields) as router:
        await proven(router)
        for name, trick in TRICKS.items():
            for tokens in (1, 12):
                body = {"model": model, "max_tokens": tokens}
                await pester(router, lambda: ask(router, trick() | body), times // 2)  # noqa: B023  awaited here
            assert (name, await suspicions(router), (await the(router)).proof) == (name, 0, "proven")
        body = {"model": model, "max_tokens": 200, "prompt": SAME}
        await pester(router, lambda: ask(router, body, hang_up=True), times)
        await pester(router, lambda: ask(router, body | {"max_tokens": 3}, headers=forged), times)
        view = await the(router)
        assert (await suspicions(router), view.proof, view.record.get("strikes", 0)) == (0, "proven", 0)
        counts = await router.fleet.index.counts()
        assert counts["exact"] > times
        assert "downgrade" not in " ".join(counts)
        assert worker.engine.core.scheduler.pool.evicted > 0
        await router.unloaded()


async def test_no_tenant_talks_a_worker_down(valkey_url: str, model: str) -> None:
    await no_tenant_talks_a_worker_down(valkey_url, model, 8)


@pytest.mark.long(
    minutes=2,
    shows="23 tricks of a tenant, 200 requests each, on simulated engines: no worker is suspected",
)
@pytest.mark.timeout(900)
async def test_no_tenant_talks_a_worker_down_with_200_requests(valkey_url: str, model: str) -> None:
    await no_tenant_talks_a_worker_down(valkey_url, model, 200)


@pytest.mark.long(
    minutes=2,
    shows=("six clients turn the cache over all the time: a right worker is left alone, and a wrong one is found out"),
)
@pytest.mark.parametrize("kind", ["right", "seed"])
async def test_constant_evictions_downgrade_no_worker_and_hide_none(valkey_url: str, model: str, kind: Kind) -> None:
    times: dict[str, Any] = {"probe_interval_s": 1.0, "backoff_s": (0.5, 1.0), "suspected_s": (0.5, 600.0)}
    async with (
        simulated(valkey_url, model, speed="demo") as worker,
        replica(valkey_url, model, token_handoff=False, **times) as router,
    ):
        await proven(router)

        async def client() -> None:
            while True:
                await ask(router, {"model": model, "prompt": random.choices(range(3, 900), k=3_000), "max_tokens": 1})

        clients = [asyncio.ensure_future(client()) for _ in range(6)]
        try:
            await asyncio.sleep(5)
            worker.become(kind)
            await asyncio.sleep(25)
        finally:
            await stop(clients)
        assert worker.engine.core.scheduler.pool.evicted > 5_000
        counts = await router.fleet.index.counts()
        results = {result: await router.metric(f'warmfleet_probes_total{{result="{result}"}}') for result in RESULTS}
        print(kind, results, {name: count for name, count in counts.items() if "suspect" in name or "down" in name})
        assert results["proven"] >= (2 if kind == "right" else 1)
        assert (results["identity"] > 0, "downgrade_tokens" in counts) == (kind == "seed", kind == "seed")


async def test_a_prompt_that_is_seen_differently_here_causes_few_probes(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: dict[str, Any] = {"backoff_s": (0.1, 60.0), "suspected_s": (0.2, 600.0)}
    async with (
        simulated(valkey_url, model) as worker,
        replica(valkey_url, model, token_handoff=False, **times) as router,
    ):
        await proven(router)
        plain = worker.engine.tokenizer.chat_ids

        def quirk(body: Body) -> list[int]:
            ids = plain(body)
            return [*ids, 7] if "quirk" in str(body) else ids

        monkeypatch.setattr(worker.engine.tokenizer, "chat_ids", quirk)
        quirky = chatting(model=model, max_tokens=16, user="quirk")
        begun = time.monotonic()
        while time.monotonic() < begun + 3.2:
            await pester(router, lambda: ask(router, quirky()), 2)
            assert (await the(router)).proof == "proven"
            await asyncio.sleep(0.01)
        assert await suspicions(router) > 20
        waits = math.log2((time.monotonic() - begun) / 0.2 + 1)
        probes = await router.metric('warmfleet_probes_total{result="proven"}') - 1
        assert 1 <= probes <= waits, "each wait is twice the last"
        assert (await the(router)).record["tries"] >= 1
        assert await router.metric("warmfleet_downgrades_total") == 0
