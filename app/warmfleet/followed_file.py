"""Reads a file that operators may change while replicas run, again whenever it has changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from warmfleet.errors import BadArgument

if TYPE_CHECKING:
    from collections.abc import Callable

Made = TypeVar("Made")


class FollowedFile:
    """A file, with its time, size and inode when it was last read and parsed.

    called: the setting that names the file, for messages. most_bytes: largest size; a larger file is refused.
    """

    def __init__(self, path: str, called: str, most_bytes: int) -> None:
        self._path = Path(path)
        self._called = called
        self._most_bytes = most_bytes
        self._seen: tuple[int, ...] = ()

    def read_if_changed(self, parse: Callable[[bytes], Made]) -> Made | None:
        """Return the result of ``parse`` for the file's content; None if it has not changed since the last reading.

        If ``parse`` raises, the next call reads the file again. Raises BadArgument if the file cannot be read.
        """
        try:
            state = self._path.stat()
            seen = (state.st_mtime_ns, state.st_size, state.st_ino)
            if seen == self._seen:
                return None
            if state.st_size > self._most_bytes:
                raise BadArgument(f"{self._path} has more than {self._most_bytes} bytes")
            data = self._path.read_bytes()
        except OSError as error:
            raise BadArgument(f"{self._called} cannot be read: {error}") from error
        made = parse(data)
        self._seen = seen
        return made
