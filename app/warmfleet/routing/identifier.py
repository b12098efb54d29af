"""Step 2 of a request: identifies its prompt, with an engine's help if this replica cannot make the token ids."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from warmfleet.pools.identified_prompt import identify_here, identify_ids

if TYPE_CHECKING:
    from warmfleet.metrics import Metrics
    from warmfleet.pools.identified_prompt import IdentifiedPrompt
    from warmfleet.pools.pool import Pool
    from warmfleet.prompt.request import Request
    from warmfleet.routing.engine_tokenizer import EngineTokenizer

logger = logging.getLogger("warmfleet.routing.identifier")

#: Reasons for which this replica cannot make the token ids, but an engine can.
ENGINE_CAN_TELL = frozenset({"no_template", "no_identity", "tools"})


class Identifier:
    """Identifies prompts for the router, and counts in the metrics how each was identified."""

    def __init__(self, engines: EngineTokenizer, metrics: Metrics) -> None:
        self._engines = engines
        self._metrics = metrics
        self._kinds = cache(metrics.identity.labels)
        tokens = metrics.identified_tokens
        self._tokens = cache(lambda tag: (tokens.labels("known", tag), tokens.labels("new", tag)))
        self._logged: set[tuple[str, str]] = set()

    async def identify(self, pool: Pool, request: Request, body: bytes, headers: bytes) -> IdentifiedPrompt:
        """Identify the request's prompt, as far as this replica or an engine can tell it. Never fails.

        body and headers: the request as an engine gets it when it is asked for the token ids.
        """
        prompt = await identify_here(request, pool)
        if prompt.reason in ENGINE_CAN_TELL:
            prompt = await self._from_elsewhere(pool, request, prompt, body, headers)
        self._kinds(prompt.kind, pool.tag).inc()
        if prompt.prompts:
            known, new = self._tokens(pool.tag)
            for each in prompt.prompts:
                known.inc(each.known_tokens)
                new.inc(each.tokens - each.known_tokens)
        if prompt.kind == "prefix":
            self._metrics.prefix_only.labels(prompt.reason, pool.tag).inc()
        elif prompt.kind == "load":
            self._metrics.load_only.labels(prompt.reason, pool.tag).inc()
            if (pool.tag, prompt.reason) not in self._logged:
                self._logged.add((pool.tag, prompt.reason))
                text = "%s: a prompt is not known here and is routed by load: %s (logged once for each reason)"
                logger.info(text, pool.tag, prompt.reason)
        return prompt

    async def _from_elsewhere(
        self, pool: Pool, request: Request, prompt: IdentifiedPrompt, body: bytes, headers: bytes
    ) -> IdentifiedPrompt:
        """Return ``prompt``, or a better one with token ids that the client gave or an engine told."""
        given = [ids for ids in request.prompts if isinstance(ids, list)]
        if prompt.reason == "no_identity" and given and len(given) == len(request.prompts):
            return identify_ids(request, pool.view, given, "exact")
        ids = await self._engines.token_ids(pool, request, prompt, body, headers)
        return identify_ids(request, pool.view, [ids], "engine") if ids else prompt
