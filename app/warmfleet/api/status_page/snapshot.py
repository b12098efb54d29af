"""The data of the status page about a model, as values for JSON."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from warmfleet.api.fleet_status import replica_facts
from warmfleet.api.status_page.words import why_in_words
from warmfleet.background.worker_words import remedy, why
from warmfleet.errors import WarmfleetError
from warmfleet.fleet import LedgerView, Line, Memory, Truth
from warmfleet.fleet.worker.state import WorkerState
from warmfleet.pools.pairing import pairing, pairs_in_words, roles_in_words
from warmfleet.pools.reasons import ledger_in_words, places_in_words, queue_in_words
from warmfleet.pools.ttft_window import WINDOW_S, quantiles

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from warmfleet.fleet import ReplicaView, WorkerTruth, WorkerView
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.recent_decisions import Recent
    from warmfleet.pools.served_models import Pools

READ_S = 1.0  # longest wait for Redis; after that the page shows this replica's own knowledge
CANDIDATES = 5  # most candidates shown of a decision that returned all: the chosen worker and the cheapest others
LAST_READ = "took requests when last read"
AVOIDED = "; this replica avoids it for a moment: a request or a health check just failed there"
#: Ways to choose a worker, the best first: by Redis; by Redis, with engines asked for /health because heartbeats are
#: missing; by hash, from the workers last read; none. The page draws them as a ladder.
RUNGS = ("redis", "asked", "last_known", "nothing")


@dataclass(frozen=True, slots=True)
class Reading:
    """The data of a model in Redis. truth: about its index. memory: used by Redis. line: its queue. ledger: of
    sessions. reached: False if Redis does not answer; the other fields are then empty."""

    reached: bool
    truth: Truth
    memory: Memory
    line: Line
    ledger: LedgerView
    replicas: Sequence[ReplicaView] = ()


async def read(pool: Pool) -> Reading:
    """Read a snapshot's data from Redis, except workers: the page shows them as of the last read, at most 2 s ago."""
    try:
        async with asyncio.timeout(READ_S):
            truth = await pool.fleet.index.truth(pool.view.workers)
            memory, line = await pool.fleet.index.memory(), await pool.fleet.queue.poll()
            ledger = await pool.fleet.ledger.read()
            return Reading(True, truth, memory, line, ledger, await pool.fleet.replicas.read())
    except (TimeoutError, WarmfleetError):
        return Reading(False, Truth(), Memory(0, 0, ""), Line(0, 0.0, {}), LedgerView())


def figures(pool: Pool, pools: Pools, found: Reading) -> dict[str, Any]:
    """Return all about a model but its history. ``queue`` and ``index`` are None while Redis does not answer."""
    identity, rung = pool.view.identity, rung_of(pool, reached=found.reached)
    away = _away(pool, reached=found.reached)
    workers = shown_workers(pool, rung, away=away)
    others = any(
        worker.routable for other in pools.named(pool.name) if other is not pool for worker in other.last_known.workers
    )
    avoided, truths, moved = pool.avoided(), found.truth.workers, pools.moved(pool, workers)
    places, paired = places_in_words(found.ledger), pairing(workers)
    roles = roles_in_words(paired)
    line, memory = found.line, found.memory
    queue = queue_in_words(line)
    index = {
        "entries": found.truth.entries,
        "memory_used_bytes": memory.used,
        "memory_limit_bytes": memory.limit,
    }
    return {
        "model": pool.tag,
        "pool_state": pools.state_of(pool),
        "policy": pool.policy.name,
        "policy_by": pool.policy.source,
        "identity": identity.kind if identity else "text" if pool.view.text else "none",
        "rung": rung,
        "away": away,
        "rung_reason": rung_in_words(pool, rung, reached=found.reached, others=others),
        "view_age_s": round(pool.view_age_s, 1) if pool.contacted else None,
        "queue": queue if found.reached else None,
        "ledger": ledger_in_words(found.ledger),
        "pairs": pairs_in_words(
            paired, able=pool.view.splits is not None, handoff=pool.view.may_split, policy=pool.policy.name
        ),
        "ttft": pool.ttft.figures(),
        "fleet": fleet_figures(found.replicas) if found.reached else None,
        "replicas": [replica_row(view) for view in found.replicas],
        "index": index if found.reached else None,
        "workers": [
            worker_row(
                worker,
                truths.get(worker.worker_id),
                pool.tag,
                avoided=worker.worker_id in avoided,
                known_last=rung == "last_known",
                moved_to=moved.get(worker.worker_id, ""),
            )
            | {"places": places.get(worker.worker_id), "pairs": roles.get(worker.worker_id)}
            for worker in workers
        ],
        "decided": pool.recent.decided,
    }


