"""vLLM's KV events over ZMQ, as its ``ZmqEventPublisher`` sends them: what routers of others learn the cache from.

Three frames a batch: topic (empty, vLLM's default), sequence number (8 bytes, big-endian) and msgpack of
``[time, events, data-parallel rank]``. A batch leaves at the end of a step, as in vLLM 0.32. There is no replay.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgpack
import zmq

if TYPE_CHECKING:
    from warmfleet_loadtest.simulator.scheduler import Request, Scheduler

HIGH_WATER = 100_000  # vLLM's: messages that wait for a subscriber; further ones are dropped


class KvEvents:
    """Listens to a scheduler and its pool. ``publish`` after each step."""

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
        """Blocks ``start``..``end`` of a request entered the cache: one event, whatever copies there are."""
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
        """``cached`` tells more."""

    def removed(self, hashes: bytes) -> None:
        """A hash's last copy went (vLLM tells of every copy; this is what its subscribers would like to hear)."""
        block = int.from_bytes(hashes, "big")
        self._events.append({"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": 0})

    def cleared(self) -> None:
        self._events.append({"type": "AllBlocksCleared"})

    def close(self) -> None:
        """What is not sent yet is lost, as with vLLM."""
        self._socket.close()

    def publish(self) -> None:
        """Send what has gathered; never waits."""
        if not self._events:
            return
        batch = msgpack.packb([time.time(), self._events, 0])
        self._socket.send_multipart([b"", self._sequence.to_bytes(8, "big"), batch])
        self._sequence += 1
        self._events = []
