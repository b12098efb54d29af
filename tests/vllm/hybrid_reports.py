"""What ``hybrid_core.py`` tells, and what a router makes of it."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.vllm.engine import MODEL, ROOT, VENV

from warmfleet.prompt.block_hashes import Hasher
from warmfleet.protocol.wire import HASH_BYTES, Scheme

if TYPE_CHECKING:
    from collections.abc import Mapping


def hybrid_cores(requests: int, *shapes: str, environment: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Run so many requests on a core of each shape. environment: of a tree of another version; None: the installed."""
    own = {"PYTHONPATH": str(ROOT / "worker_plugin"), "VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}
    environ = dict(environment or os.environ | own) | {"CORE_MODEL": str(MODEL), "VLLM_LOGGING_LEVEL": "ERROR"}
    program = [str(VENV / "bin" / "python"), str(ROOT / "tests/vllm/hybrid_core.py")]
    done = subprocess.run([*program, str(requests), *shapes], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    return [json.loads(line) for line in done.stdout.splitlines()[-len(shapes) :]]


@dataclass
class Index:
    """What a router has of one engine core: the blocks of the main set and of the ends."""

    scheme: Scheme
    sets: dict[str, set[str]] = field(default_factory=lambda: {"": set(), "ends": set()})

    def __post_init__(self) -> None:
        self.hasher = Hasher(self.scheme)

    def apply(self, changes: list[tuple[str, str, str]]) -> None:
        """Each change must be one."""
        for kind, operation, packed in changes:
            held = self.sets[kind]
            hashes = {packed[at : at + 2 * HASH_BYTES] for at in range(0, len(packed), 2 * HASH_BYTES)}
            if operation == "stored":
                assert held.isdisjoint(hashes)
                held |= hashes
            elif operation == "removed":
                assert held >= hashes
                held -= hashes
            else:
                held.clear()

    def chain(self, tokens: list[int]) -> list[str]:
        packed = self.hasher.chain(tokens).hashes
        return [packed[at : at + HASH_BYTES].hex() for at in range(0, len(packed), HASH_BYTES)]

    def predict(self, tokens: list[int], *, ends: bool = True) -> int:
        """Tokens up to the deepest end of those that the main group holds; without ends, all that it holds."""
        chain = self.chain(tokens)
        depth = next((at for at, block in enumerate(chain) if block not in self.sets[""]), len(chain))
        while ends and depth and chain[depth - 1] not in self.sets["ends"]:
            depth -= 1
        return depth * self.scheme.block_tokens


def outcome(cached: int, predicted: int) -> str:
    return "exact" if cached == predicted else "over" if cached > predicted else "short"


def outcomes(core: dict[str, Any], *, ends: bool = True) -> tuple[Counter[str], Index]:
    """Compare each request with its prediction, all changes that were reported before it being applied."""
    index, found = Index(Scheme.from_dict(core["scheme"])), Counter[str]()
    for request in core["requests"]:
        index.apply(request["changes"])
        found[outcome(request["cached"], index.predict(request["tokens"], ends=ends))] += 1
    return found, index
