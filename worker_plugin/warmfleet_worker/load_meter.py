"""The time that an engine takes to load a byte from a tier."""

LEAST_LOADS = 4  # loads until the measured time counts
MEMORY_LOADS = 64  # loads after which an earlier one counts 1/e as much as the last


class LoadMeter:
    """Measures the time that loading a byte from a tier takes, by the engine's own counts of bytes and seconds."""

    def __init__(self) -> None:
        self._loads = 0
        self._bytes, self._seconds = 0.0, 0.0

    def loaded(self, size: float) -> None:
        self._loads += 1
        self._bytes = self._bytes * (1 - 1 / MEMORY_LOADS) + size

    def took(self, seconds: float) -> None:
        self._seconds = self._seconds * (1 - 1 / MEMORY_LOADS) + seconds

    @property
    def ps_per_byte(self) -> int:
        """Picoseconds per byte; 0: not measured."""
        if self._loads < LEAST_LOADS or self._bytes <= 0:
            return 0
        return min(2**31, max(1, round(self._seconds * 1e12 / self._bytes)))
