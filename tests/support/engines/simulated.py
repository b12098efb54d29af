"""Simulated engines in a fleet, in the test's own process. Such an engine may behave otherwise than it announces."""

from __future__ import annotations

import argparse
import string
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from warmfleet_loadtest.engine import Engine, EngineConfig
from warmfleet_loadtest.simulator.api import Served
from warmfleet_loadtest.simulator.fleet_membership import Membership
from warmfleet_loadtest.simulator.scheduler import Limits
from warmfleet_loadtest.simulator.step_costs import PRESETS
from warmfleet_loadtest.tokens.prompt_tokenizer import PromptTokenizer
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from warmfleet_loadtest.simulator.scheduler import Request

Kind = Literal["right", "template", "tokenizer", "seed", "algorithm", "block size"]
LIMITS = Limits(max_model_len=4_096)
SCHEME = wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor"), 16)
SCHEMES: dict[Kind, wire.Scheme] = {
    "seed": wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor", "another seed"), 16),
    "algorithm": wire.Scheme("sha256", SCHEME.none_hash, 16),
    "block size": wire.Scheme("sha256_cbor", SCHEME.none_hash, 32),
}
TEMPLATE = """\
{%- for message in messages -%}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""
OTHER_TEMPLATE = TEMPLATE.replace("<|assistant|>", "<|assistent|>")


@cache
def tokenizer_json(source: str, size: int) -> str:
    """A byte-level BPE of ``size`` tokens that learned from this file: some milliseconds."""
    made, bytes_ = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer, made.decoder = bytes_, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=bytes_.alphabet(),
        show_progress=False,
    )
    made.train([source], trainer)
    return str(made.to_str())


def identity(kind: Kind = "right") -> PromptTokenizer:
    source = string.__file__ if kind == "tokenizer" else argparse.__file__
    return PromptTokenizer(tokenizer_json(source, 1_000), OTHER_TEMPLATE if kind == "template" else TEMPLATE)


@dataclass
class Simulated:
    """An engine of the fleet that can become another one while it runs, and tells nobody."""

    engine: Engine
    worker_id: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.engine.port}"

    def become(self, kind: Kind) -> None:
        """Change the engine as a changed tokenizer file, or a restart with the same record in Redis, would."""
        now = identity(kind)
        self.engine.tokenizer.__dict__.clear()
        self.engine.tokenizer.__dict__.update(now.__dict__)
        scheme = SCHEMES.get(kind, SCHEME)
        scheduler = self.engine.core.scheduler
        scheduler.scheme, scheduler.limits = scheme, Limits(max_model_len=4_096, block_tokens=scheme.block_tokens)

    def evict_at_once(self) -> None:
        """From now on what a request leaves in the cache is gone before anybody can look: a tenant's load at worst."""
        scheduler = self.engine.core.scheduler
        free, pool = scheduler._free, scheduler.pool

        def free_and_evict(request: Request) -> None:
            free(request)
            pool.release(pool.allocate(pool.free))

        scheduler._free = free_and_evict  # type: ignore[method-assign]


@asynccontextmanager
async def simulated(
    redis_url: str,
    model: str,
    name: str = "eng",
    kind: Kind = "right",
    *,
    lies: bool = False,
    url: str = "",
    speed: str = "fast",
    pool: str = "",
) -> AsyncIterator[Simulated]:
    """An engine that has joined. kind: what it is; lies: it announces to be ``right``; url: where it says it is.

    pool: the tag that it joins; empty: the model's only one.
    """
    config = EngineConfig(SCHEMES.get(kind, SCHEME) if not lies else SCHEME, LIMITS, 1_024, PRESETS[speed])
    made = Simulated(Engine(config, identity(kind), Served((model,))), wire.worker_id_of(name, 0))
    await made.engine.start("127.0.0.1", 0)
    try:
        membership = Membership(redis_url, pool or model, (model,), name, url or made.url)
        artifacts = identity("right" if lies else kind).artifacts()
        made.engine.join(membership, artifacts)
        if lies:
            made.become(kind)
        yield made
    finally:
        await made.engine.stop()
