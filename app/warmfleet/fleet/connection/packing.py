"""Packs calls of scripts into the bytes for Redis; parts that are the same in all calls are packed once."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Argument = bytes | str | int | float


def pack(value: Argument) -> bytes:
    """Return an argument in the protocol of Redis. Numbers are written as redis-py writes them."""
    if isinstance(value, str):
        return pack_text(value)
    return pack_bytes(value if isinstance(value, bytes) else repr(value).encode())


def pack_bytes(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def pack_text(value: str) -> bytes:
    text = value.encode()
    return b"$%d\r\n%b\r\n" % (len(text), text)


NOTHING = pack("")


@lru_cache(maxsize=8_192)
def pack_int(value: int) -> bytes:
    """Pack an integer; the last ones are kept, because most counts of tokens come again."""
    return pack_bytes(b"%d" % value)


def pack_names(values: Iterable[str]) -> bytes:
    """Pack strings joined by commas, as the scripts take lists of names."""
    return pack_text(",".join(values)) if values else NOTHING


def pack_command(*words: Argument) -> bytes:
    """Return a whole command of Redis itself."""
    return b"*%d\r\n" % len(words) + b"".join(map(pack, words))


class PackedScript:
    """A script on the keys of one model. ``load`` is its packed SCRIPT LOAD."""

    def __init__(self, name: str, text: str, keys: Sequence[str]) -> None:
        self.name = name
        source = text.encode()
        digest = hashlib.sha1(source, usedforsecurity=False).hexdigest()
        self.load = b"*3\r\n" + pack("SCRIPT") + pack("LOAD") + pack(source)
        self._fixed = 3 + len(keys)
        named: tuple[Argument, ...] = ("EVALSHA", digest, len(keys), *keys)
        self._named = b"".join(map(pack, named))
        self._heads: dict[int, bytes] = {}

    def head(self, count: int) -> bytes:
        """Return the beginning of a call with ``count`` arguments, up to the first of them."""
        head = self._heads.get(count)
        if head is None:
            head = self._heads[count] = b"*%d\r\n%b" % (self._fixed + count, self._named)
        return head

    def call(self, args: Sequence[Argument]) -> bytes:
        """Return a whole call with these arguments."""
        return self.head(len(args)) + b"".join(map(pack, args))
