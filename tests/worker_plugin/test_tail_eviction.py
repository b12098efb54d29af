"""The blocks that T-LRU gives up, by the code that vLLM's hook and the simulator share."""

from __future__ import annotations

import math

import pytest

from warmfleet_worker.eviction import next_prompt
from warmfleet_worker.eviction.finished import Finished
from warmfleet_worker.eviction.next_prompt import ASSUMED_TOKENS, MAX_WAITING, MIN_SAMPLES, NextPrompt
from warmfleet_worker.eviction.objective import FixedObjective, Served, objective_of
from warmfleet_worker.eviction.shared_prefixes import MAX_ENDS, SharedPrefixes
from warmfleet_worker.eviction.tags import Tags
from warmfleet_worker.eviction.tail_eviction import SILENT_GAPS, TailEviction

BLOCK = 16


class Xi:
    """An objective with a given ξ."""

    def __init__(self, tokens: int | None) -> None:
        self.tokens = tokens

    def xi_tokens(self) -> int | None:
        return self.tokens

    def note(self, served: Served) -> None: ...


def chain(name: str, *numbers: int, after: list[tuple[int, bytes]] | None = None) -> list[tuple[int, bytes]]:
    return [*(after or []), *((number, f"{name}{number}".encode()) for number in numbers)]


def finished(blocks: list[tuple[int, bytes]], *, ended: bool = False, answer_blocks: int = 0) -> Finished:
    tokens = len(blocks) * BLOCK
    numbers, hashes = [number for number, _ in blocks], [block_hash for _, block_hash in blocks]
    return Finished(numbers, hashes, tokens - answer_blocks * BLOCK, tokens, ended)


def always(_number: int, _hash: bytes) -> bool:
    return True


@pytest.fixture
def no_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_prompt, "ASSUMED_TOKENS", 0)


@pytest.mark.usefixtures("no_growth")
def test_blocks_beyond_the_budget_go_first_and_the_last_of_them_before_the_others() -> None:
    eviction = TailEviction(BLOCK, Xi(3 * BLOCK))
    eviction.finished(finished(chain("a", *range(10))), 1.0)
    eviction.finished(finished(chain("b", *range(10, 20))), 2.0)
    assert eviction.give_up(100, always) == [9, 8, 7, 19, 18, 17]
    assert (eviction.tagged, len(eviction.tags)) == (6, 0)


def test_the_budget_is_rounded_up_and_counts_the_next_prompt() -> None:
    eviction = TailEviction(BLOCK, Xi(300))
    assert ASSUMED_TOKENS == 200
    assert eviction.budget_blocks(1_000) == math.ceil((1_000 + 200 - 300) / BLOCK)
    assert eviction.budget_blocks(50) == 0


@pytest.mark.parametrize("xi", [None, 0])
def test_without_an_objective_nothing_is_tagged(xi: int | None) -> None:
    eviction = TailEviction(BLOCK, Xi(xi))
    eviction.finished(finished(chain("a", *range(10))), 1.0)
    assert eviction.give_up(100, always) == []


@pytest.mark.usefixtures("no_growth")
def test_an_ended_conversation_has_no_tags() -> None:
    eviction = TailEviction(BLOCK, Xi(3 * BLOCK))
    eviction.finished(finished(chain("a", *range(10))), 1.0)
    eviction.finished(finished(chain("a", *range(10)), ended=True), 2.0)
    assert eviction.give_up(100, always) == []


def test_a_prefix_that_conversations_share_is_never_tagged() -> None:
    eviction = TailEviction(BLOCK, Xi(10**6))
    system = chain("s", 0, 1, 2)
    for first in (10, 20, 30, 40):
        eviction.finished(finished(chain("c", first, first + 1, after=system)), float(first))
    assert eviction.give_up(100, always) == [11, 10, 21, 20, 31, 30, 41, 40]


def test_two_answers_after_one_prompt_make_no_shared_prefix() -> None:
    """A template that drops the reasoning of earlier answers lets every conversation go on in two ways."""
    eviction = TailEviction(BLOCK, Xi(10**6))
    prompt = chain("p", 0, 1, 2)
    eviction.finished(finished(prompt), 0.0)
    eviction.finished(finished(chain("thinking", 3, 4, after=prompt)), 1.0)
    eviction.tags.take(100, always)
    eviction.finished(finished(chain("answer", 5, 6, after=prompt)), 2.0)
    assert eviction.give_up(100, always) == [6, 5, 2, 1, 0]


