"""Messages and tools as vLLM hands them to the chat template."""

from __future__ import annotations

import json

import pytest

from warmfleet.prompt.messages import NotReproducible, conversation, tool_schemas


def test_tools_are_dumped_as_vllm_does() -> None:
    """Only known fields, in vLLM's order. Absent fields are null or left out. A tool's flag is also its function's."""
    tool = {"function": {"strict": True, "x": 1, "name": "f"}, "defer_loading": False, "cache_control": {}}
    function = {"name": "f", "description": None, "parameters": None, "strict": True, "defer_loading": False}
    plain = {"type": "function", "function": {"name": "g", "description": None, "parameters": {}, "strict": None}}
    assert json.dumps(tool_schemas([tool, plain])) == json.dumps(
        [
            {"type": "function", "function": function, "defer_loading": False},
            {"type": "function", "function": {"name": "g", "description": None, "parameters": {}}},
        ]
    )
    for wrong in ({"name": "f", "strict": "yes"}, {"name": "f", "defer_loading": "yes"}):
        with pytest.raises(NotReproducible, match="tools"):
            tool_schemas([{"function": wrong, "defer_loading": True}])


def test_unknown_fields_are_kept_where_vllm_keeps_them() -> None:
    part = {"type": "text", "text": "a", "cache_control": 1, "uuid": "u"}
    (seen,) = conversation([{"role": "user", "content": [part], "metadata": 1}], "openai")
    assert seen == {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": 1}]}
    tool = {"type": "function", "function": {"strict": True, "name": "d"}}
    (seen,) = conversation([{"role": "developer", "content": "a", "tools": [tool]}], "string")
    assert json.dumps(seen["tools"]) == json.dumps([{"function": {"name": "d", "strict": True}, "type": "function"}])
    with pytest.raises(NotReproducible, match="developer_tools"):
        conversation([{"role": "developer", "content": "a", "tools": ["d"]}], "string")


def test_billing_header_is_dropped_from_system_text() -> None:
    text = "x-anthropic-billing-header: cch=1\nBe brief."
    assert conversation([{"role": "system", "content": text}], "string")[0]["content"] == "Be brief."
    assert conversation([{"role": "user", "content": text}], "string")[0]["content"] == text
