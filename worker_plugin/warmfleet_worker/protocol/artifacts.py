"""Artifacts: the tokenizer and the chat template that an API server stores in Redis for the routers.

The content is compressed and cut into chunks, each stored under its own SHA-256. A server's join holds a manifest with
one entry per artifact: digest and size of the content, and the digests of its chunks.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING, Any

from .wire import WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK_BYTES = 65_536  # length of a chunk, hence the most that a single call to Redis moves


def split(content: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return (the manifest's entry for ``content``, its chunks by digest). The chunks are slices of one zlib stream."""
    packed = zlib.compress(content, 6)
    pieces = [packed[start : start + CHUNK_BYTES] for start in range(0, len(packed), CHUNK_BYTES)]
    chunks = {hashlib.sha256(piece).hexdigest(): piece for piece in pieces}
    names = [hashlib.sha256(piece).hexdigest() for piece in pieces]
    entry = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), "chunks": names}
    return entry, chunks


def join(entry: dict[str, Any], pieces: Sequence[bytes], max_bytes: int) -> bytes:
    """Put the content of an artifact together from its chunks.

    Raises WireError if chunks or content differ from the manifest's ``entry``. Never decompresses more than about
    ``max_bytes``, whatever the chunks contain.
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
