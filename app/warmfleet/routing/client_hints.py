"""What a client may tell of its request in headers: its session, how much of the prompt is shared, that it asks why."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmfleet.errors import BadRequest, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Mapping

SESSION, PREFIX, EXPLAIN = b"x-warmfleet-session", b"x-warmfleet-prefix-len", b"x-warmfleet-explain"
MAX_PREFIX_TOKENS = 2**22


@dataclass(frozen=True, slots=True)
class Hints:
    """session: the key of its conversation, empty = none. prefix_tokens: of the prompt that others share, 0 = all."""

    session: bytes = b""
    prefix_tokens: int = 0
    explain: bool = False


NONE = Hints()


def read(told: Mapping[bytes, bytes], session_id: str, explain_key: str | None) -> Hints:
    """``told``: the headers that begin with ``x-warmfleet-``. explain_key: what EXPLAIN must have as its value, if
    anything; None: nobody may ask. Raises BadRequest, Unauthorized."""
    session = told.get(SESSION) or session_id.encode("latin-1")
    if not told:
        return Hints(session) if session else NONE
    return Hints(session, _prefix(told.get(PREFIX, b"")), _explain(told.get(EXPLAIN, b""), explain_key))


def of(raw: list[tuple[bytes, bytes]]) -> Hints:
    """Of an operator's own request, whose headers nobody has read yet. Raises BadRequest."""
    told = {name: value for name, value in raw if name.startswith(b"x-warmfleet-")}
    return read(told, dict(raw).get(b"x-session-id", b"").decode("latin-1"), "")


def _prefix(value: bytes) -> int:
    if not value:
        return 0
    if not value.isdigit() or not 0 < len(value) < 10 or int(value) > MAX_PREFIX_TOKENS:
        raise BadRequest(
            f"X-Warmfleet-Prefix-Len must be a number of tokens, 0 (all) to {MAX_PREFIX_TOKENS}.",
            "X-Warmfleet-Prefix-Len",
        )
    return int(value)


def _explain(value: bytes, key: str | None) -> bool:
    """Authorization is the engine's: where a key guards, it is this header's value."""
    if value.strip().lower() in (b"", b"0", b"false", b"no"):
        return False
    if key is None or (key and not hmac.compare_digest(value, key.encode())):
        raise Unauthorized("X-Warmfleet-Explain is the operator's: it takes WARMFLEET_ADMIN_KEY as its value.")
    return True
