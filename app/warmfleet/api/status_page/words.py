"""Sentences for people: why a worker is in its state, why a request went where it went, and what decides now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmfleet.fleet.worker.state import WorkerState
from warmfleet.pools.reasons import OF_A_TIE, REASONS, in_words

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmfleet.fleet import Decision, WorkerView

#: By the word that a decision returns; ``in_words`` says more of one that told what it saw.
WHY: Mapping[str, str] = {
    word: f"tie: {text}" if word in OF_A_TIE and word != "seed" else text for word, text in REASONS.items()
}
#: By the reason that warmfleet_fallback_requests_total counts; other reasons are codes of errors, as REFUSED tells.
FALLBACK: Mapping[str, str] = {
    "away": "Redis did not answer in time",
    "open": "Redis did not answer a moment ago",
    "no_worker": "Redis knows no worker that takes requests",
}
REFUSED = "Redis refused the decision ({}; the log tells more)"
#: By the mark in the worker's record.
SUSPECT: Mapping[str, str] = {
    "prompt": "it counted other prompt tokens than the router: a probe is due",
    "blocks": "its stream did not report the blocks of prompts: a probe is due",
}
#: What each state means for requests; ``state_in_words`` adds what is known besides.
STATES: Mapping[WorkerState, str] = {
    WorkerState.GONE: "nothing is known of it",
    WorkerState.PENDING: "it joined and waits for its probe",
    WorkerState.WARMING: "it computes the most used prefixes before it takes requests",
    WorkerState.PROVEN: "takes requests; its blocks are matched",
    WorkerState.SUSPECTED: "takes requests; its blocks are matched",
    WorkerState.LOAD_ONLY: "takes requests by load alone; its blocks are not matched",
    WorkerState.UNREACHABLE: "its address is missing or did not answer the probe",
    WorkerState.APPROXIMATE: "takes requests; without the plugin, so only what was sent there is known",
    WorkerState.SILENT: "it is not heard",
    WorkerState.JOINING: "only one half is heard: its API server is missing",
    WorkerState.HOSTILE: "its stream broke the rules: it must join anew",
    WorkerState.DRAINING: "the operator drains it",
    WorkerState.PAUSED: "its engine is paused or asleep; vLLM's /resume or /wake_up ends this",
    WorkerState.EJECTED: "it failed requests that other workers served: read its log",
    WorkerState.UNHEARD: "takes requests; no heartbeat comes, but its engine answers: check its way to Redis",
}

LAST_READ = "took requests when last read"


def why_in_words(policy: str, decision: Decision, fallback: str) -> str:
    """Why a request went to its worker. fallback: why Redis did not choose; "" if it did."""
    if fallback:
        reason = FALLBACK.get(fallback, REFUSED.format(fallback))
        return f"{reason}: by a hash of the prompt among the workers known last"
    if decision.seen is not None:
        return in_words(policy, decision.why, decision.seen)
    return WHY.get(decision.why, decision.why)


def state_in_words(worker: WorkerView, *, known_last: bool = False) -> str:
    """What a worker's state means, and why it is in that state, as far as that is known.

    known_last: the worker is of the last known view, so nothing newer is known and no blocks are matched.
    """
    if known_last and worker.routable:
        return LAST_READ
    said = STATES[worker.state]
    if worker.state is WorkerState.SILENT:
        return _silent(worker)
    if worker.state is WorkerState.DRAINING:
        return f"{said}: {worker.load.in_flight} requests left; `warmfleet drain {worker.worker_id} --undo` ends this"
    if worker.state is WorkerState.SUSPECTED:
        suspect = str(worker.record.get("suspect", ""))
        return f"{said}; {SUSPECT.get(suspect, suspect)}"
    reason = str(worker.record.get("reason", ""))
    if reason and worker.state in (WorkerState.LOAD_ONLY, WorkerState.UNREACHABLE, WorkerState.PENDING):
        return f"{said}: {reason}"
    return said


def _silent(worker: WorkerView) -> str:
    if worker.approximate:
        return "its health check fails"
    if worker.heartbeat_age_s is None:
        return "it said goodbye: its engine has ended"
    return f"no heartbeat for {worker.heartbeat_age_s:.0f} s"
