"""Asks engines for token ids that this replica cannot make, because a chat template or the tokenizer is missing.

An engine returns the ids from /v1/chat/completions/render (vLLM: --enable-scale-out) or /tokenize. A question costs a
round trip and time of the engine's API server before the decision. So an engine is asked only about prompts of
MIN_TOKENS or more, with a short time-out, and by at most MAX_IN_FLIGHT questions of this replica at once. After any
failure the request is routed by load.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from warmfleet.engines.engine_client import SMALL_ANSWER_BYTES
from warmfleet.engines.request_headers import header_fields
from warmfleet.errors import UpstreamError, UpstreamGone
from warmfleet.prompt.request import is_ids

if TYPE_CHECKING:
    from warmfleet.engines.engine_client import EngineClient
    from warmfleet.fleet import WorkerView
    from warmfleet.metrics import Metrics
    from warmfleet.pools.identified_prompt import IdentifiedPrompt
    from warmfleet.pools.pool import Pool
    from warmfleet.prompt.request import Dialect, Request

logger = logging.getLogger("warmfleet.routing.engine_tokenizer")

MIN_TOKENS = 512  # least (estimated) tokens of a prompt; for less, asking takes longer than the prefill
MAX_BYTES = 524_288  # longest body for which an engine is asked: some 130,000 tokens
S_PER_BYTE = 5e-6  # time added to the time-out per byte, which is one token at most; an engine needs 4 us for a token
ANSWER_BYTES_PER_BYTE = 12  # most bytes of an answer for each byte of text: a token id in digits
MAX_IN_FLIGHT = 32
REST_S = 10.0  # time for which an engine that did not answer is not asked
#: By the API that a chat is written for: the engine's path that answers with the chat's token ids.
RENDERS: dict[Dialect, str] = {
    "chat": "/v1/chat/completions/render",
    "messages": "/v1/messages/render",
    "responses": "/v1/responses/render",
}
#: Fields of a chat that change its prompt, but that /tokenize ignores.
TOKENIZE_IGNORES = frozenset({"documents", "reasoning_effort"})


class _Route(NamedTuple):
    """A worker to ask, the path, and the field of the answer that holds the ids."""

    worker: WorkerView
    path: str
    field: str


class EngineTokenizer:
    """Asks engines for token ids. Remembers only which engines did not answer within the last REST_S."""

    def __init__(self, client: EngineClient, metrics: Metrics, timeout_s: float) -> None:
        """timeout_s: longest wait for an answer, plus S_PER_BYTE for each byte of the request's body."""
        self._client = client
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._in_flight = 0
        self._rests_until: dict[str, float] = {}

    async def token_ids(
        self, pool: Pool, request: Request, prompt: IdentifiedPrompt, body: bytes, headers: bytes
    ) -> list[int]:
        """Ask an engine of the model for the token ids of the request; return them, [] if no engine returned them."""
        route = self._route(pool, request, prompt)
        if route is None or len(body) > MAX_BYTES:
            return []
        if self._in_flight >= MAX_IN_FLIGHT:
            self._metrics.asked.labels("busy").inc()
            return []
        self._in_flight += 1
        try:
            return await self._ask(route, body, headers)
        finally:
            self._in_flight -= 1

    def _route(self, pool: Pool, request: Request, prompt: IdentifiedPrompt) -> _Route | None:
        """Return a random worker that can return the ids, and how to ask it; None if no worker can, if the prompt is
        short, or if only one worker could get the request anyway.
        """
        if prompt.prompt_tokens < MIN_TOKENS or not pool.view.hashers:
            return None
        now = time.monotonic()
        unable = prompt.unable_workers
        routable = [worker for worker in pool.view.workers if worker.routable and worker.worker_id not in unable]
        routes = [
            _Route(worker, *way)
            for worker in routable
            if self._rests_until.get(worker.url, 0.0) < now and (way := _way(_facts(worker).get("renders"), request))
        ]
        return random.choice(routes) if routes and len(routable) > 1 else None

    async def _ask(self, route: _Route, body: bytes, headers: bytes) -> list[int]:
        """Ask for the ids; return [] if the engine does not return them, for any reason.

        An engine that did not answer, or answered 501 or more, is not asked for REST_S. After any other failure the
        engine is asked again at once, because the request itself may have caused the failure.
        """
        fields = header_fields(headers, "Authorization", "Content-Type")
        worker, path, field = route
        ids: list[int] = []
        status, size, away = 0, len(body), False
        try:
            async with asyncio.timeout(self._timeout_s + S_PER_BYTE * size):
                limit = SMALL_ANSWER_BYTES + ANSWER_BYTES_PER_BYTE * size
                status, answer = await self._client.post(worker.url, path, body, fields, limit)
            ids = orjson.loads(answer)[field] if status == 200 else []
        except (UpstreamGone, TimeoutError):
            away = True
        except (UpstreamError, ValueError, KeyError, TypeError):
            pass
        good = status == 200 and is_ids(ids)
        if away or status > 500:
            self._rest(worker, status)
        self._metrics.asked.labels("answered" if good else "refused" if 400 <= status < 500 else "failed").inc()
        return ids if good else []

    def _rest(self, worker: WorkerView, status: int) -> None:
        now = time.monotonic()
        self._rests_until = {url: until for url, until in self._rests_until.items() if until > now}
        self._rests_until[worker.url] = now + REST_S
        text = "worker %s does not tell token ids (status %d): not asked for %d s"
        logger.info(text, worker.worker_id, status, REST_S)


def _facts(worker: WorkerView) -> dict[str, Any]:
    return (worker.server or {}).get("facts") or {}


def _way(renders: Any, request: Request) -> tuple[str, str] | None:
    """Return the path to ask, and the field of the answer with the ids; None without a path for this request."""
    if not isinstance(renders, dict):
        return None
    if request.endpoint == "completions":
        one_text = len(request.prompts) == 1 and isinstance(request.prompts[0], str)
        return ("/tokenize", "tokens") if one_text else None
    if renders.get("render") and not request.thinking_off:  # a render request cannot switch thinking off
        return RENDERS[request.dialect], "token_ids"
    if request.dialect != "chat":
        return None
    plain = request.tool_choice is None and not TOKENIZE_IGNORES & request.arguments.keys()
    return ("/tokenize", "tokens") if renders.get("tokenize") and plain else None
