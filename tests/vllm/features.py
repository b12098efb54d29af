"""Requests that use one feature of vLLM each. The answer must not depend on where the token ids were made."""

from __future__ import annotations

from typing import Any, NamedTuple


class Feature(NamedTuple):
    """A request. result: its label in ``warmfleet_handoff_requests_total``. texts: prompts that engines tokenise."""

    path: str
    body: dict[str, Any]
    result: str = "used"
    texts: int = 0


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "import asyncio\n\n\nasync def main() -> None:\n    " + "await asyncio.sleep(1)\n    " * 20
USER = {"role": "user", "content": "Tell me of the class value index, and yield."}
SYSTEM = {"role": "system", "content": "Be brief. Return self."}
EARLIER = [{"role": "user", "content": "import os"}, {"role": "assistant", "content": "def f(x):\n    return x"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string", "maxLength": 8}}},
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
AS_JSON = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA}}
USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def completion(result: str = "used", texts: int = 0, /, **more: Any) -> Feature:
    return Feature(COMPLETIONS, {"prompt": TEXT, "max_tokens": 12, "temperature": 0} | more, result, texts)


def chat(result: str = "used", texts: int = 0, /, **more: Any) -> Feature:
    body = {"messages": [SYSTEM, *EARLIER, USER], "max_tokens": 12, "temperature": 0} | more
    return Feature(CHAT, body, result, texts)


def message(result: str = "used", texts: int = 0, /, **more: Any) -> Feature:
    body = {"system": "Be brief.", "messages": [*EARLIER, USER], "max_tokens": 12, "temperature": 0} | more
    return Feature("/v1/messages", body, result, texts)


def response(result: str = "used", texts: int = 0, /, **more: Any) -> Feature:
    body = {"instructions": "Be brief.", "input": [*EARLIER, USER], "max_output_tokens": 12, "temperature": 0} | more
    return Feature("/v1/responses", body, result, texts)


USED = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"place": "X"}}
CALLED = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"place": "X"}'}
ANTHROPIC_WEATHER = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
FLAT_WEATHER = {"type": "function", "strict": False, **WEATHER["function"]}

FEATURES: dict[str, Feature] = {
    "message": message(),
    "message streamed": message(stream=True),
    "message with tools": message(tools=[ANTHROPIC_WEATHER], tool_choice={"type": "any"}, max_tokens=60),
    "message with a tool's result": message(
        tools=[ANTHROPIC_WEATHER],
        messages=[
            USER,
            {"role": "assistant", "content": [USED]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}]},
        ],
    ),
    "message with a system message amid it": message(messages=[*EARLIER, {"role": "system", "content": "Now."}, USER]),
    "message without thinking": message(thinking={"type": "disabled"}),
    "message with a salt": message(cache_salt="tenant"),
    "message, refused: no such tool": message(tools=[ANTHROPIC_WEATHER], tool_choice={"type": "tool", "name": "x"}),
    "response": response(),
    "response to a text": response(input=TEXT, instructions=None),
    "response streamed": response(stream=True),
    "response with tools": response(tools=[FLAT_WEATHER], tool_choice="required", max_output_tokens=60),
    "response with a tool's result": response(
        tools=[FLAT_WEATHER],
        input=[USER, CALLED, {"type": "function_call_output", "call_id": "c1", "output": "rain"}],
    ),
    "response as JSON": response(text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}),
    "response with a salt": response(cache_salt="tenant"),
    "response truncated": response("unknown", 1, truncation="auto"),
    "completion": completion(),
    "completion streamed": completion(stream=True),
    "completion streamed with usage": completion(**USAGE),
    "completion logprobs": completion(logprobs=3),
    "completion logprobs streamed": completion(logprobs=2, stream=True),
    "completion of several prompts": completion(prompt=[TEXT, "class A:", "é ü 你好"], n=2, seed=5, temperature=1),
    "completion of one prompt in a list": completion(prompt=[TEXT]),
    "completion without special tokens": completion(add_special_tokens=False),
    "completion with a beam": completion(use_beam_search=True, n=2),
    "completion of unicode": completion(prompt="naïve café 你好 🙂 e\u0301 \u200b\t\r\n <|im_end|> x"),
    "completion with special tokens shown": completion(skip_special_tokens=False, ignore_eos=True),
    "completion ids returned": completion(return_token_ids=True, prompt=[TEXT, "é ü 你好"]),
    "completion echoed": completion("text", 1, echo=True),
    "completion echoed with logprobs": completion("text", 1, echo=True, logprobs=1),
    "completion with prompt logprobs": completion("unknown", 1, prompt_logprobs=1),
    "completion truncated": completion("unknown", 1, truncate_prompt_tokens=9),
    "completion of ids": completion("ids", 0, prompt=[5, 6, 7, 300]),
    "chat": chat(),
    "chat streamed": chat(stream=True),
    "chat streamed with usage": chat(**USAGE),
    "max_tokens 1": chat(max_tokens=1),
    "max_completion_tokens": chat(max_tokens=None, max_completion_tokens=3),
    "min_tokens": chat(min_tokens=10, stop=["e", "a"]),
    "ignore_eos": chat(ignore_eos=True, max_tokens=40),
    "stop strings": chat(stop=["e", "in"], max_tokens=60, include_stop_str_in_output=True),
    "stop_token_ids": chat(stop_token_ids=list(range(100, 4_000)), max_tokens=60),
    "logprobs": chat(logprobs=True),
    "top_logprobs streamed": chat(logprobs=True, top_logprobs=4, stream=True),
    "logit_bias": chat(logit_bias={"300": 50, "301": -100}),
    "bad words and penalties": chat(bad_words=["self"], presence_penalty=1, repetition_penalty=1.3),
    "allowed_token_ids": chat(allowed_token_ids=[400, 401, 402]),
    "seed": chat(seed=11, temperature=1.5, top_p=0.9, top_k=50, min_p=0.01),
    "several choices": chat(n=3, seed=3, temperature=1),
    "return_token_ids": chat(return_token_ids=True),
    "return_token_ids streamed": chat(return_token_ids=True, stream=True),
    "cache_salt": chat(cache_salt="tenant"),
    "add_special_tokens": chat(add_special_tokens=True),
    "no generation prompt": chat(add_generation_prompt=False),
    "continue_final_message": chat(
        messages=[USER, {"role": "assistant", "content": "def g("}],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    "text parts": chat(messages=[{"role": "user", "content": [{"type": "text", "text": t} for t in ("a b", "c")]}]),
    "developer role": chat(messages=[{"role": "developer", "content": "Return."}, USER]),
    "unicode": chat(messages=[{"role": "user", "content": "naïve 你好 🙂 e\u0301 \u200b\t <|im_end|> \r\n x"}]),
    "json_object": chat(response_format={"type": "json_object"}, max_tokens=30),
    "json_schema streamed": chat(response_format=AS_JSON, max_tokens=30, stream=True),
    "structured choice": chat(structured_outputs={"choice": ["yes", "no"]}),
    "tools, auto": chat(tools=[WEATHER]),
    "tools, none": chat(tools=[WEATHER], tool_choice="none"),
    "tools, named": chat(tools=[WEATHER], tool_choice=NAMED, max_tokens=40),
    "tools, required": chat(tools=[WEATHER], tool_choice="required", max_tokens=60),
    "tools, required, streamed": chat(tools=[WEATHER], tool_choice="required", max_tokens=60, stream=True),
    "tool results": chat(
        tools=[WEATHER],
        messages=[
            USER,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "X"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ],
    ),
    "thinking": chat(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low"),
    "chat echoed": chat("text", 1, echo=True, add_generation_prompt=False),
    "prompt text returned": chat("text", 1, return_prompt_text=True),
    "chat with prompt logprobs": chat("unknown", 1, prompt_logprobs=1),
    "chat truncated": chat("unknown", 1, truncate_prompt_tokens=20),
    "refused: no such tool": chat(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "x"}}),
    "refused: too many tokens to say": completion(max_tokens=1_000_000),
    "refused: texts and ids together": completion("ids", prompt=["import os", [5, 6, 7, 300]]),
    "refused: a wrong type": chat(top_logprobs="many"),
}
