"""The documents agree with the code: tables are current, commands parse, links have targets, modules are listed."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
from tests.contract.generate_docs import PAGES, filled
from tests.support.run.os_tools import TAKEN_OUT, TOOLS
from tests.support.run.required_tools import require

from warmfleet.__main__ import main
from warmfleet.cli.parser import build_parser
from warmfleet.metrics import Metrics
from warmfleet.settings import FOREIGN, PREFIX, Settings
from warmfleet_worker.bridge import options, status
from warmfleet_worker.protocol.wire import SINGLE_KEYS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "app" / "docs"
README = (ROOT / "README.md").read_text()
#: Every document of the repository. Links into the plugin and to lua/ are not followed.
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "*/README.md", "app/docs/**/*.md", "tests/*/*.md")
    for path in ROOT.glob(pattern)
    if path.relative_to(ROOT).parts[0][0] != "."
)
PACKAGES = {"warmfleet_worker", "warmfleet_loadtest"}
SHELL_ENDS = frozenset({">", ">>", "|", "&&", ";"})
DOCUMENT = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def commands() -> list[str]:
    actions = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return [name for action in actions for name in action.choices]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def code_blocks(text: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def shell_commands(document: Path) -> list[list[str]]:
    """The words of every `warmfleet`, `make`, `pip` and `python` line in a code block, without environment."""
    text = document.read_text()
    indented = "\n".join(line[4:] for line in text.splitlines() if line.startswith("    "))
    found = []
    for line in "\n".join([*code_blocks(text), indented]).replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a picture, not a command
            continue
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            del words[0]
        end = next((at for at, word in enumerate(words) if word in SHELL_ENDS), len(words))
        if words and Path(words[0]).name in ("warmfleet", "make", "pip", "python"):
            found.append([Path(words[0]).name, *words[1:end]])
    return found


def prose(document: Path) -> list[str]:
    """The lines that are neither in a code block nor part of a table."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [line for line in text.splitlines() if not line.startswith("|")]


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_command_and_target_is_documented() -> None:
    told = "".join(document.read_text() for document in DOCUMENTS)
    wanted = [f"warmfleet {name}" for name in commands()] + [f"make {name}" for name in targets()]
    assert len(wanted) > 20
    assert [text for text in wanted if not re.search(rf"\b{text}\b", told)] == []


def test_the_readme_names_the_os_packages() -> None:
    assert [command for command in (*TOOLS, *TAKEN_OUT) if command not in README] == []


def test_ci_runs_what_the_readme_names() -> None:
    script = (ROOT / ".ci/run").read_text()
    assert re.findall(r"^make (\w+)", script, re.MULTILINE) == ["check", "test"]


def test_every_key_is_in_the_table_of_keys() -> None:
    table = (ROOT / "lua/README.md").read_text()
    assert [key for key in SINGLE_KEYS if f"`{key}`" not in table] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_generated_tables_are_current(page: Path) -> None:
    assert page.read_text() == PAGES[page](), "run: python -m tests.contract.generate_docs"


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="unpack"):
        filled("no marks", {"errors": "a table"})


def test_every_header_of_an_answer_is_documented() -> None:
    text = (DOCS / "api.md").read_text()
    names = ("x-request-id", "x-warmfleet-worker", "x-warmfleet-matched-tokens", "x-warmfleet-reservation")
    assert [name for name in names if f"`{name}`" not in text] == []


