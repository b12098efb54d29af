"""``warmfleet explain``: where a request would go now, and what every worker would cost."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmfleet.cli.client import ask
from warmfleet.cli.command_error import CommandError
from warmfleet.cli.terminal.output import Part, Table, Tone, Toned, print_answer

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

HEADER = (
    "",
    "WORKER",
    "CACHED",
    "SOON",
    "TO COMPUTE",
    "PREFILL AHEAD",
    "DECODING",
    "IN FLIGHT",
    "COST",
    "COMPARED",
)
LEGEND = """\
CACHED, SOON, TO COMPUTE: tokens of this prompt that are in the engine's cache (SOON: of these, those that a
running request has yet to compute), and the rest. PREFILL AHEAD, DECODING: tokens of requests that it has.
COST: the predicted time to the first token, with what the choice costs others; COMPARED: with the chosen engine's.
"""
#: Parts of the cost, which add up to it: name in an answer of /explain -> column.
TERMS = {
    "wait_s": "WAIT",
    "compute_s": "COMPUTE",
    "again_s": "AGAIN",
    "leave_s": "LEAVE",
    "evict_s": "EVICT",
    "busy_s": "BUSY",
    "label_s": "LABELS",
    "decode_s": "DECODE",
    "load_s": "LOAD",
}
#: Parts that a cost has besides, if the request may be split over two engines.
TERMS_OF_PAIRS = {"room_s": "ROOM", "partner_s": "PARTNER"}
#: What a way's cost has beyond that of its first engine: name in an answer of /explain -> column.
WAYS = {"transfer_s": "TRANSFER", "room_s": "ROOM", "answer_s": "ANSWER", "queue_s": "QUEUE"}
LAST_READING = """\
Redis does not answer. These are the workers as this replica read them {age_s:.0f} s ago; PREFILL AHEAD, DECODING:
tokens of requests that they had then. Redis alone knows what they hold of the prompt, and what it would cost. Until
Redis answers, routers choose by a hash of the prompt's beginning: equal beginnings go to the same engine.
"""
TERMS_LEGEND = """\
These add up to COST, in ms. WAIT: what is ahead; COMPUTE: the rest of the prompt; AGAIN: of that, what another
engine is making already; LEAVE: what another engine alone holds, as a session's past; EVICT: what has to make room in
the cache; BUSY: how busy the engine was lately, for the whole prompt, as sessions come back;
LABELS: for preferred labels that it lacks (WARMFLEET_PREFER); DECODE: answers under way that become
slower (an engine whose other costs are higher by the whole prompt counts like the one where they lose most);
LOAD: what only a tier of the engine holds.
"""
PAIRS_LEGEND = """\
ROOM: until the engine's cache has room; PARTNER: all that the engine costs which takes the prompt over.
"""
WAYS_LEGEND = """\
The request may be split: WORKER computes the prompt, PARTNER takes the blocks and makes the answer. These are the
cheapest engine alone and the cheapest pair; the lower COST wins. Of a pair's, in ms: TRANSFER: of the blocks; ROOM:
until PARTNER has room (the longer of both counts); ANSWER: its steps, and answers there that become slower; QUEUE: what
is left of its own prefill when the blocks have come. The rest is WORKER's.
"""
PRICES = """\
The lower price wins. It is the COST of the pool's worker, with a charge for tokens that only the other pool holds. If
the request would wait for its turn in one of them, it is half of the time until then and the time to compute the rest.
"""
IN_LINE = """\
COST leaves out the requests that wait. The price is for the comparison of pools: the time to compute the rest of the
prompt at that worker, and half of the time until its turn there, with the requests that are before it in line. The time
by which that worker is late counts whole.
"""


def run(options: argparse.Namespace) -> int:
    """Print every worker and the choice; returns 1 if no worker can be chosen. Raises CommandError."""
    answer = ask("POST", options.url, "/explain", body_of(options))
    print_answer(answer, lambda: parts_of(answer), as_json=options.json)
    return 0 if answer["candidates"] and (answer["chosen"] or not answer["fresh"]) else 1


def body_of(options: argparse.Namespace) -> bytes:
    """Make the request body that the options describe. Raises CommandError unless they describe exactly one."""
    sources = [name for name in ("file", "message", "prompt") if getattr(options, name) is not None]
    if len(sources) != 1:
        raise CommandError("give one of: FILE (- for standard input), --message TEXT, --prompt TEXT")
    if options.file is not None:
        return _read(options.file)
    body: dict[str, Any] = {"model": options.model or _first_model(options.url)}
    if options.message is not None:
        body["messages"] = [{"role": "user", "content": options.message}]
    else:
        body["prompt"] = options.prompt
    return json.dumps(body).encode()


def parts_of(answer: dict[str, Any]) -> list[Part]:
    """Make the table of workers, the cheapest first, with an arrow at the choice, and a sentence about it."""
    prompt = answer["prompt_tokens"]
    known = f"prompt identified: {answer['identity']}" + (f" ({answer['reason']})" if answer["reason"] else "")
    head = Toned(answer["model"], Tone.HEAD)
    about = f"  policy {answer['policy']}: {prompt} tokens, {answer['blocks']} full blocks, {known}"
    if not answer["fresh"]:
        return [(head, about), *_by_last_reading(answer)]
    rows = sorted(answer["candidates"], key=lambda row: float(row["cost_s"]))
    if not rows:
        return [(head, about), "no worker takes requests: `warmfleet workers` says why"]
    chosen_s = next((float(row["cost_s"]) for row in rows if row["chosen"]), float(rows[0]["cost_s"]))
    parts: list[Part] = [(head, about), Table(HEADER, [_row(row, prompt, chosen_s) for row in rows]), LEGEND]
    parts += [f"{row['worker_id']} holds {row['where_held']}." for row in rows if row.get("where_held")]
    if answer["policy"] == "cost":
        parts += _parts_of_costs(answer, rows)
    if answer["chosen"]:
        prompt_at = f", its prompt first to {answer['prefill']}" if answer.get("prefill") else ""
        would = f"would go to {answer['chosen']}{prompt_at} ({answer['because']})"
        if (held := answer.get("held")) is not None:
            line = f"{held['ahead']} sessions before it, about {held['predicted_s']:.0f} s"
            fate = "refused: the caches have no" if held["refused"] else "held until the caches have"
            parts.append(f"The request would be {fate} room for its session ({line}): {held['because']}.")
            parts.append(f"By COST alone it {would}. Nothing was booked.")
        elif answer["waits"]:
            parts += _waits(answer)
            parts.append(f"By COST alone it {would}. Nothing was booked.")
        else:
            parts.append(f"It {would}. Nothing was booked.")
    for pool in answer["pools"]:
        held, price = f"{pool['matched_tokens']} tokens held", f"priced at {1_000 * pool['price_s']:.1f} ms"
        waits = " (it would wait for its turn)" if pool["waits"] else ""
        parts.append(f"Home pool {pool['pool']}: {pool['worker_id']}, {held}, {price}{waits}")
    if len(answer["pools"]) > 1:
        parts.append(PRICES)
    parts += [f"Home pool {pool['pool']} is passed over: {pool['why']}" for pool in answer["passed_over"]]
    if answer["moved"]:
        parts.append(f"It moves: {answer['moved']}.")
    if not answer["blocks"] and answer["identity"] == "exact":
        parts.append("It is shorter than one block of an engine's cache, and only full blocks are found there again.")
    return parts


def _by_last_reading(answer: dict[str, Any]) -> list[Part]:
    """Make the table of workers as they were last read, and tell where the request would go without Redis."""
    header = ("", "WORKER", "PREFILL AHEAD", "DECODING", "IN FLIGHT")
    rows = [
        (
            Toned("->", Tone.GOOD) if row["chosen"] else "",
            row["worker_id"],
            row["prefill_tokens"] + row["foreign_prefill_tokens"],
            row["decode_tokens"],
            row["in_flight"],
        )
        for row in answer["candidates"]
    ]
    would = f"It would go to {answer['chosen']}." if answer["chosen"] else "It would go to any of them."
    legend = LAST_READING.format(age_s=answer["view_age_s"])
    return [Table(header, rows), legend, f"{would} Nothing was booked."]


def _waits(answer: dict[str, Any]) -> list[Part]:
    """Write sentences about the queue in which the request would wait; its length only if Redis told it."""
    if not answer["waits_for"]:
        return ["The queue is full: it would be refused."]
    turn = f"It would wait for its turn at {answer['waits_for']}, at a price of {answer['turn_s']:.2f} s."
    if (queue := answer["queue"]) is None:
        return [turn]
    count = queue["waiting"]
    line = f"{count} request{'s wait' if count > 1 else ' waits'}, which the engines need {queue['work_s']:.2f} s for."
    return [f"{turn} {line if count else 'No other request waits.'}", IN_LINE]


def _row(candidate: dict[str, Any], prompt_tokens: int, chosen_s: float) -> tuple[object, ...]:
    """Make a worker's row of the table. chosen_s: the cost of the worker that is chosen."""
    matched, cost = candidate["matched_tokens"], float(candidate["cost_s"])
    cells = (
        candidate["worker_id"],
        matched,
        candidate["speculative_tokens"] or "-",
        max(0, prompt_tokens - matched),
        candidate["prefill_tokens"] + candidate["foreign_prefill_tokens"],
        candidate["decode_tokens"],
        candidate["in_flight"],
        f"{1_000 * cost:.1f} ms",
    )
    if candidate["chosen"]:
        return Toned("->", Tone.GOOD), Toned(cells[0], Tone.GOOD), *cells[1:], Toned("chosen", Tone.GOOD)
    more_ms = round(1_000 * (cost - chosen_s), 1) + 0.0  # + 0.0 turns -0.0 into 0.0
    return "", *cells, f"{more_ms:+.1f} ms"


