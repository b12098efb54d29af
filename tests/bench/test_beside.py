"""The comparison of two decide scripts sees a changed rule, and nothing where none has changed."""

from __future__ import annotations

from dataclasses import replace

from tests.bench.decide_beside import HERE, Checkout, differing, same


def test_a_changed_rule_is_seen(url: str) -> None:
    ours = Checkout.read(HERE)
    assert differing(url, {"ours": ours, "other": ours}, 100) == (0, 0)
    for rule, changed in (
        ("(work + evicts) / tps", "work / tps"),
        ("decode + context, flight + 1", "decode, flight + 1"),
        ("BOOKED", "BOOKED."),
    ):
        text = ours.texts["decide"]
        assert rule in text
        other = replace(ours, texts={"decide": text.replace(rule, changed)})
        assert differing(url, {"ours": ours, "other": other}, 100) != (0, 0), rule


def test_tiers_that_are_asked_for_are_found_as_by_reading_all(url: str) -> None:
    """A fleet with few tiers is searched in another way than one with many, and decides the same."""
    ours = Checkout.read(HERE)
    text = ours.texts["decide"]

    def beside(rule: str, changed: str) -> tuple[int, int]:
        assert rule in text
        other = replace(ours, texts={"decide": text.replace(rule, changed)})
        return differing(url, {"ours": ours, "other": other}, 150, tiered=0.5)

    assert beside("count <= 16", "count < 0") == (0, 0)
    assert beside("candidates - 1, held + own[k]", "candidates - 1, held") != (0, 0)


def test_seconds_in_texts_may_differ_in_their_last_digit() -> None:
    assert same([b"0.100000,2", 7], [b"0.100001,2", 7])
    assert not same([b"0.1,2", 7], [b"0.11,2", 7])
    assert same([b"0.1,2,0.000000"], [b"0.1,2"])
    assert not same([b"0.1,2,0.1"], [b"0.1,2"])
    assert not same([b"w1.0"], [b"w2.0"])
    assert not same(([b"1"], {b"load": b"a"}), ([b"1"], {b"load": b"b"}))
