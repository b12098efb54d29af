"""Chats with parts that are not text: what the router takes for certain is what the engine's prompt begins with.

The engine's side is written out here as vLLM does it (renderers/chat_utils.py): a template that reads parts gets
``{"type": "image"}``, a template that reads text gets the model's placeholder in front of the message's text; then the
engine's processor puts as many tokens as it likes where the placeholder stood.
"""

from __future__ import annotations

import json
import random
from array import array
from typing import TYPE_CHECKING, Any

import jinja2
import pytest
from tests.support.engines.simulated import demo_identity as demo
from tests.support.engines.simulated import simulated
from tests.support.replicas.replica import replica
from tokenizers import Tokenizer

from warmfleet.prompt.chat_template import ChatTemplate
from warmfleet.prompt.cut_points import Facts
from warmfleet.prompt.media_prefix import UNSAFE_TOKENS, common
from warmfleet.prompt.messages import NotReproducible
from warmfleet.prompt.prefix_trie import Trie
from warmfleet.prompt.prompt_identity import Identity
from warmfleet.prompt.request import parse
from warmfleet.prompt.tokenizer import Encoder

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400}}
SOUND: dict[str, Any] = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
MARK = {"image": "<img>", "audio": "<snd>"}
HEAD = "{% for m in messages %}<|{{ m.role }}|>"
TAIL = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
EACH = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'image' %}<img>{% else %}<snd>"
STRING = HEAD + "{{ m.content }}" + TAIL
PARTS = HEAD + EACH + "{% endif %}{% endfor %}" + TAIL
TEMPLATES = {
    "text": STRING,
    "parts": PARTS,
    "parts, text trimmed": PARTS.replace("{{ p.text }}", "{{ p.text | trim }}"),
    "parts, numbered": PARTS.replace("<img>", "Picture {{ loop.index }}: <img>"),
    "text, last question in front": "{{ (messages | last).content | length }};" + STRING,
    "text, kind of the last in front": "{% if messages[-1].content.startswith('<') %}!{% endif %}" + STRING,
    "parts, kind of the last in front": "{% if messages[-1].content[-1].type != 'text' %}!{% endif %}" + PARTS,
    "parts, counted in front": "{{ messages[-1].content | length }};" + PARTS,
}


def made(encoder: Encoder, executor: ThreadPoolExecutor, template: str, **facts: Any) -> Identity:
    facts = {"multimodal": True, "placeholders": MARK} | facts
    return Identity(encoder, ChatTemplate(template), facts, executor, Trie(10**8), encoder.cuts(template))


def engine_text(template: str, messages: list[dict[str, Any]]) -> str:
    """The text that vLLM renders, before it expands the placeholders."""
    form = ChatTemplate(template).content_format
    seen = []
    for message in messages:
        parts = (
            [{"type": "text", "text": message["content"]}]
            if isinstance(message["content"], str)
            else message["content"]
        )
        kinds = {"text": "text", "image_url": "image", "input_audio": "audio"}
        if form == "openai" and message["role"] != "tool":
            content: Any = [p if p["type"] == "text" else {"type": kinds[p["type"]]} for p in parts]
        else:
            marks = [MARK[kinds[p["type"]]] for p in parts if p["type"] != "text"]
            content = "\n".join([*marks, *(p["text"] for p in parts if p["type"] == "text")])
        seen.append({"role": message["role"], "content": content})
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(messages=seen, add_generation_prompt=True)


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(["fox", "δοκ", "中文", "def f():\n", "  ", "3.14", "<x>", "it's"]) for _ in range(count))


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": words(rng, 60)}] if rng.random() < 0.5 else []
    for _ in range(rng.randrange(1, 5)):
        parts: list[Any] = [
            {"type": "text", "text": words(rng, rng.randrange(1, 40))} for _ in range(rng.randrange(1, 4))
        ]
        for item in rng.choices([IMAGE, SOUND], k=rng.choice([0, 0, 1, 2])):
            parts.insert(rng.randrange(len(parts) + 1), item)
        messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": words(rng, 30)}]
    if all(
        part["type"] == "text"
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
    ):
        messages.append({"role": "user", "content": [IMAGE]})
    return messages


@pytest.mark.parametrize("name", TEMPLATES)
async def test_certain_ids_are_those_of_the_engine(name: str, encoder: Encoder, executor: ThreadPoolExecutor) -> None:
    """Nearly all ids before the first part are certain; only the last few before it are given up."""
    template, rng, kept, lost = TEMPLATES[name], random.Random(name), 0, 0
    made_here = made(encoder, executor, template)
    for _ in range(40):
        messages = conversation(rng)
        text = engine_text(template, messages)
        first = min(at for mark in MARK.values() if (at := text.find(mark)) >= 0)
        # Two very different expansions of the placeholder: the ids that both begin with are those that stay.
        long, short = (encoder.plain(text[:first] + more + text[first:]).tolist() for more in ("<img>" * 40, "\ue000"))
        request = parse("chat", json.dumps({"messages": messages}).encode())
        ids, about = await made_here.beginning(request)
        sure = common(long, short)
        assert ids == sure[: len(ids)]
        assert about > len(ids)
        kept, lost = kept + len(ids), lost + len(sure) - len(ids)
    if "front" not in name:
        assert lost <= 40 * (UNSAFE_TOKENS + 8) < kept


