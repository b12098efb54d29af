"""The end of an answer, where engines report their tokens, how many of them they had cached, and why the answer
ended."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from warmfleet.engines.output_tokens import REPORTED

TAIL_BYTES = 2_048  # length of the end that is read: it holds the usage, fields behind it, and a stream's last event
# These patterns, and REPORTED, match no text of the answer itself, because a quote in it is written \".
_CACHED = re.compile(rb'"(cached_tokens|cache_read_input_tokens)" ?: ?(\d{1,9})')
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens" ?: ?(\d{1,9})')
_IMAGES = re.compile(rb'"multimodal_tokens" ?: ?\{[^{}]*?"image" ?: ?(\d{1,9})')
_FINISH = re.compile(rb'"(?:finish|stop)_reason" ?: ?"(\w+)"')
_CALL = re.compile(rb'"type" ?: ?"function_call"')
_LONGEST_CALL = len(b'"type" : "function_call"')
TOOLS_WAIT = frozenset({b"tool_calls", b"tool_use", b"function_call"})  # reasons of answers that call tools


#: Why an answer ended: ``t`` it calls tools, ``e`` the client ends its session, ``o`` another reason, ``?`` not known.
Finish = Literal["t", "e", "o", "?"]


class Usage(NamedTuple):
    """The tokens of a prompt, as the answer reports them. cached_tokens: None if the answer does not say."""

    prompt_tokens: int
    cached_tokens: int | None


class AnswerTail:
    """The last bytes of an answer. No other byte of the answer is kept or read."""

    def __init__(self, body: bytes = b"") -> None:
        """body: the body of an answer that came whole."""
        self._tail = body[-TAIL_BYTES:]

    def add(self, piece: bytes) -> None:
        self._tail = (self._tail + piece)[-TAIL_BYTES:]

    def usage(self) -> Usage | None:
        """Return the last usage in the tail; None if it has none, as in a stream whose client did not ask for usage."""
        prompts, cached = _PROMPT.findall(self._tail), _CACHED.findall(self._tail)
        if not prompts or not int(prompts[-1]):
            return None
        prompt_tokens = int(prompts[-1])
        if not cached:
            return Usage(prompt_tokens, None)
        name, cached_tokens = cached[-1][0], int(cached[-1][1])
        if name == b"cache_read_input_tokens":  # Anthropic's API leaves these out of the prompt's count
            prompt_tokens += cached_tokens
        return Usage(prompt_tokens, min(cached_tokens, prompt_tokens))

    def image_tokens(self) -> int | None:
        """Return the tokens of the prompt's images; None if the tail does not tell, as before vLLM 0.32."""
        _, details, told = self._tail.rpartition(b'"prompt_tokens_details"')
        found = _IMAGES.search(told) if details else None
        return int(found[1]) if found else None

    def context_tokens(self) -> int:
        """Return the tokens of prompt and answer together; 0 if the tail has no usage."""
        told, answered = self.usage(), REPORTED.findall(self._tail)
        return told.prompt_tokens + int(answered[-1]) if told is not None and answered else 0

    def finish(self) -> Finish:
        """Return why the answer ended, as it tells; it never tells ``e``."""
        words = _FINISH.findall(self._tail)
        return "t" if TOOLS_WAIT.intersection(words) else "o" if words else "?"


class ResponsesTail(AnswerTail):
    """The end of an answer of /v1/responses, whose calls of tools may stand anywhere in it."""

    def __init__(self, body: bytes = b"") -> None:
        super().__init__(body)
        self._calls = _CALL.search(body) is not None

    def add(self, piece: bytes) -> None:
        if not self._calls and _CALL.search(self._tail[-_LONGEST_CALL:] + piece):
            self._calls = True
        super().add(piece)

    def image_tokens(self) -> int | None:
        """Return None: this API does not tell them, and a client's JSON schema is in the tail, too."""
        return None

    def finish(self) -> Finish:
        return "t" if self._calls else "o" if self.usage() is not None else "?"
