"""One key more in a JSON object that stays the same bytes otherwise. Pure."""

from __future__ import annotations

_SPACE = b" \t\n\r"  # what JSON allows around a value


def with_key(body: bytes, key: str, value: bytes) -> bytes:
    """``body``, valid JSON of an object, with ``key`` at its end; ``value`` is JSON, too.

    Of a key that comes twice the last one counts: for orjson, which we read with, and for Python's json, which vLLM's
    server reads with. So the new value is the effective one whatever ``body`` held before, and nothing before it needs
    to be looked at: the cost is one copy. ``key`` must need no escapes.
    """
    head = body.rstrip(_SPACE)[:-1]
    comma = b"" if len(head) < 64 and head.strip(_SPACE) == b"{" else b","
    return b'%s%s"%s":%s}' % (head, comma, key.encode(), value)
