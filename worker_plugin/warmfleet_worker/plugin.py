"""vLLM's entry point (group ``vllm.general_plugins``). With ``vllm_server`` the only file that knows vLLM.

vLLM calls ``register`` in the API server, in every engine core, in every GPU worker and in the subprocess that
inspects the model. It therefore only hooks; work begins when a Scheduler is made (engine core) and when the OpenAI
server has its state (API server). Hooked, all present in vLLM 0.28 to 0.33:

- ``BlockHashToBlockMap``: replaced by a subclass that reports which hashes appear and disappear;
- ``BlockPool.reset_prefix_cache``: it makes a new map;
- ``Scheduler.__init__``, ``schedule``, ``update_from_output``, ``shutdown``;
- ``init_app_state`` of the API server.

Every hook calls the original first and hands its result on; what we add is guarded (see ``guarded``).
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from warmfleet_worker import meter, wire
from warmfleet_worker.publisher import Load, PublisherConfig, WorkerPublisher
from warmfleet_worker.server import default_server_id
from warmfleet_worker.tracker import Transitions, hash_of_key, tracking_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

logger = logging.getLogger("vllm.warmfleet")  # below vllm's logger: its handlers and format apply

#: Modules that call ``init_app_state`` by their own name for it: vLLM 0.32, and before.
SERVER_MODULES = ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server")
HOOKED = "__warmfleet_hooked__"


def register() -> None:
    """Hook this vLLM process, unless WARMFLEET_REDIS_URL is unset. Never raises, may be called again."""
    with guarded("could not hook vLLM"):
        redis_url = os.environ.get("WARMFLEET_REDIS_URL")
        if not redis_url:
            logger.info("warmfleet: inactive: WARMFLEET_REDIS_URL is not set")
            return
        log_with_vllm()
        # The engine core inherits the environment of the API server: so both halves have the same name.
        os.environ.setdefault("WARMFLEET_WORKER_ID", default_server_id(sys.argv))
        hook_block_table()
        hook_scheduler(redis_url)
        hook_server(redis_url)


def log_with_vllm() -> None:
    """The publisher's lines appear where vLLM's own do, in vLLM's format."""
    ours = logging.getLogger("warmfleet")
    if not ours.handlers:
        ours.handlers = list(logging.getLogger("vllm").handlers)
        ours.setLevel(logging.INFO)
        ours.propagate = False


def guarded(what: str) -> AbstractContextManager[None]:
    """Log and swallow any exception.

    Why so broad: vLLM calls plugins and the scheduler unguarded, so anything raised here would end the engine. Not
    being reported to the fleet is the lesser evil, and the log says so.
    """
    return _Guard(what)


class _Guard:
    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> bool:
        if isinstance(error, Exception):
            logger.error("warmfleet: %s: this engine is not, or not fully, reported", self.what, exc_info=error)
            return True
        return False


# ---------------------------------------------------------------- the block table


def hook_block_table() -> None:
    from vllm.v1.core import block_pool

    if hasattr(block_pool, HOOKED):
        return
    setattr(block_pool, HOOKED, True)
    block_pool.BlockHashToBlockMap = tracking_map(block_pool.BlockHashToBlockMap)

    def reset_prefix_cache(original: Any, pool: Any, *args: Any, **kwargs: Any) -> Any:
        before = pool.cached_block_hash_to_block
        result = original(pool, *args, **kwargs)
        after = pool.cached_block_hash_to_block
        transitions = getattr(before, "transitions", None)
        if after is not before and transitions is not None:
            before.transitions, after.transitions = None, transitions
            transitions.replace(after._cache)  # noqa: SLF001 - the table itself
        return result

    wrap(block_pool.BlockPool, "reset_prefix_cache", reset_prefix_cache)


def wrap(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``replacement(original, *its arguments)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def hook(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, hook)


# ---------------------------------------------------------------- the engine core


def hook_scheduler(redis_url: str) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    if hasattr(Scheduler, HOOKED):
        return
    setattr(Scheduler, HOOKED, True)
    cores: dict[int, Core] = {}  # by id of the scheduler: normally one in a process, and it lives as long

    def init(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        original(scheduler, *args, **kwargs)
        with guarded("could not start the publisher"):
            cores[id(scheduler)] = core = Core(scheduler, redis_url)
            core.start()

    def schedule(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(scheduler, *args, **kwargs)
        core = cores.get(id(scheduler))
        if core is not None:
            core.scheduled(output)
        return output

    def update_from_output(original: Any, scheduler: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(scheduler, scheduler_output, *args, **kwargs)
        core = cores.get(id(scheduler))
        if core is not None:
            core.done(scheduler_output, outputs)
        return outputs

    def shutdown(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        core = cores.pop(id(scheduler), None)
        if core is not None:
            with guarded("could not say goodbye"):
                core.stop()
        return original(scheduler, *args, **kwargs)

    wrap(Scheduler, "__init__", init)
    wrap(Scheduler, "schedule", schedule)
    wrap(Scheduler, "update_from_output", update_from_output)
    wrap(Scheduler, "shutdown", shutdown)


class Core:
    """One Scheduler's reporter. ``scheduled`` and ``done`` run on the engine's thread; ``load`` does not."""

    def __init__(self, scheduler: Any, redis_url: str) -> None:
        self._scheduler = scheduler
        self._speed = meter.SpeedMeter()
        self._broken = False
        group, block_tokens, closed = full_attention_group(scheduler)
        self.transitions = Transitions(hash_of_key(group))
        table = scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        with self.transitions.lock:
            table.transitions = self.transitions
            self.transitions.table = table._cache  # noqa: SLF001 - the table itself
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
            prefill, decode = meter.step_tokens(scheduler_output)
            self._speed.done(id(scheduler_output), time.monotonic(), prefill, decode)
            for reservation, cached_tokens, prompt_tokens in meter.finished_prefills(outputs):
                publisher.progress(reservation, cached_tokens, prompt_tokens)
            self._broken = False

    def load(self) -> Load:
        """Read in the publisher's thread: ``list`` of a dict is one atomic call."""
        running, waiting = self._scheduler.get_request_counts()
        prefill, decode = meter.foreign_load(list(self._scheduler.requests.values()))
        return Load(running, waiting, prefill, decode, self._speed.speed_tps)


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


# ---------------------------------------------------------------- the API server


def hook_server(redis_url: str) -> None:
    from warmfleet_worker.vllm_server import start_server_half

    for module in server_modules():
        if hasattr(module, HOOKED):
            continue
        setattr(module, HOOKED, True)

        async def init_app_state(original: Any, engine_client: Any, state: Any, *args: Any, **kwargs: Any) -> None:
            await original(engine_client, state, *args, **kwargs)
            with guarded("could not announce this API server"):
                start_server_half(engine_client, state, redis_url, model_tag(engine_client.vllm_config))

        wrap(module, "init_app_state", init_app_state)


def server_modules() -> Iterator[Any]:
    """Those that this process has loaded: only the API server has, and it has before it loads plugins."""
    for name in SERVER_MODULES:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "build_and_serve"):
            yield module
