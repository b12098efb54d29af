"""An OpenAI request as an engine reads it: token ids, how much to say, how to answer."""

from __future__ import annotations

import uuid
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from warmfleet_loadtest.simulator.scheduler import Request
from warmfleet_loadtest.tokens.prompt_tokenizer import PromptError

if TYPE_CHECKING:
    from warmfleet_loadtest.tokens.prompt_tokenizer import PromptTokenizer

NATURAL_TOKENS = (24, 160)  # an answer's length where the client sets no exact one
MAX_SEQUENCES = 1_024  # prompts x n of one request


class AskError(Exception):
    """A request that is refused: what vLLM would say and with which status."""

    def __init__(self, message: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


@dataclass(frozen=True, slots=True)
class Ask:
    """One parsed request. kind: ``cmpl`` or ``chatcmpl``; prompts: token ids; max_tokens: None = until it is said."""

    kind: str
    request_id: str  # with its kind: what the client sees
    model: str
    prompts: tuple[list[int], ...]
    max_tokens: int | None = None
    exact: bool = False  # ignore_eos: say exactly max_tokens
    min_tokens: int = 0
    n: int = 1
    salt: str | None = None
    stream: bool = False
    usage: bool = False  # in a stream
    token_ids: bool = False  # return_token_ids
    skip_cache: bool = False  # prompt_logprobs: every token of the prompt is computed

    @property
    def chat(self) -> bool:
        return self.kind == "chatcmpl"

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def requests(self, identity: PromptTokenizer, max_model_len: int) -> list[Request]:
        """One sequence per prompt and choice, named as vLLM names them. Raises AskError if one does not fit."""
        made = []
        for position, prompt in enumerate(self.prompts):
            name = self.request_id if self.chat else f"{self.request_id}-{position}"
            seed = zlib.crc32(str(prompt[-64:]).encode())
            room = max_model_len - len(prompt)
            if room < max(1, self.max_tokens or 1):
                raise AskError(
                    f"This model's maximum context length is {max_model_len} tokens. However, you requested "
                    f"{len(prompt) + max(1, self.max_tokens or 1)} tokens. Please reduce the length of the prompt."
                )
            for child in range(self.n):
                count = min(self._length(seed + child), room)
                child_id = name if self.n == 1 else f"{child}_{name}"
                answer = identity.answer(seed + child, count)
                made.append(Request(child_id, prompt, count, answer, self.salt, skip_cache=self.skip_cache))
        return made

    def _length(self, seed: int) -> int:
        if self.exact and self.max_tokens is not None:
            return self.max_tokens
        low, high = NATURAL_TOKENS
        natural = max(low + seed % (high - low), self.min_tokens)
        return natural if self.max_tokens is None else min(natural, self.max_tokens)


def parse(kind: str, raw: bytes, request_id: str | None, identity: PromptTokenizer) -> Ask:
    """Read a body. Raises AskError."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise AskError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise AskError("the body must be a JSON object")
    try:
        prompts = _chat(body, identity) if kind == "chatcmpl" else _completion(body, identity)
    except PromptError as error:
        raise AskError(str(error), param="messages" if kind == "chatcmpl" else "prompt") from error
    keep = _number(body, "truncate_prompt_tokens", 0)
    options = _object(body, "stream_options")
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise AskError("cache_salt must be a non-empty string", param="cache_salt")
    ask = Ask(
        kind,
        f"{kind}-{request_id or uuid.uuid4().hex}",
        str(body.get("model") or ""),
        tuple(prompt[-keep:] for prompt in prompts),
        max_tokens=_max_tokens(kind, body),
        exact=bool(body.get("ignore_eos")),
        min_tokens=_number(body, "min_tokens", 0),
        n=_number(body, "n", 1) or 1,
        salt=salt,
        stream=bool(body.get("stream")),
        usage=bool(options.get("include_usage")),
        token_ids=bool(body.get("return_token_ids")),
        skip_cache=body.get("prompt_logprobs") is not None,
    )
    if len(ask.prompts) * ask.n > MAX_SEQUENCES:
        raise AskError(f"at most {MAX_SEQUENCES} sequences in a request", param="n")
    return ask


def _chat(body: dict[str, Any], identity: PromptTokenizer) -> list[list[int]]:
    """Token ids that came along replace the messages, as in vLLM: not if these must be echoed."""
    given = _object(body, "kv_transfer_params").get("prompt_token_ids")
    return [identity.chat_ids(body) if given is None or body.get("echo") else _ids(given)]


def _completion(body: dict[str, Any], identity: PromptTokenizer) -> list[list[int]]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [identity.completion_ids(prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise PromptError("prompt must be a string, a list of token ids, or a list of these")
    if isinstance(prompt[0], int):
        return [_ids(prompt)]
    return [identity.completion_ids(part) if isinstance(part, str) else _ids(part) for part in prompt]


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(item) is int and 0 <= item < 2**31 for item in value):
        raise PromptError("token ids must be a non-empty list of integers")
    return value


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise AskError(f"{name} must be an object", param=name)
    return value or {}


def _max_tokens(kind: str, body: dict[str, Any]) -> int | None:
    """vLLM's defaults: 16 for completions, as much as fits for chats."""
    for name in ("max_completion_tokens", "max_tokens"):
        if body.get(name) is not None:
            return max(1, _number(body, name, 1))
    return 16 if kind == "cmpl" else None


def _number(body: dict[str, Any], name: str, default: int) -> int:
    value = body.get(name, default)
    value = default if value is None else value
    if type(value) is not int or value < 0:
        raise AskError(f"{name} must be a non-negative integer", param=name)
    return value


def for_model(ask: Ask, models: tuple[str, ...]) -> Ask:
    """The ask with its model's name filled in. Raises AskError (404) for a model that is not served."""
    if not ask.model:
        return replace(ask, model=models[0])
    if ask.model not in models:
        raise AskError(f"The model `{ask.model}` does not exist.", status=404, param="model")
    return ask
