"""The bridge on the KV events of vLLM's own core with several KV cache groups: it never promises too much."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from tests.vllm.engine import ROOT
from tests.vllm.hybrid_reports import hybrid_cores, outcome

from warmfleet_worker.bridge.block_table import BlockTable
from warmfleet_worker.bridge.kv_events import decode
from warmfleet_worker.protocol import wire
from warmfleet_worker.tracker import Tracker

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=1,
        shows=(
            "the bridge on the events of vLLM's own core with windows and states, under eviction: what is promised is "
            "never more than what is cached, and mostly equal; nothing is promised where a rule is not known"
        ),
    ),
    pytest.mark.timeout(600),
]

REQUESTS, PAGE = 300, 32
#: Shapes of ``hybrid_core.py``: the number of the followed group, and whether the rules of the others are known.
FOLLOWED = {
    "equal": (0, True),
    "sparse": (0, True),
    "odd": (0, True),
    "wide": (1, True),
    "states": (0, True),
    "sparse states": (2, True),
    "linear": (2, True),
    "chunks": (0, False),
    "finer windows": (0, False),
}


def predicted(table: BlockTable, tokens: list[int]) -> int:
    chain = [digest[-wire.HASH_BYTES :] for digest in wire.chain_hashes(table.scheme, tokens)]
    chain = chain[: (len(tokens) - 1) // PAGE]
    depth = next((at for at, block in enumerate(chain) if block not in table.held), len(chain))
    while table.ends is not None and depth and chain[depth - 1] not in table.ends.table:
        depth -= 1
    return depth * PAGE


@pytest.mark.parametrize("shape", FOLLOWED)
def test_a_bridged_hybrid_engine_is_never_promised_too_much(shape: str) -> None:
    group, known = FOLLOWED[shape]
    more = {"CORE_EVENTS": "1", "PYTHONPATH": str(ROOT / "worker_plugin"), "HF_HUB_OFFLINE": "1"}
    [core] = hybrid_cores(REQUESTS, shape, environment=os.environ | more | {"VLLM_TARGET_DEVICE": "cpu"})
    first = BlockTable(Tracker(), PAGE, 260, group)
    for request in core["requests"]:
        first.apply(event for batch in request["batches"] for event in decode(bytes.fromhex(batch)))
    assert set(first.groups_told) == set(range(len(first.groups_told) + 1)) - {group}
    tables = {
        name: BlockTable(Tracker(), PAGE, 260, group, groups=told)
        for name, told in {"with": first.groups_told, "without": {}}.items()
    }
    found = {name: Counter[str]() for name in tables}
    for request in core["requests"]:
        for name, table in tables.items():
            for batch in request["batches"]:
                table.apply(decode(bytes.fromhex(batch)))
            found[name][outcome(request["cached"], predicted(table, request["tokens"]))] += 1
    print(f"\n{shape}: {found}")
    assert found["without"]["short"], "the other groups matter"
    assert not found["with"]["short"]
    if known:
        assert found["with"]["exact"] >= 0.85 * REQUESTS
    else:
        assert tables["with"].ends is not None
        assert not tables["with"].ends.table
