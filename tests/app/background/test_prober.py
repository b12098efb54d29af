"""A worker with the plugin joins: its artifacts become an identity, the probe proves it, its blocks are matched."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import redis.asyncio as aioredis
from tests.support.engines.plugin_worker import SCHEME, TOKENIZER, caching, proof, worker
from tests.support.engines.scripted import Engine, Seen, answer_well, engine, reply
from tests.support.polling import poll
from tests.support.replicas.replica import replica

from warmfleet_worker.protocol.wire import Keys, Scheme
from warmfleet_worker.tracker import Tracker

if TYPE_CHECKING:
    from warmfleet_worker.worker_publisher import WorkerPublisher


async def test_join_is_proved_and_blocks_are_matched(valkey_url: str, model: str) -> None:
    tracker, prompts = Tracker(), list[list[int]]()
    async with (
        engine(model, caching(tracker, prompts, TOKENIZER)) as upstream,
        replica(valkey_url, model) as router,
        worker(valkey_url, model, upstream.url, tracker, tokenizer=TOKENIZER),
    ):
        await proof(router, "proven")
        await router.exact()
        await router.routable(1)
        assert len(prompts[0]) == 33  # two blocks, and the last token, which is always computed
        ids = list(range(300, 400))
        _, headers, _ = await router.post({"model": model, "prompt": ids})
        assert (headers["x-warmfleet-matched-tokens"], headers["x-warmfleet-prompt-tokens"]) == ("0", "100")

        async def matched() -> bool:
            _, headers, _ = await router.post({"model": model, "prompt": [*ids, 9, 9]})
            return bool(headers["x-warmfleet-matched-tokens"] == "96")

        await poll(matched, 10, "the engine's own report is matched")
        _, headers, _ = await router.post({"model": "adapter", "prompt": ids})
        assert headers["x-warmfleet-matched-tokens"] == "0"  # an adapter's blocks have their own hashes
        for _ in range(2):
            assert (await router.post({"model": model, "prompt": "the cat sat on a mat. " * 200}))[0] == 200
        assert await router.metric('warmfleet_identified_tokens_total{source="known"}') > 500
        messages = [{"role": "user", "content": "hello"}]
        _, headers, _ = await router.post({"model": model, "messages": messages}, "/v1/chat/completions")
        assert 2 < int(headers["x-warmfleet-prompt-tokens"]) < 12
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        status, _, _ = await router.post({"model": model, "messages": image}, "/v1/chat/completions")
        assert status == 200
        assert await router.metric('warmfleet_load_only_requests_total{reason="parts"}') == 1
        await router.unloaded()


async def test_a_worker_with_the_same_files_limits_no_other_worker(valkey_url: str, model: str) -> None:
    """A worker with a short context does not bound the prompts of the others, nor does one whose files are damaged."""
    trackers, keys = (Tracker(), Tracker()), Keys(model)
    async with (
        engine(model, caching(trackers[0], [])) as first,
        engine(model, caching(trackers[1], [])) as second,
        worker(valkey_url, model, first.url, trackers[0], name="a", takes=60, max_model_len=1),
        worker(valkey_url, model, second.url, trackers[1], name="b", takes=200),
        aioredis.Redis.from_url(valkey_url) as store,
    ):

        async def chunks(server: str) -> list[bytes]:
            return [key async for key in store.scan_iter(keys.artifact(server, "*"))]

        await poll(lambda: chunks("b"), 10, "b has brought everything")
        await poll(lambda: chunks("a"), 10, "a has brought everything")
        for key in await chunks("a"):
            await store.set(key, b"damaged", keepttl=True)
        async with replica(valkey_url, model) as router:
            await router.exact()
            await router.routable(2)
            for length, workers in (10, {"a.0", "b.0"}), (100, {"b.0"}), (1_000, {"a.0", "b.0"}):
                asked = [{"model": model, "prompt": ids, "max_tokens": 1} for ids in prompts_of(length)]
                answers = await asyncio.gather(*map(router.post, asked))  # simultaneous: load spreads them
                assert {headers["x-warmfleet-worker"] for _, headers, _ in answers} == workers, length
            assert await router.metric('warmfleet_load_only_requests_total{reason="too_long"}') == len(prompts_of(1))
            assert await router.metric('warmfleet_identified_requests_total{kind="exact"}') == 2 * len(prompts_of(1))
            await router.unloaded()


def prompts_of(length: int) -> list[list[int]]:
    return [random.choices(range(3, 200), k=length) for _ in range(12)]


async def test_a_worker_with_an_unknown_scheme_is_routed_by_load_only(valkey_url: str, model: str) -> None:
    unknown = replace(SCHEME, extra_keys="looks_back_1")
    cores: list[WorkerPublisher] = []

    async def reporting(one: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        reservation = seen.headers["x-request-id"].partition(".")[0]
        cores[0].progress(reservation, 0, len(seen.json["prompt"]))
        await answer_well(one, seen, writer)

    async with (
        engine(model, reporting) as upstream,
        replica(valkey_url, model) as router,
        worker(valkey_url, model, upstream.url, Tracker(), unknown) as core,
    ):
        cores.append(core)
        assert "scheme is not known here: unknown scheme sha256_cbor/looks_back_1" in await proof(router, "identity")
        await router.routable(1)
        status, headers, _ = await router.post({"model": model, "prompt": list(range(100))})
        assert (status, headers["x-warmfleet-matched-tokens"]) == (200, "0")


@pytest.mark.parametrize("scheme", [SCHEME, replace(SCHEME, extra_keys="looks_back_1")], ids=["known", "unknown"])
async def test_a_service_that_answers_is_no_worker_until_the_workers_stream_says_so(
    valkey_url: str, model: str, scheme: Scheme
) -> None:
    """A forged join names the URL of another service in the network: no client's request and no key goes there."""
    async with (
        engine(model) as service,
        replica(valkey_url, model, blocks_timeout_s=0.3, worker_api_key="the fleet's secret") as router,
        worker(valkey_url, model, service.url, Tracker(), scheme, name="fake"),
    ):

        async def asked_twice() -> bool:
            views = await router.fleet.workers.read()
            assert not any(view.routable for view in views)
            return bool(views) and int(views[0].record.get("tries") or 0) >= 2

        await poll(asked_twice, 40, "it was probed and probed again")
        for headers in ({}, {"Authorization": "Bearer a client's own"}):
            status, _, _ = await router.post({"model": model, "prompt": "a client's words"}, **headers)
            assert status == 503
        assert service.seen
        assert not any(b"a client's words" in seen.body for seen in service.seen)
        assert not any("authorization" in seen.headers for seen in service.seen)


