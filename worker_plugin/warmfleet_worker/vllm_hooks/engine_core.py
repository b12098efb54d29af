"""What vLLM's engine core knows: its block table, its scheme, its load. Made by ``plugin`` for every Scheduler."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from typing import Any

from warmfleet_worker import speed_meter
from warmfleet_worker.protocol import wire
from warmfleet_worker.tracker import Transitions, hash_of_key, track
from warmfleet_worker.vllm_hooks.swallow_errors import guarded
from warmfleet_worker.worker_publisher import Load, PublisherConfig, WorkerPublisher

logger = logging.getLogger("vllm.warmfleet")


class Core:
    """One Scheduler's reporter. ``scheduled`` and ``done`` run on the engine's thread; ``load`` does not."""

    def __init__(self, scheduler: Any, redis_url: str) -> None:
        self._scheduler = scheduler
        self._speed = speed_meter.SpeedMeter()
        self._broken = self._load_broken = False
        group, block_tokens, closed = full_attention_group(scheduler)
        self.transitions = Transitions(hash_of_key(group))
        track(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block, self.transitions)
        self._publisher: WorkerPublisher | None = None
        self._join = functools.partial(publisher_config, scheduler.vllm_config, redis_url, block_tokens, closed)
        self._stopping = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._start, name="warmfleet-start", daemon=True).start()

    def _start(self) -> None:
        """The engine core makes its NONE_HASH only after its Scheduler: wait for it, then join."""
        from vllm.v1.core import kv_cache_utils

        with guarded("could not start the publisher"):
            cache = self._scheduler.vllm_config.cache_config
            while cache.enable_prefix_caching and not hasattr(kv_cache_utils, "NONE_HASH"):
                if self._stopping.wait(0.05):
                    return
            self._publisher = WorkerPublisher(self._join(), self.transitions, self.load)
            self._publisher.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._publisher is not None:
            self._publisher.stop(1.0)

    def scheduled(self, output: Any) -> None:
        self._speed.scheduled(id(output), time.monotonic())

    def done(self, scheduler_output: Any, outputs: Any) -> None:
        """A step's result: its speed, and whose prefill it has finished. Errors end this part of the reports."""
        publisher = self._publisher
        if self._broken or publisher is None:
            return
        self._broken = True  # until we get to the end
        with guarded("could not read a step's result"):
            prefill, decode = speed_meter.step_tokens(scheduler_output)
            self._speed.done(id(scheduler_output), time.monotonic(), prefill, decode)
            for reservation, cached_tokens, prompt_tokens in speed_meter.finished_prefills(outputs):
                publisher.progress(reservation, cached_tokens, prompt_tokens)
            self._broken = False

    def load(self) -> Load:
        """Read in the publisher's thread: ``list`` of a dict is one atomic call."""
        if not self._load_broken:
            self._load_broken = True  # until we get to the end
            with guarded("could not read the scheduler's load"):
                running, waiting = self._scheduler.get_request_counts()
                prefill, decode = speed_meter.foreign_load(list(self._scheduler.requests.values()))
                self._load_broken = False
                return Load(running, waiting, prefill, decode, self._speed.speed_tps)
        return Load()  # the heartbeat goes on: the engine is alive


def full_attention_group(scheduler: Any) -> tuple[int, int, bool]:
    """(group number, tokens in a block, prefix-closed?) of the KV group that routers match.

    Sliding-window, Mamba and other groups forget the middle of a prompt; only full attention holds whole prefixes.
    """
    manager = scheduler.kv_cache_manager
    groups = manager.kv_cache_config.kv_cache_groups
    full = [number for number, group in enumerate(groups) if is_full_attention(group.kv_cache_spec)]
    if not full:
        raise RuntimeError("this model has no full-attention KV cache group")
    number = full[0]
    block_tokens = manager.coordinator.single_type_managers[number].block_size
    if scheduler.hash_block_size != block_tokens:
        logger.warning("warmfleet: hash block size %d is not %d", scheduler.hash_block_size, block_tokens)
    return number, block_tokens, len(groups) == 1 and scheduler.connector is None


def is_full_attention(spec: Any) -> bool:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    inner = next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec
    return isinstance(inner, FullAttentionSpec)


def publisher_config(vllm_config: Any, redis_url: str, block_tokens: int, closed: bool) -> PublisherConfig:
    from vllm.version import __version__

    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    server_id, rank = os.environ["WARMFLEET_WORKER_ID"], parallel.data_parallel_index
    return PublisherConfig(
        redis_url=redis_url,
        model=model_tag(vllm_config),
        worker_id=wire.worker_id_of(server_id, rank),
        server_id=server_id,
        rank=rank,
        scheme=scheme_of(vllm_config, block_tokens),
        capacity_blocks=cache.num_gpu_blocks,
        max_model_len=vllm_config.model_config.max_model_len,
        version=f"vllm-{__version__}",
        closed=closed,
    )


def scheme_of(vllm_config: Any, block_tokens: int) -> wire.Scheme:
    """How this engine hashes. Without prefix caching it has no NONE_HASH: then nothing is ever stored."""
    from vllm.v1.core import kv_cache_utils

    tagged = hasattr(kv_cache_utils, "to_event_extra_keys")  # came with the tags, in vLLM 0.31
    lookahead = getattr(vllm_config, "num_hash_lookahead_tokens", 0)  # 0.33 with EAGLE: routers cannot follow
    return wire.Scheme(
        algorithm=vllm_config.cache_config.prefix_caching_hash_algo,
        none_hash=bytes(getattr(kv_cache_utils, "NONE_HASH", bytes(32))),
        block_tokens=block_tokens,
        extra_keys=f"lookahead_{lookahead}" if lookahead else "tagged" if tagged else "plain",
    )


def model_tag(vllm_config: Any) -> str:
    """WARMFLEET_MODEL, else the first served model name; raises WireError if that cannot be a name."""
    served = vllm_config.model_config.served_model_name
    name = os.environ.get("WARMFLEET_MODEL") or (served if isinstance(served, str) else served[0]).strip("/")
    try:
        wire.model_tag(name)
    except wire.WireError as error:
        raise wire.WireError(f"set WARMFLEET_MODEL: {error}") from error
    return name
