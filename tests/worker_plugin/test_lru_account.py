"""The account of T-LRU against plain LRU, and the end of T-LRU when it loses."""

from __future__ import annotations

from collections import OrderedDict
from random import Random

import pytest

from warmfleet_worker.eviction import lru_account
from warmfleet_worker.eviction.finished import Finished
from warmfleet_worker.eviction.lru_account import GO_ON, STOP, LruAccount, ShadowLru
from warmfleet_worker.eviction.tail_eviction import tail_eviction_of

BLOCK = 16


def chain(name: str, blocks: int) -> list[bytes]:
    return [f"{name}{number}".encode() for number in range(blocks)]


def test_the_shadow_evicts_the_end_of_the_longest_unused_chain() -> None:
    shadow = ShadowLru(10)
    shadow.use(chain("a", 4))
    shadow.use(chain("b", 4))
    shadow.use(chain("c", 4))
    assert [shadow.leading(chain(name, 4)) for name in "abc"] == [2, 4, 4]
    shadow.use(chain("a", 2))
    shadow.use(chain("d", 3))
    assert [shadow.leading(chain(name, 4)) for name in "abcd"] == [2, 1, 4, 3]


def test_the_shadow_is_lru_whatever_happens() -> None:
    rng, shadow, plain = Random(5), ShadowLru(50), OrderedDict[bytes, None]()
    for _ in range(2_000):
        used = chain(f"{rng.randrange(12)}-", rng.randrange(1, 20))
        expected = next((index for index, used_block in enumerate(used) if used_block not in plain), len(used))
        assert shadow.leading(used) == expected
        shadow.use(used)
        for used_block in reversed(used):
            plain[used_block] = None
            plain.move_to_end(used_block)
        while len(plain) > 50:
            plain.popitem(last=False)


def test_of_a_large_cache_some_blocks_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lru_account, "MOST_HASHES", 1_000)
    shadow = ShadowLru(4_000)
    for number in range(20):
        shadow.use(chain(f"{number}-", 400))
    assert len(shadow._held) == 1_000
    held = [shadow.leading(chain(f"{number}-", 400)) for number in range(20)]
    assert max(held[:8]) < 40, "half-way to the first block that is followed"
    assert held[12:] == [400] * 8
    assert sum(held) == pytest.approx(4_000, rel=0.15)


def lose(account: LruAccount, requests: int, tokens: int) -> None:
    """Requests of which plain LRU would have had all but 16 tokens, and this cache lacks ``tokens`` more."""
    for _ in range(requests):
        account.first_token(chain("a", 20), 21 * BLOCK, BLOCK + tokens)


def test_it_loses_when_much_more_is_computed_and_not_after_that_is_over() -> None:
    account = LruAccount(100, BLOCK)
    account.first_token(chain("a", 20), 21 * BLOCK, 21 * BLOCK)
    assert not account.losing, "nobody could have had a first prompt"
    lose(account, 200, 0)
    assert not account.losing
    lose(account, 60, 4)
    assert account.losing, f"4 tokens of 16 are more than {STOP:.0%}"
    lose(account, 30, 0)
    assert account.losing, f"until it is below {GO_ON:.0%}"
    lose(account, 400, 0)
    assert not account.losing


def test_what_t_lru_saves_is_credit() -> None:
    account = LruAccount(4, BLOCK)
    for name in "abcd":
        account.first_token(chain(name, 4), 5 * BLOCK, BLOCK)  # plain LRU would have had none of them
    lose(account, 2, 16)
    assert not account.losing


def test_while_it_loses_nothing_is_given_up() -> None:
    eviction = tail_eviction_of("auto", lambda: 1_000, BLOCK, 100)
    eviction.tags.tag([(1, b"x")])
    assert eviction._account is not None
    eviction._account.losing = True
    assert eviction.give_up(9, lambda *_: True) == []
    eviction._account.losing = False
    assert eviction.give_up(9, lambda *_: True) == [1]


def test_only_the_adaptive_objective_is_stopped() -> None:
    assert tail_eviction_of("0.5", lambda: 1_000, BLOCK, 100)._account is None
    eviction = tail_eviction_of("auto", lambda: 1_000, BLOCK, 100)
    eviction.finished(Finished([0, 1], chain("a", 2), 32, 32), 1.0)
    assert eviction._account is not None
    assert eviction._account._shadow.leading(chain("a", 3)) == 2
