"""Every reason of the scripts for a choice of worker is explained to operators in the code and in the docs."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from warmfleet.fleet import Seen, Terms
from warmfleet.fleet.rows import LoadRow
from warmfleet.pools import reasons
from warmfleet.pools.reasons import OF_A_TIE, REASONS, in_words, moved_in_words, where_held

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


def test_where_a_prompt_is_held() -> None:
    assert where_held(16_384, 12_288, 0.0384, "cpu") == "4,096 on the GPU, 12,288 in CPU memory (38 ms)"
    assert where_held(48, 48, 0.0001, "disk") == "0 on the GPU, 48 on disk (1 ms)"
    assert where_held(48, 0, 0.0, "") == ""


def test_every_term_of_a_cost_has_its_words() -> None:
    assert list(reasons.TERMS) == [field.name for field in fields(Terms)]


def candidate(name: str, matched: int, **terms: float) -> list[object]:
    told = [terms.get(field.name, 0.0) for field in fields(Terms)]
    return [
        name.encode(),
        matched,
        0,
        LoadRow().pack(name),
        b"%f" % sum(told),
        b",".join(b"%f" % part for part in told),
        *(0, b"0.0", 0),  # nothing is to be loaded from a tier
    ]


def test_a_session_that_moves_is_told_why() -> None:
    home = candidate("w1", 1_600, wait_s=0.3, busy_s=0.12)
    away = candidate("w2", 320, compute_s=0.15, leave_s=0.13)
    seen = Seen((10_000, 16, 0, 0), [home, away], waits=False, tie_s=0.005)
    said = moved_in_words("cost", "w2", seen)
    assert said.startswith("w1 holds 1280 tokens more of it but costs 140 ms more, above all 300 ms for what is ahead")
    assert said.endswith("and 120 ms because it was busy lately")
    assert moved_in_words("cost", "w1", seen) == "", "it stays"
    assert moved_in_words("sticky", "w2", seen) == "", "no other policy asks what a worker costs"
