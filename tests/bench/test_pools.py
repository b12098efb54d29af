"""A served model in several pools: overlaid traces, exact simulation, virtual clock, and the bench's output."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from tests.bench.bench_pools import Job, Row, bounds, every, main, over_seeds, parser
from tests.bench.exact_pools import Served, Setup, simulate
from tests.bench.overlays import SHAPES, Blocks, copies, overlaid, shaped
from tests.bench.virtual_fleet import Plan, play
from tests.bench.virtual_plans import WORKLOADS, engine

from warmfleet.fleet import LoadRow, QueueLimits
from warmfleet_loadtest.traces.trace import BLOCK_TOKENS, Trace, generate

HOT = Setup((8,) * 8, 1_024, 0.004, 32.0)  # engines are busy for about 60 % of the time


def mean_s(served: list[Served]) -> float:
    return statistics.fmean(request.ttft_s for request in served)


def simulated(setup: Setup, trace: Trace, number: int = 8) -> tuple[list[Served], list[float]]:
    return simulate(setup, copies(trace, number), Blocks(trace))


def test_copies_of_a_trace_have_the_system_prompts_in_common_and_nothing_else() -> None:
    trace = generate(60, 3)
    thrice = overlaid(trace, 3)
    assert [arrival.at_s for arrival in thrice.arrivals] == sorted(arrival.at_s for arrival in thrice.arrivals)
    assert Counter(len(arrival.prompt) for arrival in thrice.arrivals) == Counter(
        3 * [len(arrival.prompt) for arrival in trace.arrivals]
    )
    sessions = len({arrival.session for arrival in trace.arrivals})
    assert len({arrival.session for arrival in thrice.arrivals}) == 3 * sessions
    heads = Counter(
        tuple(arrival.prompt[:BLOCK_TOKENS]) for arrival in thrice.arrivals if len(arrival.prompt) >= BLOCK_TOKENS
    )
    assert len(heads) == 1, "all begin with one block"
    second = [tuple(arrival.prompt[BLOCK_TOKENS : 2 * BLOCK_TOKENS]) for arrival in thrice.arrivals]
    whole = Counter(piece for piece in second if len(piece) == BLOCK_TOKENS)
    once = Counter(
        piece for piece in (tuple(arrival.prompt[16:32]) for arrival in trace.arrivals) if len(piece) == BLOCK_TOKENS
    )
    assert len(whole) == 3 * len(once)


def test_block_numbers_of_copies_tell_what_their_tokens_tell() -> None:
    trace = generate(40, 1)
    blocks = Blocks(trace)
    seen: dict[int, set[int]] = {}
    for copy, arrival in copies(trace, 2):
        for number in blocks.chain(arrival.prompt, copy):
            seen.setdefault(number, set()).add(copy)
    shared = {number for number, those in seen.items() if len(those) == 2}
    assert shared == set(range(blocks.system))
    assert blocks.system >= 1


def test_another_seed_begins_copies_at_other_places_and_has_no_text_in_common_but_system_prompts() -> None:
    trace = generate(60, 3)
    system = {tuple(arrival.prompt[:BLOCK_TOKENS]) for arrival in trace.arrivals}
    first, second = overlaid(trace, 3), overlaid(trace, 3, seed=1)
    assert Counter(len(arrival.prompt) for arrival in first.arrivals) == Counter(
        len(arrival.prompt) for arrival in second.arrivals
    )
    assert [arrival.at_s for arrival in first.arrivals] != [arrival.at_s for arrival in second.arrivals]
    beginnings = [{tuple(arrival.prompt[: 3 * BLOCK_TOKENS]) for arrival in each.arrivals} for each in (first, second)]
    assert {begin for begin in set.intersection(*beginnings) if len(begin) > BLOCK_TOKENS} == set()
    assert {begin[:BLOCK_TOKENS] for each in beginnings for begin in each if len(begin) > BLOCK_TOKENS} <= system
    blocks = Blocks(trace)
    chains = [
        {n for copy, arrival in copies(trace, 3, seed) for n in blocks.chain(arrival.prompt, copy)} for seed in (0, 1)
    ]
    assert set.intersection(*chains) == set(range(blocks.system))


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_what_they_say(name: str) -> None:
    trace, shape = shaped(name, 100), SHAPES[name]
    assert len(trace.arrivals) == 100
    turns = Counter(arrival.session for arrival in trace.arrivals)
    assert (max(turns.values()) > 1) == (shape.again > 0)
    assert len({tuple(arrival.prompt[: 16 * shape.system]) for arrival in trace.arrivals}) <= shape.prompts


def test_a_simulation_serves_every_request_once_and_counts_its_work() -> None:
    trace = generate(150, 2)
    served, busy = simulated(HOT, trace)
    assert len(served) == 8 * 150
    assert sum(request.prompt_tokens for request in served) == 8 * sum(
        len(arrival.prompt) for arrival in trace.arrivals
    )
    worked = sum(HOT.token_s * (request.prompt_tokens - request.cached_tokens) for request in served)
    assert sum(busy) * 8 * max(request.at_s for request in served) == pytest.approx(worked)
    assert all(
        request.ttft_s >= HOT.token_s * (request.prompt_tokens - request.cached_tokens) - 1e-9 for request in served
    )


def test_home_pools_are_nearly_as_good_as_one_pool_and_better_than_any_pool() -> None:
    trace = shaped("chat", 150)
    setup = replace(HOT, token_s=0.008)
    fleets = replace(setup, sizes=(64,)), setup, replace(setup, homes=1, at_random=True)
    one, eight, random = (mean_s(simulated(fleet, trace)[0]) for fleet in fleets)
    assert eight < 1.08 * one
    assert eight < 0.95 * random


def test_one_system_prompt_for_all_does_not_make_two_pools_hot() -> None:
    _, busy = simulated(HOT, shaped("one-prompt", 100))
    assert max(busy) < 2.5 * statistics.fmean(busy)  # 4, if two pools got everything; it takes a while to learn


async def test_requests_go_to_pools_and_no_load_is_left(url: str) -> None:
    config = engine(WORKLOADS["generated"].costs, 512)
    limits = QueueLimits(max_engine_wait_s=0.05, patience=1.0)
    plan = Plan((config,) * 8, speed=3.0, replicas=2, queue=limits, pools=(2, 2, 4))
    trace = generate(150, 1)
    played = await play(url, trace, plan)
    assert sorted(request.session for request in played.served) == sorted(arrival.session for arrival in trace.arrivals)
    assert played.cluster.queued == 0
    assert len(played.cluster.rows) == 8
    for row in map(LoadRow.unpack, played.cluster.rows.values()):
        assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, 0, 0)
    used = Counter(request.engine for request in played.served)
    assert set(used) == set(range(8))


def test_a_bound_is_the_worst_of_its_loads() -> None:
    def row(load: float, pools: int, mean: float, p99: float, *, exact: bool = False) -> Row:
        return Row(Job("conversation", load, pools, None, exact=exact), {"mean": mean, "p99": p99})

    rows = [row(0.5, 1, 2.0, 10.0), row(0.5, 8, 2.1, 9.0), row(0.7, 1, 4.0, 10.0), row(0.7, 8, 4.0, 11.0)]
    assert bounds(rows) == {"eight_over_one_mean": 1.05, "eight_over_one_p99": 1.1}
    rows += [row(0.7, 1, 1.0, 5.0, exact=True), row(0.7, 16, 1.02, 5.0, exact=True)]
    assert bounds(rows)["thousand_over_one_mean"] == 1.02
    assert bounds(rows[:1]) == {}


@pytest.mark.parametrize(
    ("words", "seeds"),
    [
        ("--loads 0.5", {1: 3, 2: 1, 4: 1, 8: 3}),
        ("--loads 0.5 --seeds 2", {1: 2, 2: 2, 4: 2, 8: 2}),
        ("--quick", {1: 1, 8: 1}),
    ],
)
def test_the_runs_that_are_compared_have_several_seeds(words: str, seeds: dict[int, int]) -> None:
    jobs = every(parser().parse_args([*words.split(), "--case", "generated", "--no-thousand"]))
    assert Counter(job.pools for job in jobs) == seeds
    assert len(set(jobs)) == len(jobs)


def test_ratios_are_those_of_the_means_over_seeds() -> None:
    def row(pools: int, seed: int, p99: float) -> Row:
        return Row(Job("conversation", 0.5, pools, None, seed=seed), {"mean": 1.0, "p99": p99})

    rows = [row(1, 0, 10.0), row(8, 0, 13.0), row(1, 1, 14.0), row(8, 1, 11.0)]
    assert bounds(rows) == {"eight_over_one_mean": 1.0, "eight_over_one_p99": 1.0}
    assert [(row.job.pools, row.figures["p99"]) for row in over_seeds(rows)] == [(1, 12.0), (8, 12.0)]


def test_the_command_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--case", "generated", "--rows", "6", "--loads", "0.5", "--pools", "1,8", "--jobs", "1"]
    options += ["--no-thousand", "--no-rest", "--seeds", "1"]
    assert main(options) == 0
    printed = capsys.readouterr()
    told: dict[str, Any] = json.loads(printed.out)
    assert [(row["pools"], row["engines"], row["requests"]) for row in told["rows"]] == [(1, 64, 48), (8, 64, 48)]
    assert told["eight_over_one_mean"] > 0
    assert "| generated | 0.5 | 64 | 8 |" in printed.err


def test_without_a_trace_the_option_is_named_that_needs_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACE", "/nowhere")
    assert main(["--quick"]) == 1
    assert "no trace at /nowhere" in (told := capsys.readouterr().err)
    assert told.endswith("add --case generated\n")


def test_wrong_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--pools", "3"], ["--loads", "1.5"], ["--case", "nosuch"], ["--rows", "0"], ["--seeds", "0"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
    assert "--rows" in capsys.readouterr().err
