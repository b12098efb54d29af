"""Canonical CBOR of the values that a block hash is made of, byte for byte as vLLM's ``sha256_cbor`` writes it."""

from __future__ import annotations

import struct
from typing import Any


def head(major: int, value: int) -> bytes:
    """Encode the first bytes of an item: its major type (upper three bits), and its length or value below 2**32."""
    if value < 24:
        return bytes((major | value,))
    if value < 0x100:
        return bytes((major | 24, value))
    if value < 0x10000:
        return struct.pack(">BH", major | 25, value)
    return struct.pack(">BI", major | 26, value)


_SMALL_INTS = tuple(head(0, n) for n in range(65_536))


def integer(value: int) -> bytes:
    """Encode a token id; the table has the bytes of most ids ready, to save time."""
    return _SMALL_INTS[value] if value < 65_536 else struct.pack(">BI", 26, value)


def encode(value: Any) -> bytes:
    """Encode None, str, bytes, an int, or a tuple of such values."""
    if value is None:
        return b"\xf6"
    if isinstance(value, bytes):
        return head(0x40, len(value)) + value
    if isinstance(value, str):
        raw = value.encode()
        return head(0x60, len(raw)) + raw
    if isinstance(value, int):
        return integer(value) if value >= 0 else head(0x20, -1 - value)
    return head(0x80, len(value)) + b"".join(encode(item) for item in value)
