"""The words of a command as a router packs it for Redis."""

from __future__ import annotations

import hiredis


def words_of(command: bytes) -> list[bytes]:
    """Return the words of one packed command; nothing may follow it."""
    reader = hiredis.Reader()
    reader.feed(command)
    words: list[bytes] = reader.gets()
    assert reader.gets() is False, "nothing else is sent"
    return words


def arguments_of(command: bytes) -> list[bytes]:
    """Return the ARGV of one packed call of a script."""
    words = words_of(command)
    return words[3 + int(words[2]) :]
