"""JSON values as vLLM's request models read them: pydantic's lax mode takes 100.0 and "100" for 100. Pure."""

from __future__ import annotations

import re
from typing import Any

_WHOLE = re.compile(r"[+-]?[0-9]+(?:_[0-9]+)*(?:\.0+)?")
_FLAGS = dict.fromkeys(("1", "on", "t", "true", "y", "yes"), True) | dict.fromkeys(
    ("0", "f", "false", "n", "no", "off"), False
)
MAX_DIGITS = 4_300  # most digits of a number that is written as text; Python converts no more


def whole(value: Any) -> int | None:
    """Return the value as a whole number; None if it is not one.

    A whole number beyond 64 bits may arrive as a float, because orjson reads it so; vLLM takes it as it is.
    """
    if isinstance(value, int):
        return int(value)  # true and false become 1 and 0
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str) and len(value) <= MAX_DIGITS:
        text = value.strip()
        return int(text.partition(".")[0]) if _WHOLE.fullmatch(text) else None
    return None


def flag(value: Any) -> bool | None:
    """Return the value as true or false; None if it is neither."""
    if isinstance(value, str):
        return _FLAGS.get(value.lower())
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    return None