def shown_workers(pool: Pool, rung: str, *, away: bool) -> Sequence[WorkerView]:
    """Return the workers that were last read from Redis. While requests go to workers known from an earlier read
    (rung ``last_known``), add these or, while Redis is away, return only these."""
    if rung != "last_known":
        return pool.view.workers
    if away:
        return pool.last_known.workers
    here = {worker.worker_id for worker in pool.view.workers}
    return [*pool.view.workers, *(worker for worker in pool.last_known.workers if worker.worker_id not in here)]


def fleet_figures(replicas: Sequence[ReplicaView]) -> dict[str, Any]:
    """Sum up the figures of all live replicas for the last minute, under the same names as for one replica."""
    minutes = [view.told.minute for view in replicas if view.heard]
    prompt, matched = (sum(getattr(minute, name) for minute in minutes) for name in ("prompt_tokens", "matched_tokens"))
    return {
        "replicas": len(minutes),
        "decisions_per_s": round(sum(minute.decided for minute in minutes) / WINDOW_S, 2),
        "fallbacks_per_s": round(sum(minute.fallbacks for minute in minutes) / WINDOW_S, 2),
        "hit_ratio": matched / prompt if prompt else None,
        **quantiles(minute.waits for minute in minutes),
    }


def replica_row(view: ReplicaView) -> dict[str, Any]:
    """Describe a replica in this pool; ``decisions`` and ``hit_ratio`` are those of the last minute."""
    told, minute = view.told, view.told.minute
    return replica_facts(view) | {
        "up_s": max(0, round(time.time()) - told.started),
        "policy": told.policy,
        "in_flight": told.in_flight,
        "waiting": told.waiting,
        "decisions": minute.decided,
        "hit_ratio": minute.matched_tokens / minute.prompt_tokens if minute.prompt_tokens else None,
    }


def rung_of(pool: Pool, *, reached: bool) -> str:
    """Return the rung: how workers are chosen now, one of RUNGS. reached: whether Redis answers."""
    known = any(worker.routable for worker in pool.last_known.workers)
    away = _away(pool, reached=reached)
    if away or not any(worker.routable for worker in pool.view.workers):
        if known:
            return "last_known"
        if away:
            return "nothing"
    if pool.fleet.upkeep.last_tick.grace or any(worker.state is WorkerState.UNHEARD for worker in pool.view.workers):
        return "asked"
    return "redis"


def _away(pool: Pool, *, reached: bool) -> bool:
    return not reached or not pool.degraded.asks_redis or pool.unread


def rung_in_words(pool: Pool, rung: str, *, reached: bool, others: bool = False) -> str:
    """Explain a rung in a sentence. others: whether another pool of the model has a worker that takes requests."""
    if rung == "nothing":
        served = "other pools of its model serve its requests" if others else "requests get 503 until Redis is back"
        return f"Redis is away and no worker of this pool is known: {served}."
    if rung == "last_known":
        none = "No worker takes requests" if pool.view.workers else "Redis came back without the workers"
        since = "Redis is away" if _away(pool, reached=reached) else none
        count = sum(worker.routable for worker in pool.last_known.workers)
        return (
            f"{since}. For now requests go to the workers known last ({count}), by a hash of the prompt; nothing is"
            " booked and the engines are asked for their health every 5 s."
        )
    unheard = sum(worker.state is WorkerState.UNHEARD for worker in pool.view.workers)
    if rung == "asked":
        told = f"{unheard} workers send no heartbeat" if unheard else "heartbeats could not be heard a moment ago"
        return f"Redis decides; {told}, so the engines are asked whether they answer."
    return "Redis decides: every choice knows the caches and the load of the whole fleet."


