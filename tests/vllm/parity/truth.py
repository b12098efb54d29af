"""Asks the oracle and compares its answers with those of the router's own code."""

from __future__ import annotations

import base64
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from warmfleet.errors import BadRequest
from warmfleet.prompt.block_hashes import MAX_BLOCKS, Hasher
from warmfleet.prompt.dialects import bodies
from warmfleet.prompt.engine_paths import KNOWN
from warmfleet.prompt.images import ImageRules
from warmfleet.prompt.learned_images import LearnedImages
from warmfleet.prompt.messages import NotReproducible
from warmfleet.protocol.wire import HASH_BYTES, Scheme
from warmfleet_worker.seen_images import SeenImages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.support.requests.random_requests import RandomRequest
    from tests.vllm.inside import Inside

    from warmfleet.pools.identities import Identities
    from warmfleet.prompt.prefix_trie import Prompt
    from warmfleet.prompt.prompt_identity import Identity
    from warmfleet.prompt.request import Request

SERVER = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-model-len", "131072")
INLINE_CHARACTERS = 10**9
PATHS = {known.name: known for known in KNOWN.values()}


@dataclass(frozen=True)
class Model:
    """A model's folder, which needs no weights, and the arguments of its server."""

    folder: Path
    arguments: tuple[str, ...] = ()


@dataclass
class Counts:
    """Results of many requests. different: (request, reason) of every wrong answer. blocks: compared hashes."""

    equal: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    fallback: Counter[str] = field(default_factory=Counter)
    different: list[tuple[RandomRequest, str]] = field(default_factory=list)
    blocks: int = 0

    @property
    def served(self) -> int:
        return self.equal + self.fallback.total() + len(self.different)


class Truth:
    """An oracle that renders and hashes requests for these models as vLLM does. A process holds the latest alone."""

    def __init__(
        self, vllm: Inside, models: Mapping[str, Model], algorithms: Sequence[str] = ("sha256", "sha256_cbor")
    ) -> None:
        self._vllm = vllm
        named = {name: (str(model.folder), [*SERVER, *model.arguments]) for name, model in models.items()}
        first = vllm.call("parity.oracle", "begin", named, algorithms)
        self.models: dict[str, Any] = first["models"]
        self.none_hashes = {name: bytes.fromhex(value) for name, value in first["none_hashes"].items()}

    def scheme(self, algorithm: str, block_tokens: int) -> Scheme:
        return Scheme(algorithm, self.none_hashes[algorithm], block_tokens)

    async def identity(self, identities: Identities, model: str) -> Identity:
        """Return the router's identity, built from the facts that a worker with this model announces."""
        announced = self.models[model]
        artifacts = {name: base64.b64decode(data) for name, data in announced["artifacts"].items()}
        return await identities.build(model, artifacts, announced["facts"])

    def answers(
        self, model: str, random_requests: Sequence[RandomRequest], schemes: Sequence[tuple[str, int]]
    ) -> list[dict[str, Any]]:
        lines = [
            {"schemes": schemes, "endpoint": ask.endpoint, "body": ask.body, "lora": ask.lora}
            for ask in random_requests
        ]
        return list(self._vllm.call("parity.oracle", "answers", model, lines))


async def compare(
    truth: Truth,
    identity: Identity,
    random_requests: Sequence[RandomRequest],
    schemes: Sequence[tuple[str, int]],
    learned: LearnedImages | None = None,
) -> Counts:
    """Compare vLLM with the router's own code, request by request, and count the results.

    learned: gets what an engine reports of each request's images, behind the request.
    """
    counts, seen, images = Counts(), SeenImages(), LearnedImages() if learned is None else learned
    hashers = tuple(Hasher(truth.scheme(*scheme)) for scheme in schemes)
    for ask, answer in zip(random_requests, truth.answers(identity.key, random_requests, schemes), strict=True):
        if "refused" in answer:
            counts.refused[answer["refused"][:60]] += 1
            continue
        try:
            facts = truth.models[identity.key]["facts"]
            request, made = await _routed(identity, ask, hashers, facts.get("images"), images)
        except (NotReproducible, BadRequest) as error:
            reason = error.reason if isinstance(error, NotReproducible) else f"400 {error}"
            counts.fallback[reason] += 1
            continue
        finally:
            if learned is not None:
                _learn(answer, seen, learned)
        why = _difference(made, answer, hashers, (request.salt, ask.lora))
        if why:
            counts.different.append((ask, why))
        else:
            counts.equal += 1
            counts.blocks += sum(len(packed) * 6 // 64 for packed in answer["hashes"][0])
    return counts


def _learn(answer: dict[str, Any], seen: SeenImages, learned: LearnedImages) -> None:
    for prompt, media in zip(answer["prompts"], answer["media"], strict=True):
        for offset, length, identifier in media:
            seen.note(identifier, prompt, offset, length)
    assert all(learned.take(report.encode(), time.time()) == "read" for report in seen.reports(1_000))


async def _routed(
    identity: Identity, ask: RandomRequest, hashers: tuple[Hasher, ...], images: Any, learned: LearnedImages
) -> tuple[Request, list[Prompt]]:
    request = bodies.parse(PATHS[ask.endpoint], ask.raw)
    if request.unforeseen:
        raise NotReproducible(request.unforeseen)
    rules = ImageRules.of(images)
    if rules is not None and b'"image' in ask.raw:
        return request, [await identity.with_images(request, rules, hashers, ask.lora, learned.find)]
    return request, await identity.prompts(request, hashers, ask.lora, INLINE_CHARACTERS)


def _difference(
    made: list[Prompt],
    answer: dict[str, Any],
    hashers: Sequence[Hasher],
    keys: tuple[str | None, tuple[str, str] | None],
) -> str:
    if [prompt.ids for prompt in made] != answer["prompts"]:
        lengths = [prompt.tokens for prompt in made], [len(ids) for ids in answer["prompts"]]
        return f"other ids: {lengths[0]} against {lengths[1]} tokens"
    if not any(prompt.chains for prompt in made):
        return "no prompt has a chain"
    for prompt, expected in zip(made, answer["hashes"], strict=True):
        # Only the prompt of a request with a single prompt brings its chains.
        chains = prompt.chains or [hasher.chain(prompt.ids, *keys) for hasher in hashers]
        for hasher, chain, value in zip(hashers, chains, expected, strict=True):
            # The router's chain ends where a hit must end: the prompt's last token is always computed.
            whole = min((prompt.tokens - 1) // hasher.scheme.block_tokens, MAX_BLOCKS) * HASH_BYTES
            if len(chain.hashes) != whole or chain.hashes != base64.b64decode(value)[:whole]:
                return f"other hashes: {hasher.scheme.algorithm}, blocks of {hasher.scheme.block_tokens}"
    return ""
