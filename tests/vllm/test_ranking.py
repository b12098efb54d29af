"""Half an hour of mixed load over two real engines: do the policies rank as in the simulator?

The policies take turns in short slices, each on empty caches, so that other work on the machine slows all alike.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvloop
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.engine import BLOCK_TOKENS, ROOT, SERVED_NAME, EngineOptions, running
from tests.vllm.replicas import replicas

from warmfleet_loadtest.replay import Target, replay, summary, table
from warmfleet_loadtest.traces.workload import Mix, mixed

if TYPE_CHECKING:
    from warmfleet_loadtest.measuring.client import Reply

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=36,
        shows="the policies rank on two real engines under mixed load as they do in the simulator",
    ),
]

POLICIES = ("cost", "least_loaded", "round_robin")
ROUNDS = 6
SLICE_SECONDS = 100.0
RATE = 1.2  # requests per second: about half of what two engines on two cores can do without a cache
CACHE_TOKENS = 16_384


@pytest.mark.timeout(3_600)
def test_policies_rank_on_real_engines_as_in_the_simulator() -> None:
    model = ROOT / "models" / "small"
    if not model.exists():
        pytest.fail("models/small is missing: run `make vllm`")
    replies: dict[str, list[Reply]] = {policy: [] for policy in POLICIES}
    with server(valkey_binary()) as redis_url:
        options = [
            EngineOptions(redis_url=redis_url, worker_id=name, model=model, blocks=CACHE_TOKENS // BLOCK_TOKENS)
            for name in ("vllm-a", "vllm-b")
        ]
        with running(*options) as engines:
            for number in range(ROUNDS):
                trace = mixed(Mix(rate=RATE, seconds=SLICE_SECONDS, seed=number, output_tokens=(2, 12)))
                for policy in POLICIES:
                    for engine in engines:
                        engine.reset_prefix_cache()
                    with replicas(redis_url, policy=policy) as urls:
                        time.sleep(1.0)  # one period of upkeep, after which the router knows that the caches are empty
                        got, client = uvloop.run(replay(trace, Target(tuple(urls), SERVED_NAME, seed=number)))
                    replies[policy] += got
                    print(f"slice {number} {policy}: {json.dumps(summary(got, skip=0.0))} client {client}", flush=True)
    rows = {policy: summary(replies[policy], skip=0.0) for policy in POLICIES}
    print(table(rows))
    out = Path(ROOT / "out")
    out.mkdir(exist_ok=True)
    (out / "ranking.json").write_text(json.dumps(rows, indent=1))
    assert all(row["errors"] == 0 for row in rows.values())
    assert rows["cost"]["hit_ratio"] > max(rows[policy]["hit_ratio"] for policy in POLICIES[1:])
    for figure in ("ttft_mean_s", "ttft_p90_s"):
        assert [rows[policy][figure] for policy in POLICIES] == sorted(rows[policy][figure] for policy in POLICIES)
