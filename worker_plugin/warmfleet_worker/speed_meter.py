"""How fast an engine computes prompts, and how long a step takes at least, measured from the durations of its steps."""

from __future__ import annotations

from collections import deque

MIN_STEP_TOKENS = 128  # least prefill of a step that is measured; in a smaller step the fixed cost hides the speed
MIN_TOKENS = 512  # number of tokens to be measured before a speed is reported
MEMORY_SECONDS = 10.0  # busy seconds after which earlier measurements count half
FEW_TOKENS = 16  # most decode tokens of a short step: without prefill it takes hardly longer than the shortest
LEAST_STEPS, STEPS = 8, 32  # step_us: the median of the latest STEPS short steps; 0 below LEAST_STEPS of them


class SpeedMeter:
    """Prefill tokens per busy second, over the steps that are mostly prefill.

    A step lasts from its schedule to its result. Of overlapping steps the later begins at the result of the earlier.
    """

    def __init__(self) -> None:
        self._started: deque[tuple[int, float]] = deque(maxlen=64)
        self._last_done = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._least: deque[float] = deque(maxlen=STEPS)

    def scheduled(self, step: int, now: float) -> None:
        """Note that the step with this number begins ``now`` (monotonic seconds)."""
        self._started.append((step, now))

    def done(self, step: int, now: float, prefill_tokens: int, decode_tokens: int) -> None:
        """Measure a step that has its result. Results come in the order of schedules; steps without one are skipped."""
        started = None
        while self._started and started is None:
            number, at = self._started.popleft()
            started = at if number == step else None
        begin = max(started if started is not None else now, self._last_done)
        self._last_done = now
        if prefill_tokens == 0 < decode_tokens <= FEW_TOKENS and begin < now:
            self._least.append(now - begin)
        if prefill_tokens < max(MIN_STEP_TOKENS, decode_tokens) or now <= begin:
            return
        self._tokens += prefill_tokens
        self._seconds += now - begin
        if self._seconds > MEMORY_SECONDS:
            self._tokens /= 2
            self._seconds /= 2

    @property
    def speed_tps(self) -> int:
        """Return tokens per second; 0 = not measured yet."""
        return int(self._tokens / self._seconds) if self._tokens >= MIN_TOKENS else 0

    @property
    def step_us(self) -> int:
        """Return the median microseconds that a step takes however little it computes; 0 = not measured yet.

        Any thread may call this, because the copy is one atomic call.
        """
        durations = sorted(self._least.copy())
        return round(1e6 * durations[len(durations) // 2]) if len(durations) >= LEAST_STEPS else 0
