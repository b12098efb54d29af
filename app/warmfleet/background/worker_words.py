"""Explains why a worker is in its state, and what to do about it, in the words of the status page and all commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmfleet.fleet.worker.state import WorkerState
from warmfleet.pools.served_names import misnamed
from warmfleet.protocol.pools import served_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmfleet.fleet import WorkerView

_W = WorkerState
#: The meaning of each state for requests; ``why`` replaces some of these texts by the cause of the state.
STATES: Mapping[WorkerState, str] = {
    _W.GONE: "nothing is known of it",
    _W.PENDING: "it joined and waits for its probe",
    _W.WARMING: "it computes popular prefixes before it takes requests",
    _W.PROVEN: "takes requests; its blocks are matched",
    _W.SUSPECTED: "an answer or its stream was not as expected: it takes requests, and a probe is due",
    _W.LOAD_ONLY: "takes requests by load alone: its blocks are not matched",
    _W.UNREACHABLE: "routers get no answer at its URL",
    _W.APPROXIMATE: "takes requests; without the plugin, so only what was sent there is known",
    _W.LEFT: "it said goodbye: nothing is wrong, and its name goes after ten minutes",
    _W.SILENT: "its heartbeats do not come",
    _W.JOINING: "only one half of it is heard: its API server is missing",
    _W.HOSTILE: "what its stream told cannot be right: it must join anew",
    _W.MISNAMED: "it does not serve its pool's name",
    _W.DRAINING: "nothing runs there any more: it can be stopped",
    _W.PAUSED: "somebody paused its engine, or put it to sleep",
    _W.EJECTED: "it failed requests that other workers served",
    _W.UNHEARD: "no heartbeat comes, but its engine answers, so it takes requests",
}
#: Field ``suspect`` of a worker's record -> the unexpected result because of which the worker is probed again.
SUSPICIONS: Mapping[str, str] = {
    "prompt": "it counted other prompt tokens than the router",
    "blocks": "its stream did not report the blocks of prompts",
}
#: States to whose text ``why`` adds the reason that the last probe gave.
PROBED = (_W.PENDING, _W.UNREACHABLE, _W.LOAD_ONLY)
#: The remedy of each state that needs one. {model} is the tag of the pool, {name} the name of its model.
REMEDIES: Mapping[WorkerState, str] = {
    _W.GONE: "start the engine",
    _W.PENDING: "wait some seconds for a router's probe; see the checks of the engine, and the routers' log",
    _W.WARMING: "wait: a router sends it popular prefixes first (WARMFLEET_WARM_PREFIXES)",
    _W.UNREACHABLE: "make its URL reachable from the routers' hosts, or announce another one (WARMFLEET_WORKER_URL); it"
    " must be inside WARMFLEET_WORKER_ADDRESSES of the routers",
    _W.SILENT: "start the engine; if it runs, read the `warmfleet:` lines of its log: its way to Redis may be cut, or"
    " another process may have joined under its WARMFLEET_WORKER_ID",
    _W.JOINING: "look for `warmfleet: server ... joined` in vLLM's log. The API server needs the plugin, too"
    " (VLLM_PLUGINS), the same WARMFLEET_REDIS_URL and WARMFLEET_WORKER_ID as its core, and where the log refuses a"
    " loopback address WARMFLEET_WORKER_URL=http://THIS_HOST:PORT",
    _W.HOSTILE: "restart the engine; if it happens again, compare the versions of plugin and routers",
    _W.MISNAMED: "start it with --served-model-name {name}, which takes several names; or let it join the pool of a"
    " name that it serves (WARMFLEET_MODEL; WARMFLEET_MODELS of the routers)",
    _W.DRAINING: "undo it when the engine shall serve again: warmfleet drain {worker} --model {model} --undo",
    _W.PAUSED: "let its engine go on when it shall serve again: POST /resume, or /wake_up where it sleeps",
    _W.EJECTED: "read the engine's log: it failed requests that other workers served",
    _W.UNHEARD: "mend the engine's way to Redis: it answers over HTTP, but its heartbeats do not come",
    _W.LOAD_ONLY: "see app/docs/identity.md, Proof",
    _W.SUSPECTED: "wait for its next probe, or let the doctor examine its URL",
}
#: Cause of a failed check -> remedy, for a silent stock engine (stock engines send no heartbeats).
STOCK_REMEDIES: Mapping[str, str] = {
    "away": "start the engine, or make its URL reachable from the routers' hosts",
    "late": "read its log, and restart it if it hangs: it takes connections, and answers nothing",
    "locked": "give the routers the engines' key: WARMFLEET_WORKER_API_KEY",
    "ill": "read its log: it answers, but not as an engine that is well; or correct its URL",
}
#: Cause that the last probe gave -> remedy, for a worker that is chosen by load only.
CAUSES: Mapping[str, str] = {
    "differs": "start it with the tokenizer, --chat-template and flags of the other engines of this model",
    "text": "restart it: its tokenizer is not the one that it announced",
    "chat": "restart it: its chat template or tokenizer is not the one that it announced",
    "tokens": "look which engine answers at its URL, and restart it: its blocks are hashed otherwise than it announced",
    "scheme": "upgrade the routers, or start it with --prefix-caching-hash-algo sha256_cbor and without EAGLE",
    "key": "give the routers WARMFLEET_WORKER_API_KEY, and WARMFLEET_WORKER_ADDRESSES with the engines' addresses",
    "silent": "look which engine answers at its URL: its stream tells nothing of a probe",
    "unmatched": "start it with --enable-prefix-caching, if its model has layers with full attention",
    "untested": "wait for the next probe; if it stays so, look for its tokenizer in the routers' log",
}


def why(worker: WorkerView, model: str, moved_to: str = "") -> str:
    """Explain a worker's state, and the cause of this state if the cause is known.

    model: the tag of its model. moved_to: another pool in which the worker is heard, which explains its absence here.
    """
    state, record = worker.state, worker.record
    if moved_to:
        return f"moved to {moved_to}"
    if state is _W.SILENT and worker.approximate:
        return f"its health check fails ({record['reason']})" if record.get("reason") else "its health check fails"
    if state is _W.SILENT and worker.heartbeat_age_s is not None:
        return f"its last heartbeat came {worker.heartbeat_age_s:.0f} s ago"
    if state is _W.MISNAMED:
        return misnamed(worker, served_model(model))
    if state is _W.DRAINING and worker.load.in_flight:
        return f"{worker.load.in_flight} requests are left there"
    if state is _W.SUSPECTED and record.get("suspect") in SUSPICIONS:
        return f"{SUSPICIONS[record['suspect']]}: it takes requests, and a probe is due"
    if state in PROBED and record.get("reason"):
        return f"{STATES[state]} ({record['reason']})"
    return STATES[state]


def remedy(worker: WorkerView, model: str, moved_to: str = "") -> str:
    """Return the remedy of this worker's state; empty if none is needed. model, moved_to: as in ``why``."""
    state, cause = worker.state, str(worker.record.get("cause", ""))
    if moved_to:
        return ""
    if state is _W.LOAD_ONLY and cause in CAUSES:
        return CAUSES[cause]
    if state is _W.SILENT and worker.approximate:
        return STOCK_REMEDIES.get(cause, STOCK_REMEDIES["away"])
    return REMEDIES.get(state, "").format(worker=worker.worker_id, model=model, name=served_model(model))
