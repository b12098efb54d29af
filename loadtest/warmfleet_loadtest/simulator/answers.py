"""Answers as vLLM writes them: JSON of the OpenAI API, whole or in chunks, with usage and errors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet_loadtest.simulator.openai_request import OpenAIRequest, RefusedError
    from warmfleet_loadtest.simulator.scheduler import Output, Request
    from warmfleet_loadtest.tokens.prompt_tokenizer import PromptTokenizer

DONE = b"data: [DONE]\n\n"
MADE_UP = -1.0  # logprob that every token gets


def error_body(error: RefusedError) -> dict[str, Any]:
    kind = {404: "NotFoundError", 500: "InternalServerError"}.get(error.status, "BadRequestError")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.status}}


def usage(ask: OpenAIRequest, requests: list[Request]) -> dict[str, Any]:
    """Return the ``usage`` object. With ``n`` choices a prompt counts once, with its first choice's cached tokens."""
    output_tokens = sum(request.output_tokens for request in requests)
    first = requests[:: ask.n]
    cached = sum(one.cached_tokens if one.prefill_cached is None else one.prefill_cached for one in first)
    return {
        "prompt_tokens": ask.prompt_tokens,
        "total_tokens": ask.prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _logprobs(texts: list[str]) -> dict[str, Any]:
    """Return the logprobs of a completion, in vLLM's form."""
    offsets = [sum(map(len, texts[:index])) for index in range(len(texts))]
    likely: list[dict[str, float]] = [{text: MADE_UP} for text in texts]
    return {"text_offset": offsets, "token_logprobs": [MADE_UP] * len(texts), "tokens": texts, "top_logprobs": likely}


def _prompt_logprobs(prompt: Sequence[int]) -> list[dict[str, Any] | None]:
    """Return an entry for each prompt token; None for the first, because no token before it could predict it."""
    return [None, *({str(token_id): {"logprob": MADE_UP, "rank": 1}} for token_id in prompt[1:])]


class Writer:
    """Writes the answers of one request."""

    def __init__(self, ask: OpenAIRequest, tokenizer: PromptTokenizer, requests: list[Request]) -> None:
        self.ask = ask
        self._tokenizer = tokenizer
        self._requests = requests
        self._head = {"id": ask.request_id, "created": int(time.time()), "model": ask.model}
        self._index = {request: index for index, request in enumerate(requests)}
        self._object = "chat.completion" if ask.chat else "text_completion"

    def whole(self, **more: Any) -> bytes:
        """Return the whole answer, for a request that is not streamed, when all sequences are finished.

        more: further fields.
        """
        choices = [self._choice(index, request) for index, request in enumerate(self._requests)]
        body = {**self._head, "object": self._object, "choices": choices, "usage": usage(self.ask, self._requests)}
        if self.ask.chat and self.ask.token_ids:
            body["prompt_token_ids"] = self.ask.prompts[0]
        if self.ask.chat and self.ask.prompt_logprobs:
            body["prompt_logprobs"] = _prompt_logprobs(self.ask.prompts[0])
        return orjson.dumps(body | more)

    def chunk(self, output: Output) -> bytes:
        """Return an event of a stream. The first event of a chat names the role, too."""
        text = self._tokenizer.text(output.token_ids)
        choice: dict[str, Any] = {"index": self._index[output.request], "logprobs": None}
        choice["finish_reason"] = self._reason(output.request) if output.finished else None
        if self.ask.chat:
            choice["delta"] = {"role": "assistant", "content": text} if output.first else {"content": text}
            if output.finished and self.ask.tool:
                choice["delta"]["tool_calls"] = [{"index": 0, **self._call(output.request)}]
        else:
            choice["text"] = text
        if self.ask.token_ids:
            choice["token_ids"] = list(output.token_ids)
        return self._event([choice])

    def failure(self, error: RefusedError, *, first: bool) -> bytes:
        """Return the end of a stream that failed. As in vLLM, a chat has named the role before."""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        begin = self._event([choice]) if first and self.ask.chat else b""
        return begin + b"data: " + orjson.dumps(error_body(error)) + b"\n\n" + DONE

    def usage_chunk(self) -> bytes:
        return self._event([], usage=usage(self.ask, self._requests))

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        name = "chat.completion.chunk" if self.ask.chat else "text_completion"
        return b"data: " + orjson.dumps({**self._head, "object": name, "choices": choices, **more}) + b"\n\n"

    def _choice(self, index: int, request: Request) -> dict[str, Any]:
        token_ids = list(request.answer[: request.output_tokens])
        text = self._tokenizer.text(token_ids)
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": self._reason(request)}
        if self.ask.chat:
            calls = [self._call(request)] if self.ask.tool else []
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": calls}
        else:
            echoed = list(request.prompt) if self.ask.echo else []
            choice["text"] = "".join([*self._tokenizer.decoded(echoed), text])
            if self.ask.logprobs:
                choice["logprobs"] = _logprobs(self._tokenizer.decoded([*echoed, *token_ids]))
            if self.ask.prompt_logprobs:
                choice["prompt_logprobs"] = _prompt_logprobs(request.prompt)
        if self.ask.token_ids:
            choice["token_ids"] = token_ids
            if not self.ask.chat:
                choice["prompt_token_ids"] = list(request.prompt)
        return choice

    def _call(self, request: Request) -> dict[str, Any]:
        """Return the call of a tool behind an answer's text, which in vLLM a parser takes out of the text."""
        function = {"name": self.ask.tool, "arguments": "{}"}
        return {"id": f"call_{request.request_id}", "type": "function", "function": function}

    def _reason(self, request: Request) -> str:
        if self.ask.tool:
            return "tool_calls"
        return "length" if self.ask.max_tokens is not None and request.max_tokens >= self.ask.max_tokens else "stop"
