"""The blocks of ended and paused sessions, by the code that vLLM's hook and the simulator share."""

from __future__ import annotations

import pytest

from warmfleet_worker.eviction import sessions as module
from warmfleet_worker.eviction.eviction import MOST_NOTES, Eviction
from warmfleet_worker.eviction.finished import Finished
from warmfleet_worker.eviction.sessions import MOST_BLOCKS, Sessions

BLOCK = 16


def id_of(name: str) -> str:
    return f"wf-{name:->22}"


class Cache:
    """Blocks whose numbers are given out in turn, and the sessions that have them. A block is named by its text."""

    def __init__(self, blocks: int = 1_000) -> None:
        self.sessions = Sessions(BLOCK, blocks)
        self.number: dict[str, int] = {}
        self.used: set[str] = set()

    def freed(self, name: str, chain: str, prompt: int, cached: int = 0, **more: bool) -> None:
        """A request is freed whose blocks are the letters of ``chain``, each after all before it."""
        texts = [chain[: index + 1] for index in range(len(chain))]
        numbers = [self.number.setdefault(text, len(self.number)) for text in texts]
        hashes = [text.encode() for text in texts]
        tokens = prompt * BLOCK, len(chain) * BLOCK
        self.sessions.freed(
            Finished(numbers, hashes, *tokens, request_id=id_of(name) + ".x", cached_tokens=cached * BLOCK, **more)
        )

    def take(self, count: int = 999) -> str:
        """The last letters of the blocks that are taken."""
        texts = {number: text for text, number in self.number.items()}
        taken = self.sessions.take(count, lambda number, _hash: texts[number] not in self.used)
        return "".join(texts[number][-1] for number in taken)


def test_an_ended_session_goes_from_its_end() -> None:
    cache = Cache()
    cache.freed("1", "abcd", 3)
    cache.freed("2", "efgh", 3, ended=True)
    assert (cache.take(3), cache.take(3), cache.take(3)) == ("hgf", "e", "")
    assert not cache.sessions.leaving


def test_a_paused_session_goes_after_those_that_went_before() -> None:
    cache = Cache()
    cache.freed("1", "abcd", 3)
    cache.freed("2", "efgh", 3)
    for name in ("2", "unknown", "1"):
        cache.sessions.give_up(id_of(name))
    assert cache.take() == "hgfedcba"


def test_a_preempted_request_goes_only_once_it_has_finished() -> None:
    cache = Cache()
    cache.freed("1", "abcd", 3, ended=True, preempted=True)
    assert cache.take() == ""
    cache.freed("1", "abcde", 3, ended=True)
    assert cache.take() == "edcba"
    assert len(cache.sessions._requests) == 1


@pytest.mark.parametrize("ended_last", [False, True])
def test_what_two_sessions_share_stays_also_if_both_have_ended(*, ended_last: bool) -> None:
    cache = Cache()
    cache.freed("1", "SYSabc", 5, ended=not ended_last)
    cache.freed("2", "SYSdef", 5, ended=ended_last)
    assert cache.take() == ("fed" if ended_last else "cba")
    cache.sessions.give_up(id_of("2" if not ended_last else "1"))
    assert cache.take() == ("fed" if not ended_last else "cba")


def test_an_earlier_request_of_the_session_keeps_nothing() -> None:
    cache = Cache()
    cache.freed("1", "abcd", 3)
    cache.freed("2", "abcdefg", 6, cached=4)
    cache.freed("3", "abcdefghij", 9, cached=7)
    cache.sessions.give_up(id_of("3"))
    assert cache.take() == "jihgfedcba"


def test_an_answer_that_came_back_changed_goes_before_the_session() -> None:
    """Otherwise its blocks would stay in the cache without those before them."""
    cache = Cache()
    cache.freed("1", "abcXYZ", 3)  # the template drops X, Y and Z
    cache.freed("2", "abcdefUV", 6, cached=3)
    cache.freed("3", "abcdefUghi", 8, cached=7)
    cache.sessions.give_up(id_of("3"))
    assert cache.take() == "ZYXVihgUfedcba"


def test_a_fork_keeps_what_it_has_in_common() -> None:
    cache = Cache()
    cache.freed("1", "abcd", 3)
    cache.freed("left", "abcdefgh", 6, cached=4)
    cache.freed("right", "abcdxyz", 6, cached=4)
    cache.sessions.give_up(id_of("left"))
    assert cache.take() == "hgfe"
    cache.sessions.give_up(id_of("right"))
    assert cache.take() == "zyx", "the fork that has gone shows that the beginning was in common"


def test_a_session_that_comes_back_keeps_its_blocks() -> None:
    cache = Cache()
    cache.freed("1", "abcdef", 4)
    cache.sessions.give_up(id_of("1"))
    assert cache.take(1) == "f"
    cache.freed("2", "abcdxyz", 6, cached=4)
    assert cache.take() == "e"


