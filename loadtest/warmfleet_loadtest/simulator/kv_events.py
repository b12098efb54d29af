"""vLLM's KV events over ZMQ, as its ``ZmqEventPublisher`` sends them. The bridge and other projects' routers read them.

A batch has three frames: topic (empty, vLLM's default), sequence number (8 bytes, big-endian) and msgpack of
``[time, events, data-parallel rank]``. It is sent at the end of a step, as in vLLM 0.32. A second port replays the last
10,000 batches on request.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgpack
import zmq

if TYPE_CHECKING:
    from warmfleet_loadtest.simulator.scheduler import Request, Scheduler

HIGH_WATER = 100_000  # most messages that wait for a subscriber, as in vLLM; further ones are dropped
KEPT_BATCHES = 10_000  # number of latest batches that are kept for replays
REPLAY_POLL_MS = 100  # time between two checks whether the publisher was closed
END = (-1).to_bytes(8, "big", signed=True)


class KvEvents:
    """Gathers the changes of a scheduler and its pool; call ``publish`` after each step.

    ports: of events and replays; 0: any free one. kept: the number of latest batches kept for replays.
    """

    def __init__(self, scheduler: Scheduler, ports: tuple[int, int] = (0, 0), kept: int = KEPT_BATCHES) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set_hwm(HIGH_WATER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.port = _bind(self._socket, ports[0])
        self._block_tokens = scheduler.limits.block_tokens
        self._lookahead = scheduler.scheme.lookahead
        self._sequence = 0
        self._events: list[dict[str, Any]] = []
        self._kept = deque[tuple[int, bytes]](maxlen=kept)
        self._closed = threading.Event()
        router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        self.replay_port = _bind(router, ports[1])
        self._replays = threading.Thread(target=self._serve_replays, args=(router,), name="replays", daemon=True)
        self._replays.start()
        scheduler.pool.listener = self
        scheduler.pool.on_copy_removed = self.copy_removed
        scheduler.on_cached = self.cached

    def cached(self, request: Request, start: int, end: int) -> None:
        """Note one event for blocks ``start`` to ``end`` of a request, which entered the cache (perhaps as copies)."""
        size, ahead = self._block_tokens, self._lookahead
        extra = [None] * (end - start)
        behind = [request.slice(block * size, block * size + ahead) for block in range(start + 1, end + 1)]
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": [int.from_bytes(digest, "big") for digest in request.hashes[start:end]],
                "parent_block_hash": int.from_bytes(request.hashes[start - 1], "big") if start else None,
                "token_ids": request.slice(start * size, end * size),
                "block_size": size,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [(request.salt,), *extra[1:]] if request.salt is not None and not start else extra,
                "group_idx": 0,
                **({"lookahead_token_ids": behind} if ahead else {}),
            }
        )

    def stored(self, hashes: bytes) -> None:
        """Do nothing: ``cached`` has made the event, with the token ids."""

    def removed(self, hashes: bytes) -> None:
        """Do nothing: ``copy_removed`` has made the event."""

    def copy_removed(self, block_hash: bytes) -> None:
        """Note that a block with this hash was evicted. vLLM sends an event even if other copies are left."""
        block = int.from_bytes(block_hash, "big")
        self._events.append({"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": 0})

    def cleared(self) -> None:
        self._events.append({"type": "AllBlocksCleared"})

    def close(self) -> None:
        """Close the sockets. Events that are not sent yet are lost, as with vLLM."""
        self._closed.set()
        self._replays.join()
        self._socket.close()

    def publish(self) -> None:
        """Send the gathered events. Never waits."""
        if not self._events:
            return
        batch = msgpack.packb([time.time(), self._events, 0])
        self._kept.append((self._sequence, batch))
        self._socket.send_multipart([b"", self._sequence.to_bytes(8, "big"), batch])
        self._sequence += 1
        self._events = []

    def _serve_replays(self, router: zmq.Socket[bytes]) -> None:
        with router:
            while not self._closed.is_set():
                if not router.poll(REPLAY_POLL_MS):
                    continue
                client, _empty, start = router.recv_multipart()
                for number, batch in list(self._kept):  # an atomic copy, because the engine's thread goes on publishing
                    if number >= int.from_bytes(start, "big"):
                        router.send_multipart([client, b"", b"", number.to_bytes(8, "big"), batch])
                router.send_multipart([client, b"", b"", END, b""])


def _bind(socket: zmq.Socket[bytes], port: int) -> int:
    """Bind the socket and return its port. Tries for 5 s: a port is free only a moment after its socket was closed.

    Raises OSError if the port is taken.
    """
    if not port:
        return int(socket.bind_to_random_port("tcp://127.0.0.1"))
    deadline = time.monotonic() + 5.0
    while True:
        try:
            socket.bind(f"tcp://127.0.0.1:{port}")
        except zmq.ZMQError as error:
            if time.monotonic() > deadline:
                raise OSError(f"KV events cannot be published on port {port}: {error}") from error
            time.sleep(0.02)
        else:
            return port
