"""A request of the OpenAI API as an engine reads it: prompts as token ids, length and form of the answer."""

from __future__ import annotations

import json
import re
import uuid
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from warmfleet_loadtest.simulator.scheduler import Request
from warmfleet_loadtest.tokens.prompt_tokenizer import PromptError

if TYPE_CHECKING:
    from warmfleet_loadtest.tokens.prompt_tokenizer import PromptTokenizer

NATURAL_TOKENS = (24, 160)  # fewest and most tokens of an answer where the client sets no exact number
MAX_SEQUENCES = 1_024  # most sequences (prompts x choices) of one request
#: Fields that vLLM supports and this engine does not imitate, with the values that have no effect; others are refused.
#: A field that changes only which tokens are sampled is not listed: the words of an answer are made up in any case.
NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
NOT_IMITATED: dict[str, tuple[Any, ...]] = {
    "response_format": (*NOTHING, {"type": "text"}),
    "tool_choice": (*NOTHING, "none", "auto"),
    "best_of": (*NOTHING, 1),
    **dict.fromkeys(("structured_outputs", "structural_tag", "guided_json", "guided_regex"), NOTHING),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_decoding_backend"), NOTHING),
    **dict.fromkeys(("functions", "function_call", "audio", "prompt_embeds", "use_beam_search"), NOTHING),
    **dict.fromkeys(("stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias", "suffix"), NOTHING),
    **dict.fromkeys(("top_logprobs", "return_tokens_as_token_ids"), NOTHING),
}

_WHOLE = re.compile(r"[+-]?[0-9]+(?:_[0-9]+)*(?:\.0+)?")  # a number in a text, as vLLM's request models take it
_FALSE = ("0", "f", "false", "n", "no", "off")


class RefusedError(Exception):
    """A request is refused, with vLLM's text and HTTP status."""

    def __init__(self, message: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """A parsed request.

    kind: ``cmpl`` or ``chatcmpl``. request_id: as the client sees it, with its kind. prompts: token ids.
    max_tokens: None = no limit. exact: the answer has exactly max_tokens (``ignore_eos``).
    stop: texts before which an answer ends. usage: a stream ends with a ``usage`` object.
    token_ids: the answer lists its token ids (``return_token_ids``).
    echo: the answer begins with the prompt. logprobs, prompt_logprobs: the answer lists made-up logprobs of its tokens,
    or of the prompt's. The cache is skipped (``skip_cache``) if logprobs of the prompt are wanted.
    tool: the function that the answer of a chat calls; empty: none. transfer: the ``kv_transfer_params`` of its blocks.
    """

    kind: str
    request_id: str
    model: str
    prompts: tuple[list[int], ...]
    max_tokens: int | None = None
    exact: bool = False
    min_tokens: int = 0
    n: int = 1
    salt: str | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    token_ids: bool = False
    echo: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    tool: str = ""
    transfer: dict[str, Any] | None = None

    @property
    def skip_cache(self) -> bool:
        return self.prompt_logprobs or (self.echo and self.logprobs)

    @property
    def chat(self) -> bool:
        return self.kind == "chatcmpl"

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def requests(self, tokenizer: PromptTokenizer, max_model_len: int) -> list[Request]:
        """Make a sequence per prompt and choice, with vLLM's ids. Raises RefusedError for limits that it refuses."""
        made = []
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            told = f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, got {self.min_tokens}."
            raise RefusedError(told, param="min_tokens")
        for position, prompt in enumerate(self.prompts):
            name = self.request_id if self.chat else f"{self.request_id}-{position}"
            seed = zlib.crc32(str(prompt[-64:]).encode())
            room = max_model_len - len(prompt)
            if room < max(1, self.max_tokens or 1):
                raise RefusedError(
                    f"This model's maximum context length is {max_model_len} tokens. However, you requested "
                    f"{len(prompt) + max(1, self.max_tokens or 1)} tokens. Please reduce the length of the prompt."
                )
            for child in range(self.n):
                count = min(self._length(seed + child), room)
                child_id = name if self.n == 1 else f"{child}_{name}"
                answer = self._before_stop(tokenizer, tokenizer.answer(seed + child, count))
                made.append(Request(child_id, prompt, len(answer), answer, self.salt, skip_cache=self.skip_cache))
        return made

    def _before_stop(self, tokenizer: PromptTokenizer, answer: list[int]) -> list[int]:
        """Cut the answer before the word in which a text of ``stop`` begins, but keep at least one word."""
        if not self.stop:
            return answer
        text = tokenizer.text(answer)
        ends = min((at for at in map(text.find, self.stop) if at >= 0), default=len(text))
        length = 0
        for position, token_id in enumerate(answer):
            length += len(tokenizer.text([token_id]))
            if length > ends:
                return answer[: max(1, position)]
        return answer

    def _length(self, seed: int) -> int:
        if self.exact and self.max_tokens is not None:
            return self.max_tokens
        low, high = NATURAL_TOKENS
        natural = max(low + seed % (high - low), self.min_tokens)
        return natural if self.max_tokens is None else min(natural, self.max_tokens)


def parse(kind: str, raw: bytes, request_id: str | None, tokenizer: PromptTokenizer) -> OpenAIRequest:
    """Read the body of a request. Raises RefusedError."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = _as_python_reads(raw)
    if not isinstance(body, dict):
        raise RefusedError("the body must be a JSON object")
    _check_imitated(kind, body)
    try:
        prompts = _chat(body, tokenizer) if kind == "chatcmpl" else _completion(body, tokenizer)
    except PromptError as error:
        raise RefusedError(str(error), param="messages" if kind == "chatcmpl" else "prompt") from error
    keep = _number(body, "truncate_prompt_tokens", 0)
    options = _object(body, "stream_options")
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise RefusedError("cache_salt must be a non-empty string", param="cache_salt")
    ask = OpenAIRequest(
        kind,
        f"{kind}-{request_id or uuid.uuid4().hex}",
        str(body.get("model") or ""),
        tuple(prompt[-keep:] for prompt in prompts),
        max_tokens=_max_tokens(kind, body),
        exact=_flag(body, "ignore_eos"),
        min_tokens=_number(body, "min_tokens", 0),
        n=_number(body, "n", 1) or 1,
        salt=salt,
        stop=_stop(body),
        stream=_flag(body, "stream"),
        usage=bool(options.get("include_usage")),
        token_ids=bool(body.get("return_token_ids")),
        echo=kind == "cmpl" and _flag(body, "echo"),
        logprobs=_wants(body, "logprobs"),
        prompt_logprobs=body.get("prompt_logprobs") is not None,
        tool=_tool(body) if kind == "chatcmpl" else "",
        transfer=_transfer(body),
    )
    if len(ask.prompts) * ask.n > MAX_SEQUENCES:
        raise RefusedError(f"at most {MAX_SEQUENCES} sequences in a request", param="n")
    return ask


def _as_python_reads(raw: bytes) -> Any:
    """Read JSON that orjson refuses, such as NaN, with Python's json, as vLLM's server does. Raises RefusedError."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body is not JSON: {error}") from error


