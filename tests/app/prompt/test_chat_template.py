"""A trusted template gives the text that it gives in the sandbox, unless it changes a list or a dict."""

from __future__ import annotations

import random
from typing import Any

import pytest

from warmfleet.prompt.chat_template import ChatTemplate
from warmfleet.prompt.messages import NotReproducible

SEEN = "{% for m in messages %}"
TEMPLATES = [
    SEEN + "{{ m.role }}:{{ m.content }}{{ m.name is defined }}{{ m.none is none }};{% endfor %}",
    SEEN + "{% if m.items is defined %}{% for k, v in m.items() %}{{ k }}={{ v }},{% endfor %}{% endif %}{% endfor %}",
    SEEN + "{{ m.get('name', 'nobody') }}{{ m.keys() | list }}{% endfor %}",
    SEEN + "{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.nextitem is defined }}{{ loop.odd }}{% endfor %}",
    SEEN + "{% if m.content is string and m.content.startswith('a') %}{{ m.content.split('b')[-1].strip() }}{% endif %}"
    "{% endfor %}",
    "{% set ns = namespace(last=-1, seen='') %}" + SEEN + "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% set ns.seen = ns.seen + m.role %}{% endif %}{% endfor %}{{ ns.last }}{{ ns.seen }}{{ ns.other is defined }}",
    SEEN + "{{ m.inner.deep.name }}{{ m.inner.items is defined }}{{ m.inner['deep'].role }}{% endfor %}",
    SEEN + "{{ m['role'] }}:{{ m['content'] }}{{ m['name'] is defined }}{{ m['none'] is none }};{% endfor %}",
    SEEN + "{% if m['items'] is callable %}{{ m['items']() | list }}{% endif %}{{ m['keys'] is callable }}{% endfor %}",
    SEEN
    + "{{ m['inner']['deep']['name'] }}{{ m['content']['upper']() }}{{ m['role']['nothing'] is defined }}{% endfor %}",
    "{{ nobody is defined }}{{ nobody }}{{ messages.role is defined }}{{ messages.count is defined }}",
    "{{ nobody.role }}",
    "{{ messages[0].role.upper() }}{{ messages[0].content.nothing is defined }}",
    "{% set rest = messages[1:] %}{% for m in rest %}{{ m.role }}{% endfor %}{{ rest | map(attribute='role') | list }}",
    "{% macro show(m, sep='-') %}{{ sep }}{{ m.role }}{{ m.content }}{% endmacro %}" + SEEN + "{{ show(m) }}"
    "{{ show(m, sep=loop.index) }}{% endfor %}{{ show.name }}",
    "{% set found = (messages | map(attribute='role')).send %}" + SEEN + "{{ found(none) }}{% endfor %}"
    "{{ found(none) is defined }}",
]
VALUES: list[Any] = ["abc", "a b c", "", None, 7, True, ["x"], {"deep": {"name": "n", "role": "r"}}, {"items": 1}]


def messages(rng: random.Random) -> list[dict[str, Any]]:
    fields = ("content", "name", "none", "items", "inner", "tool_calls", "keys")
    made = []
    for _ in range(rng.randrange(1, 5)):
        more = {name: rng.choice(VALUES) for name in rng.sample(fields, rng.randrange(1, 5))}
        made.append({"role": rng.choice(("user", "assistant", "system")), "content": rng.choice(VALUES[:3])} | more)
    return made


def text(template: ChatTemplate, chat: list[dict[str, Any]]) -> str:
    try:
        return template.render(chat, {}, {})
    except NotReproducible as error:
        return f"refused: {error.__cause__}"


@pytest.mark.parametrize("source", TEMPLATES)
def test_trusted_and_sandboxed_give_the_same_text(source: str) -> None:
    rng, trusted, sandboxed = random.Random(3), ChatTemplate(source, trusted=True), ChatTemplate(source)
    texts = []
    for _ in range(150):
        chat = messages(rng)
        texts.append(text(trusted, chat))
        assert texts[-1] == text(sandboxed, chat)
    assert source == "{{ nobody.role }}" or any(not text.startswith("refused") for text in texts)


def test_an_argument_may_not_stand_for_the_messages() -> None:
    """transformers refuses two values of one name, so the engine refuses the request."""
    for trusted in (True, False):
        template = ChatTemplate(SEEN + "{{ m.content }}{% endfor %}{{ more }}", trusted=trusted)
        for also in ({}, {"continue_final_message": True}):
            chat = [{"role": "user", "content": "a"}]
            assert template.render(chat, {"more": "b"} | also, {}) == ("a" if also else "ab")
            with pytest.raises(NotReproducible):
                template.render(chat, {"messages": [{"role": "user", "content": "c"}]} | also, {})
