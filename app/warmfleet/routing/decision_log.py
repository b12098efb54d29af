"""Logs decisions, each with everything that the choice saw, so that ``warmfleet replay`` can repeat the choice.

The log holds no prompt, no block hash and no session key. A line is one JSON object (``record``). A thread writes the
lines, so a slow disk loses records of the log but delays no request.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from warmfleet.errors import BadArgument
from warmfleet.routing.explain_header import cheapest, terms_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from warmfleet.fleet import Decision, Question
    from warmfleet.fleet.constants import Constants
    from warmfleet.metrics import Metrics

logger = logging.getLogger("warmfleet.routing.decision_log")

MAX_BYTES = 64 * 2**20  # the largest size of the file; a full file is renamed to FILE.1, which replaces an older FILE.1
MOST_PER_S = 20  # most decisions logged in a second; few, because an explained decision costs Redis more
MAX_WAITING = 1_000  # most records that wait for the disk; further ones are dropped and counted


def record(
    model: str, question: Question, constants: Constants, decision: Decision, rings: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Make a line of the log: the arguments with which lua/replay.lua repeats the decision, and the decision.

    ``costs`` is for people: the chosen worker and the cheapest others, each with the terms of its cost in seconds.
    rings: the order of the hash ring, by policy. Raises ValueError if the decision was not asked for its explanation.
    """
    seen = decision.seen
    if seen is None:
        raise ValueError("Redis did not tell what this decision saw")
    median, block_tokens, turn, now_ms = seen.context
    return {
        "at": round(time.time(), 3),
        "model": model,
        "reservation": question.reservation,
        "policy": question.policy,
        "prompt_tokens": question.prompt_tokens,
        "seed": question.tie_seed,
        "weights": asdict(constants.weights),
        "label_prices": {str(slot): seconds for slot, seconds in constants.label_prices.items()},
        "prefix_tokens": question.prefix_tokens,
        "order": list(question.order),
        "objective_s": question.objective_s,
        "rings": {policy: list(order) for policy, order in rings.items()},
        "median_tps": median,
        "block_tokens": block_tokens,
        "turn": turn,
        "now_ms": now_ms,
        "room": seen.room,
        "ways": [way._asdict() for way in seen.ways],
        "candidates": [
            [row.hex(), matched, making, loads, float(seconds)]
            for _, matched, making, row, _, _, loads, seconds, _ in seen.rows
        ],
        "worker_id": decision.worker_id,
        "why": decision.why,
        "cost_s": f"{decision.cost_s:.6f}",
        "costs": {row.worker_id: {"cost": row.cost_s} | terms_of(row) for row in cheapest(decision)},
    }


class DecisionLog:
    """Writes decisions to a file, the first MOST_PER_S of every second; an empty path turns it off."""

    def __init__(self, path: str, metrics: Metrics, max_bytes: int = MAX_BYTES) -> None:
        """Raises BadArgument if the file cannot be written."""
        self._path = Path(path) if path else None
        self._until, self._left = 0.0, 0  # end of this second; number of decisions that may still be logged in it
        self._metrics = metrics
        self._max_bytes = max_bytes
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        try:
            if self._path is not None:
                self._path.open("ab").close()
        except OSError as error:
            raise BadArgument(f"WARMFLEET_DECISION_LOG={str(self._path)!r}: {error.strerror}") from error

    def wants(self) -> bool:
        """Return whether the next decision is logged."""
        if self._path is None:
            return False
        now = time.monotonic()
        if now >= self._until:
            self._until, self._left = now + 1.0, MOST_PER_S
        self._left -= 1
        return self._left >= 0

    def note(self, line: dict[str, Any]) -> None:
        """Hand this record to the thread that writes; drop and count it if MAX_WAITING records wait already."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._metrics.decision_log.labels("dropped").inc()

    def open(self) -> None:
        """Start the thread that writes."""
        if self._path is None:
            return
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Write the records that wait, unless that takes longer than ``timeout_s``."""
        if self._thread is not None:
            with suppress(queue.Full):
                self._waiting.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (line := self._waiting.get()) is not None:
            try:
                self._write(orjson.dumps(line) + b"\n")
            except (OSError, TypeError) as error:  # TypeError: orjson refuses a record
                self._metrics.decision_log.labels("failed").inc()
                logger.warning("the decision log is not written: %s", error)
            else:
                self._metrics.decision_log.labels("written").inc()

    def _write(self, line: bytes) -> None:
        path = self._path
        if path is None:
            return
        with suppress(FileNotFoundError):
            if path.stat().st_size + len(line) > self._max_bytes:
                path.replace(path.with_name(path.name + ".1"))
        with path.open("ab") as file:
            file.write(line)
