"""Answers about the fleet, as values for JSON: its workers and replicas, and the worker that a request would get."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from warmfleet.background.worker_gauges import set_worker_gauges
from warmfleet.background.worker_words import remedy, why
from warmfleet.errors import FleetUnavailable, NoWorker, WarmfleetError
from warmfleet.fleet import LedgerView, Line, Memory, Question, Split, Truth, WorkerTruth, WorkerView, new_reservation
from warmfleet.pools.identified_prompt import identify_here
from warmfleet.pools.pairing import pairing, pairs_in_words, roles_in_words
from warmfleet.pools.reasons import (
    held_in_words,
    in_words,
    ledger_in_words,
    moved_in_words,
    places_in_words,
    queue_in_words,
    where_held,
)
from warmfleet.pools.ttft_window import SHOWN
from warmfleet.routing.decider import nobody
from warmfleet.routing.pool_choice import HOMES, MOST_ASKED, Offer, at_once, best, prices, turn_s
from warmfleet.routing.prefills import unfit
from warmfleet.routing.sessions import session_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.fleet import ReplicaView
    from warmfleet.metrics import Metrics
    from warmfleet.pools.identified_prompt import IdentifiedPrompt
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools, ServedModel
    from warmfleet.prompt.request import Request
    from warmfleet.routing.call import Hints

#: Figures of a replica that are summed over its pools, by their names in the answer.
SUMS = ("in_flight", "waiting", "decided", "fallbacks", "prompt_tokens", "matched_tokens")
AWAY, EMPTY = "its Redis is away", "it has no worker"  # why a home pool (chosen by the prompt's hash) was not asked


def versions(pools: Pools) -> dict[str, Any]:
    """Return ``version``, the most frequent one of routable engines or "", and ``engines``, their number by version."""
    seen = [worker.record.get("version") for pool in pools.all for worker in pool.view.workers if worker.routable]
    counts = Counter(str(version).removeprefix("vllm-") for version in seen if version).most_common()
    return {"version": counts[0][0] if counts else "", "engines": dict(counts)}


def gauges(pools: Pools, metrics: Metrics) -> None:
    """Set the gauges that each call of /metrics computes: of workers and TTFT, and the age of the last Redis read."""
    set_worker_gauges(pools, metrics)
    metrics.view_age_seconds.set(max(pool.view_age_s for pool in pools.all))
    for pool in pools.all:
        for share in SHOWN:
            metrics.ttft_seconds.labels(pool.tag, str(round(100 * share))).set(pool.ttft.quantile(share))
        metrics.objective_seconds.labels(pool.tag).set(pool.ttft.in_force_s)
        metrics.engine_wait_seconds.labels(pool.tag).set(pool.fleet.constants.limits.max_engine_wait_s)


async def workers(pool: Pool, pools: Pools) -> dict[str, Any]:
    """Return every worker of one model as Redis has it now or, while Redis is away, as it was last read."""
    fresh, truth, memory, line, ledger = True, Truth(), Memory(0, 0, ""), Line(0, 0.0, {}), LedgerView()
    try:
        found = await pool.fleet.workers.read()
        truth, memory, line, ledger = (
            await pool.fleet.index.truth(found),
            await pool.fleet.index.memory(),
            await pool.fleet.queue.poll(),
            await pool.fleet.ledger.read(),
        )
    except FleetUnavailable:
        found, fresh = list(pool.view.workers), False
    identity, moved, places = pool.view.identity, pools.moved(pool, found), places_in_words(ledger)
    paired = pairing(found)
    roles = roles_in_words(paired)
    return {
        "model": pool.tag,
        "served_model": pool.name,
        "pool_state": pools.state_of(pool),
        "fresh": fresh,
        "policy": pool.policy.name,
        "policy_by": pool.policy.source,
        "identity": identity.kind if identity else "text" if pool.view.text else "none",
        "template": identity.template if identity else "none",
        "tokenizer": identity.tokenizer if identity else "none",
        "queue": queue_in_words(line),
        "ledger": ledger_in_words(ledger),
        "pairs": pairs_in_words(
            paired, able=pool.view.splits is not None, handoff=pool.view.may_split, policy=pool.policy.name
        ),
        "ttft": pool.ttft.figures(),
        "index": {
            "entries": truth.entries,
            "retired_slots": truth.retired_slots,
            "memory_used_bytes": memory.used,
            "memory_limit_bytes": memory.limit,
            "counts": truth.counts,
        },
        "workers": [
            _worker(worker, truth.workers.get(worker.worker_id), pool.tag, moved.get(worker.worker_id, ""))
            | {"places": places.get(worker.worker_id), "pairs": roles.get(worker.worker_id)}
            for worker in found
        ],
    }


def _worker(worker: WorkerView, truth: WorkerTruth | None, tag: str, moved_to: str) -> dict[str, Any]:
    """Describe a worker. tag: of its pool. truth: figures of its index; None without a plugin or Redis.

    moved_to: another pool that gets the worker's heartbeats, if any.
    """
    return {
        "worker_id": worker.worker_id,
        "pool": tag,
        "url": worker.url,
        "models": worker.names,
        "state": worker.state,
        "draining": worker.draining,
        "routable": worker.routable,
        "proof": worker.proof,
        "moved_to": moved_to,
        "why": why(worker, tag, moved_to),
        "remedy": remedy(worker, tag, moved_to),
        "reason": worker.record.get("reason", ""),
        "cause": worker.record.get("cause", ""),
        "suspect": worker.record.get("suspect", ""),
        "version": worker.record.get("version", ""),
        "scheme": worker.record.get("scheme"),
        "labels": worker.record.get("labels", {}),
        "heartbeat_age_s": worker.heartbeat_age_s,
        "load": asdict(worker.load),
        "truth": asdict(truth) if truth else None,
    }


async def replicas(pools: Pools) -> dict[str, Any]:
    """Return every replica that announced itself in Redis within ten minutes, over all models of this replica.

    ``fresh`` is false if some pool's Redis does not answer.
    """
    found: dict[str, dict[str, Any]] = {}
    fresh = True
    for pool in pools.all:
        try:
            views = await pool.fleet.replicas.read()
        except FleetUnavailable:
            fresh = False
            continue
        for view in views:
            row = found.setdefault(view.name, replica_facts(view) | {"pools": {}} | dict.fromkeys(SUMS, 0))
            if view.age_s < row["heard_s"]:
                row |= replica_facts(view)
            for name in SUMS:
                row[name] += getattr(view.told, name, 0) or getattr(view.told.minute, name, 0)
            row["pools"][pool.tag] = view.told.policy
    return {"fresh": fresh, "replicas": [found[name] for name in sorted(found)]}


def replica_facts(view: ReplicaView) -> dict[str, Any]:
    """Return the facts of a replica that are the same in all its pools."""
    told = view.told
    return {
        "replica": view.name,
        "url": told.url,
        "state": view.state,
        "heard_s": round(view.age_s, 1),
        "version": told.version,
        "started": told.started,
    }


@dataclass(frozen=True, slots=True)
class Inquiry:
    """The request that ``/explain`` asks about. flow, priority: its tenant and priority in the fair queue.

    form: of its path. has_ledger: this replica has a ledger of sessions.
    """

    form: str
    request: Request
    hints: Hints
    flow: bytes
    priority: int
    has_ledger: bool


async def explain(model: ServedModel, pool: Pool, inquiry: Inquiry) -> dict[str, Any]:
    """Find the worker that a request would get now, and every worker's cost, without booking. Raises NoWorker.

    If no worker takes requests, NoWorker has the message that the request would get. While Redis does not answer, the
    workers are those last read from it, and ``fresh`` is false (``_by_last_reading``); if none was ever read,
    FleetUnavailable is raised.

    pool: the pool of the model whose tokenizer identifies the prompt. In the result, ``pools`` has the best worker and
    the price (seconds) of each pool asked, ``passed_over`` why others were not; other fields are about the best pool.
    """
    try:
        return await _considered(model, pool, inquiry)
    except NoWorker as error:
        raise NoWorker(nobody(model.pools, pool.name, inquiry.request.labels)) from error
    except FleetUnavailable:
        if not pool.contacted:
            raise
        return await _by_last_reading(pool, inquiry.request)


async def _considered(model: ServedModel, pool: Pool, inquiry: Inquiry) -> dict[str, Any]:
    """Do the same as ``explain``, but raise NoWorker without the message that the request would get."""
    prompt = await identify_here(inquiry.request, pool)
    homes = model.order_for(prompt, inquiry.request.model, counted=False)
    answers, failed = await _of_homes(homes, inquiry)
    if not answers:
        raise next(iter(failed.values()))
    full = {home for home, answer in answers.items() if _refuses(answer)}
    if len(full) < len(answers):
        answers = {home: answer for home, answer in answers.items() if home not in full}
    offered = [_offer(answer, home) for home, answer in answers.items()]
    stay = pool.fleet.constants.weights.stay
    offers = [
        {
            "pool": home.tag,
            "worker_id": worker_id,
            "matched_tokens": offer.matched_tokens,
            "waits": answers[home]["waits"],
            "price_s": price,
        }
        for home, (worker_id, offer), price in zip(
            answers, offered, prices([offer for _, offer in offered], stay), strict=True
        )
    ]
    reasons: dict[Pool, object] = {**failed, **dict.fromkeys(full, "its queue is full")}
    passed_over = [
        {"pool": home.tag, "why": str(reasons.get(home) or (AWAY if home.usable else EMPTY))}
        for home in homes[:HOMES]
        if home not in answers and not home.draining
    ]
    chosen = [*answers.values()][best([offer for _, offer in offered], stay)]
    compared = offers if passed_over or len(offers) > 1 else []
    return chosen | {"pools": compared, "passed_over": passed_over}


async def _of_homes(
    homes: Sequence[Pool], inquiry: Inquiry
) -> tuple[dict[Pool, dict[str, Any]], dict[Pool, WarmfleetError]]:
    """Ask the pools that a router would ask; return their answers, and the failures of the others."""
    reachable = [home for home in homes if home.degraded.asks_redis] or homes
    left = [home for home in reachable if home.usable] or reachable
    answers: dict[Pool, dict[str, Any]] = {}
    failed: dict[Pool, WarmfleetError] = {}
    while left and len(answers) < MOST_ASKED and all(map(_refuses, answers.values())):
        count = 1 if answers or failed else at_once(left)
        asked, left = left[:count], left[count:]
        found = await asyncio.gather(*(_explained(home, inquiry) for home in asked), return_exceptions=True)
        for home, answer in zip(asked, found, strict=True):
            if isinstance(answer, WarmfleetError):
                failed[home] = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answers[home] = answer
    return answers, failed


def _refuses(explained: dict[str, Any]) -> bool:
    """Whether the pool refuses the request: its queue is full, and no worker has room."""
    return bool(explained["waits"] and not explained["waits_for"])


def _offer(explained: dict[str, Any], pool: Pool) -> tuple[str, Offer]:
    """Return the worker that the request would get or wait for in this pool, and the pool's price (in seconds)."""

    def turn(row: dict[str, Any]) -> float:
        token_s = pool.view.token_s_of(row["worker_id"])
        ahead = row["prefill_tokens"] + row["foreign_prefill_tokens"]
        return turn_s(token_s * ahead, token_s * (explained["prompt_tokens"] - row["matched_tokens"]))

    rows: list[dict[str, Any]] = explained["candidates"]
    if not explained["waits"]:
        row = next(row for row in rows if row["chosen"])
        if held := explained["held"]:
            return row["worker_id"], Offer(None, held["predicted_s"] / 2, row["matched_tokens"], pool.view.token_s)
        return row["worker_id"], Offer(row["cost_s"], turn(row), row["matched_tokens"], pool.view.token_s)
    if _refuses(explained):
        row = min(rows, key=turn)
        return row["worker_id"], Offer(None, turn(row), row["matched_tokens"], pool.view.token_s)
    row = next(row for row in rows if row["worker_id"] == explained["waits_for"])
    return row["worker_id"], Offer(None, explained["turn_s"], row["matched_tokens"], pool.view.token_s)


async def _line(pool: Pool) -> dict[str, Any] | None:
    """Describe the pool's queue in words; None if Redis does not answer."""
    with suppress(FleetUnavailable):
        return queue_in_words(await pool.fleet.queue.poll())
    return None


async def _by_last_reading(pool: Pool, request: Request) -> dict[str, Any]:
    """Choose the worker while Redis does not answer, as routers do in an outage: by a hash of the prompt's beginning.

    ``candidates`` have the load as last read; costs and matches are left out: only Redis has them. Raises NoWorker.
    """
    prompt = await identify_here(request, pool)
    unable, workers = prompt.unable_workers, pool.last_known.workers
    able = [worker for worker in workers if worker.routable and worker.worker_id not in unable]
    chosen = pool.degraded.choose(able, prompt.beginning, pool.avoided()) or pool.degraded.choose(
        able, prompt.beginning
    )
    if chosen is None:
        raise NoWorker(nobody((pool,), pool.name, request.labels))
    rows = [
        {
            "worker_id": worker.worker_id,
            "prefill_tokens": worker.load.prefill_tokens,
            "foreign_prefill_tokens": worker.load.foreign_prefill_tokens,
            "decode_tokens": worker.load.decode_tokens,
            "in_flight": worker.load.in_flight,
            "chosen": bool(prompt.beginning) and worker is chosen,
        }
        for worker in able
    ]
    because = "Redis does not answer: routers choose by a hash of the prompt's beginning, among the workers known last"
    fields = _prompt_fields(pool, prompt, "away", because) | {"pools": [], "passed_over": []}
    return fields | {"fresh": False, "chosen": chosen.worker_id if prompt.beginning else "", "candidates": rows}


