"""Workers make equal token ids if the files and facts that their servers announced agree."""

from __future__ import annotations

from typing import Any

import pytest

from warmfleet.background import announced
from warmfleet.background.announced import Grouping
from warmfleet.fleet import LoadRow, WorkerState, WorkerView

FILES = {"tokenizer.json": {"sha256": "aa", "bytes": 2, "chunks": []}}
ALL = {"content_format": "string", "special_tokens": {"eos_token": "</s>"}, "multimodal": False}


def worker(name: str, facts: dict[str, Any], sha256: str = "aa") -> WorkerView:
    files = {"tokenizer.json": {**FILES["tokenizer.json"], "sha256": sha256}}
    server = {"artifacts": files, "facts": facts}
    return WorkerView(name, {}, server, LoadRow(), 0.0, WorkerState.PROVEN, "proven", f"http://{name}", ["m"])


def grouped(*workers: WorkerView) -> list[list[str]]:
    return [[member.worker_id for member in group] for group in Grouping().by_identity(workers).values()]


def test_a_worker_that_announces_fewer_facts_belongs_to_those_that_it_does_not_contradict() -> None:
    """Workers that announce all facts come first, because the identity is built of these facts."""
    bridged = [worker(f"bridged-{number}.0", {"special_tokens": ALL["special_tokens"]}) for number in range(3)]
    assert grouped(*bridged, worker("plugin.0", ALL)) == [["plugin.0", *(member.worker_id for member in bridged)]]


def test_a_worker_that_contradicts_or_has_other_files_does_not() -> None:
    odd = worker("odd.0", {"special_tokens": {}})
    other = worker("other.0", {"special_tokens": ALL["special_tokens"]}, sha256="bb")
    assert grouped(worker("plugin.0", ALL), odd, other) == [["plugin.0"], ["odd.0"], ["other.0"]]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b"], "a and b"),
        (["a", "b", "c"], "a, b and c"),
        (["a", "b", "c", "d"], "a, b, c and 1 more"),
        ([*"abcdefghij"], "a, b, c and 7 more"),
    ],
)
def test_at_most_three_differing_facts_are_named(names: list[str], told: str) -> None:
    assert announced.listed(names) == told
