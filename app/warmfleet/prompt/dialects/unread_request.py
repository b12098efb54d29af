"""Reads the requests whose prompts the router does not identify: the model, and about how large the prompt is. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warmfleet.errors import BadRequest
from warmfleet.prompt import request as requests
from warmfleet.prompt.request import Request

if TYPE_CHECKING:
    from collections.abc import Collection

    from warmfleet.prompt.engine_paths import EnginePath

CHARACTERS_PER_TOKEN = 4
FORM_BYTES_PER_TOKEN = 400  # of audio: some 50 tokens a second, at 16 to 32 kB a second
MAX_DEPTH = 6  # of lists and objects in which text is counted
MAX_FORM_FIELDS = 64
MAX_PART_HEAD_BYTES = 2_048
MAX_MODEL_BYTES = 1_024
#: Fields that limit the length of an answer, by the path.
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_MODEL = b'name="model"'


def parse(path: EnginePath, body: bytes, allowed: Collection[str] = ()) -> Request:
    """The request of a body that is empty, a JSON object or a multipart form. allowed: as in ``request.parse``.

    Raises BadRequest, TooLarge.
    """
    if body.startswith(b"--"):
        return _request(path, {"model": form_model(body)}, len(body) // FORM_BYTES_PER_TOKEN, takes_salt=False)
    if not body:
        return _request(path, {}, 0, takes_salt=False)
    data = requests.decoded(body)
    requests.refuse_fields(data, allowed)
    return from_dict(path, data)


def from_dict(path: EnginePath, data: dict[str, Any], reason: str = "endpoint") -> Request:
    """The request of a JSON body. reason: why its prompt is not identified. Raises BadRequest."""
    request = _request(path, data, _characters(data) // CHARACTERS_PER_TOKEN, takes_salt=path.takes_salt)
    request.unforeseen = reason
    return request


def _request(path: EnginePath, data: dict[str, Any], tokens: int, *, takes_salt: bool) -> Request:
    samples, limit = data.get("n"), next((data[name] for name in LIMITS if data.get(name)), None)
    many = samples if type(samples) is int and 0 < samples <= requests.MAX_SAMPLES else 1
    return Request(
        endpoint="unread",
        model=_model(data),
        stream=data.get("stream") is True,
        samples=many if path.generates else 0,
        max_tokens=limit if type(limit) is int and limit >= 0 else None,
        salt=requests.salt_of(data) if takes_salt else None,
        add_special_tokens=False,
        unforeseen="endpoint",
        priority=data.get("priority"),
        takes_salt=takes_salt,
        estimated=1 if path.form == "none" else max(1, tokens),
    )


def _model(data: dict[str, Any]) -> str:
    model = data.get("model")
    if model is None:
        return ""
    if not isinstance(model, str):
        raise BadRequest("model must be a string.", "model")
    return model


def _characters(value: Any, depth: int = 0) -> int:
    """The characters of all texts in a JSON value; a token id counts as one token. Inlined media count for nothing."""
    if isinstance(value, str):
        return 0 if value.startswith("data:") else len(value)
    if depth == MAX_DEPTH or not value:
        return 0
    if isinstance(value, list):
        if type(value[0]) is int:
            return len(value) * CHARACTERS_PER_TOKEN
        return sum([_characters(item, depth + 1) for item in value])
    return sum([_characters(item, depth + 1) for item in value.values()]) if isinstance(value, dict) else 0


def form_model(body: bytes) -> str:
    """The field ``model`` of a multipart form; empty if there is none among its first MAX_FORM_FIELDS fields.

    The first line of the body is the line that parts the fields.
    """
    end = body.find(b"\r\n", 0, MAX_PART_HEAD_BYTES)
    line, at = b"\r\n" + body[:end], end
    for _ in range(MAX_FORM_FIELDS):
        head_end = body.find(b"\r\n\r\n", at, at + MAX_PART_HEAD_BYTES) if at >= 0 else -1
        if head_end < 0:
            return ""
        next_line = body.find(line, head_end + 2)
        head, value = body[at:head_end], body[head_end + 4 : max(next_line, 0)]
        if _MODEL in head and b"filename" not in head:
            return value[:MAX_MODEL_BYTES].decode("utf-8", "replace").strip()
        at = next_line + len(line) if next_line >= 0 else -1
    return ""
