"""The text of ``/metrics``, with vLLM's names and labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warmfleet_loadtest.simulator.scheduler import Scheduler
    from warmfleet_loadtest.simulator.transfers.counts import Counts


def metrics_text(scheduler: Scheduler, model: str, busy_s: float, transfers: Counts | None = None) -> str:
    """Write Prometheus text, version 0.0.4. busy_s: seconds spent in steps.

    Two counters are not vLLM's: seconds spent in steps, and evicted blocks.
    """
    totals, pool = scheduler.totals, scheduler.pool
    gauges = {
        "num_requests_running": len(scheduler.running),
        "num_requests_waiting": len(scheduler.waiting),
        "kv_cache_usage_perc": round(pool.usage, 6),
    }
    counters = {
        "prefix_cache_queries": totals.queries,
        "prefix_cache_hits": totals.hits,
        "prompt_tokens": totals.prompt_tokens,
        "prompt_tokens_cached": totals.hits,
        "generation_tokens": totals.generation_tokens,
        "num_preemptions": totals.preemptions,
        "request_success": totals.finished,
    }
    labels = f'engine="0",model_name="{model}"'
    lines = []
    for name, value in gauges.items():
        lines += [f"# TYPE vllm:{name} gauge", f"vllm:{name}{{{labels}}} {value}"]
    for name, value in counters.items():
        more = ',finished_reason="length"' if name == "request_success" else ""
        lines += [f"# TYPE vllm:{name} counter", f"vllm:{name}_total{{{labels}{more}}} {value}"]
    for name, spent in {"busy_seconds": round(busy_s, 6), "evicted_blocks": pool.evicted}.items():
        lines += [f"# TYPE sim:{name} counter", f"sim:{name}_total{{{labels}}} {spent}"]
    lines += transfers.metrics(labels) if transfers else []
    config = {
        "block_size": scheduler.limits.block_tokens,
        "num_gpu_blocks": pool.blocks,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": scheduler.scheme.algorithm,
    }
    facts = ",".join(f'{key}="{value}"' for key, value in config.items())
    lines += ["# TYPE vllm:cache_config_info gauge", f'vllm:cache_config_info{{engine="0",{facts}}} 1.0']
    return "\n".join(lines) + "\n"