def _check_imitated(kind: str, body: dict[str, Any]) -> None:
    """Raise RefusedError that names the first field whose effect an answer of this engine would lack."""
    for name, nothing in NOT_IMITATED.items():
        if body.get(name) not in nothing:
            raise not_imitated(name)
    if _object(body, "stream_options").keys() - {"include_usage"}:
        raise not_imitated("stream_options")
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if kind == "chatcmpl" and _flag(body, "echo") and isinstance(last, dict) and last.get("role") == "assistant":
        raise not_imitated("echo")
    if kind == "chatcmpl" and body.get("logprobs"):
        raise not_imitated("logprobs")
    for name in ("echo", "logprobs", "prompt_logprobs"):
        if kind == "cmpl" and _flag(body, "stream") and _wants(body, name):
            raise RefusedError(f"This simulated engine does not imitate `{name}` in a stream.", param=name)


def _transfer(body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the parameters that are about blocks; None if there are none."""
    told = _object(body, "kv_transfer_params")
    return {name: value for name, value in told.items() if name != "prompt_token_ids"} or None


def _tool(body: dict[str, Any]) -> str:
    """Return the tool that an answer calls: the first of a chat; with "none" tools only enter the prompt."""
    return body["tools"][0]["function"]["name"] if body.get("tools") and body.get("tool_choice") != "none" else ""


def _stop(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop") or []
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RefusedError("stop must be a string or a list of strings", param="stop")
    return tuple(texts)


def _wants(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    return type(value) is int or (value is not None and _flag(body, name))  # a number, even 0, asks for logprobs


def not_imitated(name: str) -> RefusedError:
    """Return the error for a field whose effect the answer of this engine would lack."""
    return RefusedError(f"This simulated engine does not imitate `{name}`: ask a real one.", param=name)


def _chat(body: dict[str, Any], tokenizer: PromptTokenizer) -> list[list[int]]:
    """Return the token ids of a chat. As in vLLM, ids in the request replace the messages unless ``echo`` is set."""
    ids = _object(body, "kv_transfer_params").get("prompt_token_ids")
    return [tokenizer.chat_ids(body) if ids is None or body.get("echo") else _ids(ids)]


def _completion(body: dict[str, Any], tokenizer: PromptTokenizer) -> list[list[int]]:
    prompt, special = body.get("prompt"), body.get("add_special_tokens") is not False
    if isinstance(prompt, str):
        return [tokenizer.completion_ids(prompt, special=special)]
    if not isinstance(prompt, list) or not prompt:
        raise PromptError("prompt must be a string, a list of token ids, or a list of these")
    if isinstance(prompt[0], int):
        return [_ids(prompt)]
    return [tokenizer.completion_ids(part, special=special) if isinstance(part, str) else _ids(part) for part in prompt]


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(item) is int and 0 <= item < 2**31 for item in value):
        raise PromptError("token ids must be a non-empty list of integers")
    return value


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise RefusedError(f"{name} must be an object", param=name)
    return value or {}


def _max_tokens(kind: str, body: dict[str, Any]) -> int | None:
    """Return the limit of the answer; without one vLLM takes 16 for completions, and for chats all that fits (None)."""
    for name in ("max_completion_tokens", "max_tokens"):
        if body.get(name) is not None:
            return max(1, _number(body, name, 1))
    return 16 if kind == "cmpl" else None


def _number(body: dict[str, Any], name: str, default: int) -> int:
    value = body.get(name, default)
    value = default if value is None else value
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or value < 0:
        raise RefusedError(f"{name} must be a non-negative integer", param=name)
    return int(value)


def _flag(body: dict[str, Any], name: str) -> bool:
    """Read a boolean, also from a text or number that vLLM takes for a boolean."""
    value = body.get(name)
    return value.lower() not in _FALSE if isinstance(value, str) else bool(value)


def for_model(ask: OpenAIRequest, models: tuple[str, ...]) -> OpenAIRequest:
    """Return the request with its model's name filled in. Raises RefusedError (404) for a model that is not served."""
    if not ask.model:
        return replace(ask, model=models[0])
    if ask.model not in models:
        raise RefusedError(f"The model `{ask.model}` does not exist.", status=404, param="model")
    return ask
