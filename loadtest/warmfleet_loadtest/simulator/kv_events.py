"""vLLM's KV events over ZMQ, as its ``ZmqEventPublisher`` sends them. Other projects' routers read them.

A batch has three frames: topic (empty, vLLM's default), sequence number (8 bytes, big-endian) and msgpack of
``[time, events, data-parallel rank]``. It is sent at the end of a step, as in vLLM 0.32. Lost batches are not repeated.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgpack
import zmq

if TYPE_CHECKING:
    from warmfleet_loadtest.simulator.scheduler import Request, Scheduler

HIGH_WATER = 100_000  # messages that may wait for a subscriber, as in vLLM; further ones are dropped


class KvEvents:
    """Gathers the changes of a scheduler and its pool; call ``publish`` after each step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set_hwm(HIGH_WATER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._block_tokens = scheduler.limits.block_tokens
        self._sequence = 0
        self._events: list[dict[str, Any]] = []
        scheduler.pool.listener = self
        scheduler.on_cached = self.cached

    def cached(self, request: Request, start: int, end: int) -> None:
        """Blocks ``start`` to ``end`` of a request have entered the cache: one event, also for further copies."""
        size = self._block_tokens
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": [int.from_bytes(one, "big") for one in request.hashes[start:end]],
                "parent_block_hash": int.from_bytes(request.hashes[start - 1], "big") if start else None,
                "token_ids": request.slice(start * size, end * size),
                "block_size": size,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "group_idx": 0,
            }
        )

    def stored(self, hashes: bytes) -> None:
        """Nothing to do: ``cached`` has made the event, with the token ids."""

    def removed(self, hashes: bytes) -> None:
        """The last copy of a hash has gone. vLLM sends an event for every copy; subscribers need only the last."""
        block = int.from_bytes(hashes, "big")
        self._events.append({"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": 0})

    def cleared(self) -> None:
        self._events.append({"type": "AllBlocksCleared"})

    def close(self) -> None:
        """Close the socket. Events that are not sent yet are lost, as with vLLM."""
        self._socket.close()

    def publish(self) -> None:
        """Send the gathered events. Never waits."""
        if not self._events:
            return
        batch = msgpack.packb([time.time(), self._events, 0])
        self._socket.send_multipart([b"", self._sequence.to_bytes(8, "big"), batch])
        self._sequence += 1
        self._events = []
