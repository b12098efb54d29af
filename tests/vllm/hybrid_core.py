"""vLLM's own core with KV cache groups of several sizes, hooked by the plugin: no model, no server, no Redis.

    .venv-vllm/bin/python tests/vllm/hybrid_core.py SHAPE

The program runs random prompts, many of which continue earlier ones, through a cache that is too small for them, and
prints a JSON object: the scheme that the plugin announces, each prompt with the tokens that vLLM found cached and the
blocks that the plugin had reported just before, and at the end the plugin's set beside the whole table.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

BLOCKS, MAX_TOKENS, PROMPTS = 220, 2_048, 90


def groups_of(shape: str) -> tuple[list[Any], int, int]:
    """(specs of the KV cache groups, tokens that are hashed at a time, tokens to which hits are aligned)."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    common = {"num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
    if shape == "fine":  # a hash covers half of the full-attention group's block
        windows = SlidingWindowSpec(block_size=16, sliding_window=64, **common)
        return [windows, FullAttentionSpec(block_size=32, **common)], 16, 32
    if shape == "equal":  # as in most hybrid models: one size for all groups
        windows = SlidingWindowSpec(block_size=32, sliding_window=64, **common)
        return [FullAttentionSpec(block_size=32, **common), windows], 32, 32
    assert shape == "windows", shape
    return [SlidingWindowSpec(block_size=32, sliding_window=64, **common)], 32, 32


class Core:
    """A Scheduler of one shape, and the reporter that the plugin gave it."""

    def __init__(self, shape: str) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from warmfleet_worker.vllm_hooks.block_table import hook_prefix_cache_reset
        from warmfleet_worker.vllm_hooks.engine_core import SchedulerReporter

        self.config = EngineArgs(
            model=os.environ["CORE_MODEL"],
            served_model_name="tiny",
            block_size=32,
            max_model_len=MAX_TOKENS,
            max_num_batched_tokens=MAX_TOKENS,
            max_num_seqs=16,
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256_cbor",
        ).create_engine_config()
        self.config.cache_config.num_gpu_blocks = BLOCKS
        specs, hashed, aligned = groups_of(shape)
        groups = [KVCacheGroupSpec(layer_names=[f"layer{at}"], kv_cache_spec=spec) for at, spec in enumerate(specs)]
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=aligned,
            hash_block_size=hashed,
            log_stats=True,
        )
        function = get_hash_fn_by_name("sha256_cbor")
        kv_cache_utils.init_none_hash(function)  # as the engine core does, after its Scheduler
        self.hasher = kv_cache_utils.get_request_block_hasher(hashed, function)
        hook_prefix_cache_reset()
        self.reporter = SchedulerReporter(self.scheduler, "redis://nowhere")
        self.reported: set[bytes] = set()
        self.rng = random.Random(3)

    def follow(self) -> set[bytes]:
        """The blocks that the plugin has reported so far. Each reported change must be real."""
        for run in self.reporter.transitions.drain(10**6):
            hashes = {run.packed[at : at + 8] for at in range(0, len(run.packed), 8)}
            if run.operation == "cleared":
                self.reported = set()
            elif run.operation == "stored":
                assert self.reported.isdisjoint(hashes)
                self.reported |= hashes
            else:
                assert self.reported >= hashes
                self.reported -= hashes
        return self.reported

    def run(self, number: int, tokens: list[int]) -> int:
        """Run one request to its end; returns how many of its tokens vLLM found cached."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request

        name, cached = f"cmpl-{number}", -1
        params = SamplingParams(max_tokens=1 + number % 50, ignore_eos=True)
        more = {"block_hasher": self.hasher}
        request = Request(request_id=name, prompt_token_ids=tokens, sampling_params=params, pooling_params=None, **more)
        self.scheduler.add_request(request)
        while self.scheduler.requests:
            scheduled = self.scheduler.schedule()
            if cached < 0:
                cached = scheduled.scheduled_new_reqs[0].num_computed_tokens
            done = request.num_computed_tokens >= request.num_tokens
            made = ModelRunnerOutput(
                req_ids=[name],
                req_id_to_index={name: 0},
                sampled_token_ids=[[self.rng.randrange(3, 8_000)] if done else []],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            )
            self.scheduler.update_from_output(scheduled, made)
        return cached

    def table(self) -> list[str]:
        pool = self.scheduler.kv_cache_manager.block_pool
        return [bytes(key).hex() for key in list(pool.cached_block_hash_to_block._cache)]


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM may print
    from warmfleet_worker.vllm_hooks.engine_core import full_attention_group, scheme_of

    core = Core(sys.argv[1])
    rng, prompts, seen = random.Random(5), list[list[int]](), list[dict[str, Any]]()
    for number in range(PROMPTS):
        head = rng.choice(prompts[-12:]) if prompts and rng.random() < 0.7 else []
        prompts.append(head + [rng.randrange(3, 8_000) for _ in range(rng.randrange(20, 300))])
        if len(prompts[-1]) > MAX_TOKENS - 100:
            prompts[-1] = prompts[-1][-200:]
        held = [block.hex() for block in core.follow()]
        seen.append({"tokens": prompts[-1], "held": held, "cached": core.run(number, prompts[-1])})
    reported, table = core.follow(), core.table()
    cut = core.reporter.transitions.pick(core.reporter.transitions.cut())
    assert set(cut) == reported, "a snapshot has what the changes amount to"
    core.scheduler.reset_prefix_cache()
    told = {
        "scheme": scheme_of(core.config, full_attention_group(core.scheduler)).as_dict(),
        "closed": full_attention_group(core.scheduler).closed,
        "requests": seen,
        "reported": [block.hex() for block in reported],
        "table": table,
        "after_reset": len(core.follow()),
    }
    print(json.dumps(told), file=answers)


if __name__ == "__main__":
    main()
