"""Prints the environments that the selected tests need beyond the common one, as targets of the Makefile.

    python3 tests/support/run/needed_targets.py -q tests/app/test_stop.py      prints nothing
    python3 tests/support/run/needed_targets.py -x tests/vllm                  prints: vllm

`make test ARGS="..."` builds what this prints. Arguments that name no test file or folder select all tests. Uses the
standard library alone, because it runs before any environment of ours exists.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
#: Folder below tests/ -> the target that builds what its tests need.
TARGETS = {"vllm": "vllm", "k8s": "checkov", "envoy": "envoy"}
#: Options of pytest that take the next argument as their value: that argument names no test to run.
WITH_VALUE = {
    "-k",
    "-m",
    "-n",
    "-p",
    "-o",
    "-c",
    "-W",
    "--ignore",
    "--deselect",
    "--durations",
    "--maxfail",
    "--timeout",
}


def targets(arguments: list[str]) -> list[str]:
    """The targets that these pytest arguments need."""
    selected = selected_paths(arguments) or [TESTS]
    return [target for folder, target in TARGETS.items() if any(overlap(TESTS / folder, path) for path in selected)]


def selected_paths(arguments: list[str]) -> list[Path]:
    """The files and folders of tests that the arguments name."""
    values = {at + 1 for at, argument in enumerate(arguments) if argument in WITH_VALUE}
    named = [argument for at, argument in enumerate(arguments) if at not in values and not argument.startswith("-")]
    paths = [(TESTS.parent / argument.partition("::")[0]).resolve() for argument in named]
    return [path for path in paths if overlap(TESTS, path)]


def overlap(folder: Path, path: Path) -> bool:
    """Whether one of the two paths contains the other."""
    return path.is_relative_to(folder) or folder.is_relative_to(path)


if __name__ == "__main__":
    print(*targets(sys.argv[1:]))
