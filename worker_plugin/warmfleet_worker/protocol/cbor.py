"""Canonical CBOR of what a block hash is made of, as vLLM's ``sha256_cbor`` writes it. A leaf: stdlib only."""

from __future__ import annotations

import struct
from typing import Any


def head(major: int, value: int) -> bytes:
    if value < 24:
        return bytes((major | value,))
    if value < 0x100:
        return bytes((major | 24, value))
    if value < 0x10000:
        return struct.pack(">BH", major | 25, value)
    return struct.pack(">BI", major | 26, value)


_SMALL_INTS = tuple(head(0, n) for n in range(65_536))


def integer(value: int) -> bytes:
    return _SMALL_INTS[value] if value < 65_536 else struct.pack(">BI", 26, value)


def encode(value: Any) -> bytes:
    """None, str, bytes, int (not negative) and tuples of these."""
    if value is None:
        return b"\xf6"
    if isinstance(value, bytes):
        return head(0x40, len(value)) + value
    if isinstance(value, str):
        raw = value.encode()
        return head(0x60, len(raw)) + raw
    if isinstance(value, int):
        return integer(value)
    return head(0x80, len(value)) + b"".join(encode(item) for item in value)
