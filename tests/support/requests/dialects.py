"""Random requests in the words of Anthropic's API and of OpenAI's responses. The same seed gives the same requests."""

from __future__ import annotations

import json
from typing import Any

from tests.support.requests.random_requests import EFFORTS, NAMES, SALTS, Body, Maker, RandomRequest


def dialect_requests(seed: int, count: int) -> list[RandomRequest]:
    """Return ``count`` requests, as many for /v1/messages as for /v1/responses."""
    makers = AnthropicMaker(seed), ResponsesMaker(seed)
    return [makers[index % 2].request() for index in range(count)]


class AnthropicMaker(Maker):
    """Makes bodies of /v1/messages."""

    def request(self) -> RandomRequest:
        request = RandomRequest("messages", {"model": "m", "max_tokens": self.random.randrange(1, 64)})
        body = request.body
        if self.chance(0.5):
            body["system"] = self.text() if self.chance(0.5) else self._system()
        if self.chance(0.4):
            body["tools"] = [
                self._anthropic_tool(name) for name in self.random.sample(NAMES, self.random.choice((1, 3)))
            ]
            kinds: list[Any] = [None, {"type": "auto"}, {"type": "any"}, {"type": "none"}]
            choice = self.random.choice([*kinds, {"type": "tool", "name": body["tools"][0]["name"]}])
            body |= {"tool_choice": choice} if choice else {}
        body["messages"] = self._turns(tools="tools" in body)
        options: list[tuple[float, str, Any]] = [
            (0.2, "cache_salt", self.random.choice(SALTS)),
            (0.2, "chat_template_kwargs", {"enable_thinking": self.chance(0.5), "custom": self.text(1)}),
            (0.2, "output_config", {"effort": self.random.choice(("low", "high", "max"))}),
            (0.1, "thinking", {"type": "adaptive"}),
            (0.1, "thinking", {"type": "disabled"}),
            (0.1, "stream", True),
            (0.1, "metadata", {"user_id": "somebody"}),
        ]
        for odds, name, value in options:
            if self.chance(odds):
                body[name] = value
        return request

    def _system(self) -> list[Body]:
        blocks = [{"type": "text", "text": self.text(), "cache_control": {"type": "ephemeral"}} for _ in range(2)]
        head = {"type": "text", "text": f"x-anthropic-billing-header: cch={self.random.random()};"}
        return [head, *blocks] if self.chance(0.4) else blocks

    def _turns(self, *, tools: bool) -> list[Body]:
        messages: list[Body] = []
        for _ in range(self.random.choice((1, 1, 2, 4, 12))):
            messages.append({"role": "user", "content": self._content()})
            if self.chance(0.1):
                messages.append({"role": "system", "content": self.random.choice((self.text(), self._system()))})
            if self.chance(0.7):
                messages += self._anthropic_answer(tools=tools)
        if messages[-1]["role"] == "assistant" and self.chance(0.8):
            messages.append({"role": "user", "content": self._content()})
        return messages

    def _content(self) -> Any:
        if self.chance(0.5):
            return self.text()
        return [{"type": "text", "text": self.text()} for _ in range(self.random.choice((0, 1, 1, 3)))]

    def _anthropic_answer(self, *, tools: bool) -> list[Body]:
        if self.chance(0.4):
            return [{"role": "assistant", "content": self.text()}]
        blocks: list[Body] = []
        if self.chance(0.4):
            blocks.append({"type": "thinking", "thinking": self.text(), "signature": "s"})
        if self.chance(0.1):
            blocks.append({"type": "redacted_thinking", "data": "AAAA"})
        if self.chance(0.7):
            blocks.append({"type": "text", "text": self.text()})
        if not tools or self.chance(0.3):
            return [{"role": "assistant", "content": blocks}]
        calls = [self._use() for _ in range(self.random.choice((1, 1, 2)))]
        results = [self._tool_result(call["id"]) for call in calls]
        after = [{"type": "text", "text": self.text()}] if self.chance(0.3) else []
        return [{"role": "assistant", "content": [*blocks, *calls]}, {"role": "user", "content": [*results, *after]}]

    def _use(self) -> Body:
        given = {"q": self.text(3), "n": self._value(2)} if self.chance(0.9) else {}
        name = self.random.choice(NAMES)
        return {"type": "tool_use", "id": f"toolu_{self.random.randrange(10**6)}", "name": name, "input": given}

    def _tool_result(self, call: str) -> Body:
        texts = [{"type": "text", "text": self.text()} for _ in range(self.random.choice((0, 1, 2)))]
        content = self.random.choice((self.text(), texts, None))
        made: Body = {"type": "tool_result", "tool_use_id": call, "is_error": self.chance(0.1)}
        return made if content is None else made | {"content": content}

    def _anthropic_tool(self, name: str) -> Body:
        schema: Body = {"properties": {"q": {"type": "string", "default": self._value(2)}}, "required": ["q"]}
        if self.chance(0.8):
            schema = {"type": "object"} | schema
        tool: Body = {"name": name, "input_schema": schema}
        if self.chance(0.7):
            tool["description"] = self.text(6)
        if self.chance(0.2):
            tool["strict"] = self.chance(0.5)
        return tool


