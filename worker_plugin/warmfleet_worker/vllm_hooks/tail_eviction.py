"""T-LRU in vLLM's block pool: ``KVCacheManager.free`` tags blocks, ``BlockPool.get_new_blocks`` gives them up first.

Both functions are replaced on the objects of one scheduler, and only if WARMFLEET_TTFT_TARGET_S asks for it. vLLM's
free queue holds every free block in the order of eviction: those without content in front, then the least recently used
ones. Blocks to be given up are moved to the front of that queue, as many as the allocation would otherwise evict;
everything else is vLLM's own.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from warmfleet_worker.eviction.objective import Served
from warmfleet_worker.eviction.tail_eviction import Finished, eviction_of
from warmfleet_worker.protocol.wire import conversation_ended
from warmfleet_worker.vllm_hooks.compatibility import Part, missing, refuse
from warmfleet_worker.vllm_hooks.swallow_errors import swallow_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet_worker.eviction.tail_eviction import TailEviction

logger = logging.getLogger("vllm.warmfleet")

XARG, ENDED = "x-warmfleet-conversation", "ended"  # a key of ``vllm_xargs`` in a request's body, and its value
LOG_SECONDS = 60.0  # time between two log lines about blocks that T-LRU evicted early


def install(
    scheduler: Any, target: str | None, speed_tps: Callable[[], int], full_attention: bool = True
) -> TailEvictionHook | None:
    """Let the scheduler's cache evict by T-LRU; returns None if ``target`` asks for none, or T-LRU is not possible.

    target: the value of WARMFLEET_TTFT_TARGET_S. speed_tps: returns the measured prefill speed.
    full_attention: the model has a KV cache group that keeps whole prompts.
    """
    if not target:
        return None
    reason = missing(Part.EVICTION)
    if reason:
        refuse(Part.EVICTION, reason)
        return None
    reason = obstacle(scheduler) if full_attention else "the model keeps no whole prompts"
    if reason:
        logger.warning("warmfleet: WARMFLEET_TTFT_TARGET_S has no effect: %s", reason)
        return None
    manager = scheduler.kv_cache_manager
    block_tokens = manager.coordinator.single_type_managers[0].block_size
    try:
        eviction = eviction_of(target, speed_tps, block_tokens, len(manager.block_pool.blocks))
    except ValueError as error:
        logger.error("warmfleet: %s: blocks are evicted as vLLM does it", error)  # noqa: TRY400 - the sentence says all
        return None
    hook = TailEvictionHook(manager, eviction)
    hook.install()
    logger.info("warmfleet: blocks are evicted for a time to first token of %s s", target)
    return hook


def obstacle(scheduler: Any) -> str:
    """Say why T-LRU is not possible here; empty if it is.

    A KV connector also frees blocks elsewhere (later, and after a transfer). With several KV cache groups a prefix
    counts as cached only where all groups have it, so the end of a prompt may be the part worth keeping.
    """
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching:
        return "prefix caching is off"
    if scheduler.connector is not None:
        return "the engine has a KV connector"
    if len(manager.kv_cache_config.kv_cache_groups) != 1:
        return "the model has more than one KV cache group"
    return ""


class TailEvictionHook:
    """Lets one ``KVCacheManager`` evict as ``eviction`` says, until the first error. Runs on the engine's thread."""

    def __init__(self, manager: Any, eviction: TailEviction) -> None:
        self.eviction = eviction
        self._manager, self._pool = manager, manager.block_pool
        self._blocks = manager.block_pool.blocks
        self._of_request = manager.coordinator.single_type_managers[0].req_to_blocks
        self._logged_at, self._logged = time.monotonic(), 0
        self._removed = False

    def install(self) -> None:
        """Replace ``free`` of the manager and ``get_new_blocks`` of its pool by functions that follow T-LRU."""
        manager, pool = self._manager, self._pool
        base_free, base_get = manager.free, pool.get_new_blocks

        def free(request: Any) -> None:
            # Read before vLLM drops the list from its table. A preempted request will run again, so it is not finished.
            blocks = self._of_request.get(request.request_id) if request.is_finished() else None
            base_free(request)
            if blocks:
                self._safely(self._finished, request, blocks)

        def get_new_blocks(num_blocks: int) -> Any:
            if self.eviction.tags:
                self._safely(self._give_up, num_blocks)
            return base_get(num_blocks)

        manager.free, pool.get_new_blocks = free, get_new_blocks

    def remove(self) -> None:
        """Let vLLM evict by itself again."""
        self._removed = True
        vars(self._manager).pop("free", None)
        vars(self._pool).pop("get_new_blocks", None)

    def first_tokens(self, outputs: dict[int, Any]) -> None:
        """Tell the objective about the requests whose first token is in ``outputs`` of a step."""
        self._safely(self._first_tokens, outputs)

    def log(self) -> None:
        """Log how many blocks T-LRU evicted early, once in LOG_SECONDS. Runs on the publisher's thread."""
        self._safely(self._log)

    def _first_tokens(self, outputs: dict[int, Any]) -> None:
        for batch in outputs.values():
            for output in batch.outputs:
                stats = output.prefill_stats
                if stats is not None:
                    prompt = stats.num_prompt_tokens
                    served = Served(prompt, prompt - stats.num_cached_tokens)
                    # A request that has finished in this same step is no longer in the table.
                    blocks = self._of_request.get(output.request_id, ()) if self.eviction.compares else ()
                    hashes = [block.block_hash for block in blocks[: prompt // self.eviction.block_tokens]]
                    self.eviction.first_token(served, () if None in hashes else hashes)

    def _log(self) -> None:
        now, eviction = time.monotonic(), self.eviction
        if now - self._logged_at < LOG_SECONDS or eviction.given_up == self._logged:
            return
        self._logged_at, self._logged = now, eviction.given_up
        logger.info(
            "warmfleet: tail eviction: %d blocks tagged, %d given up first; objective %s tokens, next prompt %d tokens",
            *(eviction.tagged, eviction.given_up, eviction.objective.xi_tokens()),
            eviction.next_prompt.growth_tokens,
        )

    def _finished(self, request: Any, blocks: list[Any]) -> None:
        """Tell ``eviction`` the request's blocks, which other requests may still use. Partial blocks have no hash."""
        hashes = [block.block_hash for block in blocks]
        if None in hashes:
            del hashes[hashes.index(None) :]
        numbers = [block.block_id for block in blocks[: len(hashes)]]
        finished = Finished(numbers, hashes, request.num_prompt_tokens, request.num_tokens, says_ended(request))
        self.eviction.finished(finished, time.monotonic())

    def _give_up(self, count: int) -> None:
        """Before ``count`` blocks are taken, move tagged blocks to the free queue's front, to be evicted first."""
        queue, now, is_silent = self._pool.free_block_queue, time.monotonic(), self.eviction.is_silent
        block = queue.fake_free_list_head.next_free_block
        while count and block is not None and (block.block_hash is None or is_silent(block.block_id, now)):
            count, block = count - 1, block.next_free_block
        if count:
            moved = [self._blocks[number] for number in self.eviction.give_up(count, self._is_free)]
            for block in moved:
                queue.remove(block)
            queue.prepend_n(moved)

    def _is_free(self, number: int, block_hash: bytes) -> bool:
        """Tell whether the block is in the free queue with this content. A block in use has no neighbours there."""
        block = self._blocks[number]
        return bool(
            block.ref_cnt == 0
            and block.block_hash == block_hash
            and block.prev_free_block is not None
            and block.next_free_block is not None
        )

    def _safely(self, step: Callable[..., None], *arguments: Any) -> None:
        if self._removed:
            return
        with swallow_errors("could not choose the blocks to evict", "vLLM evicts by itself from now on"):
            step(*arguments)
            return
        self.remove()


def says_ended(request: Any) -> bool:
    """Tell whether the client said, to a router or in the body, that its conversation ends with this request."""
    if conversation_ended(request.request_id):
        return True
    extra = getattr(request.sampling_params, "extra_args", None)  # a pooling model's request has no such parameters
    return extra is not None and extra.get(XARG) == ENDED
