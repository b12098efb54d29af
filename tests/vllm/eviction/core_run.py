"""The plugin's order of eviction in vLLM's real core, without a server; the argument is the seed.

This file runs in vLLM's environment. Requests of conversations come, hit, compute, decode, are preempted and finish at
random, conversations end and are paused, and the cache is reset. After every step the free queue is checked link by
link, and every allocation is compared with what plain LRU would have done. The last line of the output is a JSON object
with what happened.
"""

from __future__ import annotations

import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from warmfleet_worker.vllm_hooks import eviction

BLOCK, BLOCKS, SPEED_TPS = 16, 400, 1_000
WORDS = 50_000


def manager_of(blocks: int) -> Any:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, max_model_len=100_000, scheduler_block_size=BLOCK, hash_block_size=BLOCK)


def hooked(manager: Any, target: str | None) -> Any:
    scheduler = SimpleNamespace(kv_cache_manager=manager, connector=None, hash_block_size=BLOCK)
    return eviction.install(scheduler, target, lambda: SPEED_TPS)


class Core:
    """A cache manager, the requests that run in it, and the checks."""

    def __init__(self, blocks: int, target: str | None) -> None:
        self.manager = manager_of(blocks)
        self.pool = self.manager.block_pool
        self.hook = hooked(self.manager, target)
        self.running: list[Any] = []
        self.evicted = self.cached_tokens = self.prompt_tokens = 0
        self.uncached: list[int] = []
        self.before: dict[bytes, bytes | None] = {}  # the hash before each block's
        self._hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        self._watch()

    def _watch(self) -> None:
        """Compare every allocation with plain LRU: as many blocks lose their content, the others keep their order."""
        base, pool = self.pool.get_new_blocks, self.pool

        def get_new_blocks(count: int) -> Any:
            before = pool.free_block_queue.get_all_free_blocks()
            full = {block.block_id for block in before if block.block_hash is not None}
            taken = base(count)
            numbers = {block.block_id for block in taken}
            lost = len(numbers & full)
            assert lost == sum(block.block_id in full for block in before[:count]), "more evictions than with LRU"
            after = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
            assert after == [block.block_id for block in before if block.block_id not in numbers], "another order"
            self.evicted += lost
            return taken

        pool.get_new_blocks = get_new_blocks

    def start(self, name: str, prompt: list[int], *, ended: bool = False) -> Any:
        """A request computes its whole prompt; returns it, or None if there is no room."""
        extra = {eviction.XARG: eviction.ENDED} if ended else None
        params = SamplingParams(max_tokens=1_000, extra_args=extra)
        request = Request(name, prompt, params, None, block_hasher=self._hasher)
        return request if self.compute(request) else None

    def compute(self, request: Any) -> bool:
        found, cached = self.manager.get_computed_blocks(request)[:2]
        if self.manager.allocate_slots(request, request.num_tokens - cached, cached, found) is None:
            return False
        self._note(request)
        request.num_computed_tokens = request.num_tokens
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        if self.hook is not None and request.num_output_tokens == 0:
            self.hook.first_token(request.request_id, cached, request.num_tokens)
        self.cached_tokens += cached
        self.prompt_tokens += request.num_tokens
        self.uncached.append(request.num_tokens - cached)
        return True

    def decode(self, request: Any, tokens: list[int]) -> None:
        for token in tokens:
            request.append_output_token_ids(token)
            if self.manager.allocate_slots(request, 1) is None:
                break
            request.num_computed_tokens += 1
        self._note(request)

    def _note(self, request: Any) -> None:
        self.before |= zip(request.block_hashes, [None, *request.block_hashes], strict=False)

    def preempt(self, request: Any) -> None:
        self.running.remove(request)
        self.manager.free(request)
        request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0

    def finish(self, request: Any) -> list[int]:
        """The conversation so far."""
        self.running.remove(request)
        request.status = RequestStatus.FINISHED_STOPPED
        self.manager.free(request)
        return list(request.all_token_ids)

    def check(self) -> None:
        """The free queue holds every free block once, linked both ways, and no other block."""
        queue = self.pool.free_block_queue
        blocks = queue.get_all_free_blocks()
        numbers = [block.block_id for block in blocks]
        assert len(numbers) == len(set(numbers)) == queue.num_free_blocks
        before = queue.fake_free_list_head
        for block in blocks:
            assert block.prev_free_block is before
            assert block.ref_cnt == 0
            before = block
        assert queue.fake_free_list_tail.prev_free_block is before
        free = set(numbers)
        for block in self.pool.blocks:
            assert block.is_null or (block.block_id in free) == (block.ref_cnt == 0)
        if self.hook.eviction.tail is None:
            held = {key[:-4] for key in self.pool.cached_block_hash_to_block._cache}
            assert all(self.before[key] is None or self.before[key] in held for key in held), "a hole"


