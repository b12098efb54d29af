"""Parses the body of a request, once. Only the fields that routing needs are read; the engine judges all others.

Values are read as vLLM's server reads them (``lax_values``). A value that only an engine can read is passed on, and the
request is routed without it.
"""

from __future__ import annotations

import array
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import orjson

from warmfleet.errors import BadRequest, TooLarge
from warmfleet.prompt.lax_values import flag, whole
from warmfleet.prompt.messages import is_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

#: The form of a request's prompt. The prompt of an ``unread`` request is not identified.
Endpoint = Literal["completions", "chat", "unread"]
#: The API of a chat's body. The engine turns a body of the last two into a chat (``bodies``).
Dialect = Literal["chat", "messages", "responses"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
MAX_PROMPTS = 256
MAX_SAMPLES = 256
MAX_MESSAGES = 4_096  # most messages of a chat
#: Most values of a body, counted by its commas and opening brackets; parsing more would hold up all other requests.
MAX_VALUES = 1_100_000
MAX_MODEL_LEN = 2**20  # most tokens of a sequence, where an engine announces no limit
TOKEN_BYTES = 16  # most bytes of JSON for one token; real text has less than half of that
EXPECTED_OUTPUT_TOKENS = 256  # most tokens booked for an answer, whatever its limit, because few answers are longer
MAX_BOOKED_TOKENS = 2**22  # most tokens booked for a request; more could overflow the sums of a load row in Redis

#: Fields by which an engine makes another prompt than the router, or gets KV cache from elsewhere. A request with one
#: of them is refused unless the operator allows the field by name.
REFUSED = ("chat_template", "kv_transfer_params", "ec_transfer_params")
#: Parts of ``kv_transfer_params`` that are refused in any case: they may end an engine, or spoil its cache.
STEPS = ("do_remote_prefill", "do_remote_decode")
#: Field → reason. With such a field the prompt, or its use of the cache, is unpredictable: it is routed by load.
UNFORESEEABLE = {
    "prompt_embeds": "embeds",
    "prompt_logprobs": "prompt_logprobs",  # such requests skip the cache
    "truncate_prompt_tokens": "truncation",
    "mm_processor_kwargs": "parts",
    "media_io_kwargs": "parts",
    "suffix": "suffix",
}
#: Fields for which the engine needs the text of the prompt: such a request is never handed off as token ids.
TEXT_ONLY = ("echo", "return_prompt_text")
#: Fields of a chat, besides its messages, that may hold numbers which the template prints.
NOT_ONLY_TEXT = ("tools", "chat_template_kwargs", "documents")
#: Keys of chat_template_kwargs with which the engine makes other token ids.
UNFORESEEABLE_ARGUMENTS = ("tokenize", "chat_template")
# Most bodies have none of these fields, which a single comparison of sets shows.
_MAY_BE_REFUSED = frozenset({*REFUSED, "chat_template_kwargs", "vllm_xargs", "sampling_params"})
_MAY_BE_UNFORESEEN = frozenset({*UNFORESEEABLE, *REFUSED, "echo", "chat_template_kwargs"})
_MAY_BE_TEXT_ONLY = frozenset(TEXT_ONLY)
_MAY_HAVE_NUMBERS = frozenset(NOT_ONLY_TEXT)
_ARGUMENTS = frozenset(
    {"chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "continue_final_message", "documents"}
)
# If a body has none of these fields, ``from_dict`` skips all checks of them.
_ASKS_FOR_MORE = (
    _MAY_BE_UNFORESEEN
    | _MAY_BE_REFUSED
    | _MAY_BE_TEXT_ONLY
    | _ARGUMENTS
    | {
        *("n", "max_completion_tokens", "cache_salt", "add_special_tokens", "priority", "prompt_cache_key"),
        *("tools", "tool_choice", "request_id"),
    }
)
NO_LABELS: frozenset[str] = frozenset()
MAX_SALT = 1_024  # most characters of a salt; newer engines take 128
#: orjson reads an integer of more than 64 bits as a float; vLLM reads it exactly.
_LONG = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else ord(" ") for byte in range(256))
_LONG_NUMBER = re.compile(rb"[\[:,]\s*-?\d{19}")
MAX_LONG_NUMBERS_BYTES = 1_000_000  # most bytes of a body whose long numbers are read exactly, because that is slow
#: Half of a surrogate pair, escaped or not. Python's json reads it, and no text with it can be encoded.
_HALF_PAIR = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u.)[c-fC-F][0-9a-fA-F]{2})"
)
_HALF_PAIR_BYTES = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")


