"""Every state of a worker has a description, and a remedy if an operator must act."""

from __future__ import annotations

from typing import Any

import pytest

from warmfleet.background.worker_words import REMEDIES, STATES, remedy, why
from warmfleet.fleet import Flag, LoadRow, WorkerState, WorkerView
from warmfleet.fleet.worker.state import ROUTABLE

WELL = {WorkerState.PROVEN, WorkerState.APPROXIMATE}
NOTHING_TO_MEND = {WorkerState.LEFT}


def worker(state: str, age_s: float | None = None, *, flags: int = 0, in_flight: int = 0, **record: Any) -> WorkerView:
    row = LoadRow(flags=flags, in_flight=in_flight)
    return WorkerView("w.0", record, None, row, age_s, WorkerState(state), "pending", "http://w", [])


def test_every_state_has_words_and_every_state_that_is_not_well_a_remedy() -> None:
    assert set(STATES) == set(WorkerState)
    assert set(REMEDIES) == set(WorkerState) - WELL - NOTHING_TO_MEND
    assert {state for state in REMEDIES if state.routable} == ROUTABLE - WELL, "these are told although they serve"


@pytest.mark.parametrize(
    ("one", "words", "mend"),
    [
        (worker("draining", in_flight=7), "7 requests are left there", "warmfleet drain w.0 --model m --undo"),
        (worker("draining"), "it can be stopped", "warmfleet drain w.0 --model m --undo"),
        (worker("silent"), "its heartbeats do not come", "start the engine"),
        (worker("left"), "it said goodbye: nothing is wrong", ""),
        (worker("silent", 20.2), "its last heartbeat came 20 s ago", "its way to Redis may be cut"),
        (worker("silent", flags=Flag.APPROXIMATE), "its health check fails", "reachable from the routers"),
        (worker("silent", flags=Flag.APPROXIMATE, cause="late", reason="so"), "check fails (so)", "restart it if it"),
        (worker("silent", flags=Flag.APPROXIMATE, cause="locked", reason="so"), "check fails (so)", "WORKER_API_KEY"),
        (worker("silent", flags=Flag.APPROXIMATE, cause="ill", reason="so"), "check fails (so)", "read its log"),
        (worker("ejected"), "it failed requests", "read the engine's log"),
        (worker("paused"), "somebody paused its engine, or put it to sleep", "/wake_up"),
        (worker("joining"), "only one half of it is heard", "VLLM_PLUGINS"),
        (
            worker("load-only", cause="text", reason="so"),
            "by load alone: its blocks are not matched (so)",
            "restart it",
        ),
        (worker("load-only", cause="unheard of"), "its blocks are not matched", "identity.md"),
        (worker("suspected", suspect="prompt"), "it counted other prompt tokens than the router", "next probe"),
        (worker("suspected", suspect="?"), "was not as expected", "next probe"),
        (worker("unheard", 40.0), "no heartbeat comes, but its engine answers", "mend the engine's way"),
        (worker("unreachable", reason="refused"), "no answer at its URL (refused)", "WARMFLEET_WORKER_URL"),
        (worker("proven", 1.0, reason="of long ago"), "its blocks are matched", ""),
    ],
    ids=lambda value: value.state if isinstance(value, WorkerView) else None,
)
def test_words_say_what_is_known(one: WorkerView, words: str, mend: str) -> None:
    assert words in why(one, "m")
    assert mend in remedy(one, "m")
    assert bool(remedy(one, "m")) == bool(mend)
    assert "of long ago" not in why(one, "m")
