"""A version's own core without a model: Scheduler, KV cache manager, block pool and hasher, hooked by the plugin.

It runs in the interpreter of ``.venv-vllm`` (see ``trees.py``) and answers each line of JSON on standard input by one
line of JSON, always with the core's own figures. What the plugin reports goes to Redis, as from any engine.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.vllm.truth.engine_truth import blocks_of, tier_of

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_TOKENS = int(os.environ.get("CORE_BLOCK_TOKENS", "32"))
BLOCKS = int(os.environ.get("CORE_BLOCKS", "128"))
MODEL_LEN = int(os.environ.get("CORE_MODEL_LEN", "2048"))
TIER = int(os.environ.get("CORE_TIER", "0"))  # blocks of its tier in CPU memory (OffloadingConnector); 0: no tier
GROUPS = os.environ.get("CORE_GROUPS", "")  # KV cache groups beside full attention: the name of a shape of hybrid_core
SEED = int(os.environ.get("CORE_SEED", "1"))
DRAFT = os.environ.get("CORE_DRAFT")  # the folder of a draft model for EAGLE, of which only config.json is read
BUDGET = 2_048  # tokens of one step
PAGE_BYTES = BLOCK_TOKENS * 2 * 16 * 4  # of a block: keys and values, 16 numbers of 4 bytes each


def hasher_of(function: Any, lookahead: int) -> Any:
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher

    return get_request_block_hasher(BLOCK_TOKENS, function, *((lookahead,) if lookahead else ()))


def connector() -> Any:
    """The configuration of a tier."""
    from vllm.config import KVTransferConfig

    more = {"cpu_bytes_to_use": TIER * PAGE_BYTES}
    return KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=more)


def cache_config() -> Any:
    """One group of full attention, or the groups of a hybrid model; all blocks are of 32 tokens."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    if GROUPS:
        from tests.vllm.hybrid_core import SHAPES, config_of

        return config_of(SHAPES[GROUPS])
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=16, dtype=torch.float32)
    groups = [KVCacheGroupSpec(layer_names=["layer"], kv_cache_spec=spec)]
    memory = [SimpleNamespace(size=BLOCKS * PAGE_BYTES, block_stride=PAGE_BYTES)] if TIER else []
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=memory, kv_cache_groups=groups)


class Core:
    """A Scheduler that takes its sampled tokens from a random number generator."""

    def __init__(self, model: str) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        self.config = EngineArgs(
            model=model,
            served_model_name="tiny",
            block_size=BLOCK_TOKENS,
            max_model_len=MODEL_LEN,
            max_num_batched_tokens=BUDGET,
            max_num_seqs=16,
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256_cbor",
            speculative_config={"method": "eagle", "model": DRAFT, "num_speculative_tokens": 2} if DRAFT else None,
            kv_transfer_config=connector() if TIER else None,
        ).create_engine_config()
        caches = cache_config()
        self.config.cache_config.num_gpu_blocks = caches.num_blocks
        if GROUPS:
            self.config.cache_config.mamba_cache_mode = "align"
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        function = get_hash_fn_by_name("sha256_cbor")
        kv_cache_utils.init_none_hash(function)  # as the engine core does, after its Scheduler
        self.hasher = hasher_of(function, getattr(self.config, "num_hash_lookahead_tokens", 0))
        gc.collect()
        gc.freeze()  # as the engine core does, too
        self.rng = random.Random(SEED)
        self.jobs: dict[int, tuple[str, bool]] = {}  # copies under way: request, and whether to the GPU

    def add(self, request_id: str, tokens: list[int], max_tokens: int) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        request = Request(
            request_id=request_id,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)

    def step(self) -> dict[int, Any]:
        """Schedule and take a made-up result; returns the outputs."""
        from vllm.v1.outputs import ModelRunnerOutput

        scheduled = self.scheduler.schedule()
        ids = list(scheduled.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled = [
            [self.rng.randrange(3, 8_000)]
            if requests[request_id].num_computed_tokens >= requests[request_id].num_tokens
            else []
            for request_id in ids
        ]
        made = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: number for number, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        if TIER:
            made.kv_connector_output = self.copied(scheduled.kv_connector_metadata)
        return dict(self.scheduler.update_from_output(scheduled, made))

    def copied(self, told: Any) -> Any:
        """End some of the copies between the GPU and the tier, as a worker would: those that may not wait, and others
        at random.
        """
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
        from vllm.v1.outputs import KVConnectorOutput

        self.jobs |= {number: (job.req_id, True) for number, job in told.load_jobs.items()}
        self.jobs |= {number: (job.req_id, False) for number, job in told.store_jobs.items()}
        ended = {
            number: self.jobs.pop(number)
            for number in list(self.jobs)
            if number in (told.jobs_to_flush or ()) or self.rng.random() < 0.5
        }
        loaded = {request_id for request_id, is_load in ended.values() if is_load}
        meta = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(ended, 1)) if ended else None
        return KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=meta)

    def settle(self) -> None:
        """Let all copies end."""
        while self.jobs:
            self.step()

    def table(self) -> list[str]:
        pool = self.scheduler.kv_cache_manager.block_pool
        return [bytes(key).hex() for key in blocks_of(pool)]

    def tier(self) -> list[str]:
        return (
            [bytes(key).hex() for key in tier_of(self.scheduler.connector.connector_scheduler.manager)] if TIER else []
        )