def _parts_of_costs(answer: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[Part]:
    """Make the table of what the costs consist of, and one of the ways to serve a request that may be split."""
    ways = answer.get("ways") or []
    terms = {**TERMS, **TERMS_OF_PAIRS} if ways else TERMS
    parts: list[Part] = [Table(("", "WORKER", *terms.values(), "COST"), [_terms(row, terms) for row in rows])]
    parts.append(TERMS_LEGEND + PAIRS_LEGEND if ways else TERMS_LEGEND)
    if ways:
        parts += [Table(("WORKER", "PARTNER", *WAYS.values(), "COST"), list(map(_way, ways))), WAYS_LEGEND]
    return parts


def _way(way: dict[str, Any]) -> tuple[object, ...]:
    of_pair = [f"{1_000 * way[name]:.1f}" if way["partner_id"] else "-" for name in WAYS]
    return way["worker_id"], way["partner_id"] or "-", *of_pair, f"{1_000 * way['cost_s']:.1f}"


def _terms(candidate: dict[str, Any], terms: Iterable[str]) -> tuple[object, ...]:
    cells = [
        f"{1_000 * seconds:.1f}"
        for seconds in (*(candidate["terms"].get(name, 0.0) for name in terms), candidate["cost_s"])
    ]
    if candidate["chosen"]:
        return Toned("->", Tone.GOOD), Toned(candidate["worker_id"], Tone.GOOD), *cells
    return "", candidate["worker_id"], *cells


def _read(name: str) -> bytes:
    if name == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise CommandError(f"{name} cannot be read: {error.strerror}") from error


def _first_model(url: str) -> str:
    """Find a name for the request from /workers: the operators' port does not serve /v1/models."""
    first = ask("GET", url, "/workers")["models"][0]
    served = [name for worker in first["workers"] if worker["routable"] for name in worker["models"]]
    return str(served[0] if served else first["model"].partition("#")[0])
