"""Token ids of prompts, and answers that are encoded to the same ids again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loadtest.engines import identity

from warmfleet_loadtest.identity import Identity, PromptError

if TYPE_CHECKING:
    from pathlib import Path

USER, ASSISTANT, BEGIN = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a cache?"}]


def test_a_chat_becomes_the_templates_text() -> None:
    text = identity().render({"messages": CHAT})
    assert text == f"{BEGIN}Be brief.{USER}What is a cache?{ASSISTANT}"


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 60))
def test_the_next_turn_extends_the_one_before(seed: int, count: int) -> None:
    """Exactly what makes a simulated conversation hit its own answers."""
    said = identity().answer(seed, count)
    before = identity().chat_ids({"messages": CHAT})
    history = [*CHAT, {"role": "assistant", "content": identity().text(said)}, {"role": "user", "content": "Why?"}]
    after = identity().chat_ids({"messages": history})
    assert after[: len(before) + count] == [*before, *said]


def test_content_parts_tools_and_continuing() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert f"{USER}a\nb{ASSISTANT}" in identity().render({"messages": parts})
    assert '{"name": "f"}' in identity().render({"messages": CHAT, "tools": [{"name": "f"}]})
    unfinished = [*CHAT, {"role": "assistant", "content": "It is"}]
    assert identity().render({"messages": unfinished, "continue_final_message": True}).endswith(f"{ASSISTANT}It is")
    assert not identity().render({"messages": CHAT, "add_generation_prompt": False}).endswith(ASSISTANT)


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
        identity().render({"messages": messages})


def test_a_models_folder_replaces_tokenizer_and_template(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(identity().artifacts()["tokenizer.json"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "model_max_length": 5}))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{% if 0 %}{{ raise_exception('x') }}{% endif %}hi")
    loaded = Identity.load(tmp_path)
    assert loaded.render({"messages": CHAT}) == "<s>hi"
    assert loaded.facts(100)["special_tokens"] == {"bos_token": "<s>"}


def test_a_template_that_fails_is_the_clients_problem() -> None:
    tokenizer = identity().artifacts()["tokenizer.json"].decode()
    with pytest.raises(PromptError, match="only users"):
        Identity(tokenizer, "{{ raise_exception('only users') }}").render({"messages": CHAT})
