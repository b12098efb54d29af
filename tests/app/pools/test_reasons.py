"""Every word of the scripts for why a worker was chosen has its words for an operator, in the code and in the docs."""

from __future__ import annotations

import re
from pathlib import Path

from warmfleet.fleet import Seen
from warmfleet.pools.reasons import OF_A_TIE, REASONS, in_words

ROOT = Path(__file__).parents[3]
SCRIPTS = (ROOT / "lua/parts/decide/cost_rule.lua", ROOT / "lua/parts/decide/baseline_policies.lua")
NOTHING_SEEN = Seen((0, 0, 0, 0), [], waits=False, tie_s=0.005)


def words_of_the_scripts() -> set[str]:
    text = "".join(path.read_text() for path in SCRIPTS)
    steps = re.search(r"DECIDED_BY = \{(.*?)\}", text)
    assert steps
    said = re.findall(r'return [^\n"]*"(\w+)"', text) + re.findall(r'(?:or|and) "(\w+)"', text)
    return {*re.findall(r'"(\w+)"', steps[1]), *said}


def test_every_word_is_explained() -> None:
    assert words_of_the_scripts() <= REASONS.keys()
    assert REASONS.keys() > OF_A_TIE


def test_the_docs_have_the_same_words() -> None:
    table = (ROOT / "app/docs/operate.md").read_text().split("\n| why | rule |\n")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines()))) == REASONS.keys()


def test_a_word_that_is_not_of_a_tie_stands_alone() -> None:
    assert in_words("cost", "lowest", NOTHING_SEEN) == REASONS["lowest"]
    assert in_words("least_loaded", "lowest", NOTHING_SEEN) == "it has the lowest load"
    assert in_words("random", "seed", NOTHING_SEEN) == REASONS["seed"]
    assert in_words("cost", "a word of a later version", NOTHING_SEEN) == "a word of a later version"
