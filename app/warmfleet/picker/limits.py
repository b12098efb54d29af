"""The limits of a port for gateways: how much a peer may send, open or repeat before its connection ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HEADER_BYTES: Final = 65_536  # most bytes of a call's headers, packed or unpacked; gateways send some 300
CONTINUATIONS: Final = 8  # most further frames of one header block
STREAM_WINDOW: Final = 262_144  # bytes that a stream may send before they are read; each stream may take this memory
CONNECTION_WINDOW: Final = 16_777_216  # bytes in flight of all streams together: 1.3 Gbit/s over 100 ms
#: Unsent bytes of a stream from which on its peer's messages are no longer asked for.
UNSENT_MAX: Final = 262_144
UNSENT_END_MAX_S: Final = 30.0  # longest time in which a peer takes the rest of a call that has ended here
SETTINGS_MAX: Final = 16  # most values in a SETTINGS frame; six are known
#: Frames that only make work (SETTINGS, PING, PRIORITY, empty DATA, unknown kinds): at once, and a second after that.
IDLE_FRAMES, IDLE_FRAMES_PER_S = 1_000, 100
#: Calls that a peer resets before they were answered. Clients that leave together reset all streams of a connection.
EARLY_RESETS, EARLY_RESETS_PER_S = 4_096, 500
MESSAGE_MARGIN: Final = 131_072  # bytes of a message beside the body in it: attributes, metadata, headers


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that settings change.

    streams: open calls of one connection. all_streams: of the port. connections: of the port. message_bytes: the
    longest message. preface_s: the longest wait for a connection's first bytes.
    """

    streams: int
    all_streams: int
    connections: int
    message_bytes: int
    preface_s: float = 10.0


class Budget:
    """A number of faults that a peer may make at once, and another number in each second."""

    __slots__ = ("_at", "_left", "_most", "_per_s")

    def __init__(self, most: int, per_s: int, now: float) -> None:
        self._most, self._per_s = most, per_s
        self._left, self._at = float(most), now

    def spend(self, now: float) -> bool:
        """Count a fault; return False if there were too many."""
        self._left = min(self._most, self._left + (now - self._at) * self._per_s) - 1
        self._at = now
        return self._left >= 0
