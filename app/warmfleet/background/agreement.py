"""Finds workers of one model with different tokenizer identities, hash schemes or rules for images, which hash one
prompt differently, and workers that do not serve the model of their pool.

Each change is logged once, and a gauge shows how many workers differ from the largest group.
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from warmfleet.metrics import Metrics

logger = logging.getLogger("warmfleet.background.agreement")

Matter = Literal["identity", "scheme", "images"]
NAMED = 8  # most workers of a group that a log line names
CONSEQUENCE = {
    "identity": "prompts are identified as the first group does; cached blocks of the others are not found",
    "scheme": "every prompt is hashed in each of these ways, if there are at most 4 of them",
    "images": "prompts with images are identified as the first group does; at the others they match in part",
}


class Agreement:
    """Logs a model's groups of workers with equal identity (tokenizer, template), scheme or images if they change."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last: dict[tuple[str, Matter], dict[str, tuple[str, ...]]] = {}
        self._unhashed: dict[str, tuple[str, ...]] = {}
        self._misnamed: dict[str, dict[str, str]] = {}

    def look(self, tag: str, matter: Matter, groups: Mapping[str, Sequence[str]]) -> None:
        """Log one model's groups if they changed. groups: digest -> workers with this digest, the largest first."""
        before = self._last.get((tag, matter), {})
        now = self._last[tag, matter] = {name: tuple(workers) for name, workers in groups.items()}
        outvoted = 0
        for (_, other), held in self._last.items():
            if other == matter:
                outvoted += sum(map(len, list(held.values())[1:]))
        self._metrics.outvoted_workers.labels(matter).set(outvoted)
        if len(now) > 1 and now != before:
            shown = "; ".join(f"{name}: {_some(workers)}" for name, workers in now.items())
            logger.warning("%s: its workers differ in their %s. %s (%s)", tag, matter, shown, CONSEQUENCE[matter])
        elif len(before) > 1 >= len(now):
            logger.info("%s: its workers agree on their %s again", tag, matter)

    def forget(self, tag: str) -> None:
        """Drop the workers of a pool that has ended."""
        self._last = {key: groups for key, groups in self._last.items() if key[0] != tag}
        self._unhashed.pop(tag, None)
        self._misnamed.pop(tag, None)

    def unhashed(self, tag: str, workers: Sequence[str]) -> None:
        """Log the workers of one model whose hash scheme is not used, because a decision takes at most 4 schemes."""
        before, now = self._unhashed.get(tag, ()), tuple(workers)
        self._unhashed[tag] = now
        self._metrics.outvoted_workers.labels("unhashed").set(sum(map(len, self._unhashed.values())))
        if now and now != before:
            logger.warning("%s: its workers use over 4 schemes: cached blocks of %s are not found", tag, _some(now))

    def misnamed(self, tag: str, reasons: Mapping[str, str]) -> None:
        """Log each worker that does not serve the model of this pool, unless the last call named the same reason."""
        before, self._misnamed[tag] = self._misnamed.get(tag, {}), dict(reasons)
        for worker, reason in islice((item for item in reasons.items() if item not in before.items()), NAMED):
            logger.warning("%s: worker %s takes no requests: %s", tag, worker, reason)


def _some(workers: Sequence[str]) -> str:
    more = f" and {len(workers) - NAMED} more" if len(workers) > NAMED else ""
    return ", ".join(workers[:NAMED]) + more
