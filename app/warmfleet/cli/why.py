"""``warmfleet why``: why a request was slow, from the records of the replica that served it."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from warmfleet.cli.client import ask
from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local.running_stack import listens, replicas_to_ask
from warmfleet.cli.terminal.output import Part, Table, Tone, Toned, print_answer
from warmfleet.tracing.last_requests import KEPT

if TYPE_CHECKING:
    import argparse

HEADER = ("TIME", "REQUEST", "WAITED", "WORKER", "STATUS", "WHY")
MAX_WHY = 90  # most characters of the sentences in a table row; a request shown alone has them whole
#: The facts printed below the sentences: name in the answer -> label.
FACTS = {
    "model": "model",
    "identity": "identified",
    "identify_ms": "to identify",
    "held_ms": "held for its session",
    "held": "session",
    "ahead": "sessions before it",
    "queue_ms": "in the queue",
    "decide_ms": "to decide",
    "predicted_ms": "predicted, in the engine",
    "engine_ms": "real, in the engine",
    "first_ms": "first byte after",
    "ms": "whole",
    "prompt_tokens": "prompt tokens",
    "matched_tokens": "predicted in cache",
    "where_held": "of these",
    "cached_tokens": "found in cache",
    "tokens": "tokens of the answer",
    "chunks": "chunks",
    "gap_ms": "longest silence within",
    "policy": "policy",
    "why": "rule",
}
ELSEWHERE = f"""\
Each replica keeps its own requests: the last {KEPT}, and of each minute of the last hour the slowest. Those that
`warmfleet replicas` lists were asked as far as they can be reached from here. Name others with --url, by the port for
operators (WARMFLEET_ADMIN_PORT), more than once if need be. On Kubernetes, where pods of routers do not reach each
other, run it in each of them:
  for pod in $(kubectl -n warmfleet get pods -l app.kubernetes.io/name=router -o name); do
    kubectl -n warmfleet exec $pod -- warmfleet why ID; done
"""


def run(options: argparse.Namespace) -> int:
    """Print why the request was slow, or a table of requests; return 1 if the asked replicas have no such request."""
    query = {"id": options.id} if options.id else {"order": options.order, "count": options.count}
    path = f"/why?{urlencode(query)}"
    answers = _answers(replicas_to_ask(options.url), path, named=bool(options.url))
    if not any(answer["requests"] for answer in answers.values()) or not (options.id or options.url):
        _ask_the_others(answers, path)

    def parts() -> list[Part]:
        return about_request(options.id, answers) if options.id else table(answers, options.order, options.count)

    print_answer(answers, parts, as_json=options.json)
    return 0 if any(answer["requests"] for answer in answers.values()) else 1


def _answers(urls: list[str], path: str, *, named: bool) -> dict[str, Any]:
    """Ask each replica; return URL -> answer. named: the user named the replicas, so all must answer; else one must.

    Raises CommandError.
    """
    answers: dict[str, Any] = {}
    for url in urls:
        try:
            answers[url] = ask("GET", url, path)
        except CommandError:
            if named or (url == urls[-1] and not answers):
                raise
    return answers


def _ask_the_others(answers: dict[str, Any], path: str) -> None:
    """Add the answers of the fleet's other replicas that can be reached from this machine."""
    with suppress(CommandError):
        listed = ask("GET", next(iter(answers)), "/replicas")["replicas"]
        names = {answer["replica"] for answer in answers.values()}
        for url in [row["url"] for row in listed if row["url"] and row["replica"] not in names]:
            with suppress(CommandError):
                if listens(url):
                    answers[url] = ask("GET", url, path)


def about_request(request_id: str, answers: dict[str, Any]) -> list[Part]:
    """Return the text about the requests with this id, the newest first."""
    found = [(answer["replica"], request) for answer in answers.values() for request in answer["requests"]]
    if not found:
        kept = [
            f"{answer['replica']} at {url} keeps {answer['kept']} requests"
            + ("" if answer["since"] is None else f", back to {_clock(answer['since'])}")
            for url, answer in answers.items()
        ]
        return [f"No request with the id {request_id} is known:", *kept, ELSEWHERE]
    parts: list[Part] = []
    for replica, request in sorted(found, key=lambda pair: -float(pair[1]["at"])):
        head = f"  {request['method']} {request['path']} at {_clock(request['at'])}, by {replica}"
        parts += [(Toned(request["request_id"], Tone.HEAD), head), request["because"]]
        if request["remedy"]:
            parts.append(f"-> {request['remedy']}")
        known = [(name, words) for name, words in FACTS.items() if request.get(name) not in (None, "")]
        parts.append(Table(("FACT", ""), [(words, _fact(name, request[name])) for name, words in known]))
        parts.append(Table(("TRY", "WORKER", "QUEUE", "IN THE ENGINE", "OUTCOME", "RESERVATION"), _tries(request)))
    return parts


def _tries(request: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (
            number,
            row["worker"] or "none",
            _fact("queue_ms", row["queue_ms"]),
            _fact("engine_ms", row["engine_ms"]),
            row["error"] or row["outcome"] or "under way",
            row["reservation"],
        )
        for number, row in enumerate(request["attempts"], 1)
    ]


def table(answers: dict[str, Any], order: str, count: int) -> list[Part]:
    """Make the table of the requests of all replicas that answered, sorted by ``order``."""
    requests = [request for answer in answers.values() for request in answer["requests"]]
    if not requests:
        return [f"No {'request has failed' if order == 'failed' else 'request is known'}: {_replicas(answers)}."]
    requests.sort(key=_waited_ms if order == "slowest" else lambda request: float(request["at"]), reverse=True)
    rows = [_row(request) for request in requests[:count]]
    return [Table(HEADER, rows), f"`warmfleet why REQUEST` tells more of a request. Asked: {_replicas(answers)}."]


def _row(request: dict[str, Any]) -> tuple[object, ...]:
    why = request["because"].partition(": ")[2] or request["because"]  # without the time, which is in another column
    return (
        _clock(request["at"]),
        request["request_id"],
        _fact("ms", _waited_ms(request)),
        request.get("worker") or "none",
        "under way" if request["running"] else request["status"] or "none",
        why if len(why) <= MAX_WHY else why[: MAX_WHY - 3] + "...",
    )


def _waited_ms(request: dict[str, Any]) -> float:
    """Return the longest time for which the client waited: for the first byte, or within the answer."""
    first_ms = request["ms"] if request.get("first_ms") is None else request["first_ms"]
    return max(float(first_ms), float(request.get("gap_ms") or 0))


def _replicas(answers: dict[str, Any]) -> str:
    return ", ".join(f"{answer['replica']} at {url}" for url, answer in answers.items())


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _fact(name: str, value: object) -> str:
    if value is None:
        return "-"
    if name == "ms" or name.endswith("_ms"):
        return f"{float(str(value)):,.1f} ms"
    return f"{value:,}" if isinstance(value, int) else str(value)
