"""Fleets as the status page gets them from a replica, made up: empty, small, degraded, of two models, of 64 workers."""

from __future__ import annotations

import json
import math
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.async_api import Page, Route

HOSTILE_NAME = "<img src=x onerror=alert(1)>"
AT = 1_795_410_000.0
RUNGS = ("redis", "asked", "last_known", "nothing")
REASONS = {
    "proven": ("takes requests; its blocks are matched", ""),
    "draining": (
        "3 requests are left there",
        "undo it when the engine shall serve again: warmfleet drain gpu-04.0 --model Qwen/Qwen3-8B --undo",
    ),
    "silent": (
        "its last heartbeat came 41 s ago",
        "start the engine; if it runs, read the `warmfleet:` lines of its log: its way to Redis may be cut",
    ),
    "load-only": (
        "takes requests by load alone: its blocks are not matched (3 of 3 blocks differ from the router's)",
        "look which engine answers at its URL, and restart it: its blocks are hashed otherwise than it announced",
    ),
    "pending": (
        "it joined and waits for its probe",
        "wait some seconds for a router's probe; see the checks of the engine, and the routers' log",
    ),
}
RUNG_REASONS = {
    "redis": "Redis decides: every choice knows the caches and the load of the whole fleet.",
    "last_known": "Redis is away. Requests go to the 3 workers known last, by a hash of the prompt; nothing is booked "
    "and the engines are asked for their health every 5 s.",
}


def worker(number: int, state: str = "proven", **other: Any) -> dict[str, Any]:
    rng = random.Random(number)
    name = f"gpu-{number:02}.0"
    found = {
        "worker_id": name,
        "url": f"http://10.0.{number // 16}.{number}:8000",
        "names": ["Qwen/Qwen3-8B"],
        "state": state,
        "routable": state in ("proven", "load-only"),
        "reason": REASONS[state][0],
        "remedy": REASONS[state][1],
        "version": "vllm-0.32.0",
        "blocks": rng.randrange(20_000, 52_000),
        "capacity_blocks": 52_000,
        "in_flight": rng.randrange(30) if state == "proven" else 0,
        "prefill_tokens": rng.randrange(12_000),
        "decode_tokens": rng.randrange(90_000),
        "speed_tps": rng.randrange(9_000, 14_000),
        "heartbeat_age_s": 1.2,
        "lag_batches": rng.choice((0, 0, 2)),
        "lag_s": 0.03,
        "diverged": False,
        "places": None,
        "pairs": None,
    }
    return found | other


def decision(number: int, *, fallback: bool = False, explained: bool = True, workers: int = 4) -> dict[str, Any]:
    rng = random.Random(number)
    prompt = rng.randrange(200, 9_000)
    matched = 0 if fallback else int(prompt * rng.choice((0, 0.62, 0.93, 0.98))) // 16 * 16
    chosen = rng.randrange(1, workers + 1)
    rows = [
        {
            "worker_id": f"gpu-{1 + (chosen + step - 1) % workers:02}.0",
            "matched_tokens": matched if step == 0 else 0,
            "wait_tokens": 400 * step,
            "in_flight": 4 + step,
            "speed_tps": 11_000,
            "cost_s": 0.02 + 0.11 * step,
        }
        for step in range(min(workers, 5))
    ]
    why = rng.choice(
        (
            ("lowest", "it has the lowest predicted cost"),
            ("prefix", "tie within 5 ms of 2 engines: it holds more of the prompt than the others"),
            ("flight", "tie within 5 ms of 3 engines: it has the fewest requests in flight"),
        )
    )
    away = ("away", "Redis did not answer in time: by a hash of the prompt among the workers known last")
    return {
        "number": number,
        "at": AT - 0.7 * (60 - number),
        "request_id": f"req-{number:04}",
        "endpoint": "chat",
        "identity": "exact",
        "worker_id": f"gpu-{chosen:02}.0",
        "policy": "" if fallback else "cost",
        "why": away[0] if fallback else why[0],
        "reason": away[1] if fallback else why[1],
        "fallback": fallback,
        "prompt_tokens": prompt,
        "matched_tokens": matched,
        "wait_tokens": 0 if fallback else 300,
        "cost_s": 0 if fallback else 0.0213,
        "candidates": rows if explained and not fallback else None,
        "of": workers if explained and not fallback else 0,
    }