def test_the_same_prompt_once_more_keeps_the_prompt() -> None:
    cache = Cache()
    cache.freed("1", "abcd", 3)
    cache.sessions.give_up(id_of("1"))
    cache.freed("2", "abcx", 3, cached=3)
    assert cache.take() == "d"


def test_a_prompt_that_was_sent_before_is_no_other_session() -> None:
    cache = Cache()
    cache.freed("1", "abcd", 3)
    cache.freed("2", "abcx", 3, cached=3)
    cache.sessions.give_up(id_of("2"))
    assert cache.take() == "dxcba"


def test_two_short_questions_are_two_sessions() -> None:
    cache = Cache()
    for name, more in (("1", 3), ("2", 7)):
        tokens = 3 * BLOCK + more, 4 * BLOCK
        hashes = [b"S", b"SY", b"SYS", name.encode()]
        cache.sessions.freed(Finished([0, 1, 2, 3 + int(name)], hashes, *tokens, request_id=id_of(name) + ".x"))
    cache.sessions.give_up(id_of("2"))
    assert list(cache.sessions.take(9, lambda *_: True)) == [5]


def test_first_steps_with_short_messages_are_sessions_of_their_own() -> None:
    """Their prompts have the same full blocks, those of the system prompt."""
    cache = Cache()
    for name, answer in (("1", "a"), ("2", "b"), ("3", "c"), ("4", "d")):
        cache.freed(name, f"SYS{answer}", 3, cached=3 if name != "1" else 0)
    cache.freed("5", "SYSxyz", 6, cached=3)
    for name in ("5", "2"):
        cache.sessions.give_up(id_of(name))
    assert cache.take() == "zyxb"


def test_a_block_that_is_in_use_is_left_alone() -> None:
    cache = Cache()
    cache.freed("1", "abcdef", 5, ended=True)
    cache.used = {"abcdef", "abc"}
    assert cache.take() == "edba"


@pytest.mark.parametrize("answer", [1, 16, 200])
def test_a_long_answer_is_found_by_its_beginning_and_by_its_end(answer: int) -> None:
    cache = Cache()
    text = "".join(chr(200 + index) for index in range(answer))
    cache.freed("1", f"ab{text}", 2)
    cache.freed("2", f"ab{text}cd", answer + 4, cached=answer + 2)
    assert len(cache.sessions._requests) == 1
    cache.freed("3", f"ab{text}cdef", answer + 6, cached=answer + 4)
    cache.sessions.give_up(id_of("3"))
    assert cache.take() == "fedc" + text[::-1] + "ba"


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_REQUESTS", 50)
    cache = Cache(20)
    sessions = cache.sessions
    for number in range(200):
        cache.freed(str(number), f"{chr(1_000 + number)}abcdefgh", 4, ended=number % 2 == 0)
        assert len(sessions._requests) <= 50
        assert sessions._blocks == sum(chain.size for chain in sessions._requests.values()) <= MOST_BLOCKS * 20
        assert sum(len(chain.numbers) for chain in sessions.leaving) <= MOST_BLOCKS * 20
    assert set(sessions._by_reservation.values()) == set(sessions._requests.values())
    assert set(sessions._by_block.values()) <= set(sessions._requests.values())
    assert len(sessions._by_block) == 6 * len(sessions._requests)


def test_a_request_without_a_full_block_is_not_remembered() -> None:
    cache = Cache()
    cache.freed("1", "", 0, ended=True)
    assert not cache.sessions._requests
    cache.freed("2", "ab", 0, ended=True)  # its prompt ends within its first block
    assert cache.take() == "ba"


def test_the_engines_thread_only_notes_what_another_looks_at() -> None:
    eviction = Eviction(BLOCK, 100)
    for number in range(MOST_NOTES - 1):
        eviction.freed(Finished([number], [b"%d" % number], BLOCK, BLOCK, request_id=f"{id_of(str(number))}.x"), 0.0)
    assert not eviction._sessions._requests
    assert not eviction.chooses
    eviction.catch_up()
    assert not eviction._notes
    eviction.yield_sessions([id_of("7")])
    assert eviction.chooses
    with eviction._lock:
        assert eviction.give_up(3, lambda *_: True) == [], "the engine's thread does not wait"
    assert eviction.give_up(3, lambda *_: True) == [7]
    assert not eviction.chooses


def test_without_the_other_thread_the_engines_own_looks_at_many_requests_at_once() -> None:
    eviction = Eviction(BLOCK, 100)
    for number in range(2 * MOST_NOTES + 1):
        eviction.freed(Finished([number], [b"%d" % number], BLOCK, BLOCK), 0.0)
        assert len(eviction._notes) < MOST_NOTES
    assert len(eviction._sessions._requests) == MOST_BLOCKS * 100
