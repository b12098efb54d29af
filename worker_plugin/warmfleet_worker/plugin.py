"""vLLM's entry point (group ``vllm.general_plugins``). With ``vllm_core`` and ``vllm_server`` all that knows vLLM.

vLLM calls ``register`` in the API server, in every engine core, in every GPU worker and in the subprocess that
inspects the model. It therefore only hooks; work begins when a Scheduler is made (engine core) and when the OpenAI
server has its state (API server). Hooked, all present in vLLM 0.28 to 0.33:

- the ``BlockHashToBlockMap`` of the scheduler's block pool: it tells which hashes appear and disappear;
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
from typing import TYPE_CHECKING, Any

from warmfleet_worker.protocol.redis_address import with_ca
from warmfleet_worker.server_publisher import default_server_id
from warmfleet_worker.tracker import track, untrack
from warmfleet_worker.vllm_hooks.engine_core import Core, model_tag
from warmfleet_worker.vllm_hooks.swallow_errors import guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
        redis_url = with_ca(redis_url, os.environ.get("WARMFLEET_REDIS_CA", ""))
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


# ---------------------------------------------------------------- the block table


def hook_block_table() -> None:
    """``reset_prefix_cache`` goes on with a new map: follow it, even when the engine idles."""
    from vllm.v1.core import block_pool

    if hasattr(block_pool, HOOKED):
        return
    setattr(block_pool, HOOKED, True)

    def reset_prefix_cache(original: Any, pool: Any, *args: Any, **kwargs: Any) -> Any:
        before = pool.cached_block_hash_to_block
        result = original(pool, *args, **kwargs)
        after = pool.cached_block_hash_to_block
        if after is not before:
            with guarded("could not follow a reset of the prefix cache"):
                transitions = untrack(before)
                if transitions is not None:
                    track(after, transitions, cleared=True)
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


# ---------------------------------------------------------------- the API server


def hook_server(redis_url: str) -> None:
    from warmfleet_worker.vllm_hooks.api_server import start_server_half

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
