"""Engines for these tests: small, fast, on free ports."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from warmfleet_loadtest.engine import Engine, EngineConfig
from warmfleet_loadtest.simulator.api import Served
from warmfleet_loadtest.simulator.scheduler import Limits
from warmfleet_loadtest.simulator.step_costs import PRESETS, StepCosts
from warmfleet_loadtest.tokens.prompt_tokenizer import PromptTokenizer
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SCHEME = wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor"), 16)


DEMO = Served(("demo",))


@cache
def identity() -> PromptTokenizer:
    """Return the demo's tokenizer, which takes a third of a second to load, so it is loaded once."""
    return PromptTokenizer.load()


@dataclass(frozen=True)
class Running:
    engine: Engine
    url: str


def config(costs: StepCosts = PRESETS["fast"], blocks: int = 256, mode: str = "step") -> EngineConfig:
    """Return a configuration for prompts of up to 1,024 tokens, or more if the cache holds more."""
    length = 1_024 if blocks <= 256 else 16 * (blocks - 1)
    return EngineConfig(SCHEME, Limits(max_model_len=length), blocks, costs, mode, 0.001)


@asynccontextmanager
async def running(
    settings: EngineConfig | None = None, served: Served = DEMO, ready: Engine | None = None
) -> AsyncIterator[Running]:
    """Run an engine that listens, without a fleet."""
    engine = ready or Engine(settings or config(), identity(), served)
    await engine.start("127.0.0.1", 0)
    try:
        yield Running(engine, f"http://127.0.0.1:{engine.port}")
    finally:
        await engine.stop()
