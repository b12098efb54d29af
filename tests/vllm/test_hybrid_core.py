"""vLLM's own core with KV cache groups of several kinds: what the plugin reports, and what routers make of it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from tests.vllm.hybrid_reports import Index, hybrid_cores, outcomes

from warmfleet.protocol.wire import NO_PREFIXES, Scheme

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=4,
        shows=(
            "vLLM's core with sliding windows, states (Mamba, linear attention) and chunks beside full attention: "
            "1,000 random prompts each under eviction find cached exactly what the plugin's reports predict"
        ),
    ),
    pytest.mark.timeout(900),
]

REQUESTS = 1_000
#: By shape: the number of the group by which routers match.
MAIN = {
    "fine": 1,
    "equal": 0,
    "sparse": 0,
    "odd": 0,
    "wide": 1,
    "segments": 0,
    "finer windows": 0,
    "states": 0,
    "sparse states": 2,
    "all states": 0,
    "linear": 2,
    "states and windows": 0,
    "chunks": 0,
}


@cache
def core_of(shape: str) -> dict[str, Any]:
    [core] = hybrid_cores(REQUESTS, shape)
    return core


@pytest.mark.parametrize("shape", MAIN)
def test_all_groups_together_predict_what_is_cached(shape: str) -> None:
    core = core_of(shape)
    found, index = outcomes(core)
    by_main, _ = outcomes(core, ends=False)
    print(f"\n{shape}: {dict(found)}, by the main group alone {dict(by_main)}")
    assert sum(request["cached"] > 0 for request in core["requests"]) > REQUESTS / 4
    assert found["exact"] == REQUESTS
    index.apply(core["last"])
    assert set(core["cut"]) == index.sets[""], "a snapshot has what the changes amount to"
    assert set(core["ends"]) == index.sets["ends"]
    index.apply(core["reset"])
    assert not any(index.sets.values())


@pytest.mark.parametrize("shape", ["fine", "equal"])
def test_the_main_set_is_the_full_attention_group(shape: str) -> None:
    core = core_of(shape)
    index, chains = Index(Scheme.from_dict(core["scheme"])), set[str]()
    assert (index.scheme.block_tokens, index.scheme.hash_block_tokens) == (32, 16 if shape == "fine" else 32)
    assert not core["closed"]
    for request in core["requests"]:
        chains.update(index.chain(request["tokens"]))
    of_group = {key[-24:-8] for key in core["table"] if int(key[-8:], 16) == MAIN[shape]}
    assert set(core["cut"]) <= of_group
    parts = of_group - set(core["cut"])
    assert bool(parts) == (shape == "fine"), "entries for parts of a block are there, and left out"
    assert parts.isdisjoint(chains)


def test_where_hits_end_within_blocks_a_match_is_a_lower_bound() -> None:
    found, _ = outcomes(core_of("parts"))
    print(f"\nparts: {dict(found)}")
    assert found["short"] == 0


def test_a_model_without_full_attention_is_chosen_by_load() -> None:
    core = core_of("windows")
    assert core["scheme"]["algorithm"] == NO_PREFIXES
    assert core["announced"] == {}
    assert core["table"]
    assert core["cut"] == []
