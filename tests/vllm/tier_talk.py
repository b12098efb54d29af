"""Requests to an engine with a tier in CPU memory: what is predicted by source, beside what vLLM counts."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from tests.support.polling import poll
from tests.vllm.engine import BLOCK_TOKENS, SERVED_NAME

if TYPE_CHECKING:
    import random

    import httpx
    from tests.vllm.engine import VllmEngine

    from warmfleet.fleet import Fleet

BLOCKS = 160  # of an engine's cache
BLOCK_BYTES = 2**15  # of the tiny model
LONGEST = 2_400  # tokens of a prompt


def host_tier(blocks: float) -> tuple[str, ...]:
    """Arguments of an engine without a GPU: a tier of so many blocks."""
    more = {"spec_name": "HostTier", "spec_module_path": "host_tier", "cpu_bytes_to_use": int(blocks) * BLOCK_BYTES}
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": more}
    return ("--kv-transfer-config", json.dumps(config))


async def held(fleet: Fleet, slot: int) -> set[bytes]:
    return set(await cast("Any", fleet.redis.smembers(fleet.keys.slot(slot))))


@dataclass
class Talk:
    """Sends prompts, which branch from earlier ones, to one engine by a router, and counts what was predicted."""

    engine: VllmEngine
    url: str
    fleet: Fleet
    client: httpx.AsyncClient
    rng: random.Random
    prompts: list[list[int]] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    differ: list[dict[str, Any]] = field(default_factory=list)
    most: int = 0  # blocks that the tier had at a time

    def prompt(self) -> list[int]:
        """Make a new prompt, or one that goes on from a part of an earlier one, or is such a part."""
        rng = self.rng
        begin: list[int] = []
        if self.prompts and rng.random() < 0.8:
            begin = rng.choice(self.prompts[-rng.choice((4, 30)) :])
            begin = begin[: rng.randrange(len(begin) // 2, len(begin)) + 1]
        if len(begin) < BLOCK_TOKENS or rng.random() < 0.9:
            begin = begin[: LONGEST - 200] + [rng.randrange(1_000) for _ in range(rng.randrange(1, 900))]
        whole = len(begin) // BLOCK_TOKENS * BLOCK_TOKENS
        return begin[:whole] if whole and rng.random() < 0.3 else begin

    async def indexed(self) -> bool:
        """Whether nothing is booked, and the index is the engine's own table, and its tier's."""
        [view] = await self.fleet.workers.read()
        told = [await held(self.fleet, slot) for slot in (view.record["slot"], view.record["sets"]["cpu"]["slot"])]
        tables = [await asyncio.to_thread(table) for table in (self.engine.table, self.engine.tier)]
        return not view.load.in_flight and told == [{key[-12:-4] for key in table} for table in tables]

    async def reset(self, *, external: bool) -> None:
        more = "?reset_external=true" if external else ""
        answer = await self.client.post(f"{self.engine.url}/reset_prefix_cache{more}")
        answer.raise_for_status()

    async def ask(self) -> None:
        """Send a request when the index is the engine's, and compare the prediction with the engine's counters."""
        prompt = self.prompt()
        await poll(self.indexed, 120, "index == the engine's tables")
        self.most = max(self.most, len(await asyncio.to_thread(self.engine.tier)))
        before = await asyncio.to_thread(self.engine.cached_by_source)
        body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 2, "temperature": 0}
        answer = await self.client.post(f"{self.url}/v1/completions", json=body, headers={"X-Warmfleet-Explain": "1"})
        assert answer.status_code == 200, answer.text
        matched = int(answer.headers["x-warmfleet-matched-tokens"])
        [told] = json.loads(answer.headers["x-warmfleet-explain"])["candidates"]
        # explain tells what the choice saw; afterwards the chosen engine's tiers were asked for more.
        device = min(matched, told["matched"] - told.get("tier_tokens", 0))
        loaded = matched - device
        usage = answer.json()["usage"]
        assert usage["prompt_tokens"] == len(prompt)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        counted: Counter[str] = Counter()

        def all_counted() -> bool:
            counted.clear()
            counted.update(self.engine.cached_by_source() - before)
            return bool(counted.total() == cached)

        await poll(lambda: asyncio.to_thread(all_counted), 30, f"{cached} tokens are counted by source")
        self.prompts.append(prompt)
        predicted = Counter({"device": device, "host": loaded})
        self.seen.update(requests=1, loaded=loaded > 0, hits=matched > 0, whole=matched == len(prompt))
        if +predicted == counted:
            self.seen["equal"] += 1
        else:
            self.differ.append({"tokens": len(prompt), "predicted": dict(+predicted), "counted": dict(counted)})
