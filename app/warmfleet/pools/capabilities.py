"""Finds the workers that take token ids in place of a text, by the facts that their servers announced. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from warmfleet.fleet import WorkerView


@dataclass(frozen=True, slots=True)
class TokenCapability:
    """The endpoints on which a worker takes token ids, made by this identity, for prompts shorter than the limit."""

    identity_key: str
    endpoints: frozenset[str]
    limit_tokens: int


def token_capabilities(groups: Mapping[str, Iterable[WorkerView]]) -> dict[str, TokenCapability]:
    """Return worker id -> capability of the workers that may get token ids. groups: by identity key."""
    return {
        worker.worker_id: able
        for key, group in groups.items()
        for worker in group
        if (able := token_capability(worker, key)) is not None
    }


def token_capability(worker: WorkerView, identity_key: str) -> TokenCapability | None:
    """Return the capability that the facts of the worker's server show; None if the worker may get no token ids.

    identity_key: names the tokenizer and the template that the worker brought.
    """
    facts: dict[str, Any] = (worker.server or {}).get("facts") or {}
    endpoints, limit = facts.get("token_handoff"), facts.get("max_model_len")
    if not worker.state.matched or not endpoints or not limit:
        return None
    return TokenCapability(identity_key, frozenset(endpoints), limit)
