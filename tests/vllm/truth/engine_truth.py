"""A second, independent general plugin of vLLM, for tests only: tells the engine's own block table on a unix socket
and, if asked to, keeps a journal of what the engine core does, or makes it hash with another seed while a file exists.
It also counts the prompts that are tokenised, and lets the engine's processes sleep while they wait for each other.

It shares no code with warmfleet_worker: it reads ``BlockPool.cached_block_hash_to_block`` directly.
"""

import functools
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

YIELD_S = 0.0002
NIXL_LOOKS_US = 1_000  # time between two looks of NIXL's thread for arrivals; it has none by default, and takes a core


def register() -> None:
    path = os.environ.get("ENGINE_TRUTH_SOCKET")
    if not path:
        return
    count_tokenised(Path(os.environ["ENGINE_TRUTH_TOKENISED"]))
    if os.environ.get("ENGINE_TRUTH_SLEEPS"):
        # The engine core and its worker spin while they wait for each other, with a yield in each round. Where several
        # engines share a few cores, that takes a part of the cores from the worker of another engine.
        os.sched_yield = functools.partial(time.sleep, YIELD_S)
        if os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT"):
            let_nixl_sleep()
    if os.environ.get("ENGINE_TRUTH_ACCELERATOR"):
        pretend_an_accelerator()
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.__init__
    if hasattr(original, "tells_the_truth"):
        return

    @functools.wraps(original)
    def init(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        original(self, *args, **kwargs)
        pool = self.kv_cache_manager.block_pool
        rank = self.vllm_config.parallel_config.data_parallel_index
        told_at = f"{path}.{rank}" if rank else path
        threading.Thread(
            target=serve, args=(told_at, lambda: blocks_of(pool)), name="engine-truth", daemon=True
        ).start()
        manager = getattr(getattr(self.connector, "connector_scheduler", None), "manager", None)
        if manager is not None:
            args = f"{told_at}.tier", lambda: tier_of(manager)
            threading.Thread(target=serve, args=args, name="engine-truth-tier", daemon=True).start()
        seed = os.environ.get("ENGINE_TRUTH_OTHER_SEED")
        if seed:
            threading.Thread(target=reseed, args=(Path(seed),), name="engine-reseed", daemon=True).start()
        journal = os.environ.get("ENGINE_TRUTH_JOURNAL")
        if journal:
            Journal(Path(journal), pool, float(os.environ.get("ENGINE_TRUTH_STEP_S", "0"))).keep(self)

    init.tells_the_truth = True  # type: ignore[attr-defined]
    Scheduler.__init__ = init


def pretend_an_accelerator() -> None:
    """Let connectors that are made for GPUs start on the CPU: Mooncake's asks for the number of its device."""
    import torch

    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.set_device_index = lambda _index: None
    torch.accelerator.synchronize = lambda *_arguments: None


def let_nixl_sleep() -> None:
    from nixl_cu12 import _bindings  # type: ignore[import-not-found]

    usual = _bindings.nixlAgentConfig
    delay = usual.pthrDelay

    class Sleeping(usual):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            delay.__set__(self, NIXL_LOOKS_US)

        @property
        def pthrDelay(self) -> Any:  # noqa: N802  NIXL's name
            return delay.__get__(self)

        @pthrDelay.setter
        def pthrDelay(self, value: Any) -> None:  # noqa: N802
            """NIXL's own API sets 0."""

    _bindings.nixlAgentConfig = Sleeping


def count_tokenised(path: Path) -> None:
    """Write a byte to ``path`` for every prompt that this server tokenises itself."""
    from vllm.renderers.base import BaseRenderer

    original = BaseRenderer._tokenize_prompt
    if hasattr(original, "counts"):
        return

    @functools.wraps(original)
    def tokenize(self, *args):  # type: ignore[no-untyped-def]
        with path.open("ab") as file:
            file.write(b".")
        return original(self, *args)

    tokenize.counts = True  # type: ignore[attr-defined]
    BaseRenderer._tokenize_prompt = tokenize


def blocks_of(pool) -> list[bytes]:  # type: ignore[no-untyped-def]
    return list(pool.cached_block_hash_to_block._cache)


def tier_of(manager) -> list[bytes]:  # type: ignore[no-untyped-def]
    """The keys of a tier in CPU memory that can be loaded, whatever its policy keeps them in."""
    policy = getattr(manager, "primary_tier", manager)._policy
    kept: dict[bytes, Any] = {}
    for name in ("chunks", "blocks", "t1", "t2"):
        kept |= dict(getattr(policy, name, {}))
    return [key for key, chunk in kept.items() if chunk.is_ready]


def serve(path: str, held) -> None:  # type: ignore[no-untyped-def]
    """Answer each connection with one JSON list: the keys that ``held()`` returns, in hex."""
    Path(path).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            client, _ = listener.accept()
            with client:
                keys = held()
                client.sendall(json.dumps([bytes(key).hex() for key in keys]).encode())


def reseed(file: Path) -> None:
    """Hash as an engine that was started anew with another PYTHONHASHSEED, while ``file`` exists."""
    from vllm.v1.core import kv_cache_utils

    while not hasattr(kv_cache_utils, "NONE_HASH"):
        time.sleep(0.05)
    right = kv_cache_utils.NONE_HASH
    while True:
        kv_cache_utils.NONE_HASH = type(right)(b"\7" * len(right)) if file.exists() else right
        time.sleep(0.02)


class Journal:
    """A JSON line for each event, in the engine's own order: [CLOCK_MONOTONIC seconds, what, ...].

    ``table`` appeared, gone: block hashes, noted before anything that depends on them. ``add`` id, tokens, chain: a
    request came. ``look`` id, tokens: this many are cached now. ``run`` ids: these are scheduled, with what their last
    look found. ``preempt`` id; ``end`` id, status.
    """

    def __init__(self, path: Path, pool, step_s: float) -> None:  # type: ignore[no-untyped-def]
        self.file = path.open("w", buffering=1)
        self.pool = pool
        self.step_s = step_s  # added to a step: a model that is slow without taking the machine's CPU from the others
        self.held: set[bytes] = set()

    def note(self, *what: object) -> None:
        table = set(self.pool.cached_block_hash_to_block._cache)
        if table != self.held:
            changes = [[key[-12:-4].hex() for key in keys] for keys in (table - self.held, self.held - table)]
            self.held = table
            self.note("table", *changes)
        self.file.write(json.dumps([time.monotonic(), *what]) + "\n")

    def keep(self, scheduler) -> None:  # type: ignore[no-untyped-def]
        """Note all work of the scheduler from now on, on the engine's thread."""

        def around(owner, name, before=None, after=None) -> None:  # type: ignore[no-untyped-def]
            original = getattr(owner, name)

            @functools.wraps(original)
            def hook(*args, **kwargs):  # type: ignore[no-untyped-def]
                if before:
                    before(*args)
                result = original(*args, **kwargs)
                if after:
                    after(result, *args)
                return result

            setattr(owner, name, hook)

        def looked(found, request) -> None:  # type: ignore[no-untyped-def]
            if not request.num_preemptions:
                self.note("look", request.request_id, found[1])

        def scheduled(output, *_) -> None:  # type: ignore[no-untyped-def]
            self.note("run", [request.req_id for request in output.scheduled_new_reqs])
            if output.total_num_scheduled_tokens:
                time.sleep(self.step_s)

        def came(request) -> None:  # type: ignore[no-untyped-def]
            chain = [bytes(block)[-8:].hex() for block in request.block_hashes]
            self.note("add", request.request_id, request.num_tokens, chain)

        around(scheduler, "add_request", before=came)
        around(scheduler.kv_cache_manager, "get_computed_blocks", after=looked)
        around(scheduler, "schedule", after=scheduled)
        around(scheduler, "_preempt_request", before=lambda request, *_: self.note("preempt", request.request_id))
        around(
            scheduler,
            "_free_request",
            before=lambda request, *_: self.note("end", request.request_id, request.status.name),
        )
