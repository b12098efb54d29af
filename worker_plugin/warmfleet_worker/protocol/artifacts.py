"""Tokenizers, templates and facts that workers bring: cut into content-addressed chunks, and put together again."""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING, Any

from .wire import WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK_BYTES = 65_536  # no single call moves more than this


def split(content: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What a join's manifest says of ``content``, and its chunks by name: slices of one zlib stream."""
    packed = zlib.compress(content, 6)
    pieces = [packed[start : start + CHUNK_BYTES] for start in range(0, len(packed), CHUNK_BYTES)]
    chunks = {hashlib.sha256(piece).hexdigest(): piece for piece in pieces}
    names = [hashlib.sha256(piece).hexdigest() for piece in pieces]
    entry = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), "chunks": names}
    return entry, chunks


def join(entry: dict[str, Any], pieces: Sequence[bytes], max_bytes: int) -> bytes:
    """The content of an artifact again; raises WireError for anything but exactly what ``entry`` promises.

    Never holds more than ``max_bytes`` of content, whatever the compressed bytes would expand to.
    """
    size = int(entry["bytes"])
    if not 0 <= size <= max_bytes:
        raise WireError(f"artifact of {size} bytes: at most {max_bytes} are allowed")
    if [hashlib.sha256(piece).hexdigest() for piece in pieces] != list(entry["chunks"]):
        raise WireError("artifact chunks do not have the digests of the manifest")
    decoder = zlib.decompressobj()
    try:
        content = decoder.decompress(b"".join(pieces), size + 1)
    except zlib.error as error:
        raise WireError(f"artifact is not a zlib stream: {error}") from error
    if len(content) != size or hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise WireError("artifact does not have the size and digest of the manifest")
    return content
