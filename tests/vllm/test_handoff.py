"""Token hand-off to real vLLM: the answer is the same, byte for byte, whoever makes the token ids."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import subprocess
from collections import Counter
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.polling import poll
from tests.support.replicas.replica import Replica, replica
from tests.vllm.conftest import BLOCKS, TAG, Reported
from tests.vllm.engine import SERVED_NAME, VENV, EngineOptions, running
from tests.vllm.features import FEATURES, Feature

if TYPE_CHECKING:
    from pathlib import Path

    from tests.vllm.engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

#: A replica on a busy machine may lack a fresh reading of the fleet, so only a difference in every try is an error.
TRIES = 3
#: Fields in the events of a stream that continue the field of the event before.
GROWING = ("text", "content", "reasoning", "reasoning_content", "arguments")


async def answer(router: Replica, engine: VllmEngine, feature: Feature) -> tuple[int, bytes]:
    """Return status and body from an engine with an empty cache, without ids and times, which differ each time."""
    async with router.client.post(f"{engine.url}/reset_prefix_cache") as reset:
        assert reset.status == 200
    body = {"model": SERVED_NAME} | feature.body
    status, _, said = await router.post(body, feature.path, **{"content-type": "application/json"})
    said = re.sub(rb'"((?:\w+_)?id|signature)":"[^"]*"', rb'"\1":""', said)
    return status, re.sub(rb'"(created\w*|completed_at)":[\d.]+', rb'"\1":0', said)


def whole(said: bytes) -> Any:
    """Join a stream into one answer, because a busy engine may put two tokens into one event."""
    lines = [line.removeprefix(b"data: ") for line in said.splitlines() if line.startswith(b"data: {")]
    return functools.reduce(joined, map(json.loads, lines), None)


def joined(old: Any, new: Any, name: str = "") -> Any:
    """Join two events, or two values of the field ``name`` in them."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: joined(old.get(key), new.get(key), key) for key in [*old, *(new.keys() - old.keys())]}
    if name in ("choices", "tool_calls") and isinstance(old, list) and isinstance(new, list):
        first, second = ({choice["index"]: choice for choice in part} for part in (old, new))
        return [joined(first.get(index), second.get(index)) for index in sorted({*first, *second})]
    if isinstance(old, list) and isinstance(new, list):
        return old + new
    if name in GROWING and isinstance(old, str) and isinstance(new, str):
        return old + new
    return old if new is None else new


async def counted(router: Replica) -> Counter[str]:
    """Return the number of requests so far, by result."""
    _, page = await router.get("/metrics")
    found = re.findall(r'^warmfleet_handoff_requests_total{result="(\w+)"} (\d+)', page.decode(), re.MULTILINE)
    return Counter({name: int(count) for name, count in found})


async def handed(router: Replica, engine: VllmEngine, feature: Feature) -> tuple[tuple[int, bytes], str, int]:
    """Return the answer, its result label, and how many prompts the engine tokenised. A check is sent again."""
    while True:
        before, texts = await counted(router), engine.tokenised()
        said = await answer(router, engine, feature)
        [result] = await counted(router) - before
        if result != "check":
            return said, result, engine.tokenised() - texts


async def compare(off: Replica, on: Replica, engine: VllmEngine, name: str, feature: Feature) -> str:
    """Return a description of the difference, or an empty string."""
    for _ in range(TRIES):
        plain = await answer(off, engine, feature)
        said, result, texts = await handed(on, engine, feature)
        stream, wrong = whole(said[1]) if feature.body.get("stream") else None, ""
        alike = said == plain or (stream is not None and (said[0], stream) == (plain[0], whole(plain[1])))
        if not alike or (plain[0] == 200) == ("refused" in name):
            wrong = f"{plain[0]} {plain[1].decode()}\n  became {said[0]} {said[1].decode()}"
        elif result != feature.result or (plain[0] == 200 and texts != feature.texts):
            wrong = f"counted as {result}, {texts} texts tokenised by the engine"
        if not wrong:
            break
    return wrong


async def differences(reported: Reported, features: dict[str, Feature], tag: str = TAG) -> dict[str, str]:
    async with AsyncExitStack() as stack:
        off, on = [
            await stack.enter_async_context(
                replica(reported.redis_url, tag, decide_timeout_s=5.0, token_handoff=enabled)
            )
            for enabled in (False, True)
        ]
        for router in (off, on):
            await router.exact()
            await poll(functools.partial(router.metric, 'warmfleet_workers{state="proven"}'), 30, "a proven worker")
        found = {}
        for name, feature in features.items():
            # vLLM joins two pieces of a stream when it is busy, so a difference counts only if it comes each time.
            for _ in range(4):
                wrong = await compare(off, on, reported.engine, name, feature)
                if not wrong:
                    break
            else:
                found[name] = wrong
        assert not await counted(off)
        return found


async def test_answers_do_not_depend_on_who_made_the_ids(reported: Reported) -> None:
    assert await differences(reported, FEATURES) == {}


TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n' }}{% endif %}{% endif %}
"""
#: Writes a LoRA adapter of the tiny model: rank 4, random.
ADAPTER = """
import json, pathlib, sys, torch
from safetensors.torch import save_file
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
torch.manual_seed(1)
layer = "base_model.model.model.layers.{}.self_attn.{}_proj.lora_{}.weight"
shapes = {"A": (4, 64), "B": (64, 4)}
weights = {layer.format(k, p, s): torch.randn(shapes[s]) for k in range(2) for p in "qv" for s in "AB"}
save_file(weights, folder / "adapter_model.safetensors")
config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none"}
(folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj", "v_proj"]}))
"""


@pytest.mark.long(
    minutes=2,
    shows=(
        "real vLLM gives the same answers with and without token hand-off: 120 requests with parsers, "
        "tools in the template and LoRA"
    ),
)
async def test_nor_with_parsers_tools_in_the_template_and_adapters(vllm_store: str, tmp_path: Path) -> None:
    template, adapter, tag = tmp_path / "template.jinja", tmp_path / "adapter", f"{TAG}#parsers"
    template.write_text(TEMPLATE)
    await asyncio.to_thread(subprocess.check_call, [VENV / "bin" / "python", "-c", ADAPTER, adapter])
    parsers = ("--reasoning-parser", "granite", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    lora = ("--enable-lora", "--lora-modules", f"adapter={adapter}")
    arguments = ("--chat-template", str(template), *parsers, *lora)
    options = EngineOptions(vllm_store, "vllm-p", tag, BLOCKS, arguments=arguments)
    adapted = {
        f"adapter, {name}": feature._replace(body=feature.body | {"model": "adapter"})
        for name, feature in FEATURES.items()
    }
    with running(options) as [engine]:
        found = Reported(engine, vllm_store)
        plain = engine.complete("class A:", max_tokens=8)["choices"][0]["text"]
        assert engine.complete("class A:", max_tokens=8, model="adapter")["choices"][0]["text"] != plain
        assert await differences(found, FEATURES | adapted, tag) == {}
