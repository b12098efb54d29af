"""Engines that hand prompts over, on the virtual clock, and the bounds of the bench."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.bench.bench_disaggregation import ENGINES, RULES, SPLIT_ARMS, SPLITS, Job, Row, bounds, draw, main
from tests.bench.virtual_fleet import Played, play
from tests.bench.virtual_pairs import BOTH, GIVES, TAKES, PairCluster, PairConfig, PairPlan, PairScheduler, within

from warmfleet.fleet import LoadRow
from warmfleet_loadtest.simulator.scheduler import Limits, Request, hash_blocks
from warmfleet_loadtest.simulator.step_costs import PRESETS
from warmfleet_loadtest.traces.trace import BLOCK_TOKENS, generate
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from pathlib import Path

    from warmfleet.fleet import Role

SCHEME = wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor"), BLOCK_TOKENS)
CONFIG = PairConfig(SCHEME, Limits(max_model_len=259 * BLOCK_TOKENS), 260, PRESETS["trace"], bytes_per_s=2e9)
TRACE = generate(200, 1)


async def played(url: str, roles: tuple[Role, ...], **more: Any) -> Played:
    plan = PairPlan((CONFIG,) * len(roles), speed=3.0, replicas=2, roles=roles, **more)
    return await play(url, TRACE, plan, PairCluster)  # type: ignore[arg-type]


@pytest.mark.parametrize("roles", [(GIVES, TAKES, TAKES), (BOTH,) * 3], ids=["roles", "both"])
async def test_every_request_is_answered_and_no_load_is_left(url: str, roles: tuple[Role, ...]) -> None:
    run = await played(url, roles)
    assert len(run.served) == len(TRACE.arrivals)
    cluster: Any = run.cluster
    assert (cluster.split > 0) == (roles[0] is GIVES)
    for row in map(LoadRow.unpack, cluster.rows.values()):
        assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, 0, 0)
    for worker in cluster.workers:
        assert not worker.engine.scheduler._kept
        assert worker.engine.scheduler.pool.free == CONFIG.blocks - 1


async def test_a_threshold_splits_what_is_beyond_it(url: str) -> None:
    for splits, shares in ((None, {1.0}), (lambda _prompt, _lacks: False, {0.0})):
        run = await played(url, (GIVES, TAKES, TAKES), ours=False, splits=splits)
        cluster: Any = run.cluster
        assert {cluster.split / len(run.served)} == shares
    assert {request.engine for request in run.served} == {1, 2}


def test_blocks_are_kept_until_they_are_taken_and_only_what_lacks_is_moved() -> None:
    now = [0.0]
    giving, taking = (CONFIG.scheduler(None, lambda: now[0]) for _ in range(2))
    assert isinstance(giving, PairScheduler)
    assert isinstance(taking, PairScheduler)
    prompt = range(10 * BLOCK_TOKENS + 1)

    def request(name: str, tokens: int) -> Request:
        made = Request(name, prompt, tokens, range(1_000_000, 1_000_009))
        hash_blocks(SCHEME, made)
        return made

    def steps(scheduler: PairScheduler) -> list[Any]:
        step = scheduler.schedule()
        return scheduler.complete(step) if step else []

    free = giving.pool.free
    moved: list[float] = []
    for turn in range(2):
        leg, asked = request("leg", 1), request("asked", 2)
        giving.legs.add(leg)
        giving.add(leg)
        assert steps(giving)[0].finished
        assert giving.pool.free == free - 11
        taking.sources[asked] = giving, leg
        taking.add(asked)
        assert steps(taking) == []
        due = taking.next_due()
        assert due is not None
        moved.append(due - now[0] - 0.005)
        now[0] = due
        assert steps(taking)[0].first
        assert giving.pool.free == free
        assert asked.cached_tokens == turn * 10 * BLOCK_TOKENS
        while taking.busy:
            steps(taking)
    tokens = len(prompt)
    assert moved == pytest.approx([131_072 / 2e9 * tokens, 131_072 / 2e9])


def test_gaps_within_a_limit() -> None:
    assert within([], 1.0)
    assert within([0.1] * 99 + [2.0], 1.0)
    assert not within([0.1] * 97 + [2.0] * 3, 1.0)


def test_bounds_are_of_what_was_played() -> None:
    def row(split: str, arm: str, good: float, ttft: float, load: float = 0.5) -> Row:
        return Row("chats", load, split, arm, {"good": good, "ttft": ttft})

    rows = [row("2:6", arm, 0.2 + 0.1 * at, 2.0) for at, arm in enumerate(RULES)]
    rows += [row("2:6", "ours", 0.8, 1.0), row("2:6", "ours-alone", 0.8, 1.0)]
    assert bounds(rows) == {"goodput_over_best_rule": 2.0, "ttft_mean_over_always": 0.5, "worst_split_goodput": 0.8}
    rows += [replace(each, split="6:2", figures={"good": 0.4, "ttft": 3.0}) for each in rows]
    assert bounds(rows) == {"goodput_over_best_rule": 1.0, "ttft_mean_over_always": 1.0, "worst_split_goodput": 0.4}
    assert bounds([row("2:6", "ours", 0.1, 1.0, load=0.7)]) == {}


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_has_eight_engines_and_only_ours_alone_lets_all_serve_alone(split: str) -> None:
    for arm in SPLIT_ARMS:
        roles = Job("chats", 0.5, split, arm, 0).roles()
        assert len(roles) == ENGINES
        assert sum(role.gives > 0 for role in roles) == int(split[0])
        assert all(role.alone for role in roles) == (arm == "ours-alone")


@pytest.mark.parametrize("wrong", [["--cases", "songs"], ["--arms", "guess"], ["--splits", "1:7"], ["--seeds", "0"]])
def test_wrong_arguments_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(wrong)


def test_without_the_trace_the_bench_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACE", str(tmp_path / "nothing.jsonl"))
    assert main(["--quick", "--arms", "ours", "--jobs", "1"]) == 1
    assert "no trace at" in capsys.readouterr().err


def test_the_last_line_is_one_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"good": 0.5, "ttft": 1.0}
    monkeypatch.setattr("tests.bench.jobs.run_all", lambda jobs, *_: [(job, figures) for job in jobs])
    monkeypatch.setattr("tests.bench.bench_disaggregation.table", lambda _: "")
    assert main(["--quick"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name: told[name] for name in told if name != "rows"} == {
        "goodput_over_best_rule": 1.0,
        "ttft_mean_over_always": 1.0,
        "worst_split_goodput": 0.5,
    }


def test_the_picture_has_each_cell_once(tmp_path: Path) -> None:
    def row(split: str, arm: str, good: float) -> Row:
        return Row("chats", 0.5, split, arm, {"good": good, "strict": good / 2, "ttft": 10 * good})

    rows = [row("2:6", "ours", 0.62), row("4:4", "ours", 0.84), row("", "both", 0.98)]
    draw(file := tmp_path / "cells.svg", rows)
    shown = re.findall(r">(\.\d\d|\d\.\d)<", file.read_text(encoding="utf-8"))
    assert sorted(shown) == [".31", ".42", ".49", ".62", ".84", ".98", "6.2", "8.4", "9.8"]
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(file, [])
