"""The choice among the pools of a served model on the virtual clock, by the router's own key, order and prices."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from warmfleet.fleet import Decision, Queued
from warmfleet.pools.home_pools import Beginnings, in_order
from warmfleet.routing.pool_choice import HOMES, Offer, best, turn_s

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from warmfleet.fleet import Fleet, Question


class HomePools:
    """A replica's knowledge of a model's pools.

    sizes: engines of each pool. depth_tokens: of a prompt's beginning; token_s: of prefill.
    """

    def __init__(self, pools: Mapping[str, Fleet], sizes: Mapping[str, int], depth_tokens: int, token_s: float) -> None:
        self._pools = pools
        self._sizes = sizes
        self._depth_tokens = depth_tokens
        self._token_s = token_s
        self._beginnings = Beginnings()

    def order(self, ask: Question) -> list[Fleet]:
        """The pools in the order in which a replica would ask them to decide the request."""
        key = self._beginnings.key(ask.chains, self._depth_tokens, len(self._pools)) or os.urandom(8)
        return [self._pools[tag] for tag in in_order(key, self._sizes)]

    async def decide(self, ask: Question) -> tuple[Fleet, Decision | Queued, list[Fleet]]:
        """Ask the home pools, keep the cheapest answer, and give back what the others hold.

        Returns the pool that gave it, the answer, and the other home pools.
        """
        answers = [(fleet, await fleet.queue.decide_in_turn(ask)) for fleet in self.order(ask)[:HOMES]]
        best = self._best(answers)
        for number, (fleet, answer) in enumerate(answers):
            if number != best and isinstance(answer, Decision):
                await fleet.bookings.settle(ask.reservation, "unsent")
            elif number != best:
                await fleet.queue.poll(leaving=[ask.reservation])
        fleet, answer = answers[best]
        return fleet, answer, [other for other, _ in answers if other is not fleet]

    async def instead(self, ask: Question, line: tuple[Fleet, Queued], other: Fleet) -> Decision | None:
        """Book a request that waits in a line in its other home pool, if it is cheaper there. ask: with another id."""
        answer = await other.queue.decide_in_turn(replace(ask, may_wait=False))
        if not isinstance(answer, Decision):
            return None
        if self._best((line, (other, answer))) == 1:
            return answer
        await other.bookings.settle(ask.reservation, "unsent")
        return None

    def _offers(self, answers: Sequence[tuple[Fleet, Decision | Queued]]) -> list[Offer]:
        return [self._offer(answer) for _, answer in answers]

    def _offer(self, answer: Decision | Queued) -> Offer:
        token_s = self._token_s
        if isinstance(answer, Queued):
            return Offer(None, answer.turn_s, answer.matched_tokens, token_s)
        turn = turn_s(token_s * answer.wait_tokens, token_s * answer.prefill_tokens)
        return Offer(answer.cost_s, turn, answer.matched_tokens, token_s)

    def _best(self, answers: Sequence[tuple[Fleet, Decision | Queued]]) -> int:
        return best(self._offers(answers), answers[0][0].constants.weights.stay)
