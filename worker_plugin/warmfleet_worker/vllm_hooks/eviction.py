"""The plugin's order of eviction in vLLM's block pool: ``KVCacheManager.free`` and ``BlockPool.get_new_blocks``.

Both functions are replaced on the objects of one scheduler: ``free`` reports which blocks a request leaves, and
``get_new_blocks`` gives up blocks first. vLLM's free queue holds every free block in the order of eviction: those
without content in front, then the least recently used ones. Blocks to be given up are moved to the front of that queue,
as many as the allocation would otherwise evict; everything else is vLLM's own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from warmfleet_worker.eviction.eviction import Eviction
from warmfleet_worker.eviction.finished import Finished
from warmfleet_worker.eviction.objective import Served
from warmfleet_worker.eviction.tail_eviction import tail_eviction_of
from warmfleet_worker.protocol import wire
from warmfleet_worker.vllm_hooks.compatibility import Part, missing, refuse
from warmfleet_worker.vllm_hooks.swallow_errors import swallow_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet_worker.eviction.tail_eviction import TailEviction

logger = logging.getLogger("vllm.warmfleet")

XARG, ENDED = "x-warmfleet-conversation", "ended"  # a key of ``vllm_xargs`` in a request's body, and its value
LOG_SECONDS = 60.0  # time between two log lines about blocks that were given up first
MOST_PROMPTS = 4_096  # most requests whose cached tokens are known; far more than an engine runs


def install(
    scheduler: Any, target: str | None, speed_tps: Callable[[], int], full_attention: bool = True
) -> EvictionHook | None:
    """Let the scheduler's cache give up ended and paused sessions first; returns None where that is not possible.

    target: the value of WARMFLEET_TTFT_TARGET_S, which asks for T-LRU besides. speed_tps: returns the measured prefill
    speed. full_attention: the model has a KV cache group that keeps whole prompts.
    """
    reason = missing(Part.EVICTION)
    if reason:
        refuse(Part.EVICTION, reason)
        return None
    reason = obstacle(scheduler) if full_attention else "the model keeps no whole prompts"
    if reason:
        logger.log(logging.WARNING if target else logging.INFO, "warmfleet: %s: %s", Part.EVICTION.value, reason)
        return None
    manager = scheduler.kv_cache_manager
    block_tokens, blocks = manager.coordinator.single_type_managers[0].block_size, len(manager.block_pool.blocks)
    tail = _tail_of(target, speed_tps, block_tokens, blocks) if target else None
    hook = EvictionHook(manager, Eviction(block_tokens, blocks, tail), block_tokens // scheduler.hash_block_size)
    hook.install()
    return hook


def _tail_of(target: str, speed_tps: Callable[[], int], block_tokens: int, blocks: int) -> TailEviction | None:
    try:
        tail = tail_eviction_of(target, speed_tps, block_tokens, blocks)
    except ValueError as error:
        logger.error("warmfleet: %s: T-LRU is off", error)  # noqa: TRY400 - the sentence says all
        return None
    logger.info("warmfleet: blocks are evicted for a time to first token of %s s", target)
    return tail


def obstacle(scheduler: Any) -> str:
    """Say why blocks cannot be given up first here; empty if they can.

    With several KV cache groups a prefix counts as cached only where all groups have it, so the end of a prompt may be
    the part worth keeping. A KV connector is no obstacle: blocks that it holds for a transfer are freed, and may be
    given up, when the transfer is over.
    """
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching:
        return "prefix caching is off"
    if len(manager.kv_cache_config.kv_cache_groups) != 1:
        return "the model has more than one KV cache group"
    return ""


class Numbers(Sequence[int]):
    """The numbers of these blocks of vLLM, read when they are needed."""

    def __init__(self, blocks: list[Any]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, at: Any) -> Any:
        return Numbers(self._blocks[at]) if isinstance(at, slice) else self._blocks[at].block_id


class EvictionHook:
    """Lets one ``KVCacheManager`` evict as ``eviction`` says, until the first error. Runs on the engine's thread.

    hashes_per_block: how many hashes of a request stand for one block; the last of them is the block's.
    """

    def __init__(self, manager: Any, eviction: Eviction, hashes_per_block: int) -> None:
        self.eviction = eviction
        self._manager, self._pool = manager, manager.block_pool
        self._blocks = manager.block_pool.blocks
        self._of_request = manager.coordinator.single_type_managers[0].req_to_blocks
        self._hashes_per_block = hashes_per_block
        self._cached: dict[str, int] = {}  # cached prompt tokens by id of a request with a first token
        self._logged_at, self._logged = time.monotonic(), 0
        self._removed = False

    def install(self) -> None:
        """Replace ``free`` of the manager and ``get_new_blocks`` of its pool."""
        manager, pool = self._manager, self._pool
        base_free, base_get = manager.free, pool.get_new_blocks

        def free(request: Any) -> None:
            blocks = self._of_request.get(request.request_id)  # read before vLLM drops the list from its table
            base_free(request)
            if blocks:
                self._safely(self._freed, request, blocks)

        def get_new_blocks(num_blocks: int) -> Any:
            if self.eviction.chooses:
                self._safely(self._give_up, num_blocks)
            return base_get(num_blocks)

        manager.free, pool.get_new_blocks = free, get_new_blocks

    def remove(self) -> None:
        """Let vLLM evict by itself again."""
        self._removed = True
        vars(self._manager).pop("free", None)
        vars(self._pool).pop("get_new_blocks", None)

    def first_token(self, request_id: str, cached_tokens: int, prompt_tokens: int) -> None:
        """Note a request that has its first token, and how many tokens of its prompt were cached."""
        self._safely(self._first_token, request_id, cached_tokens, prompt_tokens)

    def beside(self) -> None:
        """Do what the engine's thread need not do; log what was given up. Runs on the publisher's thread."""
        self._safely(self.eviction.catch_up)
        self._safely(self._log)

    def _first_token(self, request_id: str, cached_tokens: int, prompt_tokens: int) -> None:
        # A request that has finished in this same step is no longer in the table.
        blocks, tail = self._of_request.get(request_id, ()), self.eviction.tail
        if blocks:
            if len(self._cached) >= MOST_PROMPTS:
                self._cached.clear()
            self._cached[request_id] = cached_tokens
        if tail is not None:
            read = blocks[: prompt_tokens // tail.block_tokens] if tail.compares else ()
            hashes = [block.block_hash for block in read]
            tail.first_token(Served(prompt_tokens, prompt_tokens - cached_tokens), () if None in hashes else hashes)

    def _log(self) -> None:
        """Log how many blocks were given up first, once in LOG_SECONDS."""
        now, eviction, tail = time.monotonic(), self.eviction, self.eviction.tail
        if now - self._logged_at < LOG_SECONDS or eviction.given_up == self._logged:
            return
        self._logged_at, self._logged = now, eviction.given_up
        logger.info("warmfleet: %d blocks given up first, of ended and paused sessions, or by T-LRU", eviction.given_up)
        if tail is not None:
            logger.info(
                "warmfleet: T-LRU: %d blocks tagged; objective %s tokens, next prompt %d tokens",
                *(tail.tagged, tail.objective.xi_tokens(), tail.next_prompt.growth_tokens),
            )

    def _freed(self, request: Any, blocks: list[Any]) -> None:
        """Tell ``eviction`` the request's blocks, which other requests may still use."""
        numbers: Sequence[int] = Numbers(blocks)
        hashes, each = request.block_hashes, self._hashes_per_block
        if self.eviction.tail is not None:
            hashes = [block.block_hash for block in blocks]
            if None in hashes:  # a partial block
                del hashes[hashes.index(None) :]
            numbers = [block.block_id for block in blocks[: len(hashes)]]
        elif each > 1:
            hashes = hashes[each - 1 :: each]
        finished = Finished(
            numbers,
            hashes,
            request.num_prompt_tokens,
            request.num_tokens,
            ended=says_ended(request),
            request_id=request.request_id,
            cached_tokens=self._cached.pop(request.request_id, 0),
            preempted=not request.is_finished(),
        )
        self.eviction.freed(finished, time.monotonic())

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
            and block.block_hash is not None
            and block.block_hash.startswith(block_hash)  # behind it stands the number of the KV cache group
            and block.prev_free_block is not None
            and block.next_free_block is not None
        )

    def _safely(self, step: Callable[..., None], *arguments: Any) -> None:
        if self._removed:
            return
        try:  # costs nothing while there is no error
            step(*arguments)
        except Exception:
            with swallow_errors("could not choose the blocks to evict", "vLLM evicts by itself from now on"):
                raise
            self.remove()


def says_ended(request: Any) -> bool:
    """Tell whether the client said, to a router or in the body, that its conversation ends with this request."""
    if wire.conversation_ended(request.request_id):
        return True
    extra = getattr(request.sampling_params, "extra_args", None)  # a pooling model's request has no such parameters
    return extra is not None and extra.get(XARG) == ENDED
