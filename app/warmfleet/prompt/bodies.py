"""Reads a body as the path says to which it was sent. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmfleet.prompt import request as requests
from warmfleet.prompt import unread_request

if TYPE_CHECKING:
    from collections.abc import Collection

    from warmfleet.prompt.engine_paths import EnginePath
    from warmfleet.prompt.request import Request


def parse(path: EnginePath, body: bytes, allowed: Collection[str] = ()) -> Request:
    """The request of a body that was sent to ``path``. allowed: fields of ``request.REFUSED`` that are let through.

    Raises BadRequest, TooLarge.
    """
    if path.form == "completions" or path.form == "chat":
        return requests.parse(path.form, body, allowed)
    return unread_request.parse(path, body, allowed)
