"""Messages become the prompt text and the token ids that transformers and vLLM make of them."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jinja2
import pytest
from tests.support.requests import deepseek_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from warmfleet.metrics import Metrics
from warmfleet.pools.identities import Identities
from warmfleet.prompt.chat_template import ChatTemplate
from warmfleet.prompt.messages import NotReproducible, conversation
from warmfleet.prompt.prefix_trie import Trie
from warmfleet.prompt.prompt_identity import Identity, canonical_text
from warmfleet.prompt.request import Request, parse
from warmfleet.prompt.tokenizer import Encoder
from warmfleet.untrusted.template_approval import Templates

if TYPE_CHECKING:
    from array import array
    from concurrent.futures import ThreadPoolExecutor

CHATML = (
    "{%- if tools %}{{ tools | tojson }}\n{% endif -%}"
    "{%- for message in messages %}\n    {{- '<|im_start|>' + message.role + '\\n' }}\n"
    "    {%- if message.reasoning is defined %}{{ message.reasoning }}{% endif %}\n"
    "    {%- generation %}{{ message['content'] }}{% endgeneration %}\n"
    "    {%- for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}\n"
    "    {{- '<|im_end|>\\n' }}\n{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PARTS = "{% for m in messages %}{{ m.role }}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer_json() -> bytes:
    return deepseek_tokenizer.tokenizer_json()


def request(messages: list[dict[str, Any]], **more: Any) -> Request:
    return parse("chat", json.dumps({"messages": messages, **more}).encode())


def identity(encoder: Encoder, executor: ThreadPoolExecutor, template: str, **facts: Any) -> Identity:
    return Identity(encoder, ChatTemplate(template), facts, executor, Trie(10**8), encoder.cuts(template))


def transformers(messages: list[dict[str, Any]], **more: Any) -> str:
    """The text that transformers renders with CHATML."""
    from transformers.utils.chat_template_utils import render_jinja_template  # slow: every process imports this file

    rendered: Any = render_jinja_template([messages], chat_template=CHATML, **more)
    return str(rendered[0][0])


CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <b>brief</b> & kind é"},
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [{"type": "function", "id": "c1", "function": {"name": "f", "arguments": '{"q": "ü"}'}, "x": 1}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "result"}]},
    {"role": "user", "content": "and now?"},
]


@pytest.mark.parametrize("trusted", [False, True])
def test_rendering_equals_transformers(encoder: Encoder, executor: ThreadPoolExecutor, trusted: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    chat = request(CONVERSATION, tools=tools)
    made = Identity(encoder, ChatTemplate(CHATML, trusted=trusted), {}, executor, Trie(10**6))
    seen = conversation(CONVERSATION, "string")
    assert seen[1]["content"] == "one\ntwo"
    assert seen[2]["tool_calls"] == [
        {"id": "c1", "function": {"arguments": {"q": "ü"}, "name": "f"}, "type": "function", "x": 1}
    ]
    dumped = [{"type": "function", "function": {"name": "f", "description": None, "parameters": {"type": "object"}}}]
    assert made.render(chat) == transformers(seen, tools=dumped, add_generation_prompt=True)


def test_continue_final_message_equals_transformers(encoder: Encoder, executor: ThreadPoolExecutor) -> None:
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one, two "}]
    chat = request(messages, add_generation_prompt=False, continue_final_message=True)
    text = identity(encoder, executor, CHATML).render(chat)
    assert text == transformers(messages, continue_final_message=True)
    assert text.endswith("one, two ")


def test_content_format_is_detected_as_vllm_does(encoder: Encoder, executor: ThreadPoolExecutor) -> None:
    loop = "{% for m in messages %}{{ show(m.content) }}{% endfor %}"
    macro = "{% macro show(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}" + loop
    inner = "{% for c in m['content'] | list %}{% endfor %}"
    renamed = "{% set rest = messages[1:] %}{% for m in rest %}" + inner + "{% endfor %}"
    for template, form in ((CHATML, "string"), (PARTS, "openai"), (macro, "openai"), (renamed, "openai")):
        assert ChatTemplate(template).content_format == form
    assert ChatTemplate(PARTS, "string").content_format == "string"
    text = identity(encoder, executor, PARTS).render(request(CONVERSATION[:2]))
    assert text == "system[Be <b>brief</b> & kind é]user[one][two]"


def test_arguments_that_end_in_transformers_do_not_reach_the_template(
    encoder: Encoder, executor: ThreadPoolExecutor
) -> None:
    chat = request([{"role": "user", "content": "x"}], chat_template_kwargs={"padding": True, "other": True})
    assert identity(encoder, executor, "{{ padding is defined }}{{ other }}").render(chat) == "FalseTrue"


def test_developer_becomes_system_where_the_template_does_not_know_it(
    encoder: Encoder, executor: ThreadPoolExecutor
) -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "developer", "content": "a"},
        {"role": "system", "content": "b"},
    ]
    template = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    assert identity(encoder, executor, template).render(request(messages)) == "system=a\n\nb;user=q;"
    knows = template + "{# 'developer' #}"
    assert identity(encoder, executor, knows).render(request(messages)) == "user=q;developer=a;system=b;"


def test_defaults_and_special_tokens_reach_the_template(encoder: Encoder, executor: ThreadPoolExecutor) -> None:
    template = "{{ bos_token }}{{ enable_thinking }}{{ documents is none }}{{ tools is none }}{{ unknown is defined }}"
    facts = {"special_tokens": {"bos_token": "<s>"}, "default_chat_template_kwargs": {"enable_thinking": 1}}
    user = [{"role": "user", "content": "x"}]
    made = identity(encoder, executor, template, **facts)
    assert made.render(request(user)) == "<s>1TrueTrueFalse"
    assert made.render(request(user, chat_template_kwargs={"enable_thinking": 0})) == "<s>0TrueTrueFalse"


@pytest.mark.parametrize(
    ("messages", "template", "reason"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}], CHATML, "parts"),
        ([{"role": "user", "content": 7}], CHATML, "content"),
        ([{"role": "assistant", "content": "", "tool_calls": ["x"]}], CHATML, "tool_calls"),
        ([{"role": "user", "content": "x"}], "{{ raise_exception('no') }}", "template"),
        ([{"role": "user", "content": "x"}], "{{ messages[9].content }}", "template"),
        ([{"role": "user", "content": "x"}], "{{ ''.__class__.__mro__ }}", "template"),  # the sandbox
    ],
)
def test_what_cannot_be_reproduced_says_why(
    encoder: Encoder, executor: ThreadPoolExecutor, messages: list[dict[str, Any]], template: str, reason: str
) -> None:
    with pytest.raises(NotReproducible) as caught:
        identity(encoder, executor, template).render(request(messages))
    assert caught.value.reason == reason


async def test_token_ids_equal_the_reference(
    tokenizer_json: bytes, encoder: Encoder, executor: ThreadPoolExecutor
) -> None:
    reference = Tokenizer.from_str(tokenizer_json.decode())
    made = identity(encoder, executor, CHATML)
    text = "Zebra 中文 e\u0301 😀 <|im_start|> " * 300
    for inline in (0, 10**9):  # in the executor, and not
        completion = parse("completions", json.dumps({"prompt": [text, "b"]}).encode())
        ids = await made.token_ids(completion, inline)
        assert ids == [reference.encode(t, add_special_tokens=True).ids for t in (text, "b")]
    chat = request([{"role": "user", "content": text}])
    assert await made.token_ids(chat, 0) == [reference.encode(made.render(chat), add_special_tokens=False).ids]


async def test_large_chats_are_rendered_off_the_event_loop(
    encoder: Encoder, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool]] = []

    class Watched(ChatTemplate):
        def render(self, *args: Any, **kwargs: Any) -> str:
            seen.append(("render", threading.current_thread() is threading.main_thread()))
            return super().render(*args, **kwargs)

    def encode(text: str, special: bool) -> array[int]:
        seen.append(("encode", threading.current_thread() is threading.main_thread()))
        return encoder.encode(text, special)

    watched = replace(encoder, encode=encode, fast=True)
    made = Identity(watched, Watched(CHATML), {}, executor, Trie(10**6))  # without cuts: one piece
    for length, inline in ((1_000, True), (70_000, False)):
        chat = request([{"role": "user", "content": "0123456789" * (length // 10)}])
        ids = await made.token_ids(chat, 2_000)
        assert seen == [("render", inline), ("encode", inline)]
        assert ids == [encoder.encode(made.render(chat), False).tolist()]
        seen.clear()
    refused = request([{"role": "user", "content": ["x" * 70_000, {"type": "image_url"}]}])
    with pytest.raises(NotReproducible, match="parts"):
        await made.token_ids(refused, 2_000)
    monkeypatch.setattr("warmfleet.prompt.prompt_identity.MAX_WAITING", 0)
    with pytest.raises(NotReproducible, match="busy"):
        await made.token_ids(chat, 2_000)


async def test_a_twin_that_differs_is_not_used(tokenizer_json: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    fastokens = pytest.importorskip("fastokens")

    class Wrong:
        @staticmethod
        def from_json_str(_text: str) -> Wrong:
            return Wrong()

        def no_truncation(self) -> None: ...
        def no_padding(self) -> None: ...
        def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
            return b"\x01\x00\x00\x00" * len(texts), b""

    assert deepseek_tokenizer.loaded().fast
    monkeypatch.setattr(fastokens, "Tokenizer", Wrong)
    assert not Encoder.load(tokenizer_json).fast


async def test_identities_are_built_once_and_bad_ones_refused(
    tokenizer_json: bytes, executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    identities = Identities(executor, Trie(10**6), Templates(Metrics(), approved="*"))
    artifacts = {"tokenizer.json": tokenizer_json, "chat_template.jinja": CHATML.encode()}
    built = await identities.build("a", artifacts, {})
    assert identities.known("a") is built
    assert (built.tokenizer, caplog.messages) == ("fast", [])
    for key in "cde":
        assert (await identities.build(key, artifacts, {})).encoder is built.encoder
    identities.keep({"a"})
    assert [key for key in "acde" if identities.known(key)] == ["a", "d", "e"], "the identity in use, and the last two"
    words = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]")).to_str().encode()
    assert (await identities.build("f", {"tokenizer.json": words}, {})).tokenizer.endswith(", no pieces")
    assert [text for text in caplog.messages if "f: slower than others" in text]
    with pytest.raises(ValueError, match="not a tokenizer"):
        await identities.build("b", {"tokenizer.json": b"{}"}, {})
    with pytest.raises(ValueError, match="no tokenizer"):
        await identities.build("b", {}, {})
    with pytest.raises(jinja2.TemplateError):
        await identities.build("b", artifacts | {"chat_template.jinja": b"{% for %}"}, {})
    with pytest.raises(ValueError, match="cannot load"):
        await identities.load("/nowhere/at/all")


def test_canonical_text_keeps_prefixes_and_tenants_apart() -> None:
    short = canonical_text(request(CONVERSATION[:2], model="m"))[0]
    long = canonical_text(request(CONVERSATION, model="m"))[0]
    assert long.startswith(short)
    assert canonical_text(request(CONVERSATION[:2], model="m", cache_salt="s"))[0][:20] != short[:20]
    call = {"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    bad = request([{"role": "assistant", "content": "", "tool_calls": [call]}])
    with pytest.raises(NotReproducible):
        canonical_text(bad)
