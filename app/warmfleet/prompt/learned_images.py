"""The images whose tokens engines have reported, by identifier, as far as this replica has read the reports. Pure.

A model may put separators and texts among an image's tokens (Pixtral, Idefics, InternVL), so the tokens are kept as
runs. Reports come from workers' streams: each is checked, and the number and size of those kept is bounded.
"""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

from warmfleet.protocol.image_tokens import MAX_ID, MAX_IMAGE_BYTES, MAX_TOKENS

Runs = tuple[int, ...]

MAX_LEARNED = 4_096  # most images, as many as Redis keeps for a pool; 40 MB if each has as many runs as a report holds


class LearnedImages:
    """The tokens of images by identifier. The images that were reported first are forgotten first.


    runs: of an image: a token id and how often it stands there, then the next.
    """

    def __init__(self, limit: int = MAX_LEARNED) -> None:
        self._limit = limit
        self._runs: dict[str, Runs] = {}
        self.runs = MappingProxyType(self._runs)

    def take(self, report: bytes) -> bool:
        """Keep what an engine reports: JSON of identifier and runs. Returns whether it was well-formed."""
        try:
            identifier, runs = json.loads(report) if len(report) <= MAX_IMAGE_BYTES else ("", ())
        except (ValueError, TypeError, RecursionError):
            return False
        if not isinstance(identifier, str) or not 0 < len(identifier) <= MAX_ID or not _are_runs(runs):
            return False
        self._runs.pop(identifier, None)
        self._runs[identifier] = tuple(runs)
        if len(self._runs) > self._limit:
            del self._runs[next(iter(self._runs))]
        return True


def _are_runs(runs: Any) -> bool:
    if not isinstance(runs, list) or not runs or len(runs) % 2 or not all(type(number) is int for number in runs):
        return False
    tokens, counts = runs[::2], runs[1::2]
    return min(tokens) >= 0 and max(tokens) < 2**32 and min(counts) > 0 and sum(counts) <= MAX_TOKENS
