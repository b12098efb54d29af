"""vLLM's own core with KV cache groups of several kinds: what the plugin reports, and what routers make of it."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from typing import Any

import pytest
from tests.vllm.engine import MODEL, ROOT, VENV

from warmfleet.prompt.block_hashes import Hasher
from warmfleet.protocol.wire import HASH_BYTES, NO_PREFIXES, Scheme

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=1,
        shows=(
            "vLLM's core with sliding windows beside full attention: exactly the blocks of full attention are "
            "reported, also where hashes are finer than blocks, and nothing is cached that was not predicted"
        ),
    ),
    pytest.mark.timeout(600),
]

FULL = {"fine": 1, "equal": 0}  # the number of the group with full attention


def told(shape: str) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "worker_plugin"), "CORE_MODEL": str(MODEL)}
    environment |= {"VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [str(VENV / "bin" / "python"), str(ROOT / "tests/vllm/hybrid_core.py"), shape]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("shape", FULL)
def test_what_is_reported_is_the_full_attention_group_and_predicts_what_is_cached(shape: str) -> None:
    core = told(shape)
    scheme, reported = Scheme.from_dict(core["scheme"]), set(core["reported"])
    assert (scheme.block_tokens, scheme.hash_block_tokens) == (32, 16 if shape == "fine" else 32)
    assert not core["closed"]
    hasher, chains, outcomes = Hasher(scheme), set[str](), Counter[str]()
    for request in core["requests"]:
        packed, held = hasher.chain(request["tokens"]).hashes, set(request["held"])
        chain = [packed[at : at + HASH_BYTES].hex() for at in range(0, len(packed), HASH_BYTES)]
        depth = next((at for at, block in enumerate(chain) if block not in held), len(chain))
        predicted, cached = depth * scheme.block_tokens, request["cached"]
        outcomes["exact" if cached == predicted else "over" if cached > predicted else "short"] += 1
        chains.update(chain)
    # A window may have lost its blocks while full attention still has its own: then less is cached.
    assert outcomes["over"] == 0
    assert outcomes["exact"] >= 0.9 * len(core["requests"])
    assert sum(request["cached"] > 0 for request in core["requests"]) > 50
    of_group = {key[-24:-8] for key in core["table"] if int(key[-8:], 16) == FULL[shape]}
    assert reported <= of_group
    parts = of_group - reported
    assert bool(parts) == (shape == "fine"), "entries for parts of a block are there, and left out"
    assert parts.isdisjoint(chains)
    assert core["after_reset"] == 0


def test_a_model_without_full_attention_is_chosen_by_load() -> None:
    core = told("windows")
    assert core["scheme"]["algorithm"] == NO_PREFIXES
    assert core["table"]
    assert core["reported"] == []