def worker_row(
    worker: WorkerView,
    truth: WorkerTruth | None,
    tag: str,
    *,
    avoided: bool = False,
    known_last: bool = False,
    moved_to: str = "",
) -> dict[str, Any]:
    """Describe a worker. truth: None without a plugin, or while Redis is away. avoided: this replica avoids it now.

    known_last: known from an earlier read only, so its values may be old, and requests there match no blocks.
    moved_to: another pool that gets the worker's heartbeats, if any.
    """
    load, past = worker.load, known_last and worker.routable
    return {
        "worker_id": worker.worker_id,
        "url": worker.url,
        "names": worker.names,
        "state": worker.state,
        "routable": worker.routable,
        "reason": (LAST_READ if past else why(worker, tag, moved_to)) + (AVOIDED if avoided else ""),
        "remedy": "" if past else remedy(worker, tag, moved_to),
        "version": str(worker.record.get("version", "")),
        "blocks": load.blocks,
        "capacity_blocks": load.capacity_blocks,
        "in_flight": load.in_flight,
        "prefill_tokens": load.prefill_tokens + load.foreign_prefill_tokens,
        "decode_tokens": load.decode_tokens + load.foreign_decode_tokens,
        "speed_tps": load.speed_tps,
        "heartbeat_age_s": None if worker.heartbeat_age_s is None else round(worker.heartbeat_age_s, 1),
        "lag_batches": None if truth is None else truth.lag_batches,
        "lag_s": None if truth is None else round(truth.lag_s, 2),
        "diverged": truth is not None and truth.diverged,
    }


def slow_row(told: dict[str, Any]) -> dict[str, Any]:
    """Describe a slow request by some of the fields of ``/why``."""
    names = ("request_id", "at", "running", "status", "path", "model", "worker", "ms", "first_ms", "because", "remedy")
    return {name: told.get(name) for name in names}


def decision_rows(recents: Iterable[Recent], made: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the rows of these decisions by number, in this order. made: the last snapshot's rows, which are reused.

    To make the row of a decision with all candidates, every worker of the fleet is decoded, which costs too much to
    repeat each second.
    """
    return {recent.number: made.get(recent.number) or decision_row(recent) for recent in recents}


def decision_row(recent: Recent) -> dict[str, Any]:
    """Describe a decision, with its reason in words; ``candidates`` is None unless it returned all candidates."""
    decision = recent.decision
    return {
        "number": recent.number,
        "at": round(recent.at, 3),
        "request_id": recent.request_id,
        "endpoint": recent.endpoint,
        "identity": recent.kind,
        "worker_id": decision.worker_id,
        "policy": recent.policy,
        "why": recent.fallback or decision.why,
        "reason": why_in_words(recent.policy, decision, recent.fallback),
        "fallback": bool(recent.fallback),
        "prompt_tokens": decision.prompt_tokens,
        "matched_tokens": decision.matched_tokens,
        "wait_tokens": decision.wait_tokens,
        "cost_s": round(decision.cost_s, 4),
        "candidates": None if decision.seen is None else _candidates(recent),
        "of": 0 if decision.seen is None else len(decision.seen.rows),
    }


def _candidates(recent: Recent) -> list[dict[str, Any]]:
    """Describe the chosen worker, then the cheapest others."""
    seen, chosen = recent.decision.seen, recent.decision.worker_id
    rows = sorted(seen.candidates if seen else (), key=lambda row: (row.worker_id != chosen, row.cost_s))
    return [
        {
            "worker_id": row.worker_id,
            "matched_tokens": row.matched_tokens,
            "wait_tokens": row.prefill_tokens + row.foreign_prefill_tokens,
            "in_flight": row.in_flight,
            "speed_tps": row.speed_tps,
            "cost_s": round(row.cost_s, 4),
        }
        for row in rows[:CANDIDATES]
    ]
