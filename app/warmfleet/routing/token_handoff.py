"""Token hand-off: the router sends an engine the token ids that it has made, so the engine need not tokenise again.

Completions take the ids as their ``prompt``, chats as ``kv_transfer_params.prompt_token_ids`` (vLLM 0.32 and newer).
Every other byte of the request stays, so the answer is the same as for the text. Only exact ids are handed off, and
only to a worker that passed its probe and announced the same tokenizer. In every other case the engine gets the
request as the client sent it.
"""

from __future__ import annotations

import logging
import time
from functools import cache
from typing import TYPE_CHECKING

from warmfleet.prompt.json_splice import spliced

if TYPE_CHECKING:
    from warmfleet.metrics import Metrics
    from warmfleet.pools.fleet_view import View
    from warmfleet.pools.identified_prompt import IdentifiedPrompt
    from warmfleet.prompt.request import Request

logger = logging.getLogger("warmfleet.routing.token_handoff")

#: Statuses by which an engine may refuse the ids. Then the request is sent again as text.
REFUSALS = (400, 413, 422)
PAUSE_S = 300.0  # time for which a worker that refused ids, but took the text, gets no ids
CHECK_EVERY = 12  # one in so many requests is sent as text, so that a wrong token count reveals a changed tokenizer
MAX_VIEW_AGE_S = 5.0  # greatest age of the last reading: after that the worker may be a process with another tokenizer
MAX_WORKERS = 4_096


class Handoff:
    """Decides for one replica which requests go out with token ids, and remembers the workers that refused them."""

    def __init__(self, metrics: Metrics, *, enabled: bool) -> None:
        self._enabled = enabled
        self._results = cache(metrics.handoff.labels)
        self._requests: dict[str, int] = {}
        self._paused_until: dict[str, float] = {}

    def body(self, request: Request, prompt: IdentifiedPrompt, raw: bytes, view: View, worker_id: str) -> bytes | None:
        """Return ``raw`` with the token ids in it; None if this worker should get ``raw`` unchanged."""
        if not self._enabled:
            return None
        reason, made = self._against(request, prompt, view, worker_id), None
        if not reason:
            given, ids = request.prompts, [each.json() for each in prompt.prompts]
            # The last argument: the length of the prompt, if it is a single text.
            made = spliced(request.endpoint, raw, ids, len(given[0]) if len(given) == 1 else 0)
        self._results(reason or ("body" if made is None else "used")).inc()
        return made

    def refused(self, worker_id: str, status: int) -> None:
        """Note that a worker refused a request with ids, and took the same request with its text."""
        self._results("refused").inc()
        if len(self._paused_until) >= MAX_WORKERS:
            self._paused_until.clear()
        self._paused_until[worker_id] = time.monotonic() + PAUSE_S
        text = "worker %s answered %d to token ids, but takes the text: no hand-off to it for %d s"
        logger.warning(text, worker_id, status, PAUSE_S)

    def takes(self, request: Request, prompt: IdentifiedPrompt, view: View, worker_id: str) -> bool:
        """Return whether this worker can get the ids of a split request, which no engine gets as text."""
        return self._enabled and not self._lacking(request, prompt, view, worker_id)

    def _against(self, request: Request, prompt: IdentifiedPrompt, view: View, worker_id: str) -> str:
        """Return why this worker gets no ids; empty if it gets them."""
        if lacking := self._lacking(request, prompt, view, worker_id):
            return lacking
        if len(self._requests) >= MAX_WORKERS:
            self._requests.clear()
        count = self._requests[worker_id] = self._requests.get(worker_id, -1) + 1
        return "" if count % CHECK_EVERY else "check"

    def _lacking(self, request: Request, prompt: IdentifiedPrompt, view: View, worker_id: str) -> str:
        """Return why this worker cannot get ids; empty if it can."""
        if request.text_only:
            return "text"
        if list in map(type, request.prompts):
            return "ids"  # an engine may refuse texts and ids in one request
        longest = 0
        for each in prompt.prompts:
            if not each.tokens:
                return "unknown"
            longest = max(longest, each.tokens)
        if not longest or not prompt.identity_key:
            return "unknown"
        able = view.handoff.get(worker_id)
        if able is None or able.identity_key != prompt.identity_key or request.endpoint not in able.endpoints:
            return "worker"
        now = time.monotonic()
        if now - view.read_at > MAX_VIEW_AGE_S:
            return "stale"
        if self._paused_until.get(worker_id, now) > now:
            return "paused"
        if longest >= able.limit_tokens:
            return "length"  # too long: the engine's error message should speak of the text that the client sent
        return ""
