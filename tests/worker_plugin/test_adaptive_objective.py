"""The objective that follows the engine's own tail."""

from __future__ import annotations

import random

from warmfleet_worker.eviction.objective import (
    EVERY_REQUESTS,
    MEMORY_REQUESTS,
    TAIL_SHARE,
    AdaptiveObjective,
    Served,
    objective_of,
)


def note(objective: AdaptiveObjective, *uncached: int) -> None:
    for tokens in uncached:
        objective.note(Served(5_000, tokens))


def test_it_is_silent_at_first_and_then_a_share_of_what_one_request_in_ten_exceeds() -> None:
    objective = AdaptiveObjective()
    note(objective, *range(100, 1_600, 100))
    assert objective.xi_tokens() is None, f"{EVERY_REQUESTS - 1} requests tell no tail"
    note(objective, 1_600)
    assert objective.xi_tokens() == int(TAIL_SHARE * 1_500)


def test_it_follows_the_latest_requests_in_any_order() -> None:
    objective = AdaptiveObjective()
    note(objective, *[9_000] * MEMORY_REQUESTS)
    assert objective.xi_tokens() == int(TAIL_SHARE * 9_000)
    later = [tokens for tokens in range(1, 101) for _ in range(3)][:MEMORY_REQUESTS]
    random.Random(1).shuffle(later)
    note(objective, *later)
    assert objective.xi_tokens() == int(TAIL_SHARE * sorted(later)[int(0.9 * MEMORY_REQUESTS)])


def test_without_uncached_tokens_nothing_is_given_up() -> None:
    objective = AdaptiveObjective()
    note(objective, *[0] * EVERY_REQUESTS)
    assert not objective.xi_tokens()


def test_auto_asks_for_it_however_it_is_written() -> None:
    assert all(isinstance(objective_of(target, lambda: 1_000), AdaptiveObjective) for target in ("auto", " Auto "))
