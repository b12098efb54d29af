"""What a request would cost in each home pool, as ``/explain`` compares the pools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from warmfleet.api.fleet_status import _offer
from warmfleet.fleet import Weights

if TYPE_CHECKING:
    from warmfleet.pools.pool import Pool

WAIT_PRICE = Weights().wait_price


def pool() -> Pool:
    view = SimpleNamespace(token_s=0.01, token_s_of={"slow": 0.02, "fast": 0.01}.__getitem__)
    return cast("Pool", SimpleNamespace(view=view, fleet=SimpleNamespace(weights=Weights())))


def row(name: str, matched: int, wait_s: float, cost_s: float, *, chosen: bool) -> dict[str, Any]:
    terms = {"wait_s": WAIT_PRICE * wait_s}
    return {"worker_id": name, "matched_tokens": matched, "terms": terms, "cost_s": cost_s, "chosen": chosen}


@pytest.mark.parametrize("waits", [False, True])
def test_a_pool_offers_the_worker_that_the_request_gets_or_waits_for(waits: bool) -> None:
    rows = [row("slow", 90, 1.0, 2.0, chosen=False), row("fast", 0, 0.0, 1.5, chosen=True)]
    worker, offer = _offer({"prompt_tokens": 100, "waits": waits, "candidates": rows}, pool())
    if waits:
        assert (worker, offer.cost_s, offer.matched_tokens) == ("slow", None, 90)
        assert offer.turn_s == pytest.approx(0.5 * 1.0 + 0.02 * 10), "half of the wait, and what it lacks"
    else:
        assert (worker, offer.cost_s, offer.matched_tokens) == ("fast", 1.5, 0)
        assert offer.turn_s == pytest.approx(0.01 * 100)
