"""The replay client against simulated engines over HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from tests.support.engines.simulated import config, running

from warmfleet_loadtest.measuring.client import Client, Reply
from warmfleet_loadtest.measuring.figures import quantile
from warmfleet_loadtest.replay import Target, main, replay, summary, table
from warmfleet_loadtest.simulator.step_costs import StepCosts
from warmfleet_loadtest.traces.trace import Arrival, Trace, generate

if TYPE_CHECKING:
    import pytest

COSTS = StepCosts(base_s=0.002, prefill_token_s=1e-5)


async def test_a_replay_measures_what_the_engine_did() -> None:
    trace = generate(60, 1)
    async with running(config(COSTS, blocks=1_024)) as up:
        replies, client = await replay(trace, Target((up.url,), "demo", speed=20.0))
        totals = up.engine.core.scheduler.totals
    assert len(replies) == 60
    assert [reply.error for reply in replies] == [None] * 60
    assert sum(reply.prompt_tokens for reply in replies) == totals.queries
    assert sum(reply.cached_tokens for reply in replies) == totals.hits > 0
    assert [reply.output_tokens for reply in replies] == [arrival.output_tokens for arrival in trace.arrivals]
    assert all(0 < reply.ttft_s <= reply.total_s for reply in replies)
    # A single step may be shorter than its cost: an engine that a busy machine held up catches up with its clock.
    assert quantile(sorted(reply.ttft_s for reply in replies), 0.5) >= COSTS.base_s
    assert set(client) == {"cpu_share", "lag_p99_ms", "lag_max_ms"}


async def test_arrivals_do_not_wait_for_answers_unless_the_trace_is_closed() -> None:
    arrivals = tuple(Arrival(0.0, 0, [k] * 20, 20, None if k == 0 else 0.0) for k in range(4))
    slow = config(StepCosts(base_s=0.01, prefill_token_s=0.0))
    walls = []
    for closed in (False, False, True):  # the first run starts slowly, and does not count
        opened = tuple(
            Arrival(arrival.at_s, arrival.session, arrival.prompt, arrival.output_tokens) for arrival in arrivals
        )
        async with running(slow) as up:
            began = asyncio.get_running_loop().time()
            await replay(Trace("t", arrivals if closed else opened, closed), Target((up.url,), "demo"))
            walls.append(asyncio.get_running_loop().time() - began)
    assert walls[2] >= 4 * 0.2, "one after another"
    assert walls[1] < walls[2] / 2, "together"


async def test_errors_are_counted_not_raised() -> None:
    async with running() as up, Client("demo") as client, Client("other") as stranger:
        assert (await stranger.complete(up.url, [1], 1)).error is not None
        assert "404" in str((await stranger.complete(up.url, [1], 1)).error)
        assert "ClientConnector" in str((await client.complete("http://127.0.0.1:9", [1], 1)).error)
        assert (await client.complete(up.url, [1], 1)).error is None


def test_a_summary_skips_the_warm_up_but_no_error() -> None:
    bad = Reply(0.0, 0.1, error="boom")
    good = [Reply(k / 10, 1.0, prompt_tokens=100, cached_tokens=40, worker="ab"[k % 2]) for k in range(1, 10)]
    made = summary([bad, *good], speed=2.0, skip=0.1)
    assert made["requests"] == 9
    assert (made["errors"], made["error_examples"]) == (1, ["boom"])
    assert (made["hit_ratio"], made["recomputed_tokens"]) == (0.4, 540)
    assert (made["ttft_mean_s"], made["ttft_mean_trace_s"], made["ttft_p50_s"]) == (0.5, 1.0, 0.5)
    assert made["workers"] == {"b": 5, "a": 4}
    assert "| 0.4 | 540 | 0.5 |" in table({"x": made})
    assert summary([bad])["ttft_mean_s"] == 0.0
    assert quantile([], 0.5) == 0.0


async def test_the_command_prints_a_table_and_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmfleet_loadtest.traces.trace.SHARED", "nowhere")
    monkeypatch.delenv("TRACE", raising=False)
    async with running(config(COSTS, blocks=1_024)) as up:
        arguments = ["--base-url", up.url, "--model", "demo", "--rows", "20", "--speed", "50", "--json"]
        assert await asyncio.to_thread(main, arguments) == 0
        assert json.loads(capsys.readouterr().out)["generated conversation, seed 0"]["errors"] == 0
        assert await asyncio.to_thread(main, [*arguments, "--model", "nobody"]) == 1
    assert await asyncio.to_thread(main, [*arguments, "--trace", "/nowhere"]) == 2


async def test_another_seed_finds_nothing_of_its_own_in_warm_engines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmfleet_loadtest.traces.trace.SHARED", "nowhere")
    monkeypatch.delenv("TRACE", raising=False)
    async with running(config(COSTS, blocks=4_096)) as up:
        arguments = ["--base-url", up.url, "--model", "demo", "--rows", "2", "--speed", "50", "--skip", "0", "--json"]
        assert await asyncio.to_thread(main, [*arguments, "--seeds", "3"]) == 0
    rows = json.loads(capsys.readouterr().out)
    shared = [row["hit_ratio"] for row in rows.values()]
    assert len(shared) == 3
    assert max(shared[1:]) <= 0.1, "the first two prompts of a trace share one block"
