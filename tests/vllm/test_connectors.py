"""Real engines with a KV connector: token ids are handed off, matches are right, and blocks are evicted by T-LRU."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.engine import BLOCK_TOKENS, SERVED_NAME, EngineOptions, running
from tests.vllm.replicas import replicas

from warmfleet.cli.local.ports import free_port
from warmfleet.fleet import Flag, Fleet
from warmfleet.fleet.client import connect

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.vllm.engine import VllmEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=5,
        shows=(
            "real vLLM with a KV connector (NIXL, offloading to CPU memory, files): token ids are handed off and equal "
            "vLLM's own on 200 chats each, what is predicted is cached, also from a tier, as vLLM counts it by source; "
            "the index equals the engine's table and its tier's"
        ),
    ),
    pytest.mark.timeout(1_500),
]

CHATS, BLOCKS = 200, 160  # five chats fill the cache
WORDS = ("import", "return", "while", "class", "value", "index", "error", "string", "buffer", "module")


def connector(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return ``--kv-transfer-config`` and the environment of an engine with this connector."""
    more: dict[str, Any] = {"shared_storage_path": str(folder)}
    environment = {"WARMFLEET_TTFT_TARGET_S": "0.2"}
    if name == "OffloadingConnector":
        more = {"spec_name": "HostTier", "spec_module_path": "host_tier", "cpu_bytes_to_use": 2**25}
    if name == "NixlConnector":
        more = {"num_threads": 0}
        environment |= {
            "UCX_TLS": "tcp,self,sm",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }
    config = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": more}
    return config | ({"kv_buffer_device": "cpu"} if name == "NixlConnector" else {}), environment


def said(rng: random.Random, words: int) -> dict[str, str]:
    return {"role": "user", "content": " ".join(rng.choices(WORDS, k=words))}


async def own_ids(client: httpx.AsyncClient, engine: VllmEngine, messages: list[dict[str, str]]) -> list[int]:
    answer = await client.post(f"{engine.url}/tokenize", json={"model": SERVED_NAME, "messages": messages})
    return list(answer.json()["tokens"])


@pytest.mark.parametrize("name", ["NixlConnector", "OffloadingConnector", "ExampleConnector"])
async def test_an_engine_with_a_kv_connector_is_served_like_others(name: str, tmp_path: Path) -> None:
    config, environment = connector(name, tmp_path)
    rng, talks, handed, loaded, hits = random.Random(1), [[said(random.Random(2), 300)]], 0, 0, 0
    from_tier = 0  # tokens that were predicted to be loaded
    with server(valkey_binary()) as redis_url:
        arguments = ("--kv-transfer-config", json.dumps(config))
        options = EngineOptions(redis_url=redis_url, blocks=BLOCKS, arguments=arguments, environment=environment)
        with running(options) as [engine], replicas(redis_url, 1, engines=1) as [url]:
            fleet = Fleet(connect(redis_url, timeout_s=5), SERVED_NAME)
            [view] = await fleet.workers.read()
            assert not view.load.flags & Flag.CLOSED

            async def indexed() -> bool:
                """Whether nothing is booked, and the index is the engine's own table, and its tier's."""
                [view] = await fleet.workers.read()
                slots: dict[int, Callable[[], set[bytes]]] = {view.record["slot"]: engine.table}
                if name == "OffloadingConnector":
                    slots[view.record["sets"]["cpu"]["slot"]] = engine.tier
                try:
                    tables = {slot: await asyncio.to_thread(table) for slot, table in slots.items()}
                except TimeoutError:  # NIXL polls without a pause, which takes a core
                    return False
                held: Any = {slot: await fleet.redis.smembers(fleet.keys.slot(slot)) for slot in slots}
                return not view.load.in_flight and held == {
                    slot: {key[-12:-4] for key in table} for slot, table in tables.items()
                }

            async with httpx.AsyncClient(timeout=120) as client:
                for number in range(CHATS):
                    recent = talks if name == "OffloadingConnector" else talks[-3:]  # most of the former left the GPU
                    messages = rng.choice(recent) if number % 4 else [said(rng, 200)]
                    messages = [*messages, said(rng, 40)]
                    await poll(indexed, 120, "index == the engine's table")
                    texts = engine.tokenised()
                    body = {"model": SERVED_NAME, "messages": messages, "max_tokens": 4, "return_token_ids": True}
                    asked = {"X-Warmfleet-Explain": "1"}
                    path = f"{url}/v1/chat/completions"
                    answer = await client.post(path, json=body | {"temperature": 0}, headers=asked)
                    assert answer.status_code == 200, answer.text
                    handed += engine.tokenised() == texts
                    told = answer.json()
                    assert told["prompt_token_ids"] == await own_ids(client, engine, messages)
                    cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
                    matched = int(answer.headers["x-warmfleet-matched-tokens"])
                    [explained] = json.loads(answer.headers["x-warmfleet-explain"])["candidates"]
                    device = explained["matched"] - explained.get("tier_tokens", 0)  # as the choice saw it
                    from_tier += max(0, matched - device)
                    hits, loaded = hits + (matched > 0), loaded + (cached > matched)
                    assert cached >= matched
                    text = told["choices"][0]["message"]["content"]
                    talks.append([*messages, {"role": "assistant", "content": text}])
                await poll(indexed, 120, "index == the engine's table")
                counted = await asyncio.to_thread(engine.cached_by_source)
            [view] = await fleet.workers.read()
            await fleet.close()
            log = engine.log.read_text(errors="replace")
    assert "blocks are evicted for a time to first token of 0.2 s" in log
    assert handed >= CHATS * 10 // 12
    assert hits > CHATS // 4
    if name == "NixlConnector":
        assert loaded == 0, "this engine reads nothing from others"
    if name == "OffloadingConnector":
        assert loaded == 0, "what it loads from its tier is known"
        assert from_tier == counted["host"] > 0
        told = view.record["sets"]["cpu"]
        assert told["capacity_blocks"] == 2**25 // told["bytes_per_token"] // BLOCK_TOKENS
        assert 0 < told["ps_per_byte"] < 100_000, "loads were measured"
