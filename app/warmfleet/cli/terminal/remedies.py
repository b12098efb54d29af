"""Why a worker takes no requests, or fewer than it could, and what to do about it: in the words of all commands.

The keys are the states of ``warmfleet.fleet.WorkerState`` as ``/workers`` names them, so that a command that only asks
a replica loads nothing of Redis.
"""

from __future__ import annotations

#: States in which a worker takes requests although something is not as it should be.
LIMITED = ("load-only", "suspected", "unheard")
#: Why a worker in this state is not used, or not fully.
REASONS = {
    "gone": "nothing is known of it",
    "pending": "it has joined, and no router has probed it yet",
    "warming": "it computes popular prefixes before it takes requests",
    "unreachable": "routers get no answer at its URL",
    "silent": "it said goodbye, or was never heard",
    "joining": "only one half of it is heard: its engine core or its API server is missing",
    "hostile": "what its stream told cannot be right",
    "draining": "an operator takes it out",
    "paused": "somebody paused its engine, or put it to sleep",
    "ejected": "it failed requests that other workers served",
    "unheard": "no heartbeat comes, but its engine answers",
    "load-only": "its cached blocks are not used, as it is not what it announced or could not be tested",
    "suspected": "an answer or its stream was not as expected",
}
#: What to do about each state that takes no requests, or not all of them. {worker}, {model}: names to fill in.
REMEDIES = {
    "gone": "start the engine",
    "pending": "wait some seconds for a router's probe; see the checks of the engine, and the routers' log",
    "warming": "wait: a router sends it popular prefixes first (WARMFLEET_WARM_PREFIXES)",
    "unreachable": "make its URL reachable from the routers' hosts, or announce another one (WARMFLEET_WORKER_URL); it"
    " must be inside WARMFLEET_WORKER_ADDRESSES of the routers",
    "silent": "start the engine; if it runs, read the `warmfleet:` lines of its log: its way to Redis may be cut, or"
    " another process may have joined under its WARMFLEET_WORKER_ID",
    "joining": "look for `warmfleet: server ... joined` in vLLM's log. The API server needs the plugin, too"
    " (VLLM_PLUGINS), the same WARMFLEET_REDIS_URL and WARMFLEET_WORKER_ID as its core, and where the log refuses a"
    " loopback address WARMFLEET_WORKER_URL=http://THIS_HOST:PORT",
    "hostile": "restart the engine; if it happens again, compare the versions of plugin and routers",
    "draining": "undo it when the engine shall serve again: warmfleet drain {worker} --model {model} --undo",
    "paused": "let its engine go on when it shall serve again: POST /resume, or /wake_up where it sleeps",
    "ejected": "read the engine's log: it failed requests that other workers served",
    "unheard": "mend the engine's way to Redis: it answers over HTTP, but its heartbeats do not come",
    "load-only": "see app/docs/identity.md, Proof",
    "suspected": "wait for its next probe, or let the doctor examine its URL",
}
#: What made a worker suspected.
SUSPICIONS = {
    "prompt": "it counted other prompt tokens than the router",
    "blocks": "its stream did not report the blocks of prompts",
}
#: What to do about a worker that is placed by load only, by the cause that its probe gave.
CAUSES = {
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


def remedy(worker_id: str, model: str, state: str, cause: str = "") -> str:
    """What to do about this worker. cause: that of its last probe, or empty."""
    if state == "load-only" and cause in CAUSES:
        return CAUSES[cause]
    return REMEDIES.get(state, "").format(worker=worker_id, model=model)
