"""``warmfleet explain``: where a request would go now, and what every worker would cost."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmfleet.cli.client import ask, table
from warmfleet.cli.command_error import CommandError

if TYPE_CHECKING:
    import argparse

HEADER = ("", "WORKER", "MATCHED", "BLOCKS", "SPECULATIVE", "TO COMPUTE", "PREFILL", "DECODE", "IN FLIGHT", "COST")


def run(options: argparse.Namespace) -> int:
    """Print every worker and the choice; returns 1 if no worker can be chosen."""
    answer = ask("POST", options.url, "/explain", body_of(options))
    print(json.dumps(answer, indent=2) if options.json else render(answer))
    return 0 if answer["chosen"] else 1


def body_of(options: argparse.Namespace) -> bytes:
    """The request body that the options describe. Raises CommandError unless there is exactly one."""
    given = [name for name in ("file", "message", "prompt") if getattr(options, name) is not None]
    if len(given) != 1:
        raise CommandError("give one of: FILE (- for standard input), --message TEXT, --prompt TEXT")
    if options.file is not None:
        return _read(options.file)
    body: dict[str, Any] = {"model": options.model or _first_model(options.url)}
    if options.message is not None:
        body["messages"] = [{"role": "user", "content": options.message}]
    else:
        body["prompt"] = options.prompt
    return json.dumps(body).encode()


def render(answer: dict[str, Any]) -> str:
    """The table of workers, the cheapest first.

    MATCHED, TO COMPUTE: tokens of this prompt. PREFILL, DECODE: tokens that open requests have booked. COST: predicted
    seconds to the first token.
    """
    prompt = answer["prompt_tokens"]
    known = f"prompt identified: {answer['identity']}" + (f" ({answer['reason']})" if answer["reason"] else "")
    lines = [f"{answer['model']}, policy {answer['policy']}: {prompt} tokens, {answer['blocks']} full blocks, {known}"]
    rows = [_row(candidate, prompt) for candidate in sorted(answer["candidates"], key=lambda row: float(row["cost_s"]))]
    lines.append(table(HEADER, rows) if rows else "no worker takes requests")
    if answer["chosen"]:
        turn = "All workers are busy: it would wait for its turn first. As things stand it" if answer["waits"] else "It"
        lines.append(f"{turn} would go to {answer['chosen']} ({answer['why']}). Nothing was booked.")
    return "\n".join(lines)


def _row(candidate: dict[str, Any], prompt_tokens: int) -> tuple[object, ...]:
    matched = candidate["matched_tokens"]
    return (
        "->" if candidate["chosen"] else "",
        candidate["worker_id"],
        matched,
        candidate["matched_blocks"],
        candidate["speculative_tokens"],
        max(0, prompt_tokens - matched),
        candidate["prefill_tokens"] + candidate["foreign_prefill_tokens"],
        candidate["decode_tokens"],
        candidate["in_flight"],
        f"{float(candidate['cost_s']):.4f} s",
    )


def _read(name: str) -> bytes:
    if name == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise CommandError(f"{name} cannot be read: {error.strerror}") from error


def _first_model(url: str) -> str:
    models = ask("GET", url, "/v1/models")["data"]
    if not models:
        raise CommandError(f"{url} serves no model")
    return str(models[0]["id"])
