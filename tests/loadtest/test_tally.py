"""The counts of a run, added up over processes and made into figures."""

from __future__ import annotations

import json

import pytest

from warmfleet_loadtest.users.report_figures import ALL, figures, generator, over_time, split_figures
from warmfleet_loadtest.users.streaming import Answer
from warmfleet_loadtest.users.tally import MOST_EVENTS, Tally, Timing, mean, milliseconds, quantile


def answer(
    prompt: int = 100, cached: int = 40, worker: str = "", reservation: str = "booked", prefill: str = ""
) -> Answer:
    headers = {"x-warmfleet-worker": worker, "x-warmfleet-reservation": reservation} if worker else {}
    headers |= {"x-warmfleet-prefill-worker": prefill} if prefill else {}
    return Answer(1.0, "text", [0.01, 0.02], prompt, cached, 3, headers)


def timing(ttft_s: float = 0.1, late_s: float = 0.0) -> Timing:
    return Timing(late_s, ttft_s, ttft_s + 0.03)


def test_figures_are_per_kind_and_of_all() -> None:
    tally = Tally()
    for kind, cached, ttft_s in ("chat", 80, 0.1), ("chat", 40, 0.2), ("rag", 0, 0.6):
        tally.sent(kind, 1_000.0)
        tally.answered(kind, answer(100, cached), timing(ttft_s), 1_000.0)
    tally.sent("rag", 1_000.0)
    tally.failed("rag", 1_000.0)

    found = figures(tally, 0.0)

    assert found["chat"]["hit_ratio"] == 0.6
    assert found[ALL]["hit_ratio"] == 0.4
    assert found["chat"]["ttft_mean"] == 150
    assert (found[ALL]["sent"], found[ALL]["answered"], found[ALL]["failed"]) == (4, 3, 1)
    assert (found[ALL]["ttft_p50"], found[ALL]["ttft_p99"]) == (200, 600)
    assert (found[ALL]["gap_p50"], found[ALL]["gap_p99"]) == (20, 20)


def test_figures_leave_out_what_lies_before_and_behind() -> None:
    tally = Tally()
    for at, cached in (1_000.0, 0), (1_010.0, 50), (1_020.0, 100):
        tally.sent("chat", at)
        tally.answered("chat", answer(100, cached), timing(), at)

    assert figures(tally, 1_005.0, 1_015.0)[ALL]["hit_ratio"] == 0.5
    assert figures(tally, 1_005.0, 1_015.0)[ALL]["sent"] == 1


def test_two_processes_add_up_as_one() -> None:
    alone, parts, master = Tally(), (Tally(), Tally()), Tally()
    for number in range(40):
        for tally in alone, parts[number % 2]:
            tally.sent("chat", 1_000.0 + number)
            tally.answered(
                "chat", answer(100, number, f"w{number % 3}", "fallback"), timing(number / 10), 1_000.0 + number
            )
            tally.broke("cut", 1_000.0 + number)
        if number % 7 == 0:
            master.add(json.loads(json.dumps(parts[0].take())))
    for part in parts:
        master.add(part.take())

    assert figures(master, 0.0) == figures(alone, 0.0)
    assert sorted(master.broken) == sorted(alone.broken)
    assert sorted(master.fallbacks) == sorted(alone.fallbacks)
    assert parts[0].take()["slots"] == {}


def test_split_requests_are_counted_at_both_engines_and_apart_from_others() -> None:
    tally, other = Tally(), Tally()
    for counted, kind, worker, prefill, ttft_s, at in (
        (tally, "chat", "decode-1.0", "prefill-1.0", 9.0, 1_000.0),  # in the warm-up
        (tally, "chat", "decode-1.0", "prefill-1.0", 0.4, 1_010.0),
        (other, "rag", "decode-2.0", "prefill-1.0", 0.6, 1_010.0),
        (other, "rag", "decode-2.0", "", 0.1, 1_010.0),
        (tally, "chat", "decode-2.0", "", 0.4, 1_010.0),
    ):
        counted.sent(kind, at)
        counted.answered(kind, answer(worker=worker, prefill=prefill), timing(ttft_s), at)
    tally.add(json.loads(json.dumps(other.take())))
    roles = {"prefill-1": "prefill", "decode-1": "decode", "decode-2": "decode", "decode-3": "decode"}

    found = split_figures(tally, roles, 1_005.0)

    assert (found["split"], found["answered"], found["share"]) == (3, 5, 0.6)
    assert found["ttft"] == {"split": {"p50": 600, "p99": 600}, "alone": {"p50": 400, "p99": 400}}
    assert found["engines"] == {
        "prefill-1": {"role": "prefill", "prefill": 3, "decode": 0, "alone": 0},
        "decode-1": {"role": "decode", "prefill": 0, "decode": 2, "alone": 0},
        "decode-2": {"role": "decode", "prefill": 0, "decode": 1, "alone": 2},
        "decode-3": {"role": "decode", "prefill": 0, "decode": 0, "alone": 0},
    }


def test_single_events_are_bounded() -> None:
    tally, other = Tally(), Tally()
    for number in range(2 * MOST_EVENTS):
        tally.broke("cut", number)
        other.broke("retried", number)
    tally.add(other.as_json())

    assert len(tally.broken) == MOST_EVENTS
    assert sum(counts["broken|cut"] for counts in tally.slots.values()) == 2 * MOST_EVENTS


def test_a_tally_is_bounded_by_time_and_not_by_requests() -> None:
    tally = Tally(slot_s=10.0)
    for number in range(3_000):
        tally.answered("chat", answer(), timing(0.1 + number / 1e5), 1_000.0 + number / 1_000)

    assert len(tally.slots) == 1
    assert len(tally.slots[100]) < 100


def test_lines_over_time() -> None:
    tally = Tally()
    for second in range(10):
        tally.sent("chat", 1_000.0 + second)
        if second >= 5:
            tally.answered("chat", answer(100, 10 * second), timing(), 1_000.0 + second)

    lines = over_time(tally, 1_000.0, 10.0, 5.0)

    assert lines["rate"] == [(2.5, 1.0), (7.5, 1.0)]
    assert lines["hit_ratio"] == [(7.5, 0.7)]


@pytest.mark.parametrize(
    ("cpu_s", "late_s", "limits"), [(1.0, 0.0, set()), (9.0, 0.0, {"was_busy"}), (1.0, 0.02, {"was_late"})]
)
def test_a_load_generator_that_measures_itself_says_so(cpu_s: float, late_s: float, limits: set[str]) -> None:
    tally = Tally()
    tally.sent("chat", 1_000.0)
    tally.answered("chat", answer(), timing(0.1, late_s), 1_000.0)
    tally.watched("worker 1", cpu_s, 0.001, 1_000.0)
    tally.watched("master", 0.5, 0.001, 1_000.0)

    found = generator(tally, 10.0)

    assert {name for name in ("was_busy", "was_late") if found[name]} == limits
    assert found["busiest_share"] == cpu_s / 10
    assert found["cpu_s"] == {"master": 0.5, "worker 1": cpu_s}


def test_distributions() -> None:
    values = [(1.0, 5), (2.0, 4), (10.0, 1)]

    assert [quantile(values, share) for share in (0.0, 0.49, 0.5, 0.89, 0.9, 1.0)] == [1, 1, 2, 2, 10, 10]
    assert mean(values) == 2.3
    assert (quantile([], 0.5), mean([])) == (0, 0)
    assert [milliseconds(seconds, 2) for seconds in (0.01234, 1.5678, 0.0, -1.0)] == ["12", "1600", "0", "0"]
