"""Random requests to real engines: the token ids that they report, and the blocks in their own tables."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.support.requests.random_requests import random_requests
from tests.vllm.engine import BLOCK_TOKENS, ROOT, SERVED_NAME, EngineOptions, VllmEngine, running
from tests.vllm.parity.test_parity import KINDS, LIKE
from tests.vllm.parity.truth import INLINE_CHARACTERS, PATHS, SERVER, Truth

from warmfleet.metrics import Metrics
from warmfleet.pools.identities import Identities
from warmfleet.prompt.block_hashes import Hasher
from warmfleet.prompt.dialects import bodies
from warmfleet.prompt.prefix_trie import Trie
from warmfleet.protocol.wire import HASH_BYTES, Scheme, default_none_hash
from warmfleet.untrusted.template_approval import Templates

if TYPE_CHECKING:
    from tests.support.requests.random_requests import RandomRequest
    from tests.vllm.inside import Inside

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=2,
        shows=(
            "360 random requests through three real engines: the token ids that they report and the blocks "
            "in their tables are those of the router"
        ),
    ),
    pytest.mark.timeout(900),
]

REQUESTS = 120
CONTEXT_TOKENS = 4_096
SCHEME = Scheme("sha256_cbor", default_none_hash("sha256_cbor"), BLOCK_TOKENS)
NOT_OF_THE_PROMPT = ("stop", "temperature", "max_tokens", "n", "echo")


@pytest.fixture(scope="module")
def identities(vllm: Inside) -> Truth:
    return Truth(vllm, {kind: LIKE[kind] for kind in KINDS})


def served_by(engine: VllmEngine, ask: RandomRequest) -> list[list[int]] | None:
    """Send a request; return the token ids of its prompts as the engine had them, or None if it refused."""
    body: dict[str, Any] = {name: value for name, value in ask.body.items() if name not in NOT_OF_THE_PROMPT}
    body |= {"model": SERVED_NAME, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    path = "/v1/chat/completions" if ask.endpoint == "chat" else "/v1/completions"
    answer = httpx.post(engine.url + path, json=body, timeout=120)
    if answer.status_code != 200:
        return None
    said = answer.json()
    return [said["prompt_token_ids"]] if ask.endpoint == "chat" else [c["prompt_token_ids"] for c in said["choices"]]


@pytest.mark.parametrize("kind", KINDS)
async def test_ids_and_blocks_of_a_real_engine(identities: Truth, kind: str) -> None:
    options = EngineOptions(
        model=ROOT / "models" / f"tiny-{kind}",
        blocks=8_192,
        max_model_len=CONTEXT_TOKENS,
        arguments=SERVER[:3],
    )
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(1) as executor, running(options) as [engine]:
        identity = await identities.identity(
            Identities(executor, Trie(10**7), Templates(Metrics(), approved="*")), kind
        )
        hasher, expected = Hasher(SCHEME), set[bytes]()
        for ask in random_requests(7, REQUESTS, vocabulary=8_000):
            ids = await asyncio.to_thread(served_by, engine, ask)
            if ids is None:
                counts["refused"] += 1
                continue
            made = await identity.prompts(
                bodies.parse(PATHS[ask.endpoint], ask.raw), (hasher,), None, INLINE_CHARACTERS
            )
            assert [prompt.ids for prompt in made] == ids, (ask.shape, ask.raw.decode()[:2_000])
            counts["equal"] += 1
            for prompt in made:
                packed = hasher.chain(prompt.ids, ask.body.get("cache_salt")).hashes
                expected |= {packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)}
        held = {key[-12:-4] for key in await asyncio.to_thread(engine.table)}
    print(f"{kind}: {dict(counts)}, {len(expected)} blocks, {len(held)} in the engine's table")
    assert expected <= held
    assert counts["equal"] > REQUESTS // 2
