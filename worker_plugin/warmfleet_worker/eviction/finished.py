"""A request whose blocks have become free, as vLLM's hook and the simulator report it to the order of eviction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True)
class Finished:
    """A request that is finished, or preempted.

    numbers, hashes: of its blocks, from the prompt's begin; blocks beyond the shorter of the two are not full. tokens:
    of prompt and answer. ended: its conversation will not go on. request_id: the engine's own. cached_tokens: tokens of
    the prompt that were cached; 0 also if that is unknown. preempted: the request will run again.
    """

    numbers: Sequence[int]
    hashes: Sequence[bytes]
    prompt_tokens: int
    tokens: int
    ended: bool = False
    request_id: str = ""
    cached_tokens: int = 0
    preempted: bool = False
