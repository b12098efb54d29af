"""What a client is told of its decision, in headers of the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmfleet.fleet import Decision
    from warmfleet.route import Call


def answer_headers(call: Call, decision: Decision, word: str, which: str) -> Mapping[bytes, bytes]:
    """``which``: all, or request_id. ``word``: of the reservation."""
    headers = {b"x-request-id": call.request_id.encode()}
    if which != "request_id":
        headers |= {
            b"x-warmfleet-worker": decision.worker_id.encode(),
            b"x-warmfleet-matched-tokens": b"%d" % decision.matched_tokens,
            b"x-warmfleet-prompt-tokens": b"%d" % decision.prompt_tokens,
            b"x-warmfleet-reservation": word.encode(),
        }
    return headers
