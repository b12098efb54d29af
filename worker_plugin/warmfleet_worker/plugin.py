"""vLLM's entry point (group ``vllm.general_plugins``): reads the environment and lets ``vllm_hooks`` hook this process.

vLLM calls ``register`` in the API server, in every engine core, in every GPU worker and in the subprocess that
inspects the model. ``register`` therefore only replaces functions; the work begins when a Scheduler is made (in an
engine core) and when the OpenAI server has its state (in the API server). Replaced are:

- ``insert`` and ``pop`` of the block pool's ``BlockHashToBlockMap``: they show which block hashes appear and disappear;
- ``BlockPool.reset_prefix_cache``, which makes a new map;
- ``BlockPool.cache_full_blocks``, if the model has several KV cache groups: it tells which blocks precede each other;
- ``BlockPool.cache_partial_block``, where it exists: the table then also has parts of blocks, which are not reported;
- ``KVCacheManager.free`` and ``BlockPool.get_new_blocks``, only if WARMFLEET_TTFT_TARGET_S is set;
- ``Scheduler.__init__``, ``schedule``, ``update_from_output`` and ``shutdown``;
- ``init_app_state`` of the API server, and ``shutdown`` of its engine client.

Before any hook, ``vllm_hooks/compatibility`` checks that this vLLM has all internals that the plugin uses.
Every replacement returns the result of the original; an error of the plugin is only logged (``swallow_errors``).
All loggers of this distribution are called ``vllm.warmfleet``: below vLLM's logger, so that the lines appear wherever
vLLM's own do, also when vLLM sets up its log after its plugins.
"""

from __future__ import annotations

import logging
import os
import sys

from warmfleet_worker.protocol.redis_address import with_ca
from warmfleet_worker.server_address import default_server_id
from warmfleet_worker.vllm_hooks.api_server import hook_api_server
from warmfleet_worker.vllm_hooks.engine_core import hook_scheduler
from warmfleet_worker.vllm_hooks.swallow_errors import swallow_errors

logger = logging.getLogger("vllm.warmfleet")


def register() -> None:
    """Hook this vLLM process, unless WARMFLEET_REDIS_URL is unset. Never raises, and may be called again."""
    with swallow_errors("could not hook vLLM"):
        redis_url = os.environ.get("WARMFLEET_REDIS_URL")
        if not redis_url:
            logger.info("warmfleet: inactive: WARMFLEET_REDIS_URL is not set")
            return
        redis_url = with_ca(redis_url, os.environ.get("WARMFLEET_REDIS_CA", ""))
        # The engine core inherits the environment of the API server, so both processes have the same server id.
        os.environ.setdefault("WARMFLEET_WORKER_ID", default_server_id(sys.argv))
        hook_scheduler(redis_url)
        hook_api_server(redis_url)
