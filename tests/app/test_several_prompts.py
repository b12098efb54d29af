"""A request with several prompts gives its booked prefill back prompt by prompt, as the engine reports them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.engines.scripted import engine
from tests.support.replicas.replica import replica

from warmfleet.background import view_reader
from warmfleet.fleet import Decision, Question, Queued, new_reservation
from warmfleet.fleet.bookings import Bookings
from warmfleet.fleet.queueing import Queue
from warmfleet.pools.fleet_view import View, view_of
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.fleet import WorkerView
    from warmfleet.fleet.bookings import Outcome
    from warmfleet.fleet.connection.multiplexed import OnAnswer

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.mark.parametrize(
    ("prompts", "exact", "mark"), [(1, True, "0"), (1, False, "_"), (2, True, "-"), (256, False, "-")]
)
def test_the_id_tells_scripts_what_may_be_compared(prompts: int, exact: bool, mark: str) -> None:
    ids = {new_reservation(prompts, exact=exact) for _ in range(100)}
    assert len(ids) == 100
    for reservation in ids:
        assert reservation[len(wire.RESERVATION_PREFIX)] == mark
        assert wire.reservation_of(f"cmpl-{reservation}.client-0") == (reservation, 0)


@pytest.mark.parametrize(
    ("prompt", "reporter", "told"),
    [
        (PROMPT, "plugin", ["started", "finished"]),
        ([PROMPT, "another one"], "plugin", ["finished"]),
        ([PROMPT, "another one"], "nobody", ["started", "finished"]),  # no plugin will report the end
        ([PROMPT, "another one"], "bridge", ["started", "finished"]),  # no plugin behind a bridge either
    ],
    ids=["one", "several", "several without plugin", "several behind a bridge"],
)
async def test_the_first_byte_speaks_for_one_prompt(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch, prompt: object, reporter: str, told: list[str]
) -> None:
    """Each report of the engine's plugin gives back one prompt's share; the first byte must not give back all."""
    seen: list[str] = []
    decide, settle_later = Queue.decide_in_turn, Bookings.settle_later

    async def decides(self: Queue, question: Question, *, explain: bool) -> Decision | Queued:
        decision = await decide(self, question, explain=explain)
        assert isinstance(decision, Decision)
        return replace(decision, approximate=reporter == "nobody")

    def viewed(workers: Sequence[WorkerView], *args: Any, **more: Any) -> View:
        bridged = [
            replace(worker, server={"facts": {"reports_prefills": False}} if reporter == "bridge" else worker.server)
            for worker in workers
        ]
        return view_of(bridged, *args, **more)

    def settles(self: Bookings, reservation: str, outcome: Outcome, on_answer: OnAnswer, *rest: Any) -> None:
        several = reservation[3] == "-"
        assert several == isinstance(prompt, list)
        seen.append(outcome)
        settle_later(self, reservation, outcome, on_answer, *rest)

    monkeypatch.setattr(Queue, "decide_in_turn", decides)
    monkeypatch.setattr(Bookings, "settle_later", settles)
    monkeypatch.setattr(view_reader, "view_of", viewed)
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url) as router:
        status, _, _ = await router.post({"model": model, "prompt": prompt, "stream": True})
        assert status == 200
        await router.unloaded()
        assert seen == told
