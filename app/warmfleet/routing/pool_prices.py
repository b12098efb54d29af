"""The price of a request in each pool that has answered, in seconds. Pure.

While no pool lets the request wait, the price is the predicted time to first token. Inside a pool decide charges a
session that moves for what it leaves behind (the price ``stay``). Between pools nobody sees both sides but the router,
so it charges here.

If a pool lets the request wait, the price is what is to compute, how long its engine is overdue, and half of the wait
for it. Inside a pool the wait counts by how busy its engines are (lua/parts/shared/turns.lua), here alike in all
pools. A pool that lets the request wait is not worse for that: it waits because the worker that holds its beginning
is cheaper, busy as it is, than the free ones are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

HOMES = 2  # pools that are asked at once
TIE_S = 0.005  # costs that differ by less count as equal, as inside a pool (lua/parts/decide/cost_rule.lua)
WAIT_PRICE = 0.5  # of a second ahead of a request while requests wait: WAIT_PRICE in lua/parts/decide/wait_turn.lua


class Offer(NamedTuple):
    """A pool's answer. cost_s: of its best worker, with the wait for it; None if the request would wait for its turn.

    turn_s: price of the worker that it gets or waits for, see ``turn_s``. matched_tokens: that this worker holds.
    token_s: seconds of prefill of one token there.
    """

    cost_s: float | None
    turn_s: float
    matched_tokens: int
    token_s: float


def turn_s(wait_s: float, compute_s: float) -> float:
    """The price of a turn. wait_s: until the worker begins. compute_s: that it needs."""
    return WAIT_PRICE * wait_s + compute_s


def prices(offers: Sequence[Offer], stay: float) -> list[float]:
    """The price of each offer. stay: the price of a token that one other worker holds, inside a pool."""
    most = max(offer.matched_tokens for offer in offers)
    found: list[float] = []
    for offer in offers:
        if offer.cost_s is None:
            return [each.turn_s for each in offers]
        found.append(offer.cost_s + (stay - 1) * (most - offer.matched_tokens) * offer.token_s)
    return found


def best(offers: Sequence[Offer], stay: float) -> int:
    """The number of the cheapest; of those that cost the same one that holds more of the prompt, then one with room."""
    priced = prices(offers, stay)
    lowest = min(priced)
    tied = [number for number, price in enumerate(priced) if price <= lowest + TIE_S]
    return max(tied, key=lambda number: (offers[number].matched_tokens, offers[number].cost_s is not None))
