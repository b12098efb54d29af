"""``warmfleet workers``: lists the engines of a running fleet, as one replica knows them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from warmfleet.cli.client import ask
from warmfleet.cli.command_error import CommandError
from warmfleet.cli.terminal.output import Part, Table, Tone, Toned, in_short, print_answer, redraw

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

HEADER = ("WORKER", "STATE", "CACHE", "IN FLIGHT", "PREFILL", "TOKENS/S", "HEARD", "LAG")
PLACES = ("SESSIONS", "TAKEN")  # columns while the ledger of sessions binds
PAIRS = ("ROLE", "PAIRS")  # columns if some engine prefills or decodes for others
WIDE = (
    *("DECODE", "URL", "VERSION", "PROOF", "SLOT", "BLOCKS", "CAPACITY", "BATCHES", "DIGEST", "HEALED", "RESYNCS"),
    "LABELS",
)
#: Sentences about pools in a state other than ``serving``.
POOL_STATES = {
    "draining": "this pool drains: it gets no new request unless no other pool can serve it",
    "moving": "this pool drains: its workers move to other pools",
    "removed": "this pool is removed: it ends when its requests have",
}
WELL = ("proven", "approximate")


def run(options: argparse.Namespace) -> int:
    """Print the table, with ``--watch`` again and again; return 1 if in the last table no worker is routable."""
    answer: dict[str, Any] = {"models": []}

    def read() -> dict[str, Any]:
        nonlocal answer
        answer = ask("GET", options.url, "/workers")
        return answer

    def picture() -> list[Part]:
        try:
            return parts_of(read(), wide=options.wide)
        except CommandError as error:  # the replica may come back
            return [Toned(str(error), Tone.BAD)]

    if options.watch is not None:
        redraw(sys.stdout, picture, options.watch)
    else:
        print_answer(read(), lambda: parts_of(answer, wide=options.wide), as_json=options.json)
    return 0 if any(worker["routable"] for model in answer["models"] for worker in model["workers"]) else 1


def parts_of(answer: dict[str, Any], *, wide: bool = False) -> list[Part]:
    """Make a table per model, and below it a line and a remedy for each worker that is not used, or not fully.

    STATE: see app/docs/worker-life.md. CACHE: the share that holds blocks. PREFILL, DECODE: tokens booked by open
    requests. TOKENS/S: measured speed of prefill. HEARD: age of the last heartbeat. LAG: age of the oldest entry of
    the worker's stream that the index lacks. SESSIONS, TAKEN: sessions of agents with a place there, and how much of
    the cache they may take they take; ROLE, PAIRS: prefill, decode or both, and with how many of the engines with which
    it could pair it does; with ``wide`` BATCHES: the number of these. PROOF: the result of the last
    probe. DIGEST: time since the digest of its blocks was last compared with the index. HEALED: how many differences
    found are mended, and the cause of an open one. RESYNCS: snapshots of its cache that replaced its index, by cause.
    """
    parts: list[Part] = []
    for model in answer["models"]:
        parts += ["", *_title(model, wide=wide)]
        workers = model["workers"]
        if workers:
            more = (PLACES if model.get("ledger") else ()) + (PAIRS if model.get("pairs") else ())
            header = HEADER + more + (WIDE if wide else ())
            parts.append(Table(header, [_row(worker, wide=wide, more=more) for worker in workers]))
        else:
            parts.append("no workers: `warmfleet doctor` says what is missing")
        for worker in workers:
            parts += _not_well(worker)
        parts += _apart(workers)
    return parts[1:] or ["this replica has no model"]


def _title(model: dict[str, Any], *, wide: bool) -> Iterator[Part]:
    workers = [worker for worker in model["workers"] if not worker["moved_to"] and worker["state"] != "left"]
    ready = sum(bool(worker["routable"]) for worker in workers)
    title = f"  {ready} of {len(workers)} workers take requests; policy: {model['policy']} by {model['policy_by']}"
    if waiting := model["queue"]["waiting"]:
        title += f"; {waiting} requests wait for a worker"
    yield Toned(model["model"], Tone.HEAD), title
    if state := POOL_STATES.get(model["pool_state"]):
        yield Toned(state, Tone.MIND)
    if first := model["queue"]["next"]:
        yield _first_in_queue(first)
    if ledger := model.get("ledger"):
        yield _ledger(ledger)
    if pairs := model.get("pairs"):
        yield _pairs(pairs)
    yield (
        f"prompts identified: {model['identity']}; tokenizer: {model['tokenizer']}; chat template: {model['template']}"
    )
    if not model["fresh"]:
        yield Toned("the store does not answer: this is the last reading", Tone.BAD)
    elif wide:
        yield _index(model["index"])
    yield _ttft(model["ttft"])


def _ledger(ledger: dict[str, Any]) -> str:
    places = f"{ledger['running'] + ledger['idle']} sessions have a place in the caches ({ledger['idle']} idle)"
    tokens = f"{ledger['taken_tokens']:,} of {ledger['capacity_tokens']:,} tokens"
    held = f"{ledger['held']} sessions are held"
    if line := ledger["line"]:
        held += f", the first for {line[0]['held_s']:.1f} s: {line[0]['because']}"
    return f"{places}, {tokens}; {held}"


def _pairs(pairs: dict[str, Any]) -> str:
    kinds = [f"{pairs[role]} {role}" for role in ("prefill", "decode", "both") if pairs[role]]
    return f"engines by role: {', '.join(kinds)}; pairs: {pairs['pairs']}; {pairs['told']}"


def _apart(workers: list[dict[str, Any]]) -> Iterator[Part]:
    """Say why engines with a role do not pair, each reason once."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for worker in workers:
        for reason in (worker.get("pairs") or {}).get("apart", ()):
            reasons.setdefault((reason["why"], reason["remedy"]), []).append(worker["worker_id"])
    for (why, remedy), names in reasons.items():
        yield f"{in_short(names)}: ", Toned("no pair", Tone.MIND), f": {why}"
        yield "  -> ", remedy


