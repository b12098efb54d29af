"""Explains to operators why a decision chose its worker, from the one word of the scripts (lua/parts/decide)."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from warmfleet.fleet import Place

if TYPE_CHECKING:
    from warmfleet.fleet import Hold, LedgerView, Line, Seen, Session

#: The rule that decided, by the scripts' word for it, which is also the label ``why`` of ``warmfleet_decisions_total``.
REASONS = {
    "lowest": "it has the lowest predicted cost",
    "home": "the home of the request's session",
    "place": "its session has a place in this engine's cache",
    "prefix": "it holds more of the prompt than the others",
    "pressure": "its cache has the most room: it evicts least, or is the least full",
    "flight": "it has the fewest requests in flight",
    "seed": "chance, as nothing told the engines apart",
    "objective": "it meets the TTFT objective with the least load",
    "match": "it holds the longest part of the prompt",
    "smallest": "its cache holds the fewest blocks",
    "imbalance": "the load differs too much between engines to look at caches",
    "bound": "the ring's first engine is over its bound on load",
    "turn": "it was this engine's turn",
    "room": "it has the lowest cost of the engines with room",
    "known": "the same reservation was decided before",
}
LOWEST_LOAD = "it has the lowest load"  # the meaning of the word "lowest" under every policy but `cost`
ITS_TURN = "its engine has room: it is its turn"
ITS_WORKER_IS_BUSY = "its engine is busy, and to wait for it is cheaper than to compute the prompt on another"
ALL_ARE_BUSY = "all engines that can serve it are busy"
#: Why a session is held, by its state.
HELD = {
    "new": "it is new, and the sessions in the caches leave no room for it",
    "paused": "it lost its place, as the sessions of its engine outgrew the cache",
}
FIRST_HELD = 10  # number of held sessions that are told, the first of the line
#: Why a worker costs more than another, by the name of the term of its cost.
TERMS = {
    "wait_s": "for what is ahead there",
    "compute_s": "to compute the prompt",
    "again_s": "to compute what another engine is making",
    "leave_s": "for what the session leaves behind",
    "evict_s": "for what its cache must evict",
    "busy_s": "because it was busy lately",
    "label_s": "for preferred labels that it lacks",
    "decode_s": "for the answers under way",
    "load_s": "to load what only a tier holds",
    "room_s": "until its cache has room",
    "partner_s": "for the engine that takes the prompt over",
}
TIERS = {"cpu": "in CPU memory", "disk": "on disk"}  # by the kind of tier
#: Words for the reasons that warmfleet_fallback_requests_total counts; any other reason is an error code (REFUSED).
FALLBACK = {
    "away": "Redis did not answer in time",
    "open": "Redis did not answer a moment ago",
    "no_worker": "Redis knows no worker that takes requests",
}
REFUSED = "Redis refused the decision ({}; the log tells more)"
MATTERS_S = 0.0005  # least difference in seconds that is shown, because a smaller one would be rounded to 0 ms
#: The words for the steps by which the policy ``cost`` chooses among workers that cost the same.
OF_A_TIE = frozenset({"home", "prefix", "pressure", "flight", "seed"})


def reason_of(policy: str, why: str) -> str:
    """Return the rule that decided, in words; the scripts' word itself if it is a new one."""
    return LOWEST_LOAD if why == "lowest" and policy != "cost" else REASONS.get(why, why)


def in_words(policy: str, why: str, seen: Seen) -> str:
    """Tell why a worker was chosen, as a sentence's end: ``tie within 5 ms of 3 engines: it holds more of ...``."""
    reason = reason_of(policy, why)
    if policy != "cost" or why not in OF_A_TIE:
        return reason
    costs = [candidate.cost_s for candidate in seen.candidates]
    lowest = min(costs)
    tied = sum(cost <= lowest + seen.tie_s for cost in costs)
    return f"tie within {max(1, round(1_000 * seen.tie_s))} ms of {tied} engines: {reason}"