class ResponsesMaker(Maker):
    """Makes bodies of /v1/responses."""

    def request(self) -> RandomRequest:
        request = RandomRequest(
            "responses", {"model": "m", "input": self.text() if self.chance(0.3) else self._items()}
        )
        body = request.body
        if self.chance(0.4):
            body["tools"] = [self._flat(name) for name in self.random.sample(NAMES, self.random.choice((1, 3)))]
            named = {"type": "function", "name": body["tools"][0]["name"]}
            choice = self.random.choice((None, "auto", "none", "required", named))
            body |= {"tool_choice": choice} if choice else {}
        options: list[tuple[float, str, Any]] = [
            (0.4, "instructions", self.text()),
            (0.2, "cache_salt", self.random.choice(SALTS)),
            (0.2, "chat_template_kwargs", {"enable_thinking": self.chance(0.5), "custom": self.text(1)}),
            (0.2, "reasoning", {"effort": self.random.choice(EFFORTS)}),
            (0.2, "max_output_tokens", self.random.randrange(1, 64)),
            (0.1, "stream", True),
            (0.1, "store", False),
            (0.05, "truncation", "disabled"),
            (0.05, "temperature", 0.5),
        ]
        for odds, name, value in options:
            if self.chance(odds):
                body[name] = value
        return request

    def _items(self) -> list[Body]:
        items: list[Body] = []
        for _ in range(self.random.choice((1, 1, 2, 4, 12))):
            role = self.random.choice(("user", "user", "user", "user", "system", "developer"))
            items.append(self._typed({"role": role, "content": self._input()}))
            if self.chance(0.7):
                items += self._earlier_output()
        if self.chance(0.5):
            items.append({"role": "user", "content": self._input()})
        elif self.chance(0.3):
            content = [{"type": "output_text", "text": self.text(5) + "word", "annotations": []}]
            status = self.random.choice(("incomplete", "completed", "in_progress"))
            items.append({"type": "message", "role": "assistant", "id": "msg_1", "status": status, "content": content})
        return items

    def _typed(self, item: Body) -> Body:
        return {"type": "message"} | item if self.chance(0.5) else item

    def _input(self) -> Any:
        if self.chance(0.6):
            return self.text()
        return [{"type": "input_text", "text": self.text()} for _ in range(self.random.choice((1, 1, 2)))]

    def _earlier_output(self) -> list[Body]:
        items: list[Body] = []
        if self.chance(0.3):
            thought = [{"type": "reasoning_text", "text": self.text()}]
            items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": thought})
        if self.chance(0.7):
            items.append(self._output_message())
        for _ in range(self.random.choice((0, 0, 1, 2))):
            call = {"call_id": f"call_{self.random.randrange(10**6)}", "name": self.random.choice(NAMES)}
            arguments = json.dumps({"q": self.text(3), "n": self._value(2)})
            items.append({"type": "function_call", "id": "fc_1", "arguments": arguments} | call)
            items.append({"type": "function_call_output", "call_id": call["call_id"], "output": self.text()})
        return items

    def _output_message(self) -> Body:
        if self.chance(0.4):
            return self._typed({"role": "assistant", "content": self.text()})
        parts = [{"type": "output_text", "text": self.text()} for _ in range(self.random.choice((1, 1, 2)))]
        message: Body = {"type": "message", "role": "assistant", "content": parts}
        if self.chance(0.5):
            message |= {"id": "msg_1", "status": "completed"}
        return message

    def _flat(self, name: str) -> Body:
        tool: Body = {"type": "function", "name": name}
        if self.chance(0.8):
            tool["description"] = self.text(6)
        if self.chance(0.9):
            tool["parameters"] = {"type": "object", "properties": {"q": {"default": self._value(2)}}}
        if self.chance(0.5):
            tool["strict"] = self.chance(0.5)
        return tool