@dataclass(slots=True)
class Request:
    """The fields of a body that routing needs.

    unforeseen: the reason why the prompt cannot be known, else empty. text_only: the engine needs the text of the
    prompt to answer. prompts: of a completion, each a text or token ids. arguments: of a chat, for its template.
    size_bytes: of the body. takes_salt: the router may add a ``cache_salt`` to the body. estimated: tokens that are
    booked for a prompt that is not read, else 0. thinking_off: a client of Anthropic's API has switched thinking off.
    cache_key: OpenAI's ``prompt_cache_key``, by which clients group requests with a common beginning. request_id: the
    id in the body, which vLLM uses if no header has one. follows: the id of the answer that the request goes on
    from or is about, and that one engine keeps. from_json: the body is a JSON object, so every engine reads the same
    model in it. labels: from a header, each ``name=value``; the request's worker must have all of them.
    media_id: gives the id that the engine gets in place of the client's id of an image.
    """

    endpoint: Endpoint
    model: str
    stream: bool
    samples: int
    max_tokens: int | None
    salt: str | None
    add_special_tokens: bool
    unforeseen: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[str | list[int]] = field(default_factory=list)
    tools: Any = None
    tool_choice: Any = None
    arguments: dict[str, Any] = field(default_factory=dict)
    size_bytes: int = 0
    priority: Any = None
    text_only: bool = False
    cache_key: str = ""
    takes_salt: bool = True
    estimated: int = 0
    dialect: Dialect = "chat"
    thinking_off: bool = False
    request_id: str = ""
    follows: str = ""
    from_json: bool = True
    labels: frozenset[str] = NO_LABELS
    media_id: Callable[[str], str] | None = None

    @property
    def declares_tools(self) -> bool:
        """Whether the answer may call tools of the client."""
        return bool(self.tools) and self.tool_choice not in ("none", {"type": "none"})

    @property
    def goes_on(self) -> bool:
        """Whether the conversation has earlier answers, or may have: of an unread body that is not known."""
        return self.endpoint == "unread" or any(message["role"] in ("assistant", "tool") for message in self.messages)


def parse(endpoint: Endpoint, body: bytes, allowed: Collection[str] = ()) -> Request:
    """Read the JSON body of a client's request. allowed: fields of REFUSED that the operator allows.

    Raises BadRequest, whose ``param`` is the field at fault (None if the body is no JSON object), and TooLarge.
    """
    data = decoded(body)
    request = from_dict(endpoint, data, allowed, len(body))
    if type(data) is not dict or len(body) > MAX_LONG_NUMBERS_BYTES:
        note_inexact(request, data, body)
    return request


def note_inexact(request: Request, data: dict[str, Any], body: bytes) -> None:
    """Mark the prompt as not reproducible if ``decoded`` may have changed a text or number that is part of it."""
    if type(data) is not dict:
        request.unforeseen = request.unforeseen or "unicode"
    elif len(body) > MAX_LONG_NUMBERS_BYTES and not request.unforeseen and _may_be_rounded(data, body):
        request.unforeseen = "numbers"


class Approximate(dict[str, Any]):
    """A body that only Python's json reads. Engines may read other texts in it, or other numbers, such as NaN."""


def decoded(body: bytes) -> dict[str, Any]:
    """Parse a body into its JSON object. Raises BadRequest, TooLarge.

    Long numbers are exact, as vLLM reads them, unless the body is larger than MAX_LONG_NUMBERS_BYTES.
    """
    if len(body) > MAX_VALUES and len(body) - len(body.translate(None, b",[{")) > MAX_VALUES:
        raise TooLarge(f"The body has more than {MAX_VALUES} values.")
    try:
        data = orjson.loads(body)
        if isinstance(data, dict) and len(body) <= MAX_LONG_NUMBERS_BYTES and _may_be_rounded(data, body):
            data = json.loads(body)
    except ValueError:
        data = _as_python_reads(body)
    except RecursionError as error:
        raise BadRequest(f"The body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise BadRequest("The body must be a JSON object.")
    return data


def _as_python_reads(body: bytes) -> Any:
    """Parse a body that orjson does not take as vLLM's server does, which reads it by ``json.loads`` of its bytes.

    Halves of surrogate pairs become question marks, because nothing could be written with them. Raises BadRequest.
    """
    try:
        data = json.loads(_without_halves(in_utf8(body)))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}") from error
    return Approximate(data) if isinstance(data, dict) else data


