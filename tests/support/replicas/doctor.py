"""`warmfleet doctor` in the test's own process, and a server with the users of `warmfleet acl`."""

from __future__ import annotations

import io
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import redis
from tests.support.redis.servers import server

from warmfleet.cli.acl import lines, rules_of
from warmfleet.cli.doctor.command import Plan, examine, secrets_of
from warmfleet.cli.doctor.finding import Finding, Report, State
from warmfleet.cli.parser import build_parser
from warmfleet.protocol.redis_address import with_ca
from warmfleet.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class DoctorRun:
    """The findings of one run of the doctor, and the text that it printed."""

    def __init__(self, report: Report, printed: str) -> None:
        self.report = report
        self.printed = printed

    def of(self, check: str, state: State) -> list[Finding]:
        return [finding for _, finding in self.report.found if (finding.check, finding.state) == (check, state)]

    def names(self, check: str, detail: str, remedy: str, state: State = State.FAULT) -> None:
        """Assert that a finding of this check names the fault and the remedy, and that both are printed."""
        found = [finding for finding in self.of(check, state) if detail in finding.detail and remedy in finding.remedy]
        assert found, f"no {state} of {check!r} with {detail!r} and {remedy!r} in:\n{self.printed}"
        assert detail in self.printed
        assert remedy in self.printed
        assert State.BROKEN not in {finding.state for _, finding in self.report.found}, self.printed
        if state is State.FAULT:
            assert self.report.status == 1


async def doctor(url: str, model: str, *engines: str, **more: Any) -> DoctorRun:
    """Run the doctor. more: fields of Plan and of Settings."""
    plan_fields = {name: more.pop(name) for name in ("admin_url", "routers", "url_from", "wall") if name in more}
    chosen: dict[str, Any] = {"models": (model,), "approved_templates": ("*",), "decide_timeout_s": 2.0}
    settings = Settings(redis_url=url, **chosen | more)
    plan = Plan(settings, with_ca(url, settings.redis_ca), engines=engines, **plan_fields)
    out = io.StringIO()
    report = Report(out=out, secrets=secrets_of(plan))
    await examine(plan, report)
    return DoctorRun(report, out.getvalue())


@contextmanager
def guarded(model: str, binary: str, *without: str) -> Iterator[Callable[[str], str]]:
    """A server with the users of ``warmfleet acl``, some rules taken away: the URL for each user's name."""
    rules = dict(rules_of(build_parser().parse_args(["acl", model, "--worker", "eng"])))
    text = "\n".join(lines(rules, {name: f"secret-{name}" for name in rules}, commands=False))
    for rule in without:
        assert rule in text
        text = text.replace(rule, "")
    with server(binary) as url, redis.Redis.from_url(url) as client:
        for line in text.splitlines()[1:]:
            client.execute_command("ACL", "SETUSER", *_words(line.removeprefix("user ")))
        client.execute_command("ACL", "SETUSER", "default", "off")
        yield lambda user: url.replace("unix://", f"unix://{user}:secret-{user}@")


def _words(line: str) -> list[str]:
    """The words of an ACL line; a selector in brackets is one word."""
    words: list[str] = []
    for word in line.split():
        if words and words[-1].startswith("(") and not words[-1].endswith(")"):
            words[-1] += " " + word
        else:
            words.append(word)
    return words