def _first_in_queue(first: dict[str, Any]) -> str:
    where = f"{'goes to' if first['has_room'] else 'waits for'} {first['worker_id']}"
    needs_s = first["to_compute_there_s"]  # 0 if the policy predicts no time
    needs = f", which needs {needs_s:.2f} s for it" if needs_s else ""
    waited = f"has waited {first['waited_s']:.2f} s"
    return f"first in the queue: {first['prompt_tokens']} tokens, {where}{needs}, {waited}: {first['because']}"


def _row(worker: dict[str, Any], *, wide: bool, more: tuple[str, ...]) -> tuple[object, ...]:
    load, truth, state = worker["load"], worker["truth"], worker["state"]
    tone = Tone.GOOD if state in WELL else Tone.MIND if worker["routable"] else Tone.BAD
    if worker["moved_to"]:
        state, tone = "moved", Tone.MIND
    elif state == "left":
        tone = Tone.FAINT
    filled = 100 * load["blocks"] / load["capacity_blocks"] if load["capacity_blocks"] else 0.0
    narrow = (
        worker["worker_id"],
        Toned(state, tone),
        f"{filled:.0f}%",
        load["in_flight"],
        load["prefill_tokens"] + load["foreign_prefill_tokens"],
        load["speed_tps"] or "-",
        "-" if (age_s := worker["heartbeat_age_s"]) is None else _age(age_s),  # None for a worker that left
        _age(truth["lag_s"]) if truth else "-",
        *(_places(worker.get("places")) if PLACES[0] in more else ()),
        *(_role(worker.get("pairs")) if PAIRS[0] in more else ()),
    )
    if not wide:
        return narrow
    decode = load["decode_tokens"] + load["foreign_decode_tokens"]
    wider = (decode, worker["url"] or "-", worker["version"] or "-", worker["proof"])
    return *narrow, *wider, load["slot"], load["blocks"], load["capacity_blocks"], *_truth(truth), _labels(worker)


def _places(told: dict[str, int] | None) -> tuple[str, str]:
    if told is None:
        return "-", "-"
    share = f"{100 * told['taken_tokens'] / told['capacity_tokens']:.0f}%" if told["capacity_tokens"] else "-"
    return f"{told['sessions']}, {told['idle']} idle" if told["idle"] else str(told["sessions"]), share


def _role(told: dict[str, Any] | None) -> tuple[str, str]:
    return (told["role"] or "-", f"{told['partners']} of {told['of']}") if told else ("-", "-")


def _labels(worker: dict[str, Any]) -> str:
    return ",".join(sorted(f"{name}={value}" for name, value in worker.get("labels", {}).items())) or "-"


def _not_well(worker: dict[str, Any]) -> list[Part]:
    """Say why a worker takes no requests, or fewer than it could, and the remedy; empty if the worker is well."""
    name, state, remedy = worker["worker_id"], worker["state"], worker["remedy"]
    if worker["routable"] and not remedy:
        return []
    if moved_to := worker["moved_to"]:
        return [(f"{name}: ", Toned(f"moved to {moved_to}", Tone.MIND))]
    if state == "left":
        return []
    suffix = ", but routable" if worker["routable"] else "" if state == "draining" else ", not routable"
    tone = Tone.MIND if worker["routable"] else Tone.BAD
    sentence = (f"{name}: ", Toned(f"{state}{suffix}", tone), f": {worker['why']}")
    return [sentence, ("  -> ", remedy)] if remedy else [sentence]


def _truth(truth: dict[str, Any] | None) -> tuple[object, ...]:
    if truth is None:
        return ("-",) * 4
    healed = f"{truth['healed']} of {truth['found']}" + (f", {truth['cause']}" if truth["cause"] else "")
    resyncs = " ".join(f"{cause} {count}" for cause, count in sorted(truth["resyncs"].items()))
    return truth["lag_batches"], _age(truth["digest_age_s"]), healed, resyncs or "-"


def _age(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"


def _ttft(ttft: dict[str, Any]) -> str:
    """Describe the times to first token of the streamed answers that this replica gave in the last minute."""
    if not ttft["requests"]:
        return "no stream in the last minute at this replica"
    spread = ", ".join(f"{name} {ttft[name.lower() + '_s']:.3f} s" for name in ("P50", "P90", "P99"))
    aim = f"; objective {ttft['objective_s']:g} s, in force {ttft['in_force_s']:.3f} s" if ttft["objective_s"] else ""
    return f"time to first token of {ttft['requests']:.0f} streams, last minute, this replica: {spread}{aim}"


def _index(index: dict[str, Any]) -> str:
    used, limit = (index[name] / 2**20 for name in ("memory_used_bytes", "memory_limit_bytes"))
    memory = f"{used:.0f} MiB" + (f" of {limit:.0f}" if limit else "")
    return f"index: {index['entries']} entries, {index['retired_slots']} retired slots; memory {memory}"
