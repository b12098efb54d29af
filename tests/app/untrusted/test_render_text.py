"""A template renders the same text in a process of its own as in this process."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest
from tests.app.untrusted.test_render_process import HELLO, PLAIN
from tests.support.requests.random_requests import random_requests

from warmfleet.errors import BadRequest
from warmfleet.prompt.chat_template import ChatTemplate
from warmfleet.prompt.messages import Message, NotReproducible, conversation, tool_schemas
from warmfleet.prompt.request import parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.untrusted.render_process import Sandboxed


NUMBERS = {"n": 2**70, "f": 1.5e300, "nan": float("nan"), "ü": "\u2028"}


@pytest.mark.parametrize(
    ("messages", "arguments"),
    [
        ([{"role": "user", "content": "Zebra 中文 e\u0301 😀 <b>"}], {"add_generation_prompt": True}),
        ([{"role": "user", "content": "lone \ud800 half"}], {"unknown": [1, {"a": None}]}),
        ([{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": NUMBERS}}]}], {}),
        ([{"role": "user", "content": "x" * 300_000}, {"role": "assistant", "content": "one "}], {}),
        ([{"role": "assistant", "content": "one, two "}], {"continue_final_message": True}),
    ],
    ids=["unicode", "surrogate", "numbers", "large", "continued"],
)
async def test_a_process_renders_the_text_that_this_process_renders(
    started: Callable[..., Sandboxed], messages: list[Message], arguments: dict[str, Any]
) -> None:
    fixed = {"tools": [{"type": "function", "function": {"name": "f", "parameters": None}}], "bos_token": "<s>"}
    wanted = ChatTemplate(PLAIN, trusted=True).render(messages, arguments, fixed)
    box = started(PLAIN)
    assert await box.ready() == "string"
    assert await box.render(messages, arguments, fixed) == wanted


@pytest.mark.parametrize("kind", ["qwen3", "llama3", "llama2"])
async def test_random_requests_are_rendered_alike(started: Callable[..., Sandboxed], kind: str) -> None:
    source = resources.files("warmfleet_loadtest").joinpath(f"data/kind_{kind}.jinja").read_text()
    here, box, texts = ChatTemplate(source, trusted=True), started(source), 0
    assert await box.ready() == here.content_format
    for ask in random_requests(seed=7, count=80):
        try:
            request = parse("chat" if ask.endpoint == "chat" else "completions", ask.raw)
            messages = conversation(request.messages, here.content_format)
            fixed = {"tools": tool_schemas(request.tools), "bos_token": "<s>", "eos_token": "</s>"}
        except (BadRequest, NotReproducible):
            continue
        made: list[Any] = []
        for render in (here.render, box.render):
            try:
                text = render(messages, request.arguments, fixed)
                made.append(text if isinstance(text, str) else await text)
            except NotReproducible as why:
                made.append(why)
        assert str(made[0]) == str(made[1])
        texts += isinstance(made[0], str) and bool(request.messages)
    assert texts > 20


def far_away() -> str:
    return datetime.now(timezone(timedelta(hours=13))).strftime("%d %H")


async def test_the_clock_is_that_of_this_process(
    started: Callable[..., Sandboxed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "XYZ-13")
    box = started("{{ strftime_now('%d %H') }}")
    for _ in range(2):
        before, text, after = far_away(), await box.render(HELLO, {}, {}), far_away()
        assert text in (before, after)


async def test_the_content_format_is_found_in_the_process(started: Callable[..., Sandboxed]) -> None:
    parts = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    assert await started(parts).ready() == "openai"
    assert await started(parts, "string").ready() == "string"
