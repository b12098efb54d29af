"""What the READMEs say is there: every command, target and key is documented, every link leads somewhere."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from tests.os_tools import TOOLS

from warmfleet.cli.parser import build_parser
from warmfleet_worker.protocol.wire import SINGLE_KEYS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [path for path in (ROOT / "README.md", *ROOT.glob("*/README.md")) if path.parts[-2][0] != "."]


def commands() -> list[str]:
    actions = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return [name for action in actions for name in action.choices]


def targets() -> list[str]:
    return re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_every_command_and_target_is_in_the_readme() -> None:
    wanted = [f"warmfleet {name}" for name in commands()] + [f"make {name}" for name in targets()]
    assert len(wanted) > 12
    assert [text for text in wanted if not re.search(rf"\b{text}\b", README)] == []


def test_the_readme_names_the_os_packages() -> None:
    assert [command for command in TOOLS if command not in README] == []


def test_ci_runs_what_the_readme_names() -> None:
    script = (ROOT / ".ci/run").read_text()
    assert re.findall(r"^make (\w+)", script, re.MULTILINE) == ["check", "test"]


def test_every_key_is_in_the_table_of_keys() -> None:
    table = (ROOT / "lua/README.md").read_text()
    assert [key for key in SINGLE_KEYS if f"`{key}`" not in table] == []


def test_the_readme_counts_the_guards() -> None:
    counted = re.search(r"\| (\d+) protections of the protocol", README)
    assert counted is not None
    assert int(counted[1]) == (ROOT / "tests/guards/guards.toml").read_text().count("\n[[guard")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_rows_of_a_table_have_as_many_cells_as_its_head(document: Path) -> None:
    wanted, wrong = 0, []
    for line in document.read_text().splitlines():
        cells = re.sub(r"`[^`]*`", "", line).count("|") if line.startswith("|") else 0
        wanted = cells and (wanted or cells)
        if cells != wanted:
            wrong.append(line)
    assert wrong == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []
