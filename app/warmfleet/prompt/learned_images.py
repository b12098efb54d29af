"""The images whose tokens engines have reported, by identifier, as far as this replica has read the reports. Pure.

A model may put separators and texts among an image's tokens (Pixtral, Idefics, InternVL), so the tokens are kept as
runs. Reports come from workers' streams: each is checked, and the number and size of those kept is bounded.
"""

from __future__ import annotations

import json
import threading
import time
from array import array
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from warmfleet.protocol.image_tokens import MAX_ID, MAX_IMAGE_BYTES, MAX_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Runs = tuple[int, ...]
Taken = Literal["read", "malformed", "other"]

MAX_LEARNED = 4_096  # most images, as many as Redis keeps for a pool; 35 MB if each has as many runs as a report holds
KEPT_S = 86_400.0  # time after an image was told last, as in lua/parts/apply/images.lua


class _Learned(NamedTuple):
    runs: array[int]  # a number takes 4 bytes; in a tuple it takes 36
    until: float


class LearnedImages:
    """The tokens of images by identifier. The images that were told or used first are forgotten first.

    made: stands before each report of an engine with the pool's rules; no other is taken. clock: seconds since 1970.
    Safe to call from several threads.
    """

    def __init__(self, made: str = "", limit: int = MAX_LEARNED, clock: Callable[[], float] = time.time) -> None:
        self.made = made
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._images: dict[str, _Learned] = {}

    def __len__(self) -> int:
        return len(self._images)

    def find(self, identifier: str) -> Runs | None:
        """Return the runs of an image (a token id, how often it stands there, then the next); None if not known."""
        with self._lock:
            found = self._images.pop(identifier, None)
            if found is None or found.until < self._clock():
                return None
            self._images[identifier] = found
        return tuple(found.runs)

    def take(self, report: bytes, told_at: float) -> Taken:
        """Keep what an engine reports: JSON of identifier and runs, behind what the engine makes of images.

        told_at: when the engine told it. Returns how the report was: of another form, or of an engine with other rules.
        """
        if not report.startswith(self.made.encode()):
            return "other"
        text = report[len(self.made) :]
        try:
            identifier, runs = json.loads(text) if len(text) <= MAX_IMAGE_BYTES else ("", ())
        except (ValueError, TypeError, RecursionError):
            return "malformed"
        if not isinstance(identifier, str) or not 0 < len(identifier) <= MAX_ID or not are_runs(runs):
            return "malformed"
        with self._lock:
            self._images.pop(identifier, None)
            self._images[identifier] = _Learned(array("I", runs), told_at + KEPT_S)
            self._forget()
        return "read"

    def forget(self, identifiers: Iterable[str]) -> int:
        """Forget images whose tokens an answer showed to be others, until they are told again; return their number."""
        with self._lock:
            return sum(self._images.pop(identifier, None) is not None for identifier in identifiers)

    def _forget(self) -> None:
        oldest = next(iter(self._images))
        if len(self._images) > self._limit or self._images[oldest].until < self._clock():
            del self._images[oldest]


def are_runs(runs: Any) -> bool:
    """Whether this value is a list of runs, of no more tokens than a prompt's images may have."""
    if not isinstance(runs, list) or not runs or len(runs) % 2 or not all(type(number) is int for number in runs):
        return False
    tokens, counts = runs[::2], runs[1::2]
    return min(tokens) >= 0 and max(tokens) < 2**32 and min(counts) > 0 and sum(counts) <= MAX_TOKENS
