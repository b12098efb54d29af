"""Counters of transfers, and of mistakes with ``kv_transfer_params`` that real engines do not notice in time."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

#: Mistakes of whoever sends the two steps of a request, by name. With those that are True vLLM answers 200 with wrong
#: tokens, and the engine's cache holds blocks of other tokens than their hashes say; so does a simulated engine, whose
#: answer then reads WRONG-BLOCKS. Of the others, ``longer_prompt`` and ``incomplete`` end the engine, ``role`` and
#: ``may_end`` do no harm here, and the rest fail the transfer.
VIOLATIONS = {
    "twice": True,  # the parameters were used before, at the same engine
    "two_engines": True,  # ... at another engine
    "expired": True,  # the prefill engine's lease had ended
    "prompt": True,  # another prompt than the prefilled one
    "unknown_request": True,  # a remote_request_id that this engine did not give out
    "unknown_engine": False,  # remote_engine_id is not the engine at this address
    "settings": False,  # version or settings of the two engines differ
    "may_end": False,  # a prefill whose first token may end its answer: then vLLM keeps no blocks
    "role": False,  # a step was sent to an engine of the other role
    "longer_prompt": False,  # more blocks than were prefilled
    "incomplete": False,  # do_remote_prefill without the parameters of a prefill
}


@dataclass(slots=True)
class Counts:
    """Counters of one engine, from its start. violations: by a name of VIOLATIONS, at the engine of the wrong use.

    wrong_answers: made from wrong blocks, of this transfer or an earlier one. expired: prompts that nobody took before
    the lease ended. late: parameters used after that.
    """

    violations: Counter[str] = field(default_factory=Counter)
    wrong_answers: int = 0
    prefilled: int = 0
    transfers: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failed_transfers: int = 0
    failed_notifications: int = 0
    recomputed: int = 0
    expired: int = 0
    late: int = 0
    by_source: Counter[str] = field(default_factory=Counter)  # prompt tokens, by vLLM's names of sources

    def violation(self, kind: str, request_id: str) -> None:
        """Count a mistake, loudly."""
        self.violations[kind] += 1
        print(f"kv_transfer_params of {request_id} are used wrongly: {kind}", file=sys.stderr, flush=True)

    def as_dict(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in self.__slots__}
        return told | {"violations": dict(self.violations), "by_source": dict(self.by_source)}

    def metrics(self, labels: str) -> list[str]:
        """Return lines of ``/metrics``: those of vLLM's NIXL connector, and two that only simulated engines have."""
        nixl = {
            "nixl_num_kv_expired_reqs": self.expired,
            "nixl_num_notifications_after_expiry": self.late,
            "nixl_num_failed_transfers": self.failed_transfers,
            "nixl_num_failed_notifications": self.failed_notifications,
        }
        lines = []
        for name, value in nixl.items():
            lines += [f"# TYPE vllm:{name} counter", f"vllm:{name}_total{{{labels}}} {value}"]
        lines.append("# TYPE vllm:prompt_tokens_by_source counter")
        lines += [
            f'vllm:prompt_tokens_by_source_total{{{labels},source="{source}"}} {tokens}'
            for source, tokens in self.by_source.items()
        ]
        lines += ["# TYPE sim:wrong_answers counter", f"sim:wrong_answers_total{{{labels}}} {self.wrong_answers}"]
        lines.append("# TYPE sim:transfer_violations counter")
        lines += [
            f'sim:transfer_violations_total{{{labels},kind="{kind}"}} {self.violations[kind]}' for kind in VIOLATIONS
        ]
        return lines
