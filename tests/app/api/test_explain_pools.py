"""``/explain`` compares a request's home pools by their costs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.constants_alone import ConstantsAlone

from warmfleet.api import fleet_status
from warmfleet.api.fleet_status import Inquiry, _offer, explain
from warmfleet.errors import FleetUnavailable, NoWorker, WarmfleetError
from warmfleet.routing.call import NO_HINTS

if TYPE_CHECKING:
    from collections.abc import Collection

    from warmfleet.pools.pool import Pool


class Stub:
    """A hashable object with the given attributes."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)


def pool() -> Pool:
    view = SimpleNamespace(token_s=0.01, token_s_of={"slow": 0.02, "fast": 0.01}.__getitem__)
    return cast("Pool", Stub(view=view, fleet=ConstantsAlone()))


def row(name: str, matched: int, ahead: int, cost_s: float, *, chosen: bool) -> dict[str, Any]:
    """ahead: booked tokens of prefill; a tenth of these belongs to requests that bypassed the routers."""
    load = {"prefill_tokens": ahead - ahead // 10, "foreign_prefill_tokens": ahead // 10}
    return {"worker_id": name, "matched_tokens": matched, "cost_s": cost_s, "chosen": chosen, **load}


@pytest.mark.parametrize(("waits", "waits_for"), [(False, ""), (True, "slow"), (True, "")])
def test_a_pool_offers_the_worker_that_the_request_gets_or_waits_for(waits: bool, waits_for: str) -> None:
    rows = [row("slow", 90, 50, 2.0, chosen=False), row("fast", 0, 20, 1.5, chosen=True)]
    told = {"prompt_tokens": 100, "waits": waits, "waits_for": waits_for, "turn_s": 7.5, "candidates": rows}
    told |= {"held": None}
    worker, offer = _offer(told, pool())
    if waits:
        assert (worker, offer.cost_s, offer.matched_tokens) == ("slow", None, 90)
        price = 7.5 if waits_for else 0.5 * 1.0 + 0.02 * 10  # for a full queue: half of the wait, and the missing room
        assert offer.turn_s == pytest.approx(price)
    else:
        assert (worker, offer.cost_s, offer.matched_tokens) == ("fast", 1.5, 0)
        assert offer.turn_s == pytest.approx(0.5 * 0.01 * 20 + 0.01 * 100), "as the router prices what was booked"
        worker, offer = _offer(told | {"held": {"predicted_s": 30.0}}, pool())
        assert (worker, offer.cost_s, offer.turn_s) == ("fast", None, 15.0), "half of the wait for a place"


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Explain a request to a model of three pools with the given answers: each a cost and matched tokens, or an error.

    full: indexes of the pools whose queue is full.
    """

    async def asked(
        answers: list[tuple[float, int] | WarmfleetError], full: Collection[int] = (), **states: Any
    ) -> dict[str, Any]:
        pools = [cast("Any", pool()) for _ in answers]
        for number, one in enumerate(pools, 1):
            one.tag, one.usable, one.draining, one.contacted = f"m#{number}", True, False, False
            one.degraded = SimpleNamespace(asks_redis=True)
            for name, numbers in states.items():
                if number in numbers:
                    setattr(one if hasattr(one, name) else one.degraded, name, name == "draining")

        async def explained(one: Any, *_: object) -> dict[str, Any]:
            answer = answers[pools.index(one)]
            if isinstance(answer, WarmfleetError):
                raise answer
            rows = [row(f"{one.tag}.w", answer[1], 0, answer[0], chosen=True)]
            waits = {"waits": number_of(one) in full, "waits_for": "", "turn_s": 0.0, "held": None}
            return {"model": one.tag, "prompt_tokens": 100, "candidates": rows, **waits}

        def number_of(one: Any) -> int:
            return pools.index(one) + 1

        def order_for(*_: object, counted: bool) -> list[Any]:
            assert not counted, "the next prompts have the home pools that they would have had"
            return pools

        monkeypatch.setattr(fleet_status, "_explained", explained)
        monkeypatch.setattr(fleet_status, "identify_here", identified)
        model = SimpleNamespace(pools=pools, several=len(pools) > 1, order_for=order_for)
        view = SimpleNamespace(token_s=0.001, token_s_of=lambda _: 0.001, workers=[SimpleNamespace(misnamed=False)])
        for home in pools:
            home.view, home.name = view, "m"
        inquiry = Inquiry("", cast("Any", SimpleNamespace(model="m", labels=())), NO_HINTS, b"", 0, has_ledger=False)
        return await explain(cast("Any", model), pools[0], inquiry)

    async def identified(*_: object) -> None:
        return None

    return asked


async def test_the_pool_named_is_that_which_a_router_chooses(ask: Any) -> None:
    told = await ask([(1.0, 0), (1.004, 1), (0.1, 0)])
    assert told["model"] == "m#2", "within 5 ms the pool that holds more"
    assert [entry["pool"] for entry in told["pools"]] == ["m#1", "m#2"]
    assert told["passed_over"] == []
    told = await ask([(1.0, 0), (0.5, 0), (0.1, 0)], draining={2, 3})
    assert (told["model"], told["pools"]) == ("m#1", []), "nothing is compared"
    told = await ask([NoWorker("none"), (0.5, 0), (0.1, 0)], draining={2, 3})
    assert told["model"] == "m#2", "no other can serve"


async def test_a_home_pool_that_gives_no_answer_is_told(ask: Any) -> None:
    told = await ask([FleetUnavailable("gone"), (1.0, 0), (0.1, 0)])
    assert told["model"] == "m#2"
    assert told["passed_over"] == [{"pool": "m#1", "why": "gone"}]
    told = await ask([(1.0, 0), (1.0, 0), (2.0, 0)], asks_redis={1}, usable={2})
    assert told["model"] == "m#3"
    assert [entry["why"] for entry in told["passed_over"]] == ["its Redis is away", "it has no worker"]
    told = await ask([FleetUnavailable("gone"), FleetUnavailable("gone"), (2.0, 0)])
    assert told["model"] == "m#3"
    with pytest.raises(FleetUnavailable):
        await ask([FleetUnavailable("gone")] * 3)


async def test_where_no_worker_takes_requests_the_operator_reads_what_a_client_would(ask: Any) -> None:
    for count, none in (
        (1, "The only engine of `m` takes no requests"),
        (3, "None of the 3 engines of `m` takes requests"),
    ):
        with pytest.raises(NoWorker, match=f"{none} at this moment"):
            await ask([NoWorker("none of 0 workers is alive and routable")] * count)


async def test_a_pool_whose_queue_is_full_offers_nothing(ask: Any) -> None:
    told = await ask([(0.1, 90), (1.0, 0), (0.1, 0)], full={1})
    assert (told["model"], [entry["pool"] for entry in told["pools"]]) == ("m#2", ["m#2"])
    assert told["passed_over"] == [{"pool": "m#1", "why": "its queue is full"}]
    told = await ask([(0.1, 0), (1.0, 0), (2.0, 0)], full={1, 2})
    assert told["model"] == "m#3"
    told = await ask([(0.1, 0)] * 4, full={1, 2, 3})
    assert (len(told["pools"]), told["passed_over"]) == (3, []), "it would be refused"
