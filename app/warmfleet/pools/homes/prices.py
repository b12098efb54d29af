"""The price of a request in each pool that has answered, in predicted seconds to first token. Pure.

Inside a pool decide charges a session that moves for what it leaves behind (the price ``stay``). Between pools nobody
sees both sides but the router, so it charges here. A pool that lets the request wait is not worse for that: it waits
because the worker that holds its beginning is cheaper, busy as it is, than the free ones are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

HOMES = 2  # pools that are asked at once


class Offer(NamedTuple):
    """A pool's answer. cost_s: of its best worker, with the wait for it. matched_tokens: that this worker holds.

    token_s: seconds of prefill of one token there.
    """

    cost_s: float
    matched_tokens: int
    token_s: float


def prices(offers: Sequence[Offer], stay: float) -> list[float]:
    """The price of each offer. stay: the price of a token that one other worker holds, inside a pool."""
    most = max(offer.matched_tokens for offer in offers)
    return [offer.cost_s + (stay - 1) * (most - offer.matched_tokens) * offer.token_s for offer in offers]
