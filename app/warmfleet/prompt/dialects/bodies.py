"""Reads the body of a request as the API of its path demands. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warmfleet.errors import BadRequest
from warmfleet.prompt import request as requests
from warmfleet.prompt.dialects import generate_request, messages_request, responses_request, unread_request
from warmfleet.prompt.messages import NotReproducible

if TYPE_CHECKING:
    from collections.abc import Collection

    from warmfleet.prompt.engine_paths import EnginePath
    from warmfleet.prompt.request import Request


def parse(path: EnginePath, body: bytes, allowed: Collection[str] = (), content_type: bytes = b"") -> Request:
    """Read a body that was sent to ``path``. allowed: fields of ``request.REFUSED`` that are let through.

    content_type: the header, by which a form is known. Raises BadRequest, TooLarge.
    """
    if path.form == "completions" or path.form == "chat":
        return requests.parse(path.form, body, allowed)
    if path.form == "unknown" or path.form == "none" or not body.lstrip().startswith(b"{"):
        return unread_request.parse(path, body, allowed, content_type)
    data = requests.decoded(body)
    request = from_dict(path, data, allowed, len(body))
    requests.note_inexact(request, data, body)
    return request


def from_dict(path: EnginePath, data: dict[str, Any], allowed: Collection[str], size_bytes: int) -> Request:
    """Make the request of a body that is parsed already. size_bytes: length of the body. Raises BadRequest."""
    if path.form == "completions" or path.form == "chat":
        return requests.from_dict(path.form, data, allowed, size_bytes)
    requests.refuse_fields(data, allowed)
    if path.form == "unknown" or path.form == "none":
        return unread_request.from_dict(path, data)
    allowed_field = next((name for name in requests.REFUSED if data.get(name) is not None), "")
    if allowed_field:
        return unread_request.from_dict(path, data, allowed_field)
    try:
        if path.form == "generate":
            return requests.from_dict("completions", generate_request.as_completion(data), allowed, size_bytes)
        dialect = messages_request if path.form == "messages" else responses_request
        request = requests.from_dict("chat", dialect.as_chat(data), allowed, size_bytes)
    except NotReproducible as error:
        return unread_request.from_dict(path, data, error.reason)
    except BadRequest:  # the engine names the field at fault as this path calls it
        return unread_request.from_dict(path, data, "content")
    request.dialect = path.form
    request.thinking_off = path.form == "messages" and messages_request.thinking_off(data)
    return request