@pytest.mark.parametrize(
    ("template", "facts", "content"),
    [
        (STRING, {"placeholders": {"image": None}}, [IMAGE]),  # this model puts its tokens in front of the text
        (STRING, {"placeholders": {}}, [IMAGE]),
        (HEAD + "{% for p in m.content %}{{ p.text }}{% endfor %}" + TAIL, {}, [IMAGE]),  # the template drops it
        (STRING, {"multimodal": False}, [IMAGE]),  # the engine refuses such a request
        (PARTS + "{{ raise_exception('no') }}", {}, [IMAGE]),
    ],
)
async def test_no_id_is_certain_where_the_place_of_a_part_is_not_known(
    template: str, facts: dict[str, Any], content: Any, encoder: Encoder, executor: ThreadPoolExecutor
) -> None:
    messages = [{"role": "system", "content": "word " * 99}, {"role": "user", "content": content}]
    request = parse("chat", json.dumps({"messages": messages}).encode())
    with pytest.raises(NotReproducible):
        await made(encoder, executor, template, **facts).beginning(request)


async def test_ids_before_parts_of_unknown_types_are_certain(encoder: Encoder, executor: ThreadPoolExecutor) -> None:
    system = {"role": "system", "content": "word " * 99}
    user = {"role": "user", "content": [{"type": "text", "text": 1}, {"a": 1}]}
    request = parse("chat", json.dumps({"messages": [system, user]}).encode())
    ids, _ = await made(encoder, executor, STRING).beginning(request)
    text = engine_text(STRING, [system]).removesuffix("<|assistant|>") + "<|user|>"
    assert 90 < len(ids) < len(encoder.plain(text))


@pytest.mark.parametrize("content", ["\ue0a1image", ["\ue0a1image"], [{"type": "text", "text": "\ue0a1image"}]])
async def test_a_client_that_uses_our_word_gets_no_certain_ids(
    content: Any, encoder: Encoder, executor: ThreadPoolExecutor
) -> None:
    messages = [{"role": "developer", "content": content}, {"role": "user", "content": [IMAGE]}]
    request = parse("chat", json.dumps({"messages": messages}).encode())
    with pytest.raises(NotReproducible):
        await made(encoder, executor, PARTS).beginning(request)


async def test_no_id_is_certain_if_it_depends_on_the_text_behind_it(executor: ThreadPoolExecutor) -> None:
    """The tokenizer here puts the length of the text first, so no id stays the same when text follows."""
    facts = Facts.of(Tokenizer.from_str(demo().artifacts()["tokenizer.json"].decode()))
    ahead = Encoder("ahead", lambda text, _: array("I", [len(text), *map(ord, text)]), False, facts, None)
    request = parse("chat", json.dumps({"messages": [{"role": "user", "content": [IMAGE]}]}).encode())
    assert (await made(ahead, executor, STRING).beginning(request))[0] == []


async def test_a_request_with_an_image_goes_where_its_beginning_is(valkey_url: str, model: str) -> None:
    facts = {"multimodal": True, "placeholders": MARK}
    async with simulated(valkey_url, model, facts=facts), replica(valkey_url, model) as router:
        await router.proven()
        head = {"role": "system", "content": "The quick brown fox jumps over the lazy dog. " * 20}
        question = {"role": "user", "content": "And now?"}
        status, first, _ = await router.post(
            {"model": model, "messages": [head, question], "max_tokens": 1}, "/v1/chat/completions"
        )
        assert (status, first["x-warmfleet-matched-tokens"]) == (200, "0")
        looks = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, IMAGE]}
        body = {"model": model, "messages": [head, looks], "max_tokens": 1}
        _, _, answer = await router.post(body, "/explain")
        explained = json.loads(answer)
        assert (explained["identity"], explained["reason"]) == ("prefix", "parts")
        assert explained["blocks"] * 16 >= 176
        assert [row["matched_tokens"] for row in explained["candidates"]] == [explained["blocks"] * 16]
        _, headers, _ = await router.post(body, "/v1/chat/completions")  # the simulated engine refuses it: 400
        assert int(headers["x-warmfleet-matched-tokens"]) == explained["blocks"] * 16
        assert int(headers["x-warmfleet-prompt-tokens"]) > explained["blocks"] * 16
        assert await router.metric('warmfleet_identified_requests_total{kind="prefix"}') == 1
        assert await router.metric('warmfleet_load_only_requests_total{reason="parts"}') == 0
        short = {"model": model, "messages": [looks], "max_tokens": 1}
        await router.post(short, "/v1/chat/completions")
        assert await router.metric('warmfleet_load_only_requests_total{reason="parts"}') == 1
