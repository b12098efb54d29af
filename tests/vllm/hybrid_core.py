"""vLLM's own core with KV cache groups of several kinds, hooked by the plugin: no model, no server, no Redis.

    .venv-vllm/bin/python tests/vllm/hybrid_core.py REQUESTS SHAPE...

The program runs random prompts, many of which continue earlier ones, through a cache that is too small for them, and
prints for each shape a JSON object: the scheme that the plugin announces, each prompt with the tokens that vLLM found
cached and the changes that the plugin had reported just before, and at the end the plugin's set beside the whole table.
With CORE_EVENTS=1 each prompt comes with the batches of KV events that vLLM had published just before, too.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import dataclass, fields
from typing import Any

BLOCKS, MAX_TOKENS, STEP_TOKENS = 260, 2_048, 384
COMMON = {"num_kv_heads": 1, "head_size": 16}


@dataclass(frozen=True)
class Shape:
    """groups: kind, tokens in a block, and tokens in a window or chunk. hashed, aligned: tokens that are hashed at a
    time, and to whose multiples hits are cut. retention: 0 lets windows and states be kept sparsely, as vLLM does by
    default since 0.30; None: densely.
    """

    groups: tuple[tuple[str, int, int], ...]
    hashed: int
    aligned: int
    retention: int | None = None
    mode: str = "none"  # of states


def _shape(*groups: tuple[str, int, int], tokens: int = 32, **more: Any) -> Shape:
    return Shape(groups, **({"hashed": tokens, "aligned": tokens} | more))


FULL, WINDOW, WIDE = ("full", 32, 0), ("window", 32, 64), ("window", 32, 400)
STATE, LINEAR, CHUNK = ("mamba", 32, 0), ("linear", 32, 0), ("chunk", 32, 128)
SHAPES = {
    # a hash covers half of the full-attention group's block
    "fine": _shape(("window", 16, 64), FULL, hashed=16),
    "equal": _shape(FULL, WINDOW),  # as in most hybrid models: one size for all groups
    "sparse": _shape(FULL, WINDOW, retention=0),
    "odd": _shape(FULL, ("window", 32, 100), WINDOW, ("window", 32, 100)),
    "wide": _shape(WINDOW, FULL, WIDE, WIDE, retention=0),
    "segments": _shape(FULL, WIDE, retention=256),
    "finer windows": _shape(FULL, ("window", 16, 40), ("window", 64, 200), hashed=16, aligned=64),
    "states": _shape(FULL, STATE, mode="align"),
    "sparse states": _shape(STATE, STATE, FULL, STATE, mode="align", retention=0),
    "all states": _shape(FULL, STATE, STATE, mode="all"),
    "linear": _shape(LINEAR, LINEAR, FULL, mode="align", retention=0),
    "states and windows": _shape(FULL, STATE, WIDE, mode="align", retention=0),
    "chunks": _shape(FULL, CHUNK),
    "parts": _shape(FULL, ("mamba", 64, 0), hashed=16, aligned=64, mode="align"),  # hits may end within a block
    "windows": _shape(WINDOW),
}


def spec_of(shape: Shape, kind: str, tokens: int, width: int) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as of

    if kind in ("mamba", "linear"):
        from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Backend

        backend = Backend.LINEAR if kind == "linear" else Backend.MAMBA2
        states = {"shapes": ((16, 16),), "dtypes": (torch.float32,), "mamba_type": backend}
        return of.MambaSpec(block_size=tokens, mamba_cache_mode=shape.mode, **states)
    common = COMMON | {"block_size": tokens, "dtype": torch.float32}
    if kind == "window":
        return of.SlidingWindowSpec(sliding_window=width, **common)
    if kind == "chunk":
        return of.ChunkedLocalAttentionSpec(attention_chunk_size=width, **common)
    return of.FullAttentionSpec(**common)


def config_of(shape: Shape) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    groups = [
        KVCacheGroupSpec(layer_names=[f"layer{at}"], kv_cache_spec=spec_of(shape, *group))
        for at, group in enumerate(shape.groups)
    ]
    more = {}
    if "prefix_cache_retention_interval" in {field.name for field in fields(KVCacheConfig)}:
        more["prefix_cache_retention_interval"] = shape.retention
    else:  # vLLM 0.28
        from vllm import envs

        envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL = shape.retention
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups, **more)


class Core:
    """A Scheduler of one shape, and the reporter that the plugin gave it."""

    def __init__(self, shape: Shape) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        from warmfleet_worker.vllm_hooks.block_table import hook_prefix_cache_reset
        from warmfleet_worker.vllm_hooks.engine_core import SchedulerReporter

        self.config = EngineArgs(
            model=os.environ["CORE_MODEL"],
            served_model_name="tiny",
            block_size=32,
            max_model_len=MAX_TOKENS,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=16,
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256_cbor",
        ).create_engine_config()
        self.config.cache_config.num_gpu_blocks = BLOCKS
        self.config.cache_config.mamba_cache_mode = shape.mode
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=config_of(shape),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=shape.aligned,
            hash_block_size=shape.hashed,
            log_stats=True,
        )
        function = get_hash_fn_by_name("sha256_cbor")
        kv_cache_utils.init_none_hash(function)  # as the engine core does, after its Scheduler
        self.hasher = kv_cache_utils.get_request_block_hasher(shape.hashed, function)
        hook_prefix_cache_reset()
        self.reporter = SchedulerReporter(self.scheduler, "redis://nowhere")
        self.batches: list[str] = []
        if os.environ.get("CORE_EVENTS"):
            self.publish_events()
        self.rng = random.Random(3)

    def publish_events(self) -> None:
        """Keep the batches that the Scheduler publishes, as they would be sent."""
        from vllm.distributed import kv_events

        encoder = kv_events.msgspec.msgpack.Encoder()
        self.scheduler.enable_kv_cache_events = self.scheduler.kv_cache_manager.enable_kv_cache_events = True
        self.scheduler.kv_cache_manager.block_pool.enable_kv_cache_events = True
        publisher = self.scheduler.kv_event_publisher
        publisher.publish = lambda batch: self.batches.append(encoder.encode(batch).hex())

    def changes(self) -> list[tuple[str, str, str]]:
        """The changes since the last call: kind of set (empty: the main one), operation, hashes."""
        ends = getattr(self.reporter.transitions, "ends", None)
        sets = {"": self.reporter.transitions} | ({"ends": ends} if ends is not None else {})
        return [
            (kind, run.operation, run.packed.hex())
            for kind, transitions in sets.items()
            for run in transitions.drain(10**6)
        ]

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
        self.answer = list(request.output_token_ids)
        return cached

    def table(self) -> list[str]:
        pool = self.scheduler.kv_cache_manager.block_pool
        return [bytes(key).hex() for key in list(pool.cached_block_hash_to_block._cache)]


def told_of(shape: Shape, requests: int) -> dict[str, Any]:
    from warmfleet_worker.vllm_hooks.compatibility import version
    from warmfleet_worker.vllm_hooks.engine_core import full_attention_group, scheme_of

    core = Core(shape)
    rng, prompts, seen = random.Random(5), list[list[int]](), list[dict[str, Any]]()
    for number in range(requests):
        head = rng.choice(prompts[-12:]) if prompts and rng.random() < 0.8 else []
        if rng.random() < 0.3:
            head = head[: rng.randrange(len(head) + 1)]  # a prompt that parts from an earlier one
        tokens = head + [rng.randrange(3, 8_000) for _ in range(rng.randrange(1, 300))]
        if rng.random() < 0.1:
            tokens = tokens[: max(32, len(tokens) // 32 * 32)]  # whole blocks
        if len(tokens) > MAX_TOKENS - 100:
            tokens = tokens[-200:]
        changes = core.changes()
        batches, core.batches = core.batches, []
        seen.append({"tokens": tokens, "changes": changes, "batches": batches, "cached": core.run(number, tokens)})
        prompts.append(tokens + core.answer if rng.random() < 0.6 else tokens)
    last = core.changes()
    transitions, table = core.reporter.transitions, core.table()
    cut = [block.hex() for block in transitions.pick(transitions.cut())]
    ends = getattr(transitions, "ends", None)
    copied = [] if ends is None else [block.hex() for block in ends.cut()]
    core.scheduler.reset_prefix_cache()
    return {
        "version": version().removesuffix("+cpu"),
        "scheme": scheme_of(core.config, full_attention_group(core.scheduler)).as_dict(),
        "closed": full_attention_group(core.scheduler).closed,
        "announced": core.reporter.announced,
        "requests": seen,
        "last": last,
        "cut": cut,
        "ends": copied,
        "table": table,
        "reset": core.changes(),
    }


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM may print
    for name in sys.argv[2:]:
        print(json.dumps(told_of(SHAPES[name], int(sys.argv[1]))), file=answers, flush=True)


if __name__ == "__main__":
    main()
