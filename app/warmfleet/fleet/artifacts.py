"""The files that API servers stored in Redis, piece by piece: tokenizers and chat templates."""

from __future__ import annotations

import asyncio
import hashlib
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from warmfleet.errors import BadRequest, NotFound
from warmfleet.fleet.client import redis_errors
from warmfleet.fleet.connection.packing import pack_command
from warmfleet.protocol import artifacts
from warmfleet.protocol.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator, Sequence

    from warmfleet.fleet.client import Scripts
    from warmfleet.fleet.connection.packing import Argument
    from warmfleet.fleet.workers import Workers

ARTIFACT_LIMIT_BYTES = 128 * 2**20  # largest size of a file; the largest tokenizers have 30 MB
PIECE_ASKED_OF = 16  # if a server's piece is missing, it is read from the files of at most this many other servers
EMPTY_EXPIRES_S = 86_400  # time after its server's last renewal at which a stored file expires


class BadArtifact(BadRequest):
    """A worker's artifact is too large, or its digests are wrong."""

    status, type, code = 502, "server_error", "bad_artifact"


class Artifacts:
    """Reads tokenizers and templates that servers store in Redis in pieces; empties spare copies."""

    def __init__(self, scripts: Scripts, workers: Workers) -> None:
        self._scripts = scripts
        self._workers = workers

    async def read(self, server_id: str, entry: dict[str, Any]) -> bytes:
        """Read the content of one manifest entry ``{sha256, bytes, chunks}``; each piece and the whole are checked.

        A piece that Redis lacks for this server is taken from another server that announces the same piece.
        Raises BadArtifact if a digest is wrong or the content is over 128 MB, NotFound if a piece is missing.
        """
        name, pieces, held = str(entry.get("sha256"))[:12], [], 0
        for digest in entry["chunks"]:
            piece = await self._piece(server_id, str(digest)) or await self._piece_elsewhere(str(digest))
            if not piece:
                raise NotFound(f"artifact {name} of {server_id}: a piece is not there")
            held += len(piece)
            if held > ARTIFACT_LIMIT_BYTES:
                raise BadArtifact(f"artifact {name} of {server_id} has over {ARTIFACT_LIMIT_BYTES} compressed bytes")
            pieces.append(piece)
        try:  # 30 MB take 0.2 s of inflating and hashing: not on the event loop
            return await asyncio.to_thread(artifacts.join, entry, pieces, ARTIFACT_LIMIT_BYTES)
        except (WireError, ValueError, TypeError, KeyError) as error:
            raise BadArtifact(f"artifact {name} of {server_id}: {error}") from error

    async def _piece(self, server_id: str, digest: str) -> bytes | None:
        with redis_errors():
            return await cast(
                "Awaitable[bytes | None]", self._scripts.redis.get(self._scripts.keys.artifact(server_id, digest))
            )

    async def _piece_elsewhere(self, digest: str) -> bytes | None:
        """Read the piece from the files of another server that announces it; None if PIECE_ASKED_OF servers lack it.

        Of equal files in a large pool, most servers' copies were emptied to save memory (``background/spare_files``).
        """
        for server_id in islice(self._announcing(digest), PIECE_ASKED_OF):
            piece = await self._piece(server_id, digest)
            if piece and hashlib.sha256(piece).hexdigest() == digest:
                return piece
        return None

    def _announcing(self, digest: str) -> Iterator[str]:
        for server_id, record in sorted(self._workers.servers.items()):
            if any(digest in entry["chunks"] for entry in (record.get("artifacts") or {}).values()):
                yield server_id

    async def sizes(self, server_id: str, digests: Sequence[str]) -> list[int]:
        """Read the size in bytes of each of these pieces of a server's files; 0 if it is empty or not there."""
        return await self._of_pieces(server_id, digests, "STRLEN")

    async def empty(self, server_id: str, digests: Sequence[str]) -> None:
        """Empty a server's pieces to save memory. Their keys stay, so that the server does not store them again.

        Empties nothing if a piece has no time to live, because its server would not store the piece again.
        """
        if all(await self._of_pieces(server_id, digests, "EXPIRE", EMPTY_EXPIRES_S, "XX")):
            await self._of_pieces(server_id, digests, "SET", b"", "XX", "KEEPTTL")

    async def want(self, server_id: str, digests: Sequence[str]) -> None:
        """Delete a server's empty pieces, so that the server stores them again when it renews its files next."""
        sizes = await self.sizes(server_id, digests)
        empty = [digest for digest, size in zip(digests, sizes, strict=True) if not size]
        await self._of_pieces(server_id, empty, "UNLINK")

    async def _of_pieces(self, server_id: str, digests: Sequence[str], command: str, *options: Argument) -> list[Any]:
        keys = [self._scripts.keys.artifact(server_id, digest) for digest in digests]
        return (
            await self._scripts.together([("", pack_command(command, key, *options)) for key in keys]) if keys else []
        )
