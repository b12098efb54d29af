"""The keys of clients. The operator's file holds their hashes, and is read again whenever it changes."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import orjson

from warmfleet.errors import BadArgument, Unauthorized
from warmfleet.fleet import MAX_LIMIT, ClientLimits
from warmfleet.followed_file import FollowedFile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.metrics import Metrics

MAX_FILE_BYTES = 16_777_216  # largest size of the file of keys, which then has some 100,000 keys
NAME = re.compile(r"[A-Za-z0-9._@-]{1,128}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = frozenset({"name", "sha256", "models", "expires", "concurrency", "tokens_per_minute"})
_BEARER = b"bearer "


@dataclass(frozen=True, slots=True)
class ClientKey:
    """A client's key. ``models``: the models that its requests may name; None: all. ``expires_at``: Unix time or None.
    ``limits``: None if there are no limits.

    Keys with one ``name`` are one client and tenant, so that a client can get a new key while its old one is valid.
    """

    name: str
    models: frozenset[str] | None = None
    expires_at: float | None = None
    limits: ClientLimits | None = None

    def may_use(self, model: str) -> bool:
        """Whether a request with this key may name this model."""
        return self.models is None or model in self.models


#: The key that stands for every client of a replica that asks for no keys.
ANYBODY = ClientKey("")


class ClientKeys:
    """The keys that are valid now. ``required``: whether requests need a key; true if the settings name a file."""

    def __init__(self, path: str, metrics: Metrics) -> None:
        """path: the file of keys; empty if clients need none. Raises BadArgument if the file cannot be used."""
        self.required = bool(path)
        self._path = path
        self._file = FollowedFile(path, "WARMFLEET_CLIENT_KEYS_FILE", MAX_FILE_BYTES)
        self._metrics = metrics
        self._keys: dict[bytes, ClientKey] = {}
        self._limits: dict[str, ClientLimits | None] = {}
        if self.required:
            self._read_if_changed()

    async def follow(self) -> None:
        """Read the file if it changed. Raises BadArgument if it cannot be used; the last good keys then stay valid."""
        await asyncio.to_thread(self._read_if_changed)

    def client(self, headers: Sequence[tuple[bytes, bytes]]) -> ClientKey:
        """Return the key of a request, or ANYBODY if none is needed. Raises Unauthorized.

        The key is the bearer token of Authorization, or without that header the value of X-Api-Key, which clients of
        Anthropic's API send. If the header in use comes twice, the request counts as one without a key.
        """
        if not self.required:
            return ANYBODY
        given = [value for name, value in headers if name == b"authorization"]
        if given:
            key = given[0][len(_BEARER) :].strip() if given[0][: len(_BEARER)].lower() == _BEARER else b""
        else:
            given = [value for name, value in headers if name == b"x-api-key"]
            key = given[0] if given else b""
        # Needs no constant-time comparison, because no client can find keys whose hashes resemble a stored hash.
        found = self._keys.get(hashlib.sha256(key).digest()) if key and len(given) == 1 else None
        if found is None:
            raise Unauthorized("This needs a valid API key, as `Authorization: Bearer KEY` or as `X-Api-Key: KEY`.")
        if found.expires_at is not None and found.expires_at <= time.time():
            raise Unauthorized("This API key has expired.")
        return found

    def limits_of(self, name: str) -> ClientLimits | None:
        """Return the limits of a client whose key a gateway has checked: those of the first key with this name."""
        return self._limits.get(name)

    def _read_if_changed(self) -> None:
        keys = self._file.read_if_changed(self._parsed)
        if keys is None:
            return
        limits = {key.name: key.limits for key in reversed(keys.values())}
        self._metrics.forget_clients(self._limits.keys() - limits.keys())
        self._keys, self._limits = keys, limits

    def _parsed(self, data: bytes) -> dict[bytes, ClientKey]:
        try:
            keys = parse(data)
        except ValueError as error:
            raise BadArgument(f"WARMFLEET_CLIENT_KEYS_FILE={self._path!r}, {error}") from error
        return keys


def parse(data: bytes) -> dict[bytes, ClientKey]:
    """Parse a file of keys: SHA-256 -> key. Raises ValueError that has the number of a wrong line, not its text.

    Each line is a JSON object. Empty lines, and those that begin with ``#``, are left out.
    """
    found: dict[bytes, ClientKey] = {}
    for number, text in enumerate(data.split(b"\n"), 1):
        line = text.strip()
        if not line or line.startswith(b"#"):
            continue
        try:
            digest, key = _entry(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if digest in found:
            raise ValueError(f"line {number}: an earlier line has the same key")
        found[digest] = key
    return found


def _entry(line: bytes) -> tuple[bytes, ClientKey]:
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        raise ValueError("this is not JSON") from None
    if not isinstance(entry, dict):
        raise ValueError("this is not a JSON object")  # noqa: TRY004  the content of a file, not an argument
    if strange := entry.keys() - _FIELDS:
        raise ValueError(f"known fields are {', '.join(sorted(_FIELDS))}; {len(strange)} others are here")
    name, digest, models = entry.get("name"), entry.get("sha256"), entry.get("models")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError("name must be 1 to 128 letters, digits and ._@-")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ValueError("sha256 must be 64 hex digits, in lower case")
    if "models" in entry and not (isinstance(models, list) and models and all(isinstance(m, str) for m in models)):
        raise ValueError("models must be a list of names; without this field the key is for all models")
    allowed = None if models is None else frozenset(models)
    expires_at = _expiry(entry) if "expires" in entry else None
    return bytes.fromhex(digest), ClientKey(name, allowed, expires_at, _limits(name, entry))


def _limits(name: str, entry: dict[str, Any]) -> ClientLimits | None:
    found = {field: entry[field] for field in ("concurrency", "tokens_per_minute") if field in entry}
    for field, value in found.items():
        if type(value) is not int or not 1 <= value <= MAX_LIMIT:
            raise ValueError(f"{field} must be an integer from 1 to {MAX_LIMIT}; without this field there is no limit")
    return ClientLimits(name, **found) if found else None


def _expiry(entry: dict[str, Any]) -> float:
    try:
        moment = datetime.fromisoformat(entry["expires"])
    except (TypeError, ValueError):
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ValueError("expires must be a time with its zone, such as 2027-01-31T00:00:00Z")
    return moment.timestamp()