async def test_addresses_that_the_operator_lists_need_no_proof(valkey_url: str, model: str) -> None:
    async with (
        engine(model) as upstream,
        replica(
            valkey_url, model, blocks_timeout_s=0.3, worker_api_key="secret", worker_addresses=("127.0.0.0/8",)
        ) as router,
        worker(valkey_url, model, upstream.url, Tracker()),
    ):
        await router.routable(1)
        assert (await router.post({"model": model, "prompt": "x"}))[0] == 200
        assert {seen.headers.get("authorization") for seen in upstream.seen} == {"Bearer secret"}


async def test_a_wrong_url_is_not_routed_to(valkey_url: str, model: str) -> None:
    async def not_found(_: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        reply(writer, b"{}", "404 Not Found")

    async with (
        engine(model, not_found) as upstream,
        replica(valkey_url, model) as router,
        worker(valkey_url, model, upstream.url, Tracker()),
    ):
        assert "404" in await proof(router, "url")
        assert (await router.post({"model": model, "prompt": "x"}))[0] == 503


async def test_an_address_outside_the_allowed_ranges_is_never_asked(valkey_url: str, model: str) -> None:
    async with (
        engine(model) as upstream,
        replica(valkey_url, model, worker_addresses=("10.0.0.0/8",)) as router,
        worker(valkey_url, model, upstream.url, Tracker()),
    ):
        assert "WARMFLEET_WORKER_ADDRESSES" in await proof(router, "url")
        assert not upstream.seen