def random_life(seed: int, steps: int, target: str | None) -> dict[str, int]:
    """Everything that can happen to requests, at random. Without a target the blocks held are always whole prefixes."""
    rng = random.Random(seed)
    core = Core(BLOCKS, target)
    tail = core.hook.eviction.tail
    systems = [[rng.randrange(WORDS) for _ in range(rng.choice([40, 200]))] for _ in range(2)]
    talks: list[list[int]] = []
    names: list[str] = []
    counts = dict.fromkeys(("finished", "preempted", "resets", "refused", "tagged_by_preemption"), 0)
    waiting: list[Any] = []
    for step in range(steps):
        act = rng.random()
        if act < 0.45 and len(core.running) < 6:
            old = talks.pop(rng.randrange(len(talks))) if talks and rng.random() < 0.7 else rng.choice(systems)
            prompt = old[: rng.randrange(1, len(old) + 1)] if rng.random() < 0.1 else old
            prompt = prompt + [rng.randrange(WORDS) for _ in range(rng.randrange(1, 400))]
            names.append(f"wf-{step:022}")
            if core.start(f"cmpl-{names[-1]}.x-0", prompt[:3_000], ended=rng.random() < 0.1) is None:
                counts["refused"] += 1
        elif act < 0.55 and waiting:
            request = waiting.pop()
            if not core.compute(request):
                waiting.append(request)
        elif act < 0.7 and core.running:
            core.decode(rng.choice(core.running), [rng.randrange(WORDS) for _ in range(rng.randrange(1, 60))])
        elif act < 0.78 and core.running:
            request, before = rng.choice(core.running), tail and tail.tagged
            core.preempt(request)
            waiting.append(request)
            counts["preempted"] += 1
            counts["tagged_by_preemption"] += tail.tagged - before if tail else 0
        elif act < 0.785:
            while core.running:
                core.finish(core.running[0])
            counts["resets"] += core.manager.reset_prefix_cache()
        elif core.running:
            talks = [*talks[-30:], core.finish(rng.choice(core.running))]
            counts["finished"] += 1
        if rng.random() < 0.05:
            core.hook.eviction.yield_sessions(names[-rng.randrange(1, 40) :][:1])
        core.check()
    return counts | {"given_up": core.hook.eviction.given_up, "evicted": core.evicted}


def turns(target: str | None) -> dict[str, float]:
    """600 turns of conversations of very different lengths, one after another, in a cache that is too small."""
    rng = random.Random(7)
    core = Core(4_000, target)
    talks: list[list[int]] = [[] for _ in range(16)]
    for turn in range(600):
        index = rng.randrange(len(talks))
        prompt = talks[index] + [rng.randrange(WORDS) for _ in range(rng.choice([50, 200, 1_500]))]
        request = core.start(f"t{turn}", prompt)
        core.decode(request, [rng.randrange(WORDS) for _ in range(100)])
        talk = core.finish(request)
        talks[index] = talk if len(talk) < 8_000 else []
    core.check()
    uncached = sorted(core.uncached)
    return {
        "hit": round(core.cached_tokens / core.prompt_tokens, 3),
        "p90_uncached": uncached[int(len(uncached) * 0.9)],
        "p99_uncached": uncached[int(len(uncached) * 0.99)],
        "mean_uncached": round(sum(uncached) / len(uncached)),
    }


def failing() -> dict[str, bool]:
    """An error of ours lets vLLM evict by itself, and nothing else."""
    core = Core(100, "0.1")
    core.hook.eviction.freed = None
    core.finish(core.start("a", list(range(320))))
    core.check()
    return {"free": "free" not in vars(core.manager)}


def main() -> None:
    init_none_hash(sha256_cbor)
    seed = int(sys.argv[1])
    result: dict[str, Any] = {
        name: random_life(seed, 3_000, target) for name, target in (("random", "0.3"), ("random lru", None))
    }
    result["failing"] = failing()
    result["turns"] = {name: turns(target) for name, target in (("lru", None), ("t_lru", "1.5"), ("target 0", "0"))}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