@pytest.mark.usefixtures("no_growth")
def test_the_latest_request_decides_about_a_block() -> None:
    eviction = TailEviction(BLOCK, Xi(3 * BLOCK))
    turn = chain("a", *range(10))
    eviction.finished(finished(turn), 1.0)
    eviction.finished(finished(chain("a", *range(10, 20), after=turn)), 2.0)
    assert eviction.give_up(100, always) == [19, 18, 17]


def test_tags_of_blocks_that_changed_or_are_in_use_are_dropped() -> None:
    tags = Tags()
    tags.tag([(1, b"a"), (2, b"b"), (3, b"c"), (4, b"d")])
    now = {1: b"a", 2: b"other", 3: None, 4: b"d"}
    assert tags.take(1, lambda number, block_hash: now[number] == block_hash) == [1]
    assert tags.take(5, lambda number, block_hash: now[number] == block_hash) == [4]
    assert len(tags) == 0


def test_a_block_has_one_tag_and_its_place_is_that_of_the_last() -> None:
    tags = Tags()
    tags.tag([(1, b"a"), (2, b"b")])
    tags.keep([1, 3])
    tags.tag([(3, b"c"), (1, b"a")])
    assert len(tags) == 3
    tags.keep([3])
    assert tags.take(9, always) == [2, 1]


def test_growth_and_gap_are_learned_from_turns() -> None:
    learner = NextPrompt(BLOCK)
    hashes = [f"h{number}".encode() for number in range(600)]
    tokens = now = 0
    for turn in range(MIN_SAMPLES + 1):
        assert (learner.growth_tokens, learner.gap_s) == (ASSUMED_TOKENS, None)
        prompt = tokens + 320
        tokens, now = prompt + 160, 7 * turn
        learner.finished(hashes[: tokens // BLOCK], prompt, tokens, float(now))
    assert (learner.growth_tokens, learner.gap_s) == (320, 7.0)


def test_a_repeated_prompt_and_a_shared_prefix_are_no_next_turn() -> None:
    learner = NextPrompt(BLOCK)
    hashes = [f"h{number}".encode() for number in range(40)]
    for turn in range(3 * MIN_SAMPLES):
        learner.finished(hashes[:10], 160, 160, float(turn))
        learner.finished(hashes[:20], 320, 320, float(turn), shared=lambda found: found == hashes[9])
    assert learner.gap_s is None


def test_what_is_learned_is_bounded() -> None:
    learner, prefixes = NextPrompt(BLOCK), SharedPrefixes()
    for number in range(MAX_WAITING + 100):
        learner.finished([b"%d" % number], BLOCK, BLOCK, 0.0)
        prefixes.note(b"%d" % number, b"next")
    assert len(learner._waiting) == MAX_WAITING
    assert len(prefixes._ends) == MAX_ENDS
    assert b"0" not in learner._waiting


def test_a_conversation_that_is_silent_for_long_counts_as_ended() -> None:
    eviction = TailEviction(BLOCK, Xi(None))
    blocks = chain("a", *range(10))
    assert not eviction.is_silent(0, 1e9)
    for turn in range(MIN_SAMPLES + 1):
        blocks = chain("a", 10 + 2 * turn, 11 + 2 * turn, after=blocks)
        eviction.finished(finished(blocks), 10.0 * turn)
    end = 10.0 * MIN_SAMPLES
    assert not eviction.is_silent(0, end + SILENT_GAPS * 10)
    assert eviction.is_silent(0, end + SILENT_GAPS * 10 + 1)
    assert not eviction.is_silent(9_999, 1e9), "nobody knows how long that block is unused"


def test_a_fixed_objective_is_a_time_at_the_measured_speed() -> None:
    speed = [0]
    objective = objective_of("0.5", lambda: speed[0])
    assert objective.xi_tokens() is None
    speed[0] = 4_000
    assert objective.xi_tokens() == 2_000
    assert FixedObjective(0.0, lambda: 4_000).xi_tokens() == 0


@pytest.mark.parametrize("target", ["", "soon", "-1", "nan", "inf", "1s"])
def test_a_target_that_is_no_time_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="WARMFLEET_TTFT_TARGET_S must be"):
        objective_of(target, lambda: 0)