@DOCUMENT
def test_commands_in_snippets_can_be_typed(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, *words in shell_commands(document):
        if name == "warmfleet":
            assert _parses(words), f"warmfleet {shlex.join(words)}: {capsys.readouterr().err}"
        elif name == "make":
            _check_make(words)
        elif name == "pip" and words[:1] == ["install"]:
            folders = [ROOT / word.partition("[")[0] for word in words[1:] if word.startswith(".")]  # without extras
            assert [folder for folder in folders if not (folder / "pyproject.toml").exists()] == []
        elif name == "python" and words[:1] == ["-m"]:
            assert importlib.util.find_spec(words[1]) is not None, words


@DOCUMENT
def test_commands_within_sentences_exist(document: Path) -> None:
    text = "\n".join(prose(document)) + "\n".join(re.findall(r"^\|.*$", document.read_text(), re.MULTILINE))
    named = set(re.findall(r"`(?:\.venv/bin/)?warmfleet ([a-z]\w*)", text))
    assert named - set(commands()) == set()
    for words in re.findall(r"`make ([^`]*)`", text):
        _check_make(shlex.split(words))


def _parses(words: list[str]) -> bool:
    """The real parser takes these words, or answers them with its help."""
    try:
        if words[0] == "bridge":
            options.parser().parse_args(words[1:])
        else:
            build_parser().parse_args(words)
    except SystemExit as end:
        return end.code == 0
    return True


def _check_make(words: list[str]) -> None:
    """Targets, benches and paths that a `make` command names exist."""
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            assert name.startswith("-") or name in targets(), word
        elif name == "NAME" and value.isidentifier():
            assert (ROOT / f"tests/bench/bench_{value}.py").exists(), word
        elif name == "ARGS":
            paths = [part for part in value.split() if part.startswith("tests/")]
            assert [path for path in paths if not (ROOT / path.partition("::")[0]).exists()] == [], word


def test_snippets_that_need_no_fleet_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = {tuple(words) for document in DOCUMENTS for name, *words in shell_commands(document) if name == "warmfleet"}
    ran = sorted(words for words in found if words[0] == "acl")
    assert ran
    for words in ran:
        assert main(words) == 0
        assert "user router" in capsys.readouterr().out


def test_the_unit_and_the_balancer_for_plain_machines_work(tmp_path: Path) -> None:
    text = (DOCS / "operate.md").read_text()
    (unit,) = re.findall(r"```ini\n(.*?)```", text, re.DOTALL)
    (start,) = re.findall(r"^ExecStart=\S+/warmfleet (.*)$", unit, re.MULTILINE)
    assert _parses(shlex.split(start))
    (balancer,) = re.findall(r"```haproxy\n(.*?)```", text, re.DOTALL)
    (tmp_path / "haproxy.cfg").write_text(balancer)
    subprocess.run([require("haproxy"), "-c", "-q", "-f", tmp_path / "haproxy.cfg"], check=True)


@DOCUMENT
def test_settings_and_metrics_that_are_named_exist(document: Path) -> None:
    """A name may end in a star."""
    text = document.read_text()
    variables = {PREFIX + item.name.upper() for item in fields(Settings)} | FOREIGN
    variables |= {f"{PREFIX}{item.name.upper()}_FILE" for item in fields(Settings) if item.metadata.get("secret")}
    named = set(re.findall(r"\bWARMFLEET_[A-Z][A-Z_]*[A-Z]\b(?!_)", text))
    assert named - variables == set()
    families = list(Metrics().registry.collect())
    metrics = {metric.name for metric in families} | {name for name, _, _ in status.METRICS}
    metrics |= {f"{metric.name}_bucket" for metric in families if metric.type == "histogram"}
    named = set(re.findall(r"\bwarmfleet_[a-z_]+[a-z](?![a-z_/.*])", text)) - PACKAGES
    assert {name for name in named if name.removesuffix("_total") not in metrics} == set()


@DOCUMENT
def test_links_lead_somewhere(document: Path) -> None:
    lost = []
    for link, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", document.read_text()):
        target = document.parent / link if link else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(f"{link}#{anchor}")
    assert lost == []


def test_every_page_of_the_docs_can_be_reached() -> None:
    linked = {
        (document.parent / link).resolve()
        for document in (ROOT / "README.md", ROOT / "app/README.md", *DOCS.glob("*.md"))
        for link in re.findall(r"\]\(([^)#:\s]+)", document.read_text())
    }
    assert set(DOCS.glob("*.md")) - linked == set()


def test_decision_records_are_few_short_and_listed() -> None:
    folder = DOCS / "decisions"
    records = {path.name: path.read_text() for path in sorted(folder.iterdir()) if path.name != "README.md"}
    assert len({name[:3] for name in records}) == len(records) <= 40
    assert [name for name in records if not re.fullmatch(r"\d{3}-[a-z0-9-]+\.md", name)] == []
    assert [name for name, text in records.items() if len(text.split()) > 120] == []
    listed = re.findall(r"^- \[(\d{3})\]\((.*?)\) (.*)$", (folder / "README.md").read_text(), re.MULTILINE)
    assert listed == [(name[:3], name, text.splitlines()[0][2:]) for name, text in records.items()]
    paths = re.findall(r"`((?:app|lua|tests|worker_plugin)/\S+)`", "".join(records.values()))
    assert [path for path in paths if not (ROOT / path).exists()] == []
