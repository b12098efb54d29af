"""All engines of one bridge: starts and stops them as the list of engines says."""

from __future__ import annotations

import logging
import threading
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import zmq

from warmfleet_worker.bridge import tokenizer_files
from warmfleet_worker.bridge.bridged_engine import BridgedEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet_worker.bridge.options import EngineOptions

logger = logging.getLogger("warmfleet")

#: Time between the starts of two engines. When a bridge is restarted, its engines join anew, and a worker that joins
#: gets no requests until a router has probed it. So one engine joins after the other, and the others go on serving.
APART_SECONDS = 1.0
LEAVE_SECONDS = 5.0  # longest wait until an engine that left the list has said goodbye
STOP_SECONDS = 10.0  # longest time that all engines together may take to end
TOKENIZERS = 8  # most tokenizers whose files are kept in memory


class Bridge:
    """Reports the engines of a list to the fleet. ``follow`` sets the list, and may be called again."""

    def __init__(self, redis_url: str, stopping: threading.Event | None = None) -> None:
        self.engines: dict[EngineOptions, BridgedEngine] = {}
        self._redis_url = redis_url
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._stopping = stopping or threading.Event()
        self._ending: list[BridgedEngine] = []  # engines not listed any more, whose threads still run
        self._loading: dict[tuple[str, str], threading.Lock] = {}  # by (name, chat template)
        self._tokenizers = lru_cache(TOKENIZERS)(tokenizer_files.load)

    def follow(self, wanted: Sequence[EngineOptions]) -> None:
        """Start the engines that are new, and let those leave the fleet that are not listed any more."""
        for options in [known for known in self.engines if known not in wanted]:
            logger.info("warmfleet: engine %s is not listed any more", options.url)
            engine = self.engines.pop(options)
            engine.stop(leave=True)
            engine.join(LEAVE_SECONDS)
            self._ending.append(engine)
        self._ending = [engine for engine in self._ending if not engine.ended]
        busy = {engine.options.name for engine in self._ending}  # a name is free again once its engine has said goodbye
        for options in wanted:
            if options not in self.engines and options.name not in busy and not self._stopping.is_set():
                engine = BridgedEngine(options, self._redis_url, self._context, self._load_tokenizer)
                self.engines[options] = engine
                engine.start()
                self._stopping.wait(APART_SECONDS if len(wanted) > 1 else 0.0)

    def stop(self) -> None:
        """Stop reporting. Routers go on using the engines, by their last reports, as long as the engines answer."""
        self._stopping.set()
        deadline = time.monotonic() + STOP_SECONDS
        engines = [*self.engines.values(), *self._ending]
        for engine in self.engines.values():
            engine.stop()
        for engine in engines:
            engine.join(max(0.0, deadline - time.monotonic()))
        if all(engine.ended for engine in engines):  # else a thread still uses sockets, which the process's end closes
            self._context.destroy(linger=0)

    def _load_tokenizer(self, name: str, chat_template: str) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Load a tokenizer (takes seconds) once for all engines of its model; other models do not wait meanwhile."""
        with self._loading.setdefault((name, chat_template), threading.Lock()):
            return self._tokenizers(name, chat_template)
