"""Engines with a tier on the virtual clock: blocks are loaded instead of computed, and routers know of them."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING

import pytest
from tests.bench.bench_tiers import ARMS, CASES, Row, bounds, main
from tests.bench.virtual_fleet import Plan, Played, play
from tests.bench.virtual_sessions import ENGINE_BLOCK
from tests.bench.virtual_tiers import Tier, TieredConfig, counted_at, tiers_of

from warmfleet_loadtest.simulator.scheduler import Limits
from warmfleet_loadtest.simulator.step_costs import PRESETS
from warmfleet_loadtest.traces.trace import BLOCK_TOKENS, generate
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from pathlib import Path

SCHEME = wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor"), BLOCK_TOKENS)
TRACE = generate(400, 1)


def engines(*, told: bool = True, times: float = 4.0) -> tuple[TieredConfig, ...]:
    limits = Limits(max_model_len=259 * BLOCK_TOKENS, block_tokens=BLOCK_TOKENS)
    return (TieredConfig(SCHEME, limits, 260, PRESETS["trace"], tier_times=times, told=told, bytes_per_s=2e9),) * 3


async def played(url: str, **more: float) -> Played:
    told = bool(more.pop("told", True))
    return await play(url, TRACE, Plan(engines(told=told, **more), speed=3.0, replicas=2))


def computed(run: Played) -> int:
    return sum(worker.engine.work_tokens for worker in run.cluster.workers)


def loaded(run: Played) -> int:
    return sum(tier.loaded for tier in tiers_of(worker.engine.scheduler for worker in run.cluster.workers))


async def test_routers_that_know_tiers_use_them(url: str) -> None:
    ignored, known = await played(url, told=False), await played(url)
    for run in (ignored, known):
        assert len(run.served) == len(TRACE.arrivals)
    assert loaded(known) > 1.2 * loaded(ignored) > 0
    assert computed(known) < computed(ignored)
    differ = [
        (tokens, request) for request, tokens in known.cluster.predicted.items() if tokens != request.cached_tokens
    ]
    assert len(differ) < 0.02 * len(TRACE.arrivals), "what is predicted is what the engine finds"


async def test_a_tier_that_holds_nothing_changes_nothing(url: str) -> None:
    run = await played(url, times=0.0)
    assert loaded(run) == 0
    assert statistics.fmean(request.ttft_s for request in run.served) > 0


async def test_a_tier_with_a_price_that_is_too_high_is_not_used(url: str) -> None:
    known = await played(url)
    with counted_at(-1.0):
        dear = await played(url)
    assert computed(known) < computed(dear)


def test_a_tier_evicts_the_least_used_prompt_its_end_first() -> None:
    tier = Tier(4, 1, 1, 1.0, told=True)
    first, second = [b"%08d" % number for number in range(3)], [b"%08d" % number for number in range(10, 12)]
    tier.use(first, store=True)
    tier.use(second, store=True)
    assert set(tier.tracker.table) == {*first[:2], *second}
    assert [tier.after(first, start, 3) for start in range(3)] == [2, 1, 0]
    tier.use(first)
    tier.use([b"another."], store=True)
    assert set(tier.tracker.table) == {*first[:2], second[0], b"another."}


def test_bounds_are_of_what_was_played() -> None:
    def row(case: str, arm: str, mean: float, load: float = 0.7, link: float = 25.0) -> Row:
        return Row(case, load, 4.0, link, arm, {"mean": mean})

    rows = [row("chats", "ignored", 1.0), row("chats", "seconds", 0.9), row("chats", "ignored", 1.0, 0.85)]
    assert bounds(rows) == {"seconds_over_today_mean": 0.9}
    rows += [row("mixed", arm, 1.0 + index, link=5.0) for index, arm in enumerate(ARMS)]
    assert bounds(rows)["mixed_over_best_weight"] == 2.5
    assert CASES["agents"].cache_tokens // ENGINE_BLOCK == 585


@pytest.mark.parametrize("wrong", [["--case", "songs"], ["--arms", "guess"], ["--seeds", "0"]], ids=str)
def test_wrong_arguments_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(wrong)


def test_without_the_trace_the_bench_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACE", str(tmp_path / "nothing.jsonl"))
    assert main(["--quick", "--case", "chats", "--jobs", "1"]) == 1
    assert "no trace at" in capsys.readouterr().err


def test_the_last_line_is_one_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tests.bench.jobs.run_all", lambda jobs, *_: [(job, {"mean": 1.0}) for job in jobs])
    monkeypatch.setattr("tests.bench.bench_tiers.table", lambda _: "")
    assert main(["--seeds", "1"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    ratios = {name: ratio for name, ratio in told.items() if name != "rows"}
    assert ratios.keys() >= {"seconds_over_today_mean", "worst_case_over_today", "mixed_3b_over_best_weight"}
    assert set(ratios.values()) == {1.0}
