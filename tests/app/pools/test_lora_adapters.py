"""Workers with LoRA adapters of their own: which worker gets a request, and which cached blocks count for it."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.support.engines.plugin_worker import SCHEME, caching, worker
from tests.support.engines.scripted import engine
from tests.support.polling import poll
from tests.support.replicas.replica import Replica, replica

from warmfleet_worker.protocol import wire
from warmfleet_worker.protocol.wire import chain_hashes, pack_hashes
from warmfleet_worker.tracker import Tracker

if TYPE_CHECKING:
    import pytest

LISTED = ("127.0.0.0/8",)  # the engines must be listed, because these report no probe in their streams
IDS = random.Random(3).choices(range(2_000, 90_000), k=100)
WHOLE = "96"  # the full blocks of 16 tokens in 100, without the last token


async def listed(router: Replica, *names: str) -> None:
    async def seen() -> bool:
        data = json.loads((await router.get("/v1/models"))[1])["data"]
        return {entry["id"] for entry in data} == set(names)

    await poll(seen, 60, f"/v1/models lists {names}")


async def asked(router: Replica, **body: object) -> tuple[int, str, str]:
    """The status, the worker and the matched tokens of a request's answer."""
    status, headers, _ = await router.post({"prompt": IDS, **body})
    return status, headers.get("x-warmfleet-worker", ""), headers.get("x-warmfleet-matched-tokens", "")


async def test_a_request_goes_only_to_a_worker_that_serves_its_adapter(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.2)
    trackers, adapters = {"a": Tracker(), "b": Tracker()}, {"a": {"one": "/one"}, "b": {"one": "/one", "two": "/two"}}
    facts: dict[str, Any] = {"renders": {"render": True}, "same_template_with_tools": False}
    async with (
        engine(model) as first,
        engine(model) as second,
        replica(valkey_url, model, blocks_timeout_s=0.3, worker_addresses=LISTED) as router,
        worker(valkey_url, model, first.url, trackers["a"], name="a", adapters=adapters["a"], **facts),
        worker(valkey_url, model, second.url, trackers["b"], name="b", adapters=adapters["b"], **facts),
    ):
        await listed(router, model, "one", "two")
        await router.routable(2)
        chat = {"messages": [{"role": "user", "content": "a fox " * 500}], "tools": [{"type": "function"}]}
        await router.post(chat | {"model": "two"}, "/v1/chat/completions")
        assert "/v1/chat/completions/render" not in [seen.path for seen in first.seen + second.seen], "no choice"
        await router.post(chat | {"model": "one"}, "/v1/chat/completions")
        assert "/v1/chat/completions/render" in [seen.path for seen in first.seen + second.seen]
        for _ in range(12):
            assert (await asked(router, model="two", cache_salt=str(random.random())))[:2] == (200, "b.0")

        async def both() -> bool:  # "a" may have joined later
            seen = {(await asked(router, model="one", cache_salt=str(random.random())))[1] for _ in range(24)}
            return seen == {"a.0", "b.0"}

        await poll(both, 10, "both serve it")
        assert (await asked(router, model="three"))[0] == 404
        del adapters["b"]["two"]  # unloads the adapter; the next heartbeat reports it
        await listed(router, model, "one")
        assert (await asked(router, model="two"))[0] == 404


async def test_blocks_of_an_adapter_or_a_salt_count_for_it_alone(valkey_url: str, model: str) -> None:
    """Blocks that the engine stored under an (adapter, salt) are found under that pair, and under no other."""
    tracker, adapters = Tracker(), {"one": "/one", "two": "/two"}
    owners = [(name, salt) for name in ("", "one", "two") for salt in (None, "red", "blue")]
    async with (
        engine(model, caching(tracker, [])) as upstream,
        replica(valkey_url, model) as router,
        worker(valkey_url, model, upstream.url, tracker, adapters=adapters),
    ):
        await listed(router, model, "one", "two")
        for count, (name, salt) in enumerate(owners):
            lora = (name, adapters[name]) if name else None
            tracker.stored(pack_hashes(chain_hashes(SCHEME, IDS, salt=salt, lora=lora)))

            matched = partial(found, router, (name, salt), model, WHOLE)
            await poll(matched, 10, "the engine's own report is matched")
            for other in owners[count + 1 :]:
                assert await found(router, other, model, "0"), (owners[count], other)


async def found(router: Replica, owner: tuple[str, str | None], model: str, tokens: str) -> bool:
    """Whether a request with this adapter and salt would match ``tokens``, without booking it."""
    name, salt = owner
    status, _, answer = await router.post({"model": name or model, "prompt": IDS, "cache_salt": salt}, "/explain")
    assert status == 200, answer
    (candidate,) = json.loads(answer)["candidates"]
    return str(candidate["matched_tokens"]) == tokens
