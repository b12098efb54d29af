"""The virtual clock: scripts use virtual time, several replicas decide like one, and no load is left at the end."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.bench.bench_sweep import main
from tests.bench.virtual_figures import figures
from tests.bench.virtual_fleet import Plan, Played, play
from tests.bench.virtual_plans import WORKLOADS, engine
from tests.bench.virtual_store import BEGINNING_US, VirtualStore
from tests.bench.virtual_workers import MODEL

from warmfleet.fleet import LoadRow, QueueLimits, Weights
from warmfleet.settings import POLICIES
from warmfleet_loadtest.traces.trace import generate

SMALL = engine(WORKLOADS["generated"].costs, 512)


def chosen(played: Played) -> list[tuple[float, int, int]]:
    return [(one.at_s, one.session, one.engine) for one in played.served]


async def test_scripts_take_the_time_from_the_bench(url: str) -> None:
    store = VirtualStore(url)
    fleet = store.fleet(MODEL, Weights())
    store.clock.now = 12.5
    assert (await fleet.tick()).ran
    store.clock.now = 12.52  # 20 virtual ms later, and hardly any real time
    assert not (await fleet.tick()).ran
    store.clock.now = 12.53
    assert (await fleet.tick()).ran
    assert store.sync.get(fleet.keys.tick).split()[0] == b"%d" % ((BEGINNING_US + 12_530_000) // 1_000)
    await store.close()


async def test_a_run_is_reproducible_and_its_books_close_at_zero(url: str) -> None:
    trace, plan = generate(60), Plan((SMALL,) * 3, speed=3.0)
    first, again = [await play(url, trace, plan) for _ in range(2)]
    assert chosen(first) == chosen(again)
    assert len(first.served) == 60
    for row in (LoadRow.unpack(packed) for packed in first.cluster.rows.values()):
        assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, 0, 0)
        assert 0 < row.speed_tps < 1_300  # heartbeats told it: 8e-4 s a token, and the time of the steps
    assert figures(first, skip=0.0)["foreseen"] == 1.0


async def test_four_replicas_decide_as_one(url: str) -> None:
    trace = generate(80, 3)
    one, four = [await play(url, trace, Plan((SMALL,) * 4, replicas=count, speed=4.0)) for count in (1, 4)]
    assert len(four.cluster.fleets) == 4
    assert chosen(one) == chosen(four)


async def test_requests_wait_their_turn_in_virtual_time(url: str) -> None:
    """More than two engines can serve at once: tickets of two replicas wait, all are served, and nothing is left."""
    trace, plan = generate(60, 5), Plan((SMALL,) * 2, replicas=2, speed=6.0)
    at_once = await play(url, trace, plan)
    waiting = await play(url, trace, replace(plan, queue=QueueLimits(0.3)))
    cluster = waiting.cluster
    assert min(tickets.most for tickets in cluster.tickets.values()) >= 2
    assert sorted(one.session for one in waiting.served) == sorted(one.session for one in at_once.served)
    assert figures(waiting, skip=0.0)["foreseen"] == 1.0
    assert figures(waiting)["ttft_mean_s"] < 1.3 * figures(at_once)["ttft_mean_s"], "no engine stands idle meanwhile"
    for row in (LoadRow.unpack(packed) for packed in cluster.rows.values()):
        assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, 0, 0)
    assert not cluster.queued


def test_the_command_prints_every_combination(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--workload", "generated", "--rows", "30", "--engines", "2", "--vary", "kappa=0,1"]
    assert main([*options, "--policy", "cost,round_robin"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(told["rows"]) == [f"{policy} kappa={k} 4x" for policy in ("cost", "round_robin") for k in (0, 1)]
    assert all(row["requests"] == 30 and row["ttft_mean_s"] > 0 for row in told["rows"].values())


def test_a_policy_that_is_none_is_refused_with_the_names_of_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, environment in (["--policy", "cost,nosuch"], ""), ([], "nosuch"):
        monkeypatch.setenv("POLICY", environment)
        with pytest.raises(SystemExit) as ended:
            main(["--workload", "generated", "--rows", "9", *words])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert "'nosuch' is no policy" in said
        assert all(policy in said for policy in POLICIES)


def test_a_picture_that_cannot_be_made_costs_no_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--workload", "generated", "--rows", "9", "--plot", f"{__file__}/x.svg"]) == 1
    printed = capsys.readouterr()
    assert list(json.loads(printed.out.splitlines()[-1])["rows"]) == ["cost 4x"]
    assert "error: " in printed.err
