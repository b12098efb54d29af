"""Adapters and salts through real vLLM: a decision predicts exactly the blocks of its own adapter and salt."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.conftest import TAG
from tests.vllm.engine import BLOCK_TOKENS, SERVED_NAME, EngineOptions, VllmEngine, running
from tests.vllm.replicas import BY_MATCH, replicas

from warmfleet.fleet import Fleet
from warmfleet.fleet.client import connect

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=2,
        shows=(
            "two real engines with adapters and salts: each request goes to the right engine, its "
            "prediction is exact, and it never matches blocks of anybody else"
        ),
    ),
    pytest.mark.timeout(1_500),
]

LAYERS, HIDDEN, RANK = 2, 64, 8  # the shape of models/tiny, and the rank of the adapters
ADAPTERS = {"vllm-a": ("one", "two"), "vllm-b": ("one",)}
WORDS = ("import", "return", "while", "class", "value", "index", "error", "string", "buffer", "module")
WHO = [(model, salt) for model in (SERVED_NAME, "one", "two") for salt in (None, "red", "blue")]


@dataclass(frozen=True)
class Adapted:
    """Two replicas; engine a serves both adapters, engine b one of them."""

    replicas: list[str]
    engines: dict[str, VllmEngine]
    folder: Path
    redis_url: str


@dataclass(frozen=True)
class Answer:
    worker: str
    predicted: int
    cached: int
    tokens: int


def save_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter for models/tiny with random weights, as peft saves it."""
    rng = random.Random(seed)
    header: dict[str, Any] = {}
    tensors = bytearray()
    for layer in range(LAYERS):
        for name in ("q_proj", "v_proj"):
            for part, shape in (("A", [RANK, HIDDEN]), ("B", [HIDDEN, RANK])):
                values = [rng.gauss(0, 0.5) for _ in range(RANK * HIDDEN)]
                begin = len(tensors)
                tensors += struct.pack(f"<{len(values)}f", *values)
                key = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight"
                header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(tensors)]}
    folder.mkdir()
    said = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(said)) + said + tensors)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 16, "bias": "none"}
    config |= {"target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": SERVED_NAME, "lora_dropout": 0.0}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    folder = tmp_path_factory.mktemp("adapters")
    paths = {name: save_adapter(folder / name, seed) for seed, name in enumerate(("one", "two", "three"))}
    with server(valkey_binary()) as redis_url:
        options = [
            EngineOptions(
                redis_url=redis_url,
                worker_id=worker_id,
                model_tag=TAG,
                blocks=1_024,
                arguments=(
                    "--enable-lora",
                    "--max-lora-rank",
                    "8",
                    "--lora-modules",
                    *[f"{n}={paths[n]}" for n in names],
                ),
                environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
            )
            for worker_id, names in ADAPTERS.items()
        ]
        with running(*options) as engines, replicas(redis_url, policy=BY_MATCH) as urls:
            yield Adapted(urls, {engine.worker_id: engine for engine in engines}, folder, redis_url)


def prompt(seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=600))


async def ask(url: str, model: str, text: str, salt: str | None = None) -> Answer:
    body = {"model": model, "prompt": text, "max_tokens": 2, "temperature": 0} | ({"cache_salt": salt} if salt else {})
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage, headers = answer.json()["usage"], answer.headers
    assert int(headers["x-warmfleet-prompt-tokens"]) == usage["prompt_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    worker, predicted = headers["x-warmfleet-worker"], int(headers["x-warmfleet-matched-tokens"])
    return Answer(worker, predicted, cached, usage["prompt_tokens"])


async def quiet(adapted: Adapted) -> None:
    """Wait until nothing is booked, and no block is credited that the engines have not reported."""
    fleet = Fleet(connect(adapted.redis_url, timeout_s=5), TAG)

    async def settled() -> bool:
        in_flight = sum(view.load.in_flight for view in await fleet.workers.read())
        return not in_flight and not await fleet.redis.exists(fleet.keys.leases)

    await poll(settled, 20, "everything is settled")
    await fleet.close()


async def listed(url: str, wanted: set[str]) -> None:
    async def seen() -> bool:
        async with httpx.AsyncClient() as client:
            return {model["id"] for model in (await client.get(f"{url}/v1/models")).json()["data"]} == wanted

    await poll(seen, 20, f"/v1/models lists {sorted(wanted)}")


async def told(engine: VllmEngine, verb: str, body: dict[str, str]) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        (await client.post(f"{engine.url}/v1/{verb}_lora_adapter", json=body)).raise_for_status()


async def test_adapters_and_salts_keep_apart(adapted: Adapted) -> None:
    """All tenants send the same prompt: nothing of it is cached at first, all of it on the same engine later."""
    one, two = adapted.replicas
    for url in adapted.replicas:
        await listed(url, {SERVED_NAME, "one", "two"})
    for seed in range(3):
        text = prompt(seed)
        first = {who: await ask(one, who[0], text, who[1]) for who in WHO}
        assert [(answer.predicted, answer.cached) for answer in first.values()] == [(0, 0)] * len(WHO)
        await quiet(adapted)
        for who, before in first.items():
            again = await ask(two, who[0], text, who[1])
            whole = (again.tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            assert (again.worker, again.predicted, again.cached) == (before.worker, whole, whole), who
        await quiet(adapted)
        assert {first["two", salt].worker for salt in (None, "red", "blue")} == {"vllm-a.0"}, "only that one has it"


async def test_an_adapter_that_is_loaded_later_is_served_where_it_is(adapted: Adapted) -> None:
    engine, (url, _) = adapted.engines["vllm-b.0"], adapted.replicas
    load = {"lora_name": "three", "lora_path": str(adapted.folder / "three")}
    await told(engine, "load", load)
    await listed(url, {SERVED_NAME, "one", "two", "three"})
    for seed in range(20, 24):
        answer = await ask(url, "three", prompt(seed))
        assert (answer.worker, answer.predicted, answer.cached) == ("vllm-b.0", 0, 0)
    await quiet(adapted)
    answer = await ask(url, "three", prompt(20))
    assert answer.predicted == answer.cached > 0
    await told(engine, "unload", {"lora_name": "three"})
    await listed(url, {SERVED_NAME, "one", "two"})
