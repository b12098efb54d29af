"""A followed file is read again when it has changed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from warmfleet.errors import BadArgument
from warmfleet.followed_file import FollowedFile

if TYPE_CHECKING:
    from pathlib import Path


def test_it_is_read_when_it_changed_and_again_until_it_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "list"
    file = FollowedFile(str(path), "WARMFLEET_LIST", 8)
    with pytest.raises(BadArgument, match="WARMFLEET_LIST cannot be read"):
        file.read_if_changed(bytes.decode)
    path.write_bytes(b"one")
    assert file.read_if_changed(bytes.decode) == "one"
    assert file.read_if_changed(bytes.decode) is None
    path.write_bytes(b"\xff")
    for _ in range(2):
        with pytest.raises(UnicodeDecodeError):
            file.read_if_changed(bytes.decode)
    path.write_bytes(b"more than 8")
    with pytest.raises(BadArgument, match="has more than 8 bytes"):
        file.read_if_changed(bytes.decode)
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert file.read_if_changed(bytes.decode) == "two"
