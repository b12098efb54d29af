"""Numbers read from vLLM's scheduler: the tokens of a step, finished prefills, and load from outside the fleet.

The functions read public attributes of vLLM's objects and import nothing of vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warmfleet_worker.protocol.wire import reservation_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator


def step_tokens(scheduler_output: Any) -> tuple[int, int]:
    """Count (prefill tokens, decode tokens) of a step, in O(1).

    Every request of the step counts as one decode token and its draft tokens; everything beyond that is prefill.
    """
    total = scheduler_output.total_num_scheduled_tokens
    decode = len(scheduler_output.num_scheduled_tokens)
    drafts = scheduler_output.scheduled_spec_decode_tokens
    if drafts:
        decode += sum(map(len, drafts.values()))
    return max(0, total - decode), min(total, decode)


def finished_prefills(outputs: dict[int, Any]) -> Iterator[tuple[str, int, int]]:
    """List (request id, cached tokens, prompt tokens) of the requests with a first output in ``outputs``."""
    for batch in outputs.values():
        for output in batch.outputs:
            stats = output.prefill_stats
            if stats is not None:
                yield output.request_id, stats.num_cached_tokens, stats.num_prompt_tokens


def foreign_load(requests: Iterable[Any], left: Collection[str] = ()) -> tuple[int, int]:
    """Sum (prefill tokens still to compute, context tokens of decoding requests) of all foreign requests.

    A foreign request is one that no router of the fleet has sent: its id holds no reservation. left: ids of requests
    that count as foreign, too, because their reservations are in a pool that the worker has left.
    """
    prefill = decode = 0
    for request in requests:
        if request.request_id not in left and reservation_of(request.request_id) is not None:
            continue
        computed, prompt = request.num_computed_tokens, request.num_prompt_tokens
        if computed < prompt:
            prefill += prompt - computed
        else:
            decode += request.num_tokens
    return prefill, decode
