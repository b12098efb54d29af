"""Reads the requests whose prompts the router does not identify: the model, and about how large the prompt is. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warmfleet.errors import BadRequest
from warmfleet.prompt import request as requests
from warmfleet.prompt.dialects import form
from warmfleet.prompt.lax_values import flag, whole
from warmfleet.prompt.request import Request

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from warmfleet.prompt.engine_paths import EnginePath

CHARACTERS_PER_TOKEN = 4
FORM_BYTES_PER_TOKEN = 400  # bytes of audio that count as a token: 16 to 32 kB a second make some 50 tokens
MAX_DEPTH = 6  # most levels of lists and objects within each other in which text is counted
#: Fields that limit the length of an answer: each path has one of them.
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def parse(path: EnginePath, body: bytes, allowed: Collection[str] = (), content_type: bytes = b"") -> Request:
    """Return the request of a body that is empty, a JSON object, a form, or of any type if the path takes all types.

    allowed: as in ``request.parse``. content_type: the header. Raises BadRequest, TooLarge.
    """
    if not body:
        return _unjudged(path, {}, 0)
    if path.takes_all_types and form.is_form(content_type):
        return _unjudged(path, form.fields(content_type, body), len(body))
    try:
        data = requests.decoded(body)
    except BadRequest:
        if path.takes_all_types:
            return _unjudged(path, {}, len(body))
        raise
    requests.refuse_fields(data, allowed)
    return from_dict(path, data)


def _unjudged(path: EnginePath, fields: Mapping[str, Any], size_bytes: int) -> Request:
    """Make the request of a body that is no JSON object, such as a form or audio, which only the engine reads."""
    request = _request(path, fields, size_bytes // FORM_BYTES_PER_TOKEN, takes_salt=False)
    request.from_json = False
    return request


def from_dict(path: EnginePath, data: dict[str, Any], reason: str = "endpoint") -> Request:
    """Return the request of a JSON body. reason: why its prompt is not identified. Raises BadRequest."""
    request = _request(path, data, _characters(data) // CHARACTERS_PER_TOKEN, takes_salt=path.takes_salt)
    request.unforeseen = reason
    request.tools, request.tool_choice = bool(data.get("tools")), data.get("tool_choice")
    if type(key := data.get("prompt_cache_key")) is str:
        request.cache_key = key
    if type(follows := data.get("previous_response_id")) is str:
        request.follows = follows
    return request


def _request(path: EnginePath, data: Mapping[str, Any], tokens: int, *, takes_salt: bool) -> Request:
    limits = [limit for name in LIMITS if (limit := whole(data.get(name))) is not None and limit >= 0]
    return Request(
        endpoint="unread",
        model=requests.typed(data, "model", str, ""),
        stream=flag(data.get("stream")) is True,
        samples=requests.samples_to_book(whole(data.get("n"))) if path.generates else 0,
        max_tokens=limits[0] if limits else None,
        salt=requests.salt_of(data) if takes_salt else None,
        add_special_tokens=False,
        unforeseen="endpoint",
        priority=requests.priority_of(data),
        takes_salt=takes_salt,
        estimated=1 if path.form == "none" else max(1, tokens),
        request_id=requests.request_id_of(data),
        follows=path.response,
    )


def _characters(value: Any, depth: int = 0) -> int:
    """Count the characters of all texts in a JSON value, without inlined media; a token id counts as four."""
    if isinstance(value, str):
        return 0 if value.startswith("data:") else len(value)
    if depth == MAX_DEPTH or not value:
        return 0
    if isinstance(value, list):
        if type(value[0]) is int:
            return len(value) * CHARACTERS_PER_TOKEN
        return sum([_characters(item, depth + 1) for item in value])
    return sum([_characters(item, depth + 1) for item in value.values()]) if isinstance(value, dict) else 0
