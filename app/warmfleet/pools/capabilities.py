"""Which workers take token ids in place of a text, as their servers announced it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warmfleet.fleet import WorkerView


@dataclass(frozen=True, slots=True)
class TokenCapability:
    """A worker takes the token ids that this identity makes, on these endpoints, for prompts shorter than the limit."""

    identity_key: str
    endpoints: frozenset[str]
    limit_tokens: int


def token_capability(worker: WorkerView, identity_key: str) -> TokenCapability | None:
    """What the facts of the worker's server allow; None if the worker may be given no token ids.

    identity_key: names the tokenizer and the template that the worker brought.
    """
    facts: dict[str, Any] = (worker.server or {}).get("facts") or {}
    endpoints, limit = facts.get("token_handoff"), facts.get("max_model_len")
    if not worker.state.matched or facts.get("kv_connector") is not False:
        return None  # with a KV connector the field that carries the ids steers transfers
    return TokenCapability(identity_key, frozenset(endpoints), limit) if endpoints and limit else None
