"""The bench ``tlru``: its policies keep their promises, and the whole works in its quick form."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.bench.bench_tlru import HEADLINE_TOKENS, main
from tests.bench.tail_conversations import BLOCK_TOKENS, NEXT_PROMPT_TOKENS, Turn, turns
from tests.bench.tail_policies import Lru, PluginLru, TailBelady, TailLru, blocks_for

if TYPE_CHECKING:
    from pathlib import Path

XI = 2_000
PLAYED = turns(300, 7, 180.0)


class LiteralTailLru(Lru):
    """Algorithm 1 step by step: a block of each conversation in turn, then of the longest unused one."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.lengths: dict[int, int] = {}

    def served(self, turn: Turn, length: int) -> None:
        self.lengths[turn.conversation] = length

    def make_room(self) -> None:
        trimmed = True
        while trimmed and self.used > self.blocks:
            trimmed = False
            for conversation in list(self.held):
                needed = blocks_for(self.lengths[conversation] + NEXT_PROMPT_TOKENS - XI)
                if self.used > self.blocks and self.held[conversation] > needed:
                    self.take(conversation, 1)
                    trimmed = True
        super().make_room()


def uncached(policy: Lru) -> list[int]:
    return [policy.serve(turn) for turn in PLAYED]


def excess(tokens: list[int]) -> int:
    return sum(max(0, count - XI) for count in tokens)


@pytest.mark.parametrize("blocks", [125, 500])
def test_the_policy_is_algorithm_1(blocks: int) -> None:
    literal, ours = uncached(LiteralTailLru(blocks)), uncached(TailLru(blocks, XI))
    assert sum(ours) == pytest.approx(sum(literal), rel=0.005)
    assert excess(ours) == pytest.approx(excess(literal), rel=0.02)
    assert sum(uncached(Lru(blocks))) != sum(ours)


@pytest.mark.parametrize("blocks", [62, 250, 625, 2_000])
def test_belady_is_the_bound_of_the_tail(blocks: int) -> None:
    bound = excess(uncached(TailBelady(blocks, XI)))
    others = [Lru(blocks), TailLru(blocks, XI), PluginLru(blocks, "auto"), PluginLru(blocks, "0.2")]
    assert all(bound <= excess(uncached(other)) for other in others)


def test_no_policy_holds_more_than_the_cache_or_a_conversation_has() -> None:
    for policy in (Lru(300), TailLru(300, XI), TailBelady(300, XI), PluginLru(300, "auto")):
        for turn in PLAYED:
            assert 0 < policy.serve(turn) <= turn.history + turn.prompt
            assert policy.used == sum(policy.held.values()) <= 300
            whole = (turn.history + turn.prompt + turn.reply) // BLOCK_TOKENS
            assert policy.held.get(turn.conversation, 0) <= whole


def test_the_command_prints_the_figures_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--jobs", "1", "--plots", str(tmp_path)]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    cell = told["rows"][f"conversations, gap 180 s, {HEADLINE_TOKENS} tokens"]["change_pct"]
    assert told["p90_change_pct"] == cell["T-LRU 200 ms"]["p90"]
    assert told["misses_change_pct"] == cell["T-LRU 200 ms"]["misses"]
    adaptive = [row["change_pct"]["auto"]["mean"] for row in told["rows"].values() if "auto" in row["change_pct"]]
    assert told["adaptive_worst_mean_change_pct"] == max(adaptive)
    fleet = told["rows"]["generated, each engine 256 blocks"]["change_pct"]
    assert list(fleet) == ["least_loaded", "least_loaded, T-LRU", "cost", "cost, T-LRU"]
    assert {path.name for path in tmp_path.iterdir()} == {"tlru_conversations.svg"}


def test_a_missing_trace_is_told_before_the_first_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACE", "/nowhere")
    assert main(["--part", "traces"]) == 1
    assert "no trace at /nowhere" in capsys.readouterr().err
