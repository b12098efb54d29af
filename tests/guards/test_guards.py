"""Every guard of ``guards.toml`` has a test that fails without it. A guard is a line of code that prevents one mistake.

The default run checks that the table still fits the sources. The long run takes out one guard after the other, each in
a copy of the sources, and runs the test that the table names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("app", "worker_plugin", "loadtest", "lua", "tests")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.lock", "*.egg-info", "e2e", "k8s", "truth")
LIMIT_S = 60  # some code never ends without its guard


@dataclass(frozen=True, slots=True)
class Guard:
    """One row. case: the event that may happen; why: how the guard handles it. Replacing ``cut`` by ``put`` in ``file``
    takes the guard out, and then the test ``red`` must fail."""

    case: str
    why: str
    file: str
    cut: str
    red: str
    put: str = ""


GUARDS = [Guard(**row) for row in tomllib.loads(Path(__file__).with_name("guards.toml").read_text())["guard"]]
NAMES = [f"{at + 1}: {guard.case}" for at, guard in enumerate(GUARDS)]
LONG = pytest.mark.long(
    minutes=18,
    shows=(
        "every protection in guards.toml is taken away once, in a copy of the sources: the test that it names must fail"
    ),
)

#: Events that must never make the index wrong. Each has at least one guard.
CASES = {
    "a dead process's entry after its successor's",
    "two processes with one name",
    "the clock steps",
    "a stream begins anew",
    "a snapshot begins twice",
    "a clear cuts a snapshot",
    "a gap cuts a snapshot",
    "death cuts a snapshot",
    "a command is lost or repeated",
    "settle after forget",
    "decide after its cancel",
    "no router for ten minutes",
    "memory is short",
    "forged ids",
    "a key of a wrong type",
    "a hostile chat template",
    "more load than the fleet can serve",
    "a malformed join",
    "a hostile tokenizer",
}


def copy(folder: Path) -> None:
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=LEFT_OUT)
    shutil.copy(ROOT / "pyproject.toml", folder)


def pytest_in(folder: Path, *tests: str) -> tuple[int, str]:
    """Run these tests with the sources of ``folder``; return pytest's exit status and output."""
    path = os.pathsep.join(str(folder / name) for name in ("app", "worker_plugin", "loadtest", ""))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--timeout={LIMIT_S}", *tests]
    environment, limit_s = os.environ | {"PYTHONPATH": path}, LIMIT_S * max(8, len(tests))
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=limit_s
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("guard", GUARDS, ids=NAMES)
def test_the_table_is_true(guard: Guard) -> None:
    assert (ROOT / guard.file).read_text().count(guard.cut) == 1, "the fragment is in the file once"
    assert guard.cut != guard.put
    file, _, test = guard.red.partition("::")
    name, _, _ = test.partition("[")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), "the test is there"


def test_every_case_has_a_guard() -> None:
    assert sorted(CASES - {guard.case for guard in GUARDS}) == []


@LONG
@pytest.mark.timeout(3600)
def test_all_are_green_with_their_guards(tmp_path: Path) -> None:
    copy(tmp_path)
    status, output = pytest_in(tmp_path, *sorted({guard.red for guard in GUARDS}))
    assert status == 0, output[-4000:]


@LONG
@pytest.mark.timeout(600)
@pytest.mark.parametrize("guard", GUARDS, ids=NAMES)
def test_without_its_guard_it_is_red(tmp_path: Path, guard: Guard) -> None:
    copy(tmp_path)
    path = tmp_path / guard.file
    path.write_text(path.read_text().replace(guard.cut, guard.put))
    status, output = pytest_in(tmp_path, guard.red)
    failed = re.search(r"^FAILED ", output, re.MULTILINE)
    assert status == 1, f"nothing noticed that the guard is gone\n{output[-2000:]}"
    assert failed, f"not the test has failed, but what it needs\n{output[-4000:]}"
    assert "compiling script" not in output, "what is left is no script"
    assert "SyntaxError" not in output
