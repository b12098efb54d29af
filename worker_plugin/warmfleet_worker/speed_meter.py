"""What an engine core's scheduler tells about its work: prefill speed, foreign load, finished prefills.

Works on vLLM's objects by their public attributes and imports nothing of vLLM.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from warmfleet_worker.protocol.wire import reservation_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MIN_STEP_TOKENS = 128  # of prefill in a step: below, the step's fixed cost hides the speed
MIN_TOKENS = 512  # measured before a speed is told
MEMORY_SECONDS = 10.0  # busy seconds after which the past counts half


class SpeedMeter:
    """Prefill tokens per busy second, over steps that are mostly prefill.

    A step lasts from its schedule (or the end of the step before, when steps overlap) to its result.
    """

    def __init__(self) -> None:
        self._started: deque[tuple[int, float]] = deque(maxlen=64)
        self._last_done = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    def scheduled(self, step: int, now: float) -> None:
        self._started.append((step, now))

    def done(self, step: int, now: float, prefill_tokens: int, decode_tokens: int) -> None:
        """The step's result is there. Results come in the order of the schedules; a step without one is passed over."""
        started = None
        while self._started and started is None:
            number, at = self._started.popleft()
            started = at if number == step else None
        begin = max(started if started is not None else now, self._last_done)
        self._last_done = now
        if prefill_tokens < max(MIN_STEP_TOKENS, decode_tokens) or now <= begin:
            return
        self._tokens += prefill_tokens
        self._seconds += now - begin
        if self._seconds > MEMORY_SECONDS:
            self._tokens /= 2
            self._seconds /= 2

    @property
    def speed_tps(self) -> int:
        """Tokens per second; 0 = not measured yet."""
        return int(self._tokens / self._seconds) if self._tokens >= MIN_TOKENS else 0


def step_tokens(scheduler_output: Any) -> tuple[int, int]:
    """(prefill, decode) tokens of a step, in O(1): what exceeds one token (and its drafts) per request is prefill."""
    total = scheduler_output.total_num_scheduled_tokens
    decode = len(scheduler_output.num_scheduled_tokens)
    drafts = scheduler_output.scheduled_spec_decode_tokens
    if drafts:
        decode += sum(map(len, drafts.values()))
    return max(0, total - decode), min(total, decode)


def finished_prefills(outputs: dict[int, Any]) -> Iterator[tuple[str, int, int]]:
    """(reservation, cached tokens, prompt tokens) of the fleet's requests whose first output is in ``outputs``.

    Of ``n`` > 1 children only the first counts: the others find what it has just computed.
    """
    for batch in outputs.values():
        for output in batch.outputs:
            stats = output.prefill_stats
            if stats is not None:
                ours = reservation_of(output.request_id)
                if ours is not None and ours[1] == 0:
                    yield ours[0], stats.num_cached_tokens, stats.num_prompt_tokens


def foreign_load(requests: Iterable[Any]) -> tuple[int, int]:
    """(prefill tokens to do, context tokens of decoding ones) of requests that no router of the fleet has sent."""
    prefill = decode = 0
    for request in requests:
        if reservation_of(request.request_id) is not None:
            continue
        computed, prompt = request.num_computed_tokens, request.num_prompt_tokens
        if computed < prompt:
            prefill += prompt - computed
        else:
            decode += request.num_tokens
    return prefill, decode
