"""Ids of the answers of /v1/responses, which one engine keeps: by its id, a later request finds that engine. Pure.

The id begins with the reservation, by which the plugin knows the request. Its end is a digest of reservation and worker
together, so that two ids do not show whether their answers are on the same engine.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

from warmfleet.protocol.wire import ENDED_MARK, RESERVATION

if TYPE_CHECKING:
    from collections.abc import Iterable

DIGEST_BYTES = 6
_ID = re.compile(rf"resp_(?:unbooked\.)?({RESERVATION})\.{ENDED_MARK}?([0-9a-f]{{{2 * DIGEST_BYTES}}})")


def response_id(reservation: str, worker_id: str, *, booked: bool, ended: bool) -> str:
    """Return the id for an answer of this worker. booked: Redis has booked it; ended: its conversation ends with it."""
    owner = reservation if booked else f"unbooked.{reservation}"
    return f"resp_{owner}.{ENDED_MARK if ended else ''}{_digest(reservation, worker_id)}"


def is_ours(text: str) -> bool:
    """Return whether a router made this id."""
    return _ID.fullmatch(text) is not None


def keeper_of(text: str, workers: Iterable[str]) -> str:
    """Return the worker that keeps the answer with this id; empty if it is none of these, or no router made the id."""
    found = _ID.fullmatch(text)
    if found is None:
        return ""
    return next((worker for worker in workers if _digest(found[1], worker) == found[2]), "")


def _digest(reservation: str, worker_id: str) -> str:
    return hashlib.blake2b(worker_id.encode(), key=reservation.encode(), digest_size=DIGEST_BYTES).hexdigest()
