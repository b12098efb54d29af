"""Chats with odd values in any field are refused as bad requests, identified or placed by load; no router error."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import pytest
from tests.support.requests import deepseek_tokenizer

from warmfleet.errors import BadRequest
from warmfleet.prompt import request as prompt
from warmfleet.prompt.chat_template import ChatTemplate
from warmfleet.prompt.messages import NotReproducible
from warmfleet.prompt.prefix_trie import Trie
from warmfleet.prompt.prompt_identity import Identity, canonical_text

LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}"
TEMPLATES = (
    LOOP
    + "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
    LOOP
    + "{% for p in m.content %}{{ p.text }}{{ p.type }}{% endfor %}{{ m | tojson }}{% endfor %}{{ tools | tojson }}",
)
PARTS: list[Any] = [
    *({"type": kind, "text": "x"} for kind in ("text", "input_text", "refusal", "thinking", ["x"], None)),
    *({"type": "image_url", "image_url": url} for url in ({"url": "u"}, None, 3)),
    *({"type": "input_audio"}, {"text": "x"}, {}, {"type": "text", "text": None}, {"type": "text", "n": 2**63}),
    {"type": "text", "text": "\ue0a1image"},
]
ATOMS: list[Any] = [
    *(None, True, 0, -1, 1.5, 2**63, "", "a", "text", "\x00", "😀", "\ue0a1image", [], {}, [1]),
    *(
        {"a": {"b": [1, 2]}},
        '{"a": "\\ud800"}',
        '{"a": 1e999}',
        "[1]",
        "9" * 5_000,
        orjson.loads("[" * 200 + "]" * 200),
    ),
]
FIELDS = ("content", "tool_calls", "reasoning", "reasoning_content", "name", "tool_call_id", "tools", "task")
ROLES = ("user", "assistant", "system", "tool", "developer", "x", "\x00")
MORE: tuple[str, ...] = (
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "add_generation_prompt",
)
MORE += ("continue_final_message", "cache_salt", "n", "max_tokens", "echo", "logprobs", "stream")
NAMES = ("type", "text", "name", "function", "arguments", "role", "content", "id", "parameters", "messages", "loop")


class Odd:
    """A generator of random chats."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def value(self, depth: int = 0) -> Any:
        kind = self.rng.random()
        if kind < 0.7 or depth > 2:
            return self.rng.choice(ATOMS + PARTS)
        if kind < 0.85:
            return [self.value(depth + 1) for _ in range(self.rng.randrange(4))]
        return {self.rng.choice(NAMES): self.value(depth + 1) for _ in range(self.rng.randrange(4))}

    def message(self) -> dict[str, Any]:
        made = {"role": self.rng.choice(ROLES)} | {name: self.value() for name in FIELDS if self.rng.random() < 0.3}
        if self.rng.random() < 0.3:
            function = {"name": self.value(), "arguments": self.value()}
            made["tool_calls"] = [{"id": self.value(), "type": "function", "function": function}]
        if self.rng.random() < 0.5:
            made["content"] = self.rng.choices(PARTS, k=3)
        return made

    def body(self) -> bytes:
        made = {"model": "m", "messages": [self.message() for _ in range(self.rng.randrange(1, 4))]}
        return orjson.dumps(made | {name: self.value() for name in MORE if self.rng.random() < 0.08})


async def known(identity: Identity, body: bytes) -> list[str]:
    """The kind of refusal, or the reasons for which the prompt and its beginning are not known."""
    try:
        request = prompt.parse("chat", body)
    except BadRequest:
        return ["bad request"]
    reasons = []
    for look in (identity.prompts(request, (), None, 2_000), identity.beginning(request)):
        try:
            await look
            reasons.append("known")
        except NotReproducible as why:
            reasons.append(why.reason)
    try:
        canonical_text(request)
    except NotReproducible as why:
        reasons.append(why.reason)
    assert prompt.estimated_tokens(request) > 0
    prompt.too_long(request, 10)
    return reasons


async def run(count: int, seed: int) -> Counter[str]:
    facts = {"multimodal": True, "placeholders": {"image": "<img>", "audio": "<a>"}}
    encoder, odd, seen = deepseek_tokenizer.loaded(), Odd(seed), Counter[str]()
    with ThreadPoolExecutor(1) as executor:
        made = [
            Identity(
                encoder, ChatTemplate(template, trusted=trusted), facts, executor, Trie(10**6), encoder.cuts(template)
            )
            for template in TEMPLATES
            for trusted in (True, False)
        ]
        for number in range(count):
            seen.update(await known(made[number % len(made)], odd.body()))
    return seen


async def test_odd_chats() -> None:
    seen = await run(2_500, 1)
    assert min(seen[reason] for reason in ("bad request", "known", "parts", "content", "tool_calls", "tools")) > 10


@pytest.mark.long(
    minutes=4,
    shows=(
        "200,000 chats with odd values in every field are refused, known, or routed by load, and never end "
        "in an error of the router"
    ),
)
@pytest.mark.timeout(1_800)
async def test_very_many_odd_chats() -> None:
    assert (await run(200_000, 2))["known"] > 1_000