def _prompt_fields(pool: Pool, prompt: IdentifiedPrompt, why: str, because: str) -> dict[str, Any]:
    """Return the fields about the prompt and its pool, which need no answer of Redis."""
    return {
        "model": pool.tag,
        "policy": pool.policy.name,
        "fresh": True,
        "view_age_s": pool.view_age_s,
        "why": why,
        "because": because,
        "moved": "",
        "identity": prompt.kind,
        "reason": prompt.reason,
        "prompt_tokens": prompt.prompt_tokens,
        "blocks": max((len(chain.hashes) // 8 for chain in prompt.chains), default=0),
        "waits": False,
        "waits_for": "",
        "turn_s": 0.0,
        "held": None,
        "queue": None,
    }


async def _explained(pool: Pool, inquiry: Inquiry) -> dict[str, Any]:
    """Return the answer of /explain for this pool: the worker that the request would get here, and why."""
    request, hints = inquiry.request, inquiry.hints
    prompt = await identify_here(request, pool)
    pool.idle.wake()
    question = Question(
        new_reservation(prompt.prompt_count),
        prompt.chains,
        prompt.prompt_tokens,
        prompt.decode_tokens,
        pool.policy.name,
        exclude=prompt.unable_workers,
        prefix_tokens=hints.prefix_tokens,
        order=pool.policy.order(pool.view, request, hints.session),
        objective_s=pool.ttft.in_force_s,
        tenant=inquiry.flow,
        priority=inquiry.priority,
        barred=prompt.unable_workers,
        session=session_of(inquiry.form, inquiry.flow, hints, request, prompt) if inquiry.has_ledger else b"",
        split=_split(pool, inquiry, prompt),
    )
    chosen, why, seen = await pool.fleet.queue.consider(question)
    block_tokens = {chain.scheme_id: chain.block_tokens for chain in prompt.chains}
    of_worker = {worker.worker_id: block_tokens.get(worker.load.scheme, 0) for worker in pool.view.workers}
    rows, candidates = [], seen.candidates
    most_s = pool.fleet.constants.sessions.held_max_ms / 1_000
    cheapest = min(seen.ways, key=lambda way: way.cost_s, default=None)
    for candidate in candidates:
        size = of_worker.get(candidate.worker_id, 0)
        blocks = candidate.matched_tokens // size if size else 0
        where = (candidate.matched_tokens, candidate.tier_tokens, candidate.tier_s, candidate.tier)
        row = asdict(candidate) | {"matched_blocks": blocks, "chosen": candidate.worker_id == chosen}
        rows.append(row | {"where_held": where_held(*where)})
    return _prompt_fields(pool, prompt, why, in_words(pool.policy.name, why, seen)) | {
        "moved": moved_in_words(pool.policy.name, chosen, seen),
        "waits": seen.waits,
        "waits_for": candidates[seen.turn_at - 1].worker_id if seen.waits and seen.turn_at else "",
        "turn_s": seen.turn_s,
        "held": held_in_words(seen.hold, most_s, first=not request.goes_on) if seen.hold else None,
        "queue": await _line(pool) if seen.waits else None,
        "chosen": chosen,
        "prefill": cheapest.worker_id if cheapest is not None and cheapest.partner_id == chosen else "",
        "ways": [way._asdict() for way in seen.ways],
        "candidates": rows,
    }


def _split(pool: Pool, inquiry: Inquiry, prompt: IdentifiedPrompt) -> Split:
    view = pool.view
    if view.splits is None:
        return Split.ROLES_IGNORED
    alone = unfit(inquiry.request, inquiry.form, prompt, view.splits, view.max_model_len)
    return Split.FORBIDDEN if alone else Split.ALLOWED