class Answers:
    """The commands of standard input; each method's name is its word in the protocol."""

    def __init__(self, core: Core, said: list[str]) -> None:
        self.core = core
        self.said = said
        self.noted_s: list[float] = []
        self.ended_s: list[float] = []  # three for each request: noted as new, as ended, reported
        self._time_notes()

    def _time_notes(self) -> None:
        from warmfleet_worker.vllm_hooks.engine_core import SchedulerReporter
        from warmfleet_worker.vllm_hooks.eviction import EvictionHook

        def time_calls(
            owner: Any, name: str, spent_s: list[float], counts: Callable[[Any], bool] = lambda _: True
        ) -> None:
            function = getattr(owner, name)

            def timed(*arguments: Any) -> None:
                # To read this clock takes microseconds on some machines, as long as what is measured, and several times
                # as long after a pause. So each call is timed with a reading of its own beside it.
                counted = counts(arguments[0])
                before = time.thread_time()
                began = time.thread_time()
                function(*arguments)
                ended = time.thread_time()
                if counted:
                    spent_s.append((ended - began) - (began - before))

            setattr(owner, name, timed)

        time_calls(EvictionHook, "_freed", self.noted_s)
        time_calls(SchedulerReporter, "added", self.ended_s)
        time_calls(SchedulerReporter, "freed", self.ended_s)
        time_calls(SchedulerReporter, "updated", self.ended_s, lambda reporter: bool(reporter._freed))

    def run(self, requests: int, tokens: int) -> dict[str, Any]:
        """Run this many requests to their end, four at a time; every second one continues an earlier prompt.

        Returns (prompt tokens, cached tokens) by id as vLLM itself counts them, and the table.
        """
        core, counted = self.core, {}
        prompts: list[list[int]] = []
        for number in range(requests):
            head = core.rng.choice(prompts) if prompts and number % 2 else []
            prompt = head[: tokens // 2] + [
                core.rng.randrange(3, 8_000) for _ in range(tokens - len(head[: tokens // 2]))
            ]
            prompts.append(prompt)
            core.add(f"cmpl-wf-{number:022}.x-0", prompt, 1 + number % 40)
            while len(core.scheduler.requests) >= 4 or (number == requests - 1 and core.scheduler.requests):
                for batch in core.step().values():
                    for output in batch.outputs:
                        if output.prefill_stats is not None:
                            stats = output.prefill_stats
                            counted[f"wf-{int(output.request_id[8:30]):022}"] = [
                                stats.num_cached_tokens,
                                stats.num_prompt_tokens,
                            ]
        core.settle()
        return {"counted": counted, "table": core.table(), "tier": core.tier()}

    def bench(self, requests: int, tokens: int, answer: int, pause_s: float) -> dict[str, Any]:
        """Run this many new prompts to their end, four at a time; a pause after each step stands for the model's work.

        Every conversation ends if CORE_ENDS is set. Returns CPU seconds of the whole process so far, (seconds, CPU
        seconds of this thread) of each step, and CPU seconds in which the plugin noted each finished request
        for eviction, and reported its end.
        """
        core, steps = self.core, []
        mark = "~" if "CORE_ENDS" in os.environ else ""
        for number in range(requests):
            prompt = [core.rng.randrange(3, 8_000) for _ in range(tokens)]
            core.add(f"cmpl-wf-{core.rng.randrange(10**22):022}.{mark}x-0", prompt, answer)
            while len(core.scheduler.requests) >= 4 or (number == requests - 1 and core.scheduler.requests):
                cpu, began = time.thread_time(), time.perf_counter()
                core.step()
                steps.append((time.perf_counter() - began, time.thread_time() - cpu))
                time.sleep(pause_s)
        noted, self.noted_s[:] = list(self.noted_s), []
        ended, self.ended_s[:] = list(self.ended_s), []
        return {"process_s": time.process_time(), "steps_s": steps, "noted_s": noted, "ended_s": ended}

    def cached(self, prompt: list[int]) -> dict[str, Any]:
        """Run one request alone; returns the tokens of its prompt that were cached before (in all, and in the tier
        only), and the tables afterwards.
        """
        core, counted = self.core, []
        core.add(f"cmpl-wf-{core.rng.randrange(10**22):022}.x-0", prompt, 3)
        while core.scheduler.requests:
            outputs = [output for batch in core.step().values() for output in batch.outputs]
            counted += [output.prefill_stats for output in outputs if output.prefill_stats]
        core.settle()
        loaded = counted[0].num_external_cached_tokens
        return {"cached": counted[0].num_cached_tokens, "loaded": loaded, "table": core.table(), "tier": core.tier()}

    def reset(self, *, external: bool = False) -> dict[str, Any]:
        """external: empty the tier, too."""
        done = self.core.scheduler.reset_prefix_cache(reset_connector=external)
        return {"reset": done, "table": self.core.table(), "tier": self.core.tier()}

    def hold(self) -> dict[str, Any]:
        """Stop while three requests run: a foreign one that decodes, a foreign one that waits, one of the fleet."""
        core = self.core
        core.add("cmpl-foreign-decodes", [5] * 100, 500)
        core.add(f"cmpl-wf-{999:022}.x-0", [6] * 64, 500)
        core.step()
        core.step()
        core.add("cmpl-foreign-prefills", [7] * 1_500, 500)
        waiting = core.scheduler.get_request_counts()[1]
        requests = core.scheduler.requests
        decodes = requests["cmpl-foreign-decodes"].num_tokens
        return {"running": len(core.scheduler.running), "waiting": waiting, "prefill": 1_500, "decode": decodes}

    def finish(self) -> dict[str, Any]:
        while self.core.scheduler.requests:
            self.core.step()
        return {"table": self.core.table()}

    def hashes(self, algorithms: list[str], cases: list[dict[str, Any]], lookahead: int = 0) -> dict[str, Any]:
        """Per algorithm the announced scheme, and for each case the hashes that vLLM's own hasher computes.

        lookahead: number of tokens behind a block that its hash covers; since vLLM 0.33.
        """
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.request import Request

        from warmfleet_worker.vllm_hooks.engine_core import full_attention_group, scheme_of

        found: dict[str, Any] = {}
        for algorithm in algorithms:
            function = get_hash_fn_by_name(algorithm)
            kv_cache_utils.init_none_hash(function)
            self.core.config.cache_config.prefix_caching_hash_algo = algorithm
            hasher, made = hasher_of(function, lookahead), []
            for case in cases:
                lora = case["lora"]
                request = Request(
                    request_id="r",
                    prompt_token_ids=case["tokens"],
                    sampling_params=SamplingParams(max_tokens=1),
                    pooling_params=None,
                    cache_salt=case["salt"],
                    lora_request=LoRARequest(lora[0], 1, lora[1]) if lora else None,
                    block_hasher=hasher,
                )
                made.append([bytes(block)[-8:].hex() for block in request.block_hashes])
            scheme = scheme_of(self.core.config, full_attention_group(self.core.scheduler)).as_dict()
            found[algorithm] = {"scheme": scheme, "hashes": made}
        return found

    def transfer(self, config: dict[str, Any]) -> dict[str, Any]:
        """What an engine with this ``--kv-transfer-config`` announces, and NIXL's own hash."""
        from tests.vllm.transfers import announced
        from vllm.config import KVTransferConfig

        self.core.config.kv_transfer_config = KVTransferConfig(**config)
        return announced(self.core.config)

    def lacks(self) -> dict[str, str]:
        """The missing parts of this vLLM, by part of the report; empty where all is as expected."""
        from warmfleet_worker.vllm_hooks.compatibility import Part, missing

        return {part.name: missing(part) for part in Part}

    def differs(self) -> dict[str, str]:
        """Differences of this version from others, in words for the table."""
        from importlib.util import find_spec

        from vllm.renderers import online_renderer
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils

        roots = set()
        for _ in range(2):
            kv_cache_utils.init_none_hash(get_hash_fn_by_name("sha256_cbor"))
            roots.add(bytes(kv_cache_utils.NONE_HASH))
        launcher = find_spec("vllm.entrypoints.launchers")
        return {
            "root": "random" if len(roots) > 1 else "fixed",
            "server": "launchers" if launcher else "openai.api_server",
            "chat_ids": "yes" if hasattr(online_renderer, "_reused_prompt_token_ids") else "no",
        }

    def log(self) -> list[str]:
        return self.said


def main() -> None:
    import logging

    said: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return True

    logging.getLogger("vllm.warmfleet").addFilter(keep)  # vLLM sets up its log later, and takes handlers away then
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM may print
    from warmfleet_worker.plugin import register

    register()
    import vllm

    asked = Answers(Core(os.environ["CORE_MODEL"]), said)
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        began = time.monotonic()
        answer = getattr(asked, question.pop("ask"))(**question)
        print(json.dumps({"answer": answer, "seconds": time.monotonic() - began}), file=answers, flush=True)


if __name__ == "__main__":
    main()
