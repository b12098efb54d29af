"""How the suite is run: the table of long tests is current, and the rules about processes name files that exist."""

from __future__ import annotations

import pytest
from tests.support.run.long_tests import README, ROOT, rows, with_table
from tests.support.run.scheduling import FIRST, TOGETHER, runs_long_tests, unit_of


def test_the_table_of_long_tests_is_current() -> None:
    text = README.read_text()
    assert text == with_table(text), "run: python -m tests.support.run.long_tests --write"


def test_every_folder_of_tests_is_described() -> None:
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in ROOT.glob("tests/*/**/test_*.py")}
    text = README.read_text()
    assert [name for name in sorted(folders) if f"| [{name}]({name}) |" not in text] == []


def test_minutes_are_told_for_every_long_test() -> None:
    found = rows()
    assert len(found) > 40
    assert min(row.minutes for row in found) >= 1


@pytest.mark.parametrize(
    ("marks", "long"),
    [("not long", False), ("", True), ("long", True), ("long and in_turn", True), ("long or not long", True)],
)
def test_long_tests_are_recognised_in_every_choice_of_marks(marks: str, long: bool) -> None:
    assert runs_long_tests(marks) == long


def test_the_files_that_start_early_or_share_a_process_exist() -> None:
    named = [*FIRST, *(name for group in TOGETHER for name in group)]
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_real_vllm_starts_in_one_process_and_other_files_are_apart() -> None:
    assert len({unit_of(f"tests/vllm/{name}::test[x::y]") for name in ("test_fleet.py", "test_handoff.py")}) == 1
    assert len({unit_of(f"tests/vllm/{name}::test[x::y]") for name in ("test_routes.py", "parity/test_parity.py")}) == 1
    assert unit_of("tests/lua/test_tick.py::test_a") == "tests/lua/test_tick.py"
