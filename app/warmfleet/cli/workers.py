"""``warmfleet workers``: the engines of a running fleet as one replica lists them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from warmfleet.cli.client import ask
from warmfleet.cli.command_error import CommandError
from warmfleet.cli.terminal.output import Part, Table, Tone, Toned, redraw, show

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

HEADER = ("WORKER", "STATE", "CACHE", "IN FLIGHT", "PREFILL", "TOKENS/S", "HEARD", "LAG")
WIDE = ("DECODE", "URL", "VERSION", "PROOF", "SLOT", "BLOCKS", "CAPACITY", "BATCHES", "DIGEST", "HEALED", "RESYNCS")
#: Of pools that do not just serve.
POOL_STATES = {
    "draining": "this pool drains: it gets no new request unless no other pool can serve it",
    "moving": "this pool drains: its workers move to other pools",
    "removed": "this pool is removed: it ends when its requests have",
}
WELL = ("proven", "approximate")


def run(options: argparse.Namespace) -> int:
    """Print the table, or with ``--watch`` one table after the other; 1 if no worker is routable, at last."""
    if options.json:
        answer = ask("GET", options.url, "/workers")
        print(json.dumps(answer, indent=2))
        return _status(answer)
    last: dict[str, Any] = {"models": []}

    def picture() -> list[Part]:
        nonlocal last
        last = ask("GET", options.url, "/workers")
        return parts_of(last, wide=options.wide)

    def picture_or_why_not() -> list[Part]:
        try:
            return picture()
        except CommandError as error:  # the replica may come back
            return [Toned(str(error), Tone.BAD)]

    if options.watch is None:
        show(sys.stdout, picture())
    else:
        redraw(sys.stdout, picture_or_why_not, options.watch)
    return _status(last)


def _status(answer: dict[str, Any]) -> int:
    return 0 if any(worker["routable"] for model in answer["models"] for worker in model["workers"]) else 1


def parts_of(answer: dict[str, Any], *, wide: bool = False) -> list[Part]:
    """One table per model, and below it a line and a remedy for each worker that is not used, or not fully.

    STATE: see app/docs/worker-life.md. CACHE: the share that holds blocks. PREFILL, DECODE: tokens booked by open
    requests. TOKENS/S: measured speed of prefill. HEARD: age of the last heartbeat. LAG: age of the oldest entry of
    the worker's stream that is not applied yet, and with ``wide`` BATCHES: their number. PROOF: the result of the last
    probe. DIGEST: time since the worker's digest was last compared with the index. HEALED: how many of the divergences
    that were found are mended, and the cause of the open one. RESYNCS: snapshots taken over, by cause.
    """
    parts: list[Part] = []
    for model in answer["models"]:
        parts += ["", *_title(model, wide=wide)]
        workers = model["workers"]
        if workers:
            header = HEADER + WIDE if wide else HEADER
            parts.append(Table(header, [_row(worker, wide=wide) for worker in workers]))
        else:
            parts.append("no workers: `warmfleet doctor` says what is missing")
        for worker in workers:
            parts += _not_well(worker)
    return parts[1:] or ["this replica has no model"]


def _title(model: dict[str, Any], *, wide: bool) -> Iterator[Part]:
    workers = [one for one in model["workers"] if not one.get("moved_to") and one["state"] != "left"]
    ready = sum(bool(worker["routable"]) for worker in workers)
    told = f"  {ready} of {len(workers)} workers take requests; policy: {model['policy']} by {model['policy_by']}"
    if waiting := model.get("queue", {}).get("waiting"):
        told += f"; {waiting} requests wait for a worker"
    yield Toned(model["model"], Tone.HEAD), told
    if state := POOL_STATES.get(model.get("pool_state", "")):
        yield Toned(state, Tone.MIND)
    if first := model.get("queue", {}).get("next"):
        yield _first(first)
    yield (
        f"prompts identified: {model['identity']}; tokenizer: {model['tokenizer']}; chat template: {model['template']}"
    )
    if not model["fresh"]:
        yield Toned("the store does not answer: this is the last reading", Tone.BAD)
    elif wide:
        yield _index(model["index"])
    yield _ttft(model["ttft"])


def _first(first: dict[str, Any]) -> str:
    """The request that is first in the queue. A replica of an older version tells only how long some engine needs."""
    worker, there_s = first["worker_id"], first.get("to_compute_there_s")
    where = f"goes to {worker}" if first.get("has_room") else f"waits for {worker}"
    needs = f", which needs {there_s:.2f} s for it" if there_s else ""
    waited = f"has waited {first['waited_s']:.2f} s"
    return f"first in the queue: {first['prompt_tokens']} tokens, {where}{needs}, {waited}: {first['because']}"


def _row(worker: dict[str, Any], *, wide: bool) -> tuple[object, ...]:
    load, truth, state = worker["load"], worker["truth"], worker["state"]
    tone = Tone.GOOD if state in WELL else Tone.MIND if worker["routable"] else Tone.BAD
    if worker.get("moved_to"):
        state, tone = "moved", Tone.MIND
    elif state == "left":
        tone = Tone.FAINT
    filled = 100 * load["blocks"] / load["capacity_blocks"] if load["capacity_blocks"] else 0.0
    usual = (
        worker["worker_id"],
        Toned(state, tone),
        f"{filled:.0f}%",
        load["in_flight"],
        load["prefill_tokens"] + load["foreign_prefill_tokens"],
        load["speed_tps"] or "-",
        "-" if (age_s := worker["heartbeat_age_s"]) is None else _age(age_s),  # of one that left it is forgotten
        _age(truth["lag_s"]) if truth else "-",
    )
    if not wide:
        return usual
    decode = load["decode_tokens"] + load["foreign_decode_tokens"]
    more = (decode, worker["url"] or "-", worker.get("version") or "-", worker["proof"])
    return *usual, *more, load["slot"], load["blocks"], load["capacity_blocks"], *_truth(truth)


def _not_well(worker: dict[str, Any]) -> list[Part]:
    """Why a worker takes no requests, or fewer than it could, and what to do; nothing of a worker that is well."""
    name, state, remedy = worker["worker_id"], worker["state"], worker.get("remedy", "")
    if worker["routable"] and not remedy:
        return []
    if moved_to := worker.get("moved_to"):
        return [(f"{name}: ", Toned(f"moved to {moved_to}", Tone.MIND))]
    if state == "left":
        return []
    head = (
        f"{state}, but routable" if worker["routable"] else state if state == "draining" else f"{state}, not routable"
    )
    tone = Tone.MIND if worker["routable"] else Tone.BAD
    told = (f"{name}: ", Toned(head, tone), f": {worker.get('why', worker['reason'])}")
    return [told, ("  -> ", remedy)] if remedy else [told]


def _truth(truth: dict[str, Any] | None) -> tuple[object, ...]:
    if truth is None:
        return ("-",) * 4
    healed = f"{truth['healed']} of {truth['found']}" + (f", {truth['cause']}" if truth["cause"] else "")
    resyncs = " ".join(f"{cause} {count}" for cause, count in sorted(truth["resyncs"].items()))
    return truth["lag_batches"], _age(truth["digest_age_s"]), healed, resyncs or "-"


def _age(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"


def _ttft(ttft: dict[str, Any]) -> str:
    """The times to first token of streamed answers that this replica gave in the last minute."""
    if not ttft["requests"]:
        return "no stream in the last minute at this replica"
    spread = ", ".join(f"{name} {ttft[name.lower() + '_s']:.3f} s" for name in ("P50", "P90", "P99"))
    aim = f"; objective {ttft['objective_s']:g} s, in force {ttft['in_force_s']:.3f} s" if ttft["objective_s"] else ""
    return f"time to first token of {ttft['requests']:.0f} streams, last minute, this replica: {spread}{aim}"


def _index(index: dict[str, Any]) -> str:
    used, limit = (index[name] / 2**20 for name in ("memory_used_bytes", "memory_limit_bytes"))
    memory = f"{used:.0f} MiB" + (f" of {limit:.0f}" if limit else "")
    return f"index: {index['entries']} entries, {index['retired_slots']} retired slots; memory {memory}"