def moved_in_words(policy: str, chosen: str, seen: Seen) -> str:
    """Tell why the worker that holds most of the prompt was not chosen; "" if the chosen worker holds about as much."""
    rows = {row.worker_id: row for row in seen.candidates}
    if policy != "cost" or chosen not in rows:
        return ""
    own = rows[chosen]
    most = max(rows.values(), key=lambda row: (row.matched_tokens, -row.cost_s))
    more_s = most.cost_s - own.cost_s
    if most.matched_tokens - own.matched_tokens < seen.context[1] or more_s <= 0:
        return ""
    held, terms = asdict(own.terms), asdict(most.terms)
    worse = sorted(((terms[name] - held[name], words) for name, words in TERMS.items()), reverse=True)
    mainly = " and ".join(f"{1_000 * seconds:.0f} ms {words}" for seconds, words in worse[:2] if seconds >= MATTERS_S)
    of_these = f", above all {mainly}" if mainly else ""
    tokens = most.matched_tokens - own.matched_tokens
    return f"{most.worker_id} holds {tokens} tokens more of it but costs {1_000 * more_s:.0f} ms more{of_these}"


def where_held(matched: int, tier_tokens: int, tier_s: float, tier: str) -> str:
    """Tell where an engine holds its part of the prompt; "" if all of that is on the GPU."""
    if not tier_tokens:
        return ""
    where = TIERS.get(tier, "in a tier")
    return f"{matched - tier_tokens:,} on the GPU, {tier_tokens:,} {where} ({max(1, round(1_000 * tier_s))} ms)"


def fallback_in_words(fallback: str) -> str:
    """Tell why Redis did not choose the worker, and how it was chosen instead."""
    return f"{FALLBACK.get(fallback, REFUSED.format(fallback))}: by a hash of the prompt among the workers known last"


def queue_in_words(line: Line) -> dict[str, Any]:
    """Put the fleet's queue in words: its length, and why its first request waits."""
    told: dict[str, Any] = {"waiting": line.waiting, "work_s": line.work_s, "next": None}
    if (first := line.next) is not None:
        told["next"] = {name: value for name, value in asdict(first).items() if name != "reservation"}
        because = ITS_TURN if first.has_room else ITS_WORKER_IS_BUSY if first.any_has_room else ALL_ARE_BUSY
        told["next"]["because"] = because
    return told


def state_of(session: Session) -> str:
    """Return a session's state: running or idle with a place; new or paused in the line; out (neither)."""
    if session.place is Place.IN:
        return "running" if session.running else "idle"
    return session.place.name.lower()


def ledger_in_words(ledger: LedgerView) -> dict[str, Any] | None:
    """Put the ledger of sessions in words; None while it does not bind."""
    if not ledger.engines:
        return None
    states = Counter(map(state_of, ledger.sessions))
    line = [(session, state_of(session)) for session in ledger.held[:FIRST_HELD]]
    return {
        "running": states["running"],
        "idle": states["idle"],
        "held": states["new"] + states["paused"],
        "taken_tokens": sum(engine.taken_tokens for engine in ledger.engines),
        "capacity_tokens": sum(engine.capacity_tokens for engine in ledger.engines),
        "line": [
            {
                "session": session.session.hex(),
                "state": state,
                "held_s": round(session.since_s, 1),
                "tokens": session.tokens,
                "because": HELD[state],
            }
            for session, state in line
        ],
    }


def held_in_words(hold: Hold, most_s: float, *, first: bool) -> dict[str, Any]:
    """Put in words how the session of a request would stand in the line.

    most_s: a new session is refused at its first request if its wait is predicted to be longer.
    """
    state, refused = "paused" if hold.paused else "new", first and not hold.paused and hold.predicted_s > most_s
    place = {"state": state, "ahead": hold.ahead, "predicted_s": hold.predicted_s, "refused": refused}
    return place | {"because": HELD[state]}


def places_in_words(ledger: LedgerView) -> dict[str, dict[str, int]]:
    """Return the places of sessions at each worker, by its id."""
    return {
        engine.worker_id: {
            "sessions": engine.inside,
            "idle": engine.idle,
            "taken_tokens": engine.taken_tokens,
            "capacity_tokens": engine.capacity_tokens,
        }
        for engine in ledger.engines
    }
