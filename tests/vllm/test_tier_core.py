"""The plugin's view of a tier in CPU memory is the manager's own table, in every version of vLLM."""

from __future__ import annotations

import json
import subprocess

import pytest
from tests.vllm.engine import ROOT, VENV
from tests.vllm.trees import VERSIONS, environment, tree

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=1,
        shows=(
            "the manager of the tier in CPU memory of vLLM 0.28 to 0.33, under random stores, loads, evictions, "
            "failures and resets: the plugin's set equals its table after each step"
        ),
    ),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_tier_is_followed_exactly(version: str) -> None:
    command = [str(VENV / "bin" / "python"), str(ROOT / "tests/vllm/tier_core.py")]
    done = subprocess.run(command, env=environment(tree(version)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["steps"] == 6_000
    assert found["differences"] == 0
    assert all(found[what] > 10 for what in ("evicted", "failed", "loaded", "reset", "refused")), found
