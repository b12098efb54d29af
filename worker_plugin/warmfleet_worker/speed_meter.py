"""How fast an engine computes prompts, and how long a step takes at least, measured from the durations of its steps."""

from __future__ import annotations

from collections import deque

MIN_STEP_TOKENS = 128  # a step with less prefill is left out: its fixed cost would hide the speed
MIN_TOKENS = 512  # before so many are measured no speed is reported
MEMORY_SECONDS = 10.0  # busy seconds after which earlier measurements count half
FEW_TOKENS = 16  # a step that decodes no more, and computes no prompt, takes hardly longer than the least there is
LEAST_STEPS, STEPS = 8, 32  # so many of these are needed to tell their duration; the last so many are looked at


class SpeedMeter:
    """Prefill tokens per busy second, over the steps that are mostly prefill.

    A step lasts from its schedule to its result. Where steps overlap it begins at the result of the step before.
    """

    def __init__(self) -> None:
        self._started: deque[tuple[int, float]] = deque(maxlen=64)
        self._last_done = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._least: deque[float] = deque(maxlen=STEPS)

    def scheduled(self, step: int, now: float) -> None:
        """The step with this number begins ``now`` (monotonic seconds)."""
        self._started.append((step, now))

    def done(self, step: int, now: float, prefill_tokens: int, decode_tokens: int) -> None:
        """The step has its result. Results come in the order of the schedules; a step without a result is skipped."""
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
        """Tokens per second; 0 = not measured yet."""
        return int(self._tokens / self._seconds) if self._tokens >= MIN_TOKENS else 0

    @property
    def step_us(self) -> int:
        """Microseconds that a step takes however little it computes, as a median; 0 = not measured yet.

        Any thread may ask: the copy is one call.
        """
        durations = sorted(self._least.copy())
        return round(1e6 * durations[len(durations) // 2]) if len(durations) >= LEAST_STEPS else 0
