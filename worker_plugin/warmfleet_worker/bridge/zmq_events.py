"""The two ZMQ sockets of one engine core: live batches (SUB), and replays of earlier ones (its ROUTER)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from warmfleet_worker.bridge.sequence import ReplayError

if TYPE_CHECKING:
    from collections.abc import Iterator

HIGH_WATER = 100_000  # most batches that wait in a socket; an engine queues as many for a slow subscriber
REPLAY_SILENCE_SECONDS = 3.0  # longest silence in a replay; an engine looks for replay requests every 0.1 s
REPLAY_SECONDS = 60.0  # longest time for a whole replay
END = (-1).to_bytes(8, "big", signed=True)
RECONNECT_MS = 100, 2_000  # first and longest pause between tries to connect


class EventSockets:
    """Reads KV events, in the thread that enters it, until it is left.

    endpoint, replay_endpoint (None: no replay): such as ``tcp://host:5557``.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, replay_endpoint: str | None) -> None:
        self._context, self._endpoint, self._replay_endpoint = context, endpoint, replay_endpoint

    def __enter__(self) -> Self:
        self._live = live = self._context.socket(zmq.SUB)
        live.setsockopt(zmq.LINGER, 0)
        live.setsockopt(zmq.RCVHWM, HIGH_WATER)
        live.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS[0])
        live.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1])
        live.setsockopt(zmq.TCP_KEEPALIVE, 1)
        live.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        live.subscribe(b"")
        self._monitor = live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            live.connect(self._endpoint)
        except zmq.ZMQError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._live.disable_monitor()
        self._monitor.close(0)  # disable_monitor leaves it open
        self._live.close(0)

    def wait(self, seconds: float) -> None:
        """Return when a batch has come, or after this time."""
        self._live.poll(int(1_000 * seconds))

    def received(self, most: int) -> Iterator[tuple[int, bytes]]:
        """Receive (number, payload) of up to ``most`` batches that have come. Frames that are no batch are skipped."""
        for _ in range(most):
            try:
                frames = self._live.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3 and len(frames[1]) == 8:
                yield int.from_bytes(frames[1], "big"), frames[2]

    def reconnected(self) -> bool:
        """Tell whether the connection began or broke since the last call: if so, batches may be missing."""
        changed = False
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            changed = True
        return changed

    def replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Ask the engine for the batches from ``start`` on, as far as it still has them. Raises ReplayError.

        A ZeroMQ ROUTER socket drops messages while a reader's queue is full, so batches in the middle may be missing.
        """
        if self._replay_endpoint is None:
            raise ReplayError("no replay endpoint is known")
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
            socket.connect(self._replay_endpoint)
            socket.send_multipart([b"", start.to_bytes(8, "big")])
            deadline = time.monotonic() + REPLAY_SECONDS
            while time.monotonic() < deadline:
                if not socket.poll(int(1_000 * REPLAY_SILENCE_SECONDS)):
                    raise ReplayError(f"{self._replay_endpoint} does not answer")
                # [empty, topic,] number, payload: earlier engines sent no topic
                frames = socket.recv_multipart()
                if len(frames) < 3 or len(frames[-2]) != 8:
                    raise ReplayError(f"{self._replay_endpoint} answers no replay")
                if frames[-2] == END:
                    return
                yield int.from_bytes(frames[-2], "big"), frames[-1]
        raise ReplayError(f"{self._replay_endpoint} took too long")