def _without_halves(body: bytes) -> bytes:
    """Put a question mark in place of each half of a surrogate pair in a body in UTF-8.

    Replacing them in the parsed texts would take ten times as long as parsing.
    """
    if b"\xed" in body:
        body = _HALF_PAIR_BYTES.sub(b"?", body)
    if b"\\u" not in body or b"\0" in body:  # a body with a zero byte is no JSON, which escapes it
        return body
    escaped = body.replace(rb"\\", b"\0\0")  # in valid JSON each other backslash then begins an escape
    return _HALF_PAIR.sub(b"?", escaped).replace(b"\0\0", rb"\\")


def in_utf8(body: bytes) -> bytes:
    """Turn a JSON object in any encoding into UTF-8 without a byte order mark. Other bodies stay as they are.

    vLLM's server also reads UTF-16 and UTF-32. Only in UTF-8 can a key be put into the body (``json_splice``).
    """
    if body[:1] < b"\xef" and b"\0" not in body[:4]:
        return body
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
    except UnicodeDecodeError:
        return body
    return text.encode("utf-8", "surrogatepass") if text.lstrip().startswith("{") else body


def from_dict(endpoint: Endpoint, data: dict[str, Any], allowed: Collection[str] = (), size_bytes: int = 0) -> Request:
    """Make the request of a body that is parsed already. size_bytes: length of the body."""
    if _ASKS_FOR_MORE.isdisjoint(data):  # most bodies have only a model, a limit and a prompt
        model, stream, limit = typed(data, "model", str, ""), _flag(data, "stream"), _limit(data, "max_tokens")
        request = Request(endpoint, model, stream, 1, limit, None, endpoint == "completions", "", size_bytes=size_bytes)
    else:
        refuse_fields(data, allowed)
        request = Request(
            endpoint=endpoint,
            model=typed(data, "model", str, ""),
            stream=_flag(data, "stream"),
            samples=samples_to_book(_whole(data, "n")),
            max_tokens=_limit(data, "max_tokens") if endpoint == "completions" else _chats_limit(data),
            salt=salt_of(data),
            add_special_tokens=_flag(data, "add_special_tokens", default=endpoint == "completions"),
            unforeseen=_unforeseen(endpoint, data),
            size_bytes=size_bytes,
            priority=priority_of(data),
            text_only=not _MAY_BE_TEXT_ONLY.isdisjoint(data) and any(_may_be_set(data, name) for name in TEXT_ONLY),
            request_id=request_id_of(data),
        )
        if type(key := data.get("prompt_cache_key")) is str:
            request.cache_key = key
    if endpoint == "completions":
        if request.unforeseen != "embeds":
            _read_prompts(request, data)
    else:
        _read_messages(request, data)
        request.tools, request.tool_choice = data.get("tools"), data.get("tool_choice")
        if _ARGUMENTS.isdisjoint(data):
            request.arguments = {"add_generation_prompt": True, "continue_final_message": False}
        else:
            request.arguments = _template_arguments(data)
    return request


def refuse_fields(data: dict[str, Any], allowed: Collection[str]) -> None:
    """Raise BadRequest if the body has a field of REFUSED that is not among the ``allowed`` ones."""
    if _MAY_BE_REFUSED.isdisjoint(data):
        return
    sampling = data.get("sampling_params")
    arguments = data.get("vllm_xargs"), sampling.get("extra_args") if isinstance(sampling, dict) else None
    for name in REFUSED:
        # vLLM takes each field from such an object, too.
        places = data, *((data.get("chat_template_kwargs"),) if name == "chat_template" else arguments)
        found = [place[name] for place in places if isinstance(place, dict) and place.get(name) is not None]
        if found and name not in allowed:
            raise BadRequest(f"{name} is not accepted by this router.", name)
        if any(isinstance(value, dict) and any(value.get(step) for step in STEPS) for value in found):
            raise BadRequest(f"{' and '.join(STEPS)} of {name} are set by routers only.", name)


