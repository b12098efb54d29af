"""Lines for the user of ``up --worker``: how much the first answers matched, and what the plugin would add."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
from prometheus_client.parser import text_string_to_metric_families

from warmfleet.cli.client import admin_headers

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.cli.local.stack import Stack

FIRST_ANSWERS = 5
PLUGIN_ADDS = (
    "         with the plugin (pip install ./worker_plugin beside vLLM) this would be exact: evictions, requests\n"
    "         from elsewhere and restarts are seen, tokens are counted by the engine's own tokenizer"
)


class AnswerWatch:
    """Reads the replicas' counters, and prints a line about each of the first answers."""

    def __init__(self, stack: Stack, say: Callable[[str], None]) -> None:
        self._stack = stack
        self._say = say
        self._said = 0
        self._last = self._totals()

    def look(self) -> None:
        """Print how many prompt tokens of the answers since the last call matched, for FIRST_ANSWERS answers in all."""
        if self._said >= FIRST_ANSWERS:
            return
        now = self._totals()
        requests, prompt, matched = (after - before for after, before in zip(now, self._last, strict=True))
        if requests <= 0:
            return
        self._last = now
        subject = "answer " if requests == 1 else f"{requests:.0f} answers"
        self._say(f"{subject}  matched {matched:.0f} of {prompt:.0f} prompt tokens, judged by the requests sent there")
        if not self._said:
            self._say(PLUGIN_ADDS)
        self._said += int(requests)

    def _totals(self) -> tuple[float, float, float]:
        totals = dict.fromkeys(
            ("warmfleet_requests_total", "warmfleet_prompt_tokens_total", "warmfleet_matched_tokens_total"), 0.0
        )
        for replica in self._stack.replicas:
            try:
                page = httpx.get(f"{replica.operators}/metrics", headers=admin_headers(), timeout=2).raise_for_status()
            except httpx.HTTPError:
                continue
            for family in text_string_to_metric_families(page.text):
                for sample in family.samples:
                    if sample.name in totals:
                        totals[sample.name] += sample.value
        requests, prompt, matched = totals.values()
        return requests, prompt, matched
