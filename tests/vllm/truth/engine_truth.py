"""A second, independent general plugin of vLLM, for tests only: tells the engine's own block table on a unix socket.

It shares no code with warmfleet_worker: it reads ``BlockPool.cached_block_hash_to_block`` directly.
"""

import functools
import json
import os
import socket
import threading
from pathlib import Path


def register() -> None:
    path = os.environ.get("ENGINE_TRUTH_SOCKET")
    if not path:
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.__init__
    if hasattr(original, "tells_the_truth"):
        return

    @functools.wraps(original)
    def init(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        original(self, *args, **kwargs)
        pool = self.kv_cache_manager.block_pool
        threading.Thread(target=serve, args=(path, pool), name="engine-truth", daemon=True).start()

    init.tells_the_truth = True  # type: ignore[attr-defined]
    Scheduler.__init__ = init


def serve(path: str, pool) -> None:  # type: ignore[no-untyped-def]
    """One JSON list of hex keys per connection."""
    Path(path).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            client, _ = listener.accept()
            with client:
                keys = list(pool.cached_block_hash_to_block._cache)
                client.sendall(json.dumps([bytes(key).hex() for key in keys]).encode())
