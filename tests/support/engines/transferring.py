"""Simulated engines that hand blocks to one another, and the two steps of a request."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import httpx
from tests.support.engines.simulated import DEMO, config, demo_identity, running

from warmfleet_loadtest.engine import Engine
from warmfleet_loadtest.simulator.transfers.config import Link, TransferConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from warmfleet_loadtest.simulator.api import Served
    from warmfleet_loadtest.simulator.fleet_membership import Membership
    from warmfleet_loadtest.simulator.step_costs import StepCosts
    from warmfleet_loadtest.tokens.prompt_tokenizer import PromptTokenizer

PREFILL: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
PRODUCER = TransferConfig("kv_producer", recomputes=True, link=Link(handshake_s=0.5))
CONSUMER = replace(PRODUCER, role="kv_consumer")


@dataclass
class Transferring:
    """A running engine. http: a client at its URL."""

    engine: Engine
    http: httpx.AsyncClient

    async def ask(self, prompt: list[int], params: Mapping[str, Any] | None = None, **more: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, **more}
        return await self.http.post("/v1/completions", json=body | ({"kv_transfer_params": params} if params else {}))

    async def prefill(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        """Do the first step; return what the second needs."""
        answer = await self.ask(prompt, PREFILL, **{"max_tokens": 1, **more})
        found = answer.json()["kv_transfer_params"]
        assert isinstance(found, dict)
        return found

    async def counts(self) -> dict[str, Any]:
        found = (await self.http.get("/sim/transfers")).json()
        assert isinstance(found, dict)
        return found

    async def order(self, **fault: Any) -> None:
        (await self.http.post("/sim/faults", json=fault)).raise_for_status()


def text_of(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["text"])


@asynccontextmanager
async def transferring(
    transfer: TransferConfig | None,
    costs: StepCosts | None = None,
    blocks: int = 256,
    served: Served = DEMO,
    membership: Membership | None = None,
    tokenizer: PromptTokenizer | None = None,
) -> AsyncIterator[Transferring]:
    """Run an engine. transfer: None: one that hands over nothing. membership: of a fleet; its URL is filled in.

    tokenizer: None: the demo's, which is large.
    """
    tokenizer = tokenizer or demo_identity()
    settings = config(costs, blocks) if costs else config(blocks=blocks)
    engine = Engine(replace(settings, transfer=transfer), tokenizer, served)
    once = httpx.Limits(max_keepalive_connections=0)  # else a request may meet the end of an idle connection
    async with (
        running(ready=engine) as up,
        httpx.AsyncClient(base_url=up.url, timeout=30, verify=False, limits=once) as http,
    ):
        if membership is not None:
            engine.join(replace(membership, url=up.url), tokenizer.artifacts())
        yield Transferring(engine, http)


@asynccontextmanager
async def pair(
    prefill: TransferConfig = PRODUCER, decode: TransferConfig = CONSUMER
) -> AsyncIterator[tuple[Transferring, Transferring]]:
    """Run two engines."""
    async with transferring(prefill) as first, transferring(decode) as second:
        yield first, second
