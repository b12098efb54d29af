"""HTTP calls of a subcommand to a running replica."""

from __future__ import annotations

import os
from typing import Any

import httpx

from warmfleet.cli.command_error import CommandError
from warmfleet.errors import ModelNotFound
from warmfleet.settings import ADMIN_PORT, secret

TIMEOUT_SECONDS = 10.0
OPERATORS_PORT = f"the port for operators, WARMFLEET_ADMIN_PORT, by default {ADMIN_PORT}"


def ask(method: str, url: str, path: str, body: bytes | None = None) -> Any:
    """Ask a replica and return its JSON answer. Raises CommandError."""
    headers = admin_headers() | ({b"content-type": b"application/json"} if body is not None else {})
    try:
        answer = httpx.request(method, url.rstrip("/") + path, content=body, headers=headers, timeout=TIMEOUT_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandError(
            f"no replica answers at {url} ({error}): start one with `warmfleet up`, or name one with --url"
        ) from error
    try:
        value = answer.json()
    except ValueError as error:
        raise CommandError(f"{url}{path} answered {answer.status_code}, and not in JSON: is that a replica?") from error
    if answer.is_error:
        detail = value.get("error") if isinstance(value, dict) else None
        fields = detail if isinstance(detail, dict) else {}
        message = fields.get("message", value)
        unknown_path = answer.status_code == httpx.codes.NOT_FOUND and fields.get("code") != ModelNotFound.code
        hint = f" (does --url name {OPERATORS_PORT}?)" if unknown_path else ""
        raise CommandError(f"{url}{path} answered {answer.status_code}: {message}{hint}")
    return value


def admin_headers() -> dict[bytes, bytes]:
    """Return the header with ``WARMFLEET_ADMIN_KEY`` that replicas require of operators; empty if no key is set."""
    key = secret("WARMFLEET_ADMIN_KEY", os.environ)
    return {b"authorization": f"Bearer {key}".encode()} if key else {}
