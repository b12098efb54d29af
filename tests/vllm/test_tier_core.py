"""The plugin's view of a tier in CPU memory, and of a folder behind it, in every version of vLLM."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest
from tests.vllm.engine import ROOT, VENV
from tests.vllm.trees import VERSIONS, environment, tree

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=2,
        shows=(
            "the managers of tiers of vLLM 0.28 to 0.33, under random stores, loads, evictions, failures and resets: "
            "the plugin's set equals the table of the tier in CPU memory after each step; two engines share a folder "
            "from which somebody deletes files: both together report what is there, but for files that nobody missed"
        ),
    ),
    pytest.mark.timeout(300),
]


def run(version: str, script: str, *arguments: str) -> dict[str, int]:
    command = [str(VENV / "bin" / "python"), str(ROOT / "tests/vllm" / script), *arguments]
    done = subprocess.run(command, env=environment(tree(version)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_tier_is_followed_exactly(version: str) -> None:
    found = run(version, "tier_core.py")
    assert found["steps"] == 6_000
    assert found["differences"] == 0
    assert all(found[what] > 10 for what in ("evicted", "failed", "loaded", "reset", "refused")), found
    assert found["left out"] == 2, "several blocks in a chunk; several KV cache groups"


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_told_of_a_shared_folder_is_there(version: str, tmp_path: Path) -> None:
    found = run(version, "store_core.py", str(tmp_path))
    assert found["requests"] == 400
    assert found["stores"] == 1, "both engines found the same mark"
    assert found["loaded"] > 800
    assert found["promised less"] == found["never told"] == found["still promised"] == 0
    assert 0 < found["promised more"] <= found["deleted"] == 40
    assert found["measured"] == 2