def slow(number: int) -> dict[str, Any]:
    running = number == 1
    return {
        "request_id": f"slow-{number:04}",
        "at": AT - 60 * number,
        "running": running,
        "status": None if running else 200,
        "path": "/v1/chat/completions",
        "model": "m",
        "worker": None if number == 2 else f"gpu-{number:02}.0",
        "ms": 9_000.0 / number,
        "first_ms": None if running else 8_000.0 / number,
        "because": "4.2 s to the first token: 2.9 s in the queue: the engines that suit it were busy (5 waited then, "
        f"with 6.2 s of work for the fleet); 1.2 s at gpu-{number:02}.0 to its first byte, predicted 300 ms.",
        "remedy": "`warmfleet workers` shows how busy each engine is: more engines shorten the queue",
    }


def history(points: int, *, away_since: int = 0) -> dict[str, list[float | None]]:
    """away_since: number of points since Redis went away."""
    rng, ages = random.Random(1), [5.0 * (points - 1 - place) for place in range(points)]
    found: dict[str, list[float | None]] = {"age_s": list(ages)}
    names = ("decisions_per_s", "fallbacks_per_s", "hit_ratio", "p50_s", "p90_s", "p99_s", "waiting")
    found |= {name: [] for name in names}
    for place in range(points):
        away = points - place <= away_since
        wave = 1 + 0.4 * math.sin(place / 14) + rng.uniform(-0.08, 0.08)
        rate = round(42 * wave, 2)
        found["decisions_per_s"].append(rate)
        found["fallbacks_per_s"].append(rate if away else 0)
        found["hit_ratio"].append(None if away else round(min(0.97, 0.78 + 0.12 * math.sin(place / 20)), 3))
        base = 0.35 if away else 0.14 * wave
        found["p50_s"].append(round(base, 4))
        found["p90_s"].append(round(base * 2.6, 4))
        found["p99_s"].append(round(base * 4.4, 4))
        found["waiting"].append(0 if wave < 1.25 else round(12 * (wave - 1.25) * 10))
    return found


def model(name: str = "Qwen/Qwen3-8B", rung: str = "redis", **other: Any) -> dict[str, Any]:
    past = history(180)
    found = {
        "model": name,
        "policy": "cost",
        "policy_by": "setting",
        "identity": "exact",
        "rung": rung,
        "away": rung in ("last_known", "nothing"),
        "rung_reason": RUNG_REASONS[rung],
        "view_age_s": 0.4,
        "queue": {
            "waiting": 3,
            "prompt_tokens": 14_200,
            "work_s": 1.3,
            "next": {"worker_id": "gpu-02.0", "waited_s": 1.5, "to_compute_s": 0.4, "has_room": False, "because": "so"},
        },
        "ledger": None,
        "pairs": None,
        "ttft": {"requests": 840, "p50_s": 0.16, "p90_s": 0.41, "p99_s": 0.72, "objective_s": 0.0, "in_force_s": 0.0},
        "fleet": {
            "replicas": 3,
            "decisions_per_s": 126.4,
            "fallbacks_per_s": 0.0,
            "hit_ratio": 0.81,
            "p50_s": 0.18,
            "p90_s": 0.44,
            "p99_s": 0.8,
        },
        "replicas": [replica(1), replica(2), replica(3, "silent")],
        "index": {"entries": 162_411, "memory_used_bytes": 41_000_000, "memory_limit_bytes": 2**31},
        "workers": [worker(1), worker(2), worker(3), worker(4, "draining")],
        "decisions": [decision(number) for number in range(50, 0, -1)],
        "decided": 50,
        "lately": {"decisions_per_s": 42.1, "fallbacks_per_s": 0.0, "hit_ratio": 0.83},
        "history": past,
    }
    return found | other


def replica(number: int, state: str = "serving") -> dict[str, Any]:
    return {
        "replica": f"router-{number}:9090",
        "url": f"http://10.0.1.{number}:9090",
        "state": state,
        "heard_s": 41.0 if state == "silent" else 1.4,
        "version": "0.1.0",
        "up_s": 8_000,
        "policy": "cost",
        "in_flight": 31,
        "waiting": 1,
        "decisions": 2_500,
        "hit_ratio": 0.81,
    }


def fleet(*models: dict[str, Any], slowest: int = 10) -> dict[str, Any]:
    own = {"name": "router-7f9c, process 1", "up_s": 8_000, "draining": False}
    rows = [slow(number) for number in range(1, slowest + 1)]
    return {"at": AT, "replica": own, "rungs": RUNGS, "models": list(models), "slow": rows, "hidden": ""}


