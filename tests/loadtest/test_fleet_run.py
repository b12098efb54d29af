"""The load test's verdict on made-up runs, its description and its report."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest

from warmfleet_loadtest.users.fleet_run import FleetRun, Mark, describe, verdict, warnings
from warmfleet_loadtest.users.html_report import save_report
from warmfleet_loadtest.users.plan import Plan
from warmfleet_loadtest.users.streaming import Answer
from warmfleet_loadtest.users.tally import Tally, Timing

if TYPE_CHECKING:
    from pathlib import Path

BEGAN = 1_000.0
ROLES = {"prefill-1": "prefill", "decode-1": "decode"}
MOVED = {"transfers": 2, "bytes": 3e8, "seconds": 0.05, "failed_transfers": 0, "recomputed": 1}
PLAN = Plan({"chat": 1.0}, "poisson", 1.0, 100.0, "1", 1, BEGAN)
KILL = Mark(30.0, "kill", "replica-1")
STOP = Mark(60.0, "stop", "engine-1")
ADD = Mark(50.0, "add", "replica-4")


def run(tally: Tally | None = None, **more: Any) -> FleetRun:
    """A run of 100 s that passes."""
    summary = {"plan": asdict(PLAN), "tally": (tally or counted()).as_json(), "errors": more.pop("errors", [])}
    fields = {"marks": (KILL, ADD, STOP), "sessions": {"replica-1": 4, "replica-4": 2}, "cpu_s": {"client": 5.0}}
    return FleetRun("warmfleet", 100.0, summary, **fields | more)


def counted(reservation: str = "booked", requests: int = 100, split: int = 0) -> Tally:
    tally = Tally()
    for second in range(requests):
        headers = {"x-warmfleet-worker": "decode-1.0", "x-warmfleet-reservation": reservation}
        headers |= {"x-warmfleet-prefill-worker": "prefill-1.0"} if second < split else {}
        tally.sent("chat", BEGAN + second)
        answer = Answer(1.0, "text", [0.01], 100, 50, 3, headers)
        tally.answered("chat", answer, Timing(0.0, 0.1, 0.2), BEGAN + second)
    return tally


def broken(*seconds: float) -> Tally:
    tally = counted()
    for at in seconds:
        tally.broke("cut", BEGAN + at)
    return tally


def failed() -> Tally:
    tally = counted()
    tally.failed("chat", BEGAN + 1)
    return tally


def test_a_run_whose_breaks_all_follow_what_was_taken_away_passes() -> None:
    assert verdict(run(broken(30.1, 32.9, 60.5, 65.0))) == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (run(failed(), errors=["1 x chat: Refused"]), "1 failures"),
        (run(failed(), errors=["1 x chat: Refused"]), "request failed: 1 x chat"),
        (run(Tally()), "no requests"),
        (run(broken(29.9)), "while nothing was taken away (second 29.9)"),
        (run(broken(33.1)), "while nothing was taken away"),
        (run(broken(51.0)), "while nothing was taken away"),
        (run(counted("fallback", 30)), "30 of 30 requests"),
        (run(sessions={"replica-1": 4, "replica-4": 0}), "the added replica-4 got no traffic"),
        (run(locust_status=1), "Locust ended with 1"),
        (run(roles=ROLES, transfers=MOVED | {"wrong_answers": 2}), "2 answers from wrong blocks"),
        (run(roles=ROLES, transfers=MOVED | {"violations": 1}), "1 transfers asked for wrongly"),
    ],
)
def test_what_fails_a_run(bad: FleetRun, message: str) -> None:
    assert any(message in problem for problem in verdict(bad))


def test_few_fallbacks_are_told_but_fail_nothing() -> None:
    tally = counted()
    fallback = counted("fallback", 5)
    tally.add(fallback.as_json())
    found = run(tally)

    assert verdict(found) == []
    assert any("5 answers without a decision (fallback), in second 0, 1" in warning for warning in warnings(found))


def test_whatever_was_the_limit_is_told() -> None:
    busy = counted()
    busy.watched("locust", 90.0, 0.0, BEGAN)

    late = counted()
    late.answered("chat", Answer(1.0, "", [], 1, 0), Timing(0.05, 0.1, 0.2), BEGAN)
    late.answered("chat", Answer(1.0, "", [], 1, 0), Timing(0.05, 0.1, 0.2), BEGAN)

    assert warnings(run()) == []
    assert any("requests were sent up to 50 ms late" in warning for warning in warnings(run(late)))
    assert any("the load generator was the limit" in warning for warning in warnings(run(busy)))
    assert any(
        "haproxy was the limit: it used 90% of a core" in warning for warning in warnings(run(cpu_s={"haproxy": 90.0}))
    )
    assert any("the machine was the limit" in warning for warning in warnings(run(cpu_s={"engines": 1e6})))


def test_the_description_hides_nothing() -> None:
    text = describe(run(broken(30.1)))

    assert "0 before an answer, 1 in mid-stream" in text
    assert "50.0%" in text
    assert "replica-1 4, replica-4 2" in text
    assert "replica-1 killed at 30 s, replica-4 added at 50 s, engine-1 stopped at 60 s" in text


def test_both_steps_of_split_requests_are_told(tmp_path: Path) -> None:
    found = run(counted(split=20), roles=ROLES, transfers=MOVED)

    page = save_report(tmp_path, [found])

    told = [
        "20 of 100 requests (20.0%), TTFT p50 100 ms, p99 100 ms",
        "prefill-1 20 (first steps of split requests)",
        "decode-1 20 (second steps)",
        "prefill-1 0, decode-1 80 (requests not split), TTFT p50 100 ms",
        "2, 150 MB and 25 ms each; 0 failed, 1 prompts computed again",
    ]
    assert verdict(found) == []
    for text in told:
        assert text in describe(found)
        assert text in page.read_text()
    saved = json.loads((tmp_path / "figures.json").read_text())["warmfleet"]["split"]
    assert (saved["split"], saved["engines"]["prefill-1"]["prefill"], saved["transfers"]) == (20, 20, MOVED)


def test_a_fleet_with_roles_says_that_nothing_was_split() -> None:
    text = describe(run(roles=ROLES, transfers={"transfers": 0}))

    assert "0 of 100 requests (0.0%)" in text
    assert "transfers none" in text


def test_figures_leave_the_warm_up_out_but_count_its_failures() -> None:
    tally = Tally()
    for second, cached in (5, 0), (50, 80):
        tally.sent("chat", BEGAN + second)
        tally.answered("chat", Answer(1.0, "", [], 100, cached), Timing(0.0, 0.1, 0.2), BEGAN + second)
    tally.failed("chat", BEGAN + 5)

    found = run(tally).figures["chat"]

    assert (found["hit_ratio"], found["sent"], found["failed"]) == (0.8, 2, 1)


def test_the_report_has_figures_and_plots_with_names_units_and_marks(tmp_path: Path) -> None:
    baseline = replace(run(), fleet="session-affinity", marks=(STOP,))

    page = save_report(tmp_path, [run(), baseline])

    text = page.read_text()
    assert text.count("<svg") == text.count("</svg>") == len(list(tmp_path.glob("*.svg"))) == 5
    assert "<h2>warmfleet</h2>" in text
    assert "<h2>session-affinity</h2>" in text
    plot = (tmp_path / "hit_ratio.svg").read_text()  # matplotlib writes each text as a comment above its outline
    for text in "warmfleet", "session-affinity", "replica-1 killed", "engine-1 stopped", "share of prompt tokens":
        assert f"<!-- {text} -->" in plot
    assert "<!-- seconds from the first arrival -->" in plot
    assert "<!-- warmfleet, p90 -->" in (tmp_path / "ttft.svg").read_text()
    assert (tmp_path / "figures.json").stat().st_size > 500
    for word in "split", "prefill", "transfers":  # the engines of these fleets have no roles
        assert word not in page.read_text() + describe(run()) + (tmp_path / "figures.json").read_text()
