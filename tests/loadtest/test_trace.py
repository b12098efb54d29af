"""Traces as arrivals: sharing is kept, lengths shrink, equal ids give equal tokens."""

from __future__ import annotations

import json
import lzma
from typing import TYPE_CHECKING, Any

import pytest

from warmfleet_loadtest.traces import trace
from warmfleet_loadtest.traces.trace import BLOCK_TOKENS, block

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, rows: list[dict[str, Any]], **header: object) -> Path:
    """Write a trace with these fields in its header."""
    with lzma.open(path, "wt") as out:
        for line in [{"name": "t", "block": 64, **header}, *rows]:
            out.write(json.dumps(line) + "\n")
    return path


ROWS: list[dict[str, object]] = [
    {"t": 0.5, "s": 0, "n": 1, "in": 160, "out": 40, "k": 0, "new": [0, 1, 2]},
    {"t": 1.0, "s": 1, "n": 1, "in": 64, "out": 1, "k": 0, "new": [0]},
    {"t": 9.5, "s": 0, "n": 2, "in": 256, "out": 8, "k": 2, "new": [7, 8]},
]


def test_a_trace_block_becomes_one_of_ours(tmp_path: Path) -> None:
    first, second, third = trace.load(write(tmp_path / "t.jsonl.xz", ROWS)).arrivals
    assert first.prompt == block(0) + block(1) + block(2)[: BLOCK_TOKENS // 2]
    assert second.prompt == block(0)
    assert third.prompt == block(0) + block(1) + block(7) + block(8)
    assert [arrival.at_s for arrival in (first, second, third)] == [0.5, 1.0, 9.5]
    assert [arrival.output_tokens for arrival in (first, second, third)] == [10, 1, 2]
    assert third.think_s is None


def test_a_synthetic_trace_is_closed_within_a_session(tmp_path: Path) -> None:
    loaded = trace.load(write(tmp_path / "t.jsonl.xz", ROWS, timing="synthetic: x"))
    assert loaded.closed
    assert [arrival.think_s for arrival in loaded.arrivals] == [None, None, pytest.approx(9.0 - 40 * 0.02)]


def test_only_so_many_rows(tmp_path: Path) -> None:
    assert len(trace.load(write(tmp_path / "t.jsonl.xz", ROWS), rows=2).arrivals) == 2


def test_different_ids_differ_within_two_tokens() -> None:
    heads = {tuple(block(identifier)[:2]) for identifier in range(20_000)}
    assert len(heads) == 20_000
    assert block(5) == block(5)
    assert all(trace.FIRST_TOKEN <= token < 8_192 for token in block(19_999))


def test_another_seed_gives_other_tokens_and_the_same_sharing(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl.xz", ROWS)
    one, other = trace.load(path), trace.load(path, seed=1)
    assert one.scale == other.scale == 4.0
    assert [len(arrival.prompt) for arrival in one.arrivals] == [len(arrival.prompt) for arrival in other.arrivals]
    assert not set(one.arrivals[1].prompt[:2]) & set(other.arrivals[1].prompt[:2])
    assert other.arrivals[2].prompt[:32] == other.arrivals[0].prompt[:32]
    assert len({tuple(block(identifier, 3)[:2]) for identifier in range(20_000)}) == 20_000


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.xz"
    with lzma.open(path, "wt") as out:
        out.write('{"name": "x"}\n')
    with pytest.raises(ValueError, match="header"):
        trace.load(path)
    whole = write(path, ROWS).read_bytes()
    for broken in (b"no xz", whole[: len(whole) // 2], write(path, [{"t": 1.0}]).read_bytes()):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"t\.jsonl\.xz is no trace"):
            trace.load(path)


def test_a_named_trace_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACE", "/nowhere.xz")
    with pytest.raises(FileNotFoundError):
        trace.open_trace()
    monkeypatch.setattr(trace, "SHARED", "nowhere")
    with pytest.raises(FileNotFoundError, match="sweagent"):
        trace.open_trace("agents")
    assert trace.open_trace("conversation", 3).name == "generated conversation"


def test_without_a_trace_one_of_the_same_shape_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACE", raising=False)
    monkeypatch.setattr(trace, "SHARED", "nowhere")
    made = trace.open_trace(rows=1_200, seed=3)
    assert made == trace.generate(1_200, 3) != trace.generate(1_200, 4)
    lengths = sorted(len(arrival.prompt) for arrival in made.arrivals)
    assert 300 < sum(lengths) / len(lengths) < 520  # the real one: 430
    assert 190 < lengths[600] < 330  # 256
    assert 320 < made.arrivals[-1].at_s < 480  # 400
    prefixes: set[tuple[int, ...]] = set()
    shared = 0
    for arrival in made.arrivals:
        for end in range(BLOCK_TOKENS, len(arrival.prompt) + 1, BLOCK_TOKENS):
            prefix = tuple(arrival.prompt[:end])
            shared += prefix in prefixes
            prefixes.add(prefix)
    assert 0.15 < BLOCK_TOKENS * shared / sum(lengths) < 0.4  # 0.3
