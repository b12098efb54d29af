"""Compares the cached tokens that a decision expected at an approximate worker with those that its answer reports.

A worker with the plugin, or behind a bridge, reports its blocks. Of an engine without either, the fleet only knows the
prompts that it was sent, and the number of cached prompt tokens in the field ``usage`` of its answers. If that number
is lower than the decision expected, the engine has evicted blocks or was restarted, and Redis corrects its mirror of
that engine's cache (lua/parts/settle/mirror).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warmfleet.engines.reported_usage import Usage
    from warmfleet.fleet import Decision
    from warmfleet.metrics import Metrics
    from warmfleet.pools.fleet_view import View
    from warmfleet.pools.identified_prompt import IdentifiedPrompt
    from warmfleet.prompt.block_hashes import Chain

KNOWN = frozenset({"exact", "engine", "text"})  # the kinds of ``IdentifiedPrompt`` whose length is known
#: Least difference that counts, as a share of the expected tokens, because lengths of texts are estimates.
TOLERATED_SHARE = 1 / 8
#: Least difference in tokens that counts. Engines match whole pages only, so a smaller difference may be one page; the
#: fleet does not know the page size (SGLang: --page-size 64); 128 is twice the largest common size.
TOLERATED_TOKENS = 128
#: Some engines report cached tokens only if there are any: after a first report, an answer without them means none.
#: Number of such answers in a row after which the engine is taken to report cached tokens no more.
SILENT_ANSWERS = 8
MAX_WORKERS = 1_024  # most workers that a replica remembers as reporting cached tokens


class CacheReports:
    """The cached tokens that approximate workers reported in answers to this replica."""

    def __init__(self, metrics: Metrics) -> None:
        self._results = {word: metrics.cached_predictions.labels(word) for word in ("as_predicted", "more", "fewer")}
        self._silent: dict[str, int] = {}  # reporting worker_id -> its last answers in a row without cached tokens

    def held_blocks(self, view: View, prompt: IdentifiedPrompt, decision: Decision, usage: Usage | None) -> int | None:
        """Return the number of the prompt's blocks that the worker had, if the decision expected more; else None.

        Also None if the answer does not tell. usage: the usage field of the worker's answer.
        """
        cached = self._cached_tokens(decision, usage)
        if cached is None or decision.speculative or prompt.kind not in KNOWN or prompt.prompt_count != 1:
            return None
        believed = decision.matched_tokens
        chain = _chain(view, prompt, decision.worker_id)
        block = chain.block_tokens if chain is not None else 1
        tolerated = max(block, TOLERATED_TOKENS, TOLERATED_SHARE * believed)
        if believed - cached <= tolerated:
            self._results["more" if cached - believed > tolerated else "as_predicted"].inc()
            return None
        self._results["fewer"].inc()
        return int(cached) // block

    def _cached_tokens(self, decision: Decision, usage: Usage | None) -> float | None:
        """Return the answer's cached tokens, scaled to the router's count of the prompt, which may be an estimate."""
        if usage is None:
            return None
        worker_id = decision.worker_id
        if usage.cached_tokens is None:
            silent = self._silent.get(worker_id, SILENT_ANSWERS)
            if silent >= SILENT_ANSWERS:
                return None
            self._silent[worker_id] = silent + 1
            return 0.0
        if usage.cached_tokens:
            if worker_id not in self._silent and len(self._silent) >= MAX_WORKERS:
                self._silent.clear()
            self._silent[worker_id] = 0
        return usage.cached_tokens * decision.prompt_tokens / usage.prompt_tokens


def _chain(view: View, prompt: IdentifiedPrompt, worker_id: str) -> Chain | None:
    """Return the block hashes by which the decision matched this worker; None if the worker has left the fleet."""
    schemes = [worker.load.scheme for worker in view.workers if worker.worker_id == worker_id]
    return next((chain for chain in prompt.chains if chain.scheme_id in schemes), None)
