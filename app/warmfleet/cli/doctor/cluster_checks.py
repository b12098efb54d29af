"""Checks the settings of a Redis Cluster's nodes by which the loss of one master stops only pools on this master."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warmfleet.cli.doctor.finding import Finding, fault, note, ok, skipped
from warmfleet.cli.terminal.output import in_short
from warmfleet.fleet.connection.redis_connections import RedisConnections
from warmfleet.fleet.connection.reply_errors import RefusedCall

if TYPE_CHECKING:
    from collections.abc import Iterable

    from warmfleet.protocol.redis_address import HostPort

COVERAGE, TIMEOUT = "cluster-require-full-coverage", "cluster-node-timeout"


async def coverage(url: str) -> list[Finding]:
    """Check that nodes serve their own slots even while a lost master's slots have no owner. url: redis+cluster://."""
    connections = RedisConnections(url)
    try:
        answers = await connections.of_every_node("CONFIG", "GET", "cluster-*")
    finally:
        await connections.aclose()
    return of_settings({place: _settings(answer) for place, answer in answers.items()})


def of_settings(nodes: dict[HostPort, dict[str, str] | Exception]) -> list[Finding]:
    """Return the findings about these nodes. nodes: the settings of each, or the error of reading them."""
    failed = {place: answer for place, answer in nodes.items() if isinstance(answer, Exception)}
    read = {place: answer for place, answer in nodes.items() if not isinstance(answer, Exception)}
    strict = [place for place, settings in read.items() if settings.get(COVERAGE) != "no"]
    if not read:
        why = next((error for error in failed.values() if isinstance(error, RefusedCall)), "no node answers")
        text = (
            f"{COVERAGE} cannot be read (CONFIG GET; {why}): name an admin's redis+cluster:// URL in"
            " WARMFLEET_ADMIN_REDIS_URL, or see for yourself that it is no on every node (app/docs/redis.md)"
        )
        return [skipped("coverage", text)]
    findings = []
    if strict:
        text = (
            f"{COVERAGE} is yes on {_named(strict)}: when any master is lost, these refuse all calls until it is"
            " replaced, so the pools of all masters fail"
        )
        remedy = f"on every node: CONFIG SET {COVERAGE} no, and the same line in its redis.conf"
        findings.append(fault("coverage", text, remedy))
    if failed:
        text = f"{COVERAGE} could not be read on {_named(failed)} ({next(iter(failed.values()))})"
        findings.append(note("coverage", text, f"see that these nodes run, and that {COVERAGE} is no there"))
    if findings:
        return findings
    slowest = max(int(settings.get(TIMEOUT, 0)) for settings in read.values()) / 1_000
    text = f"a lost master touches its own pools only; no replica takes its place within {slowest:g} s ({TIMEOUT})"
    return [ok("coverage", text)]


def _settings(answer: Any) -> dict[str, str] | Exception:
    """Return the settings in an answer to CONFIG GET: redis-py's mapping, or the raw list of names and values."""
    if isinstance(answer, Exception):
        return answer
    pairs = answer.items() if isinstance(answer, dict) else zip(answer[::2], answer[1::2], strict=False)
    return {_text(name): _text(value) for name, value in pairs}


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _named(places: Iterable[HostPort]) -> str:
    return in_short([f"{host}:{port}" for host, port in places])
