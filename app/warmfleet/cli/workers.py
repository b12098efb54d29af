"""``warmfleet workers``: the engines of a running fleet as one replica lists them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from warmfleet.cli.client import ask, table

if TYPE_CHECKING:
    import argparse

HEADER = (
    "WORKER", "URL", "STATE", "PROOF", "SLOT", "BLOCKS", "CAPACITY", "IN FLIGHT", "PREFILL", "DECODE", "TOKENS/S",
    "SEEN", "LAG", "DIGEST", "HEALED", "RESYNCS",
)  # fmt: skip

SUSPECT = {
    "prompt": "it counted other prompt tokens than the router: a probe is due",
    "blocks": "its stream did not report the blocks of prompts: a probe is due",
}


def run(options: argparse.Namespace) -> int:
    """Print the table; 1 if no worker is routable."""
    answer = ask("GET", options.url, "/workers")
    print(json.dumps(answer, indent=2) if options.json else render(answer))
    return 0 if any(worker["routable"] for model in answer["models"] for worker in model["workers"]) else 1


def render(answer: dict[str, Any]) -> str:
    """One table per model.

    STATE: see app/docs/worker-life.md. PROOF: the result of the last probe. PREFILL, DECODE: tokens booked by open
    requests. SEEN: age of the last heartbeat. LAG: entries of the worker's stream that are not applied yet, and the age
    of the oldest. DIGEST: time since the worker's digest was last compared with the index. HEALED: how many of the
    divergences that were found are mended, and the cause of the open one. RESYNCS: snapshots taken over, by cause.
    """
    parts = []
    for model in answer["models"]:
        title = f"{model['model']}  (prompts identified: {model['identity']}, tokenizer: {model['tokenizer']}, "
        title += f"chat template: {model['template']}, policy: {model['policy']} by {model['policy_by']})"
        if not model["fresh"]:
            title += "  the store does not answer: this is the last reading"
        else:
            title += "  " + _index(model["index"])
        title += "\n" + _ttft(model["ttft"])
        body = table(HEADER, [_row(worker) for worker in model["workers"]]) if model["workers"] else "no workers"
        reasons = [f"{worker['worker_id']}: {worker['reason']}" for worker in model["workers"] if worker["reason"]]
        reasons += [
            f"{worker['worker_id']}: suspected, {SUSPECT[worker['suspect']]}"
            for worker in model["workers"]
            if worker["suspect"]
        ]
        reasons += [_unheard(worker) for worker in model["workers"] if worker["state"] == "unheard"]
        reasons += [_ejected(worker) for worker in model["workers"] if worker["state"] == "ejected"]
        reasons += [_paused(worker) for worker in model["workers"] if worker["state"] == "paused"]
        reasons += [_draining(worker) for worker in model["workers"] if worker["draining"]]
        parts.append("\n".join([title, body, *reasons]))
    return "\n\n".join(parts)


def _row(worker: dict[str, Any]) -> tuple[object, ...]:
    load, age = worker["load"], worker["heartbeat_age_s"]
    return (
        worker["worker_id"],
        worker["url"] or "-",
        worker["state"],
        worker["proof"],
        load["slot"],
        load["blocks"],
        load["capacity_blocks"],
        load["in_flight"],
        load["prefill_tokens"] + load["foreign_prefill_tokens"],
        load["decode_tokens"] + load["foreign_decode_tokens"],
        load["speed_tps"],
        _age(age),
        *_truth(worker["truth"]),
    )


def _unheard(worker: dict[str, Any]) -> str:
    quiet = _age(worker["heartbeat_age_s"])
    return f"{worker['worker_id']}: no heartbeat for {quiet}, but its engine answers: check its way to Redis"


def _ejected(worker: dict[str, Any]) -> str:
    return f"{worker['worker_id']}: ejected, it failed requests that other workers served: read its log"


def _paused(worker: dict[str, Any]) -> str:
    return f"{worker['worker_id']}: paused or asleep; vLLM's /resume or /wake_up ends this"


def _draining(worker: dict[str, Any]) -> str:
    left = worker["load"]["in_flight"]
    return f"{worker['worker_id']}: draining, {left} requests left; `warmfleet drain --undo` ends this"


def _truth(truth: dict[str, Any] | None) -> tuple[str, ...]:
    if truth is None:
        return ("-",) * 4
    healed = f"{truth['healed']} of {truth['found']}" + (f", {truth['cause']}" if truth["cause"] else "")
    resyncs = " ".join(f"{cause} {count}" for cause, count in sorted(truth["resyncs"].items()))
    return f"{truth['lag_batches']}, {_age(truth['lag_s'])}", _age(truth["digest_age_s"]), healed, resyncs or "-"


def _age(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"


def _ttft(ttft: dict[str, Any]) -> str:
    """The times to first token of streamed answers that this replica gave in the last minute."""
    spread = ", ".join(f"{name} {ttft[name.lower() + '_s']:.3f} s" for name in ("P50", "P90", "P99"))
    aim = f"; objective {ttft['objective_s']:g} s, in force {ttft['in_force_s']:.3f} s" if ttft["objective_s"] else ""
    return f"time to first token of {ttft['requests']:.0f} streams, last minute, this replica: {spread}{aim}"


def _index(index: dict[str, Any]) -> str:
    used, limit = (index[name] / 2**20 for name in ("memory_used_bytes", "memory_limit_bytes"))
    memory = f"{used:.0f} MiB" + (f" of {limit:.0f}" if limit else "")
    return f"index: {index['entries']} entries, {index['retired_slots']} retired slots; memory {memory}"
