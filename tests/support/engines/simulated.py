"""Simulated engines in the test's own process: alone, or in a fleet, where they may differ from their announcement."""

from __future__ import annotations

import argparse
import string
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from warmfleet_loadtest.engine import Engine, EngineConfig
from warmfleet_loadtest.simulator.api import Served
from warmfleet_loadtest.simulator.fleet_membership import Membership
from warmfleet_loadtest.simulator.scheduler import Limits
from warmfleet_loadtest.simulator.step_costs import PRESETS, StepCosts
from warmfleet_loadtest.tokens.prompt_tokenizer import PromptTokenizer
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from warmfleet_loadtest.simulator.scheduler import Request

Kind = Literal["right", "template", "tokenizer", "seed", "algorithm", "block size", "lookahead", "drop"]
DEMO = Served(("demo",))
LIMITS = Limits(max_model_len=8_192)
SCHEME = wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor"), 16)
SCHEMES: dict[Kind, wire.Scheme] = {
    "seed": wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor", "another seed"), 16),
    "algorithm": wire.Scheme("sha256", SCHEME.none_hash, 16),
    "block size": wire.Scheme("sha256_cbor", SCHEME.none_hash, 32),
    "lookahead": replace(SCHEME, extra_keys="lookahead_1"),  # vLLM 0.33 with EAGLE
    "drop": replace(SCHEME, extra_keys="tagged_drop"),  # earlier ones
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


@cache
def demo_identity() -> PromptTokenizer:
    """Return the demo's tokenizer, which takes a third of a second to load, so it is loaded once."""
    return PromptTokenizer.load()


class Announcing(PromptTokenizer):
    """An identity with other facts than its own."""

    def __init__(self, known: PromptTokenizer, facts: Mapping[str, Any]) -> None:
        self.__dict__.update(known.__dict__)
        self._facts = facts

    def facts(self, max_model_len: int) -> dict[str, Any]:
        return super().facts(max_model_len) | dict(self._facts)


@dataclass
class Simulated:
    """An engine that can become another one while it runs, without an announcement. worker_id: only in a fleet."""

    engine: Engine
    worker_id: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.engine.port}"

    def become(self, kind: Kind) -> None:
        """Change the engine as a changed tokenizer file, or a restart with the same record in Redis, would."""
        self.engine.tokenizer.__dict__.update(identity(kind).__dict__)
        scheme = SCHEMES.get(kind, SCHEME)
        scheduler = self.engine.core.scheduler
        scheduler.scheme, scheduler.limits = scheme, Limits(max_model_len=8_192, block_tokens=scheme.block_tokens)

    def see(self, token_id: int | None, tokens: int) -> None:
        """Take chats with images, which have this token so often; the token's text is a zero byte."""
        tokenizer = self.engine.tokenizer
        chat_ids = tokenizer.chat_ids

        def with_images(body: dict[str, Any]) -> list[int]:
            """vLLM puts images in front of a message's text."""
            made = []
            for message in body["messages"]:
                parts = message["content"] if isinstance(message["content"], list) else [{"text": message["content"]}]
                texts = [part.get("text", "\0") for part in sorted(parts, key=lambda part: "text" in part)]
                made.append(message | {"content": "\n".join(texts)})
            ids = chat_ids(body | {"messages": made})
            return [each for one in ids for each in [one] * (tokens if one == token_id else 1)]

        tokenizer.chat_ids = with_images  # type: ignore[method-assign]

    def evict_at_once(self) -> None:
        """From now on evict the blocks of a request as soon as it ends: the worst load of another tenant."""
        scheduler = self.engine.core.scheduler
        free, pool = scheduler._free, scheduler.pool

        def free_and_evict(request: Request) -> None:
            free(request)
            pool.release(pool.allocate(pool.free))

        scheduler._free = free_and_evict  # type: ignore[method-assign]


def config(
    costs: StepCosts = PRESETS["fast"], blocks: int = 256, mode: str = "step", scheme: wire.Scheme = SCHEME
) -> EngineConfig:
    """Return a configuration for prompts of up to 1,024 tokens, or more if the cache holds more."""
    length = 1_024 if blocks <= 256 else 16 * (blocks - 1)
    return EngineConfig(scheme, Limits(max_model_len=length), blocks, costs, mode, 0.001)


@asynccontextmanager
async def running(
    settings: EngineConfig | None = None, served: Served = DEMO, ready: Engine | None = None
) -> AsyncIterator[Simulated]:
    """Run an engine that listens, without a fleet."""
    engine = ready or Engine(settings or config(), demo_identity(), served)
    await engine.start("127.0.0.1", 0)
    try:
        yield Simulated(engine)
    finally:
        await engine.stop()


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
    facts: Mapping[str, Any] | None = None,
    leave_out: tuple[str, ...] = (),
    reports_ends: bool = True,
) -> AsyncIterator[Simulated]:
    """An engine that has joined. kind: its real kind; lies: it announces ``right``; url: its announced address.

    pool: the tag that it joins; empty: the model's only one. facts: announced beside or instead of the usual ones.
    leave_out: artifacts that the engine does not announce. reports_ends: as in ``Membership``.
    """
    scheme = SCHEMES.get(kind, SCHEME) if not lies else SCHEME
    engine = Engine(
        EngineConfig(scheme, LIMITS, 1_024, PRESETS[speed]), Announcing(identity(kind), facts or {}), Served((model,))
    )
    brought = identity("right" if lies else kind).artifacts()
    async with running(ready=engine) as made:
        made.worker_id = wire.worker_id_of(name, 0)
        membership = Membership(redis_url, pool or model, (model,), name, url or made.url, reports_ends)
        engine.join(membership, {file: content for file, content in brought.items() if file not in leave_out})
        if lies:
            made.become(kind)
        yield made