def _may_be_rounded(data: dict[str, Any], body: bytes) -> bool:
    """Return whether orjson may have rounded a number that is part of the prompt, so that an exact parser is needed."""
    if (
        _MAY_HAVE_NUMBERS.isdisjoint(data) or not any(data.get(name) for name in NOT_ONLY_TEXT)
    ) and not _holds_more_than_text(data.get("messages")):
        return False
    return b"0" * 19 in body.translate(_LONG) and _LONG_NUMBER.search(body) is not None


def _holds_more_than_text(messages: Any) -> bool:
    """Return whether some message has a field that is no text."""
    if isinstance(messages, list):
        for message in messages:
            if isinstance(message, dict):
                for value in message.values():
                    if type(value) is not str:
                        return True
    return False


def priority(request: Request) -> int:
    """Return the priority that the request names, 0 if it names none; lower goes first. Raises BadRequest."""
    if request.priority is None:
        return 0
    if type(request.priority) is not int:
        raise BadRequest("priority must be a whole number.", "priority")
    return request.priority


def estimated_tokens(request: Request) -> int:
    """Return the tokens booked for a prompt that cannot be known: one for four characters of its text, at least 1."""
    if request.estimated:
        return request.estimated
    characters, tokens = 0, 0
    for prompt in request.prompts:
        if isinstance(prompt, str):
            characters += len(prompt)
        else:
            tokens += len(prompt)
    for message in request.messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else part
            characters += len(text) if isinstance(text, str) else 0
    return max(1, tokens + characters // 4)


def too_long(request: Request, max_model_len: int) -> bool:
    """Return whether no engine with a limit of ``max_model_len`` tokens takes this prompt, by a quick estimate."""
    limit = max_model_len * TOKEN_BYTES
    if 0 < request.size_bytes <= max_model_len:
        return False
    if any(len(prompt) > (limit if isinstance(prompt, str) else max_model_len) for prompt in request.prompts):
        return True
    if request.endpoint == "completions" or request.size_bytes <= limit:
        return False
    try:  # with the size of the request without its images
        return len(orjson.dumps([list(map(_text_only, request.messages)), request.tools, request.arguments])) > limit
    except TypeError:  # a lone surrogate, or nested deeper than orjson goes
        return True


def _text_only(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return message | {"content": [*filter(is_text, content)]} if isinstance(content, list) else message


def decode_tokens(request: Request, prompt_tokens: int) -> int:
    """Return the context tokens that each decode step of this request reads, counted once for each of its samples."""
    limit = request.max_tokens
    output = EXPECTED_OUTPUT_TOKENS if limit is None or limit > EXPECTED_OUTPUT_TOKENS else limit
    return min(request.samples * (prompt_tokens + output), MAX_BOOKED_TOKENS)


def salt_of(data: Mapping[str, Any]) -> str | None:
    """Return the body's ``cache_salt``; None if it has none. Raises BadRequest."""
    salt: str | None = typed(data, "cache_salt", str, None)
    if salt is not None and len(salt) > MAX_SALT:
        raise BadRequest(f"cache_salt has {len(salt)} characters; at most {MAX_SALT} are allowed.", "cache_salt")
    return salt or None


def _unforeseen(endpoint: Endpoint, data: dict[str, Any]) -> str:
    if _MAY_BE_UNFORESEEN.isdisjoint(data):
        return ""
    for name, reason in UNFORESEEABLE.items():
        if data.get(name) is not None:
            return reason
    for name in REFUSED:
        if data.get(name) is not None:
            return name
    # For echoed logprobs, and for every chat with echo, the engine computes logprobs of the prompt.
    if _may_be_set(data, "echo") and (endpoint == "chat" or data.get("logprobs") is not None):
        return "prompt_logprobs"
    arguments = data.get("chat_template_kwargs")
    if isinstance(arguments, dict) and any(arguments.get(name) is not None for name in UNFORESEEABLE_ARGUMENTS):
        return "chat_template"
    return ""


def _read_prompts(request: Request, data: dict[str, Any]) -> None:
    """Read the prompts of a completion. A prompt with odd token ids such as 5.0 is left out, so it is routed by load.

    Raises BadRequest.
    """
    prompt = data.get("prompt")
    if isinstance(prompt, str):
        request.prompts = [prompt]
        return
    if not isinstance(prompt, list):
        raise BadRequest("prompt must be a string, token ids, or a list of these.", "prompt")
    if is_ids(prompt):
        request.prompts = [prompt]
        return
    if prompt and all(isinstance(item, str) or is_ids(item) for item in prompt):
        if len(prompt) > MAX_PROMPTS:
            raise BadRequest(f"prompt has {len(prompt)} entries; at most {MAX_PROMPTS} are allowed.", "prompt")
        request.prompts = prompt
        return
    request.unforeseen = request.unforeseen or "content"
    request.estimated = max(1, sum(len(item) if isinstance(item, list) else 1 for item in prompt))


def is_ids(value: Any) -> bool:
    """Return whether ``value`` is a list of at least one token id, each of 32 bits."""
    if not isinstance(value, list) or set(map(type, value)) != {int}:
        return False
    try:
        array.array("I", value)  # the fastest way to check the range of every id
    except OverflowError:
        return False
    return True


def _read_messages(request: Request, data: dict[str, Any]) -> None:
    """Read the messages of a chat. Raises BadRequest."""
    messages = data.get("messages")
    if not isinstance(messages, list):
        raise BadRequest("messages must be a list.", "messages")
    if len(messages) > MAX_MESSAGES:
        raise BadRequest(f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are allowed.", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest("A message must be an object with a role.", f"messages[{index}].role")
    request.messages = messages
    if not messages:
        request.unforeseen = request.unforeseen or "content"


def _template_arguments(data: dict[str, Any]) -> dict[str, Any]:
    """Return the template's arguments as vLLM merges them: fields of the request override its chat_template_kwargs."""
    arguments = typed(data, "chat_template_kwargs", dict, None) or {}
    effort = data.get("reasoning_effort")
    fields = {
        "add_generation_prompt": _flag(data, "add_generation_prompt", default=True),
        "continue_final_message": _flag(data, "continue_final_message"),
        "documents": data.get("documents"),
        "reasoning_effort": effort,
    }
    if effort is not None and "enable_thinking" not in arguments:
        fields["enable_thinking"] = effort != "none"
    return _set(arguments | _set(fields))


def _set(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values without those that leave the choice to the server (null and ``auto``)."""
    return {name: value for name, value in values.items() if value is not None and value != "auto"}


def typed(data: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """Return the value of a field, or ``default`` for null. kind: str or dict. Raises BadRequest for any other type."""
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise BadRequest(f"{name} must be {'a string' if kind is str else 'an object'}.", name)
    return value


def _flag(data: dict[str, Any], name: str, *, default: bool = False) -> bool:
    """Return the value of a field that is true or false, or ``default`` for null. Raises BadRequest."""
    value = data.get(name)
    if value is None:
        return default
    if value is True or value is False:
        return value
    read = flag(value)
    if read is None:
        raise BadRequest(f"{name} must be true or false.", name)
    return read


def _may_be_set(data: dict[str, Any], name: str) -> bool:
    return data.get(name) is not None and flag(data[name]) is not False


def _whole(data: dict[str, Any], name: str) -> int | None:
    """Return the value of a field that is a whole number. Raises BadRequest."""
    value = data.get(name)
    if value is None or type(value) is int:
        return value
    read = whole(value)
    if read is None:
        raise BadRequest(f"{name} must be a whole number.", name)
    return read


def _limit(data: dict[str, Any], name: str) -> int | None:
    """Return a limit of tokens; None if the body has none, or one that an engine refuses. Raises BadRequest."""
    limit = _whole(data, name)
    return None if limit is None or limit < 0 else limit


def _chats_limit(data: dict[str, Any]) -> int | None:
    newer, older = _limit(data, "max_completion_tokens"), _limit(data, "max_tokens")
    return older if newer is None else newer


def samples_to_book(n: int | None) -> int:
    """Return the number of answers that is booked for a request's ``n``, of which an engine refuses all below 1."""
    return min(max(n or 1, 1), MAX_SAMPLES)


def priority_of(data: Mapping[str, Any]) -> Any:
    """Return the body's ``priority``, as a whole number if it can be read as one."""
    value = data.get("priority")
    return value if value is None or type(value) is int or (read := whole(value)) is None else read


def request_id_of(data: Mapping[str, Any]) -> str:
    """Return the body's ``request_id``; empty if it has none."""
    value = data.get("request_id")
    return value if isinstance(value, str) else ""
