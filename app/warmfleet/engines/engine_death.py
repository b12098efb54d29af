"""The words by which vLLM's API server says that its engine core has died, until the server ends as well.

Such an answer looks like one of a request that fails by its own fault: both have status 500, or begin a stream with an
error of that code.
"""

from __future__ import annotations

WORDS = b"EngineCore encountered an issue"  # text of vLLM's EngineDeadError; the type alone is that of many errors


def is_reported_in(piece: bytes) -> bool:
    """Return whether this first piece of an error answer reports the death of the engine core."""
    return WORDS in piece
