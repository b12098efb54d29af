"""The end of an answer, where engines report how many tokens of the prompt they had in their cache."""

from __future__ import annotations

import re
from typing import NamedTuple

TAIL_BYTES = 2_048  # length of the end that is read: it holds the usage, fields behind it, and a stream's last event
# These patterns match no text of the answer itself, because a quote in it is written \".
_CACHED = re.compile(rb'"(cached_tokens|cache_read_input_tokens)" ?: ?(\d{1,9})')
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens" ?: ?(\d{1,9})')


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
