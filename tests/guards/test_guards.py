"""Every guard has a test that fails without it. A guard is a line of code that prevents one mistake.

The guards of a room stand in ``guards.toml`` beside the room's tests. The default run checks that the rows still fit
the sources. The long run takes out one guard after the other, each in a copy of the sources, and runs the test that
the row names.
"""

from __future__ import annotations

import difflib
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
    """A row. case: the event that may happen; why: how the guard handles it. Replacing ``cut`` by ``put`` in ``file``
    takes the guard out, and then the test ``red`` must fail."""

    case: str
    why: str
    file: str
    cut: str
    red: str
    put: str = ""


TABLES = {
    str(path.relative_to(ROOT)): [Guard(**row) for row in tomllib.loads(path.read_text())["guard"]]
    for path in sorted((ROOT / "tests").rglob("guards.toml"))
}
GUARDS = [guard for rows in TABLES.values() for guard in rows]
NAMES = [f"{at + 1}: {guard.file}: {guard.case}" for at, guard in enumerate(GUARDS)]
LONG = pytest.mark.long(
    minutes=18,
    shows=(
        "every protection in a guards.toml is taken away once, in a copy of the sources: "
        "the test that it names must fail"
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


def nearest(cut: str, text: str) -> str:
    """The lines of ``text`` that are most like ``cut``, with the number of the first."""
    lines, height = text.splitlines(), cut.count("\n") + 1
    windows = ["\n".join(lines[at : at + height]) for at in range(max(1, len(lines) - height + 1))]
    best = difflib.get_close_matches(cut, windows, n=1, cutoff=0.0)[0]
    return f"line {windows.index(best) + 1}: {best}"


def fault(guard: Guard) -> str:
    """Why this row does not fit the sources, empty where it does."""
    path = ROOT / guard.file
    text = path.read_text() if path.is_file() else ""
    if text.count(guard.cut) != 1:
        return f"its cut stands there {text.count(guard.cut)} times; nearest {nearest(guard.cut, text)}"
    if guard.cut == guard.put:
        return "its put is its cut"
    file, _, test = guard.red.partition("::")
    name, tests = test.partition("[")[0], (ROOT / file)
    there = tests.is_file() and re.search(rf"^(async )?def {name}\(", tests.read_text(), re.MULTILINE)
    return "" if there else f"there is no test {guard.red}"


@pytest.mark.parametrize("table", TABLES)
def test_a_table_fits_the_sources(table: str) -> None:
    faults = [f"{guard.file}, {guard.cut!r}: {why}" for guard in TABLES[table] if (why := fault(guard))]
    assert not faults, "\n".join(faults)


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