def empty() -> dict[str, Any]:
    nothing = {"p50_s": 0.0, "p90_s": 0.0, "p99_s": 0.0}
    past: dict[str, list[float | None]] = {name: [None if name == "hit_ratio" else 0.0] for name in history(1)}
    return fleet(
        model(
            workers=[],
            decisions=[],
            decided=0,
            identity="none",
            queue={"waiting": 0, "prompt_tokens": 0, "work_s": 0.0, "next": None},
            ttft=nothing | {"requests": 0, "objective_s": 0.0, "in_force_s": 0.0},
            fleet=nothing | {"replicas": 1, "decisions_per_s": 0.0, "fallbacks_per_s": 0.0, "hit_ratio": None},
            replicas=[replica(1)],
            index={"entries": 0, "memory_used_bytes": 1_100_000, "memory_limit_bytes": 0},
            lately={"decisions_per_s": 0.0, "fallbacks_per_s": 0.0, "hit_ratio": None},
            history=past | {name: [None] for name in nothing},
        ),
        slowest=0,
    )


def degraded() -> dict[str, Any]:
    away: dict[str, Any] = {"lag_s": None, "lag_batches": None}
    workers = [worker(1, **away), worker(2, **away), worker(3, "load-only", **away), worker(4, "silent", **away)]
    return fleet(
        model(
            rung="last_known",
            workers=workers,
            decisions=[decision(number, fallback=True) for number in range(50, 0, -1)],
            view_age_s=118.2,
            queue=None,
            fleet=None,
            replicas=[],
            index=None,
            lately={"decisions_per_s": 39.0, "fallbacks_per_s": 39.0, "hit_ratio": None},
            history=history(180, away_since=24),
        )
    )


def two_models() -> dict[str, Any]:
    other = model(
        "meta/Llama-4-Scout-17B#pool-with-a-name-that-is-rather-long", workers=[worker(9), worker(10, "pending")]
    )
    other["queue"]["next"] |= {"has_room": True, "because": "its engine has room: it is its turn"}
    return fleet(model(), other)


def overfull() -> dict[str, Any]:
    """A fleet whose caches are too small for the contexts of all agents."""
    places = {"sessions": 9, "idle": 4, "taken_tokens": 310_000, "capacity_tokens": 400_000}
    row = {"session": "70" + "5a" * 12, "state": "paused", "held_s": 12.3, "tokens": 41_000}
    line = [row | {"because": "it lost its place, as the sessions of its engine outgrew the cache"}]
    line.append(row | {"session": "6e" + "c3" * 12, "state": "new", "because": "it is new"})
    ledger = {"running": 5, "idle": 4, "held": 2, "taken_tokens": 310_000, "capacity_tokens": 400_000, "line": line}
    return fleet(model(workers=[worker(1, places=places), worker(2)], ledger=ledger))


def roles() -> dict[str, Any]:
    """A fleet of prefill and decode engines, of which one has another version."""
    told: dict[str, Any] = {"role": "prefill", "partners": 1, "of": 2, "apart": []}
    older = "vLLM: 0.31.0 at the prefill engine, 0.32.0 at the decode engine"
    apart = {"from": ["gpu-04.0", "gpu-05.0", "gpu-06.0", HOSTILE_NAME], "why": older, "remedy": "upgrade one"}
    lonely = {"from": [], "why": "LMCacheConnectorV1 hands no request from engine to engine", "remedy": "use another"}
    pairs = [told, told | {"partners": 0, "apart": [apart]}, told | {"role": "decode"}, told | {"role": "both"}]
    pairs.append(told | {"role": "", "apart": [lonely]})
    workers = [worker(number, pairs=pairs) for number, pairs in enumerate(pairs, 1)]
    counts = {"prefill": 2, "decode": 1, "both": 1, "pairs": 2, "told": "requests are not split over pairs yet"}
    return fleet(model(workers=workers, pairs=counts))


def many() -> dict[str, Any]:
    states = {7: "silent", 12: "draining", 30: "load-only", 41: "pending"}
    workers = [worker(number, states.get(number, "proven")) for number in range(1, 64)]
    workers.append(worker(64) | {"worker_id": HOSTILE_NAME, "url": "javascript:alert(1)"})
    return fleet(model(workers=workers, decisions=[decision(number, workers=64) for number in range(50, 0, -1)]))


FLEETS: dict[str, Callable[[], dict[str, Any]]] = {
    "four workers": lambda: fleet(model()),
    "empty": empty,
    "degraded": degraded,
    "two models": two_models,
    "overfull": overfull,
    "roles": roles,
    "64 workers": many,
}


async def answer(page: Page, told: dict[str, Any]) -> None:
    """Let the page get these figures in place of its replica's."""

    async def give(route: Route) -> None:
        await route.fulfill(status=200, content_type="application/json", body=json.dumps(told))

    await page.route("**/status.json", give)
