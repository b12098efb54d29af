"""Token ids that only an engine can tell: chats without a jinja template here, models without a tokenizer here.

An engine tells them by /v1/chat/completions/render (vLLM: --enable-scale-out) or /tokenize. That costs a round trip and
its API server's time before the decision, so it is asked only where much can be won, briefly, and by few at a time;
whatever goes wrong, the request is routed by load, as without asking.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, Any

import orjson

from warmfleet.engines.engine_client import SMALL_ANSWER_BYTES
from warmfleet.errors import UpstreamError
from warmfleet.prompt.request import is_ids

if TYPE_CHECKING:
    from warmfleet.engines.engine_client import EngineClient
    from warmfleet.fleet import WorkerView
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool, Shape
    from warmfleet.prompt.request import Request
    from warmfleet.routing.call import Call
    from warmfleet.settings import Settings

logger = logging.getLogger("warmfleet.routing.engine_tokenizer")

REASONS = frozenset({"no_template", "no_identity", "tools"})
MIN_TOKENS = 512  # about; a shorter prompt is computed sooner than it is asked about
MAX_BYTES = 524_288  # of a request: some 130,000 tokens
ASK_TIMEOUT_S = 0.25  # besides S_PER_BYTE; a later answer would cost the request more than a cold prefill
S_PER_BYTE = 5e-6  # a prompt has a token for each of its bytes at most, and an engine takes 4 us for one
ANSWER_BYTES_PER_BYTE = 12  # so much takes a token id
MAX_IN_FLIGHT = 32
REST_S = 10.0  # for an engine that is not there
#: What /tokenize does not look at, though the chat itself does.
NOT_TOKENIZE = frozenset({"documents", "reasoning_effort"})


class Asker:
    """One for a replica. Remembers only who did not answer lately."""

    def __init__(self, client: EngineClient, settings: Settings, metrics: Metrics) -> None:
        self._client = client
        self._settings = settings
        self._metrics = metrics
        self._in_flight = 0
        self._resting: dict[str, float] = {}
        self._told: set[tuple[str, str]] = set()

    async def better(self, pool: Pool, request: Request, call: Call, shape: Shape) -> Shape:
        """``shape``, or what an engine makes of the request if only that can tell. Counts how it is known now."""
        shape = await self._better(pool, request, call, shape)
        self._metrics.identity.labels(shape.kind).inc()
        known = sum([one.known_tokens for one in shape.ids])
        self._metrics.identified_tokens.labels("known").inc(known)
        self._metrics.identified_tokens.labels("new").inc(sum([one.tokens for one in shape.ids]) - known)
        if shape.kind == "load":
            self._metrics.load_only.labels(shape.reason).inc()
            if (pool.tag, shape.reason) not in self._told:
                self._told.add((pool.tag, shape.reason))
                logger.info("%s: a prompt is not known here, routed by load: %s (told once)", pool.tag, shape.reason)
        return shape

    async def _better(self, pool: Pool, request: Request, call: Call, shape: Shape) -> Shape:
        if shape.reason not in REASONS:
            return shape
        expected = self._settings.expected_output_tokens
        if shape.reason == "no_identity" and request.prompts and all(isinstance(one, list) for one in request.prompts):
            return pool.shape_of(request, [one for one in request.prompts if isinstance(one, list)], "exact", expected)
        found = self._who(pool, request, shape)
        if found is None or len(call.body) > MAX_BYTES:
            return shape
        if self._in_flight >= MAX_IN_FLIGHT:
            self._metrics.asked.labels("busy").inc()
            return shape
        worker, path, name = found
        self._in_flight += 1
        try:
            ids = await self._ask(worker, path, name, call)
        finally:
            self._in_flight -= 1
        return pool.shape_of(request, [ids], "engine", expected) if ids else shape

    def _who(self, pool: Pool, request: Request, shape: Shape) -> tuple[WorkerView, str, str] | None:
        """Any of those that can tell, if it matters who gets the request; with the path and the answer's field."""
        if not self._settings.ask_engines or shape.prompt_tokens < MIN_TOKENS or not pool.view.hashers:
            return None
        now = time.monotonic()
        routable = [one for one in pool.view.workers if one.routable and one.worker_id not in shape.barred]
        able = [
            (worker, *way)
            for worker in routable
            if self._resting.get(worker.url, 0.0) < now and (way := _way(_facts(worker).get("renders"), request))
        ]
        return random.choice(able) if able and len(routable) > 1 else None

    async def _ask(self, worker: WorkerView, path: str, name: str, call: Call) -> list[int]:
        """Empty if it does not tell, whatever the cause.

        Only an engine that is not there rests: what a request may be the cause of must not keep it from others.
        """
        headers = {key: value for key, value in call.headers.items() if key in ("Authorization", "Content-Type")}
        ids: list[int] = []
        status, size = 0, len(call.body)
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S + S_PER_BYTE * size):
                limit = SMALL_ANSWER_BYTES + ANSWER_BYTES_PER_BYTE * size
                status, body = await self._client.post(worker.url, path, call.body, headers, limit)
            ids = orjson.loads(body)[name] if status == 200 else []
        except (UpstreamError, TimeoutError, ValueError, KeyError, TypeError):
            pass
        good = status == 200 and is_ids(ids)
        if status == 0 or status > 500:
            self._resting = {url: until for url, until in self._resting.items() if until > time.monotonic()}
            self._resting[worker.url] = time.monotonic() + REST_S
            logger.info(
                "worker %s does not tell token ids (status %d): not asked for a while", worker.worker_id, status
            )
        self._metrics.asked.labels("answered" if good else "refused" if 400 <= status < 500 else "failed").inc()
        return ids if good else []


def _facts(worker: WorkerView) -> dict[str, Any]:
    return (worker.server or {}).get("facts") or {}


def _way(renders: Any, request: Request) -> tuple[str, str] | None:
    """Path and field of the answer, if this worker has a route that sees the request as its engine will."""
    if not isinstance(renders, dict):
        return None
    if request.endpoint == "completions":
        one_text = len(request.prompts) == 1 and isinstance(request.prompts[0], str)
        return ("/tokenize", "tokens") if one_text else None
    if renders.get("render"):
        return "/v1/chat/completions/render", "token_ids"
    plain = request.tool_choice is None and not NOT_TOKENIZE & request.arguments.keys()
    return ("/tokenize", "tokens") if renders.get("tokenize") and plain else None
