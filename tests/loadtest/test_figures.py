"""The figures that the trace bench makes of replies and samples."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from warmfleet_loadtest.measuring.client import Reply
from warmfleet_loadtest.measuring.figures import due_ttft, figures, half_width, health, markdown, over_mean, over_seeds
from warmfleet_loadtest.measuring.sampling import Sample, sampled
from warmfleet_loadtest.replay import Balance, Target
from warmfleet_loadtest.stacks.processes import StackError

ZERO = Sample(0.0, (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (7.0, 0.0))
END = Sample(10.0, (0.0, 0.0), (500.0, 300.0), (100.0, 200.0), (4.0, 2.0), (10.0, 1.0))
GOOD = Reply(0.4, 1.0, prompt_tokens=100, cached_tokens=40, late_s=0.1, reservation="booked")
WATCH = {"cpu_share": 0.1, "lag_p99_ms": 1.0, "lag_max_ms": 2.0}


def test_ttft_counts_from_when_a_request_was_due_in_trace_seconds() -> None:
    late = replace(GOOD, late_s=1.1)
    assert due_ttft([late, GOOD, replace(GOOD, error="boom")], 6.0) == pytest.approx([3.0, 9.0])


def test_figures_of_a_run() -> None:
    bad = Reply(0.0, 0.1, error="boom")
    made = figures([bad, *[GOOD] * 8, replace(GOOD, reservation="fallback")], [ZERO, END], 6.0, 0.1)
    assert (made["mean_ttft"], made["p99_ttft"]) == (pytest.approx(3.0), pytest.approx(3.0))
    assert (made["requests"], made["failed"], made["error_examples"], made["undecided"]) == (9, 1, ["boom"], 1)
    assert made["hit_ratio"] == 0.4
    assert made["computed_tokens"] == 500
    assert made["imbalance"] == pytest.approx(400 / 250)
    assert made["evictions_over_mean"] == pytest.approx(3 / 2)
    assert made["busy"] == pytest.approx(0.3)
    broken = figures([bad, replace(bad, ttft_s=0.2)], [ZERO, ZERO, END], 6.0, 0.0)
    assert (broken["mean_ttft"], broken["failed"], broken["cut"]) == (0.0, 2, 1)


@pytest.mark.parametrize(
    ("reply", "share", "bottleneck"), [(replace(GOOD, late_s=0.001), 0.1, False), (GOOD, 0.1, True), (GOOD, 0.9, True)]
)
def test_a_late_or_busy_client_is_named(reply: Reply, share: float, bottleneck: bool) -> None:
    made = health([reply], {**WATCH, "cpu_share": share}, 6.0, {"client": 1.0, "store": 2.0}, 10.0)
    assert made["client_was_the_bottleneck"] is bottleneck
    assert made["cores_used"] == 0.3
    assert made["client"]["late_p99"] == pytest.approx(6.0 * reply.late_s)


def test_seeds_give_means_and_intervals() -> None:
    runs = [{"mean_ttft": value, "failed": 1, "requests": 9, "undecided": 0} for value in (1.0, 2.0, 3.0)]
    made = over_seeds(runs)
    assert (made["mean_ttft"], made["failed"], made["requests"]) == (2.0, 3, 27)
    assert made["ci95"]["mean_ttft"] == pytest.approx(4.303 / 3**0.5, abs=1e-4)  # Student's t for two degrees
    assert "ci95" not in over_seeds(runs[:1])
    assert half_width([1.0] * 30) == 0.0
    for count, t in ((11, 2.228), (31, 2.042), (121, 1.980)):  # of 10, 30 and 120 degrees
        spread = [float(number % 2) for number in range(count)]
        assert half_width(spread) == pytest.approx(t * statistics.stdev(spread) / count**0.5, rel=0.006)


def test_the_most_over_the_mean() -> None:
    assert over_mean([1, 2, 3]) == 1.5
    assert (over_mean([0, 0]), over_mean([], nothing=1.0)) == (0.0, 1.0)


def test_a_table_in_markdown() -> None:
    assert markdown(("", "a"), [("x", 1), ("y", 2.5)]) == "|  | a |\n|---|---|\n| x | 1 |\n| y | 2.5 |"


async def test_an_engine_that_does_not_answer_cannot_be_sampled() -> None:
    with pytest.raises(StackError, match=r"does not answer with its counters: ClientConnectorError"):
        async with sampled(["http://127.0.0.1:9"]):
            pytest.fail("the block is not entered")


def test_the_clients_own_balance() -> None:
    urls = tuple(f"http://{name}" for name in "abcd")
    by_session = Balance(Target(urls, "m", balance="session"))
    assert len({by_session.take("0-7") for _ in range(9)}) == 1
    assert {by_session.take(f"0-{number}") for number in range(99)} == set(urls)
    least = Balance(Target(urls, "m", balance="least"))
    assert {least.take("") for _ in urls} == set(urls)
    least.give_back(urls[2])
    assert least.take("") == urls[2]
    at_random = Balance(Target(urls, "m", seed=1))
    assert {at_random.take("0") for _ in range(99)} == set(urls)
