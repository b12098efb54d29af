"""Step tokens, foreign load and finished prefills, read from objects shaped like vLLM's."""

from __future__ import annotations

from types import SimpleNamespace as Thing
from typing import Any

from warmfleet_worker.protocol import wire
from warmfleet_worker.vllm_hooks.scheduler_work import finished_prefills, foreign_load, step_tokens

OURS = "wf-" + "a" * 22


def request(name: str, computed: int, prompt: int, tokens: int) -> Any:
    return Thing(request_id=name, num_computed_tokens=computed, num_prompt_tokens=prompt, num_tokens=tokens)


def test_tokens_beyond_one_and_its_drafts_per_request_are_prefill() -> None:
    step = Thing(
        total_num_scheduled_tokens=512 + 1 + 4,
        num_scheduled_tokens={"a": 512, "b": 1, "c": 4},
        scheduled_spec_decode_tokens={"c": [1, 2, 3]},
    )
    assert step_tokens(step) == (511, 6)


def test_foreign_load_counts_only_requests_that_no_router_has_sent() -> None:
    requests = [
        request(f"cmpl-{OURS}.x-0-1", 0, 1_000, 1_000),
        request(f"chatcmpl-{OURS}.x", 500, 500, 600),
        request("cmpl-batch-0", 300, 1_000, 1_000),
        request("chatcmpl-direct", 500, 500, 640),
    ]
    assert foreign_load(requests) == (700, 640)
    left = {request.request_id for request in requests[:2]}
    assert foreign_load(requests, left) == (1_700, 1_240), "no reservation of the worker's pool stands for them"


def test_a_prefill_ends_with_the_first_output() -> None:
    stats = Thing(num_cached_tokens=64, num_prompt_tokens=100)
    outputs = [
        Thing(request_id="a", prefill_stats=stats),
        Thing(request_id="b", prefill_stats=None),  # a later token
    ]
    assert list(finished_prefills({0: Thing(outputs=outputs)})) == [("a", 64, 100)]


def test_one_child_stands_for_a_request_of_a_router() -> None:
    ids = (f"0_cmpl-{OURS}.me-0-ab", f"1_cmpl-{OURS}.me-0-ab", f"cmpl-{OURS}.me-0", "cmpl-somebody")
    assert [wire.first_child(request_id) for request_id in ids] == [OURS, "", OURS, ""]


def test_a_reservation_is_cut_out_of_the_engines_own_ids() -> None:
    cases = {
        f"cmpl-{OURS}.client-0-1f": (OURS, 0),
        f"chatcmpl-{OURS}.client": (OURS, 0),
        f"3_chatcmpl-{OURS}.client": (OURS, 3),
        f"{OURS}.client": (OURS, 0),
        f"cmpl-{OURS}": None,  # the router always adds an id of its own
        f"cmpl-client.{OURS}.x": None,  # a client's id cannot pass for one
        f"cmpl-{OURS}a.x": None,
        "cmpl-123": None,
    }
    assert {name: wire.reservation_of(name) for name in cases} == cases
