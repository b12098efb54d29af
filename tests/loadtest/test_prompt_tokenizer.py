"""Token ids of prompts, and answers that are encoded to the same ids again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.engines.simulated import demo_identity

from warmfleet.prompt.chat_template import ChatTemplate
from warmfleet.prompt.messages import tool_schemas
from warmfleet_loadtest.tokens.prompt_tokenizer import PromptError, PromptTokenizer

if TYPE_CHECKING:
    from pathlib import Path

USER, ASSISTANT, BEGIN = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a cache?"}]


def test_a_chat_becomes_the_templates_text() -> None:
    text = demo_identity().render({"messages": CHAT})
    assert text == f"{BEGIN}Be brief.{USER}What is a cache?{ASSISTANT}"


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 60))
def test_the_next_turn_extends_the_one_before(seed: int, count: int) -> None:
    """So the next turn of a simulated conversation hits its own answers."""
    ids = demo_identity().answer(seed, count)
    before = demo_identity().chat_ids({"messages": CHAT})
    history = [*CHAT, {"role": "assistant", "content": demo_identity().text(ids)}, {"role": "user", "content": "Why?"}]
    after = demo_identity().chat_ids({"messages": history})
    assert after[: len(before) + count] == [*before, *ids]


def test_content_parts_tools_and_continuing() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert f"{USER}a\nb{ASSISTANT}" in demo_identity().render({"messages": parts})
    tool = {"function": {"x": 1, "parameters": {}, "name": "f"}, "type": "function", "odd": 2}
    dumped = '{"type": "function", "function": {"name": "f", "description": null, "parameters": {}}}'
    assert f"Tools:\n{dumped}{USER}" in demo_identity().render({"messages": CHAT, "tools": [tool]})
    unfinished = [*CHAT, {"role": "assistant", "content": "It is"}]
    continued = demo_identity().render({"messages": unfinished, "continue_final_message": True})
    assert continued.endswith(f"{ASSISTANT}It is")
    assert not demo_identity().render({"messages": CHAT, "add_generation_prompt": False}).endswith(ASSISTANT)


flags = st.sampled_from([None, True, False])
functions = st.fixed_dictionaries(
    {"name": st.text(max_size=5)},
    optional={
        "description": st.none() | st.text(max_size=5),
        "parameters": st.none() | st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=3),
        "strict": flags,
        "defer_loading": flags,
        "x": st.integers(),
    },
)
any_tool = st.fixed_dictionaries(
    {"function": functions}, optional={"type": st.just("function"), "defer_loading": flags}
)


@settings(max_examples=100)
@given(st.lists(any_tool, max_size=3))
def test_tools_are_rendered_as_routers_render_them(given_tools: list[dict[str, Any]]) -> None:
    """An engine that renders differently is suspected. tests/vllm/parity compares routers with vLLM itself."""
    body = {"messages": CHAT, "tools": given_tools}
    template = ChatTemplate(demo_identity().template)
    arguments = {"add_generation_prompt": True}
    assert demo_identity().render(body) == template.render(CHAT, arguments, {"tools": tool_schemas(given_tools)})


@pytest.mark.parametrize("tools", [5, [5], [{}], [{"name": "f"}], [{"function": {}}], [{"function": {"name": 5}}]])
def test_what_is_no_tool_is_refused(tools: object) -> None:
    with pytest.raises(PromptError, match="tool"):
        demo_identity().render({"messages": CHAT, "tools": tools})


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        ["text"],
        [{"content": "no role"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
    ],
)
def test_what_is_no_chat_is_refused(messages: object) -> None:
    with pytest.raises(PromptError):
        demo_identity().render({"messages": messages})


def test_a_models_folder_replaces_tokenizer_and_template(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(demo_identity().artifacts()["tokenizer.json"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "model_max_length": 5}))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{% if 0 %}{{ raise_exception('x') }}{% endif %}hi")
    loaded = PromptTokenizer.load(tmp_path)
    assert loaded.render({"messages": CHAT}) == "<s>hi"
    assert loaded.facts(100)["special_tokens"] == {"bos_token": "<s>"}


def test_a_template_that_fails_is_the_clients_problem() -> None:
    tokenizer = demo_identity().artifacts()["tokenizer.json"].decode()
    with pytest.raises(PromptError, match="only users"):
        PromptTokenizer(tokenizer, "{{ raise_exception('only users') }}").render({"messages": CHAT})
