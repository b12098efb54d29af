"""The virtual clock against the real one: the same arrivals in process, and over HTTP through real processes."""

from __future__ import annotations

import os
import sys

import pytest
import uvloop
from tests.bench.virtual_figures import figures
from tests.bench.virtual_fleet import Plan, play
from tests.bench.virtual_plans import WORKLOADS, engine
from tests.bench.virtual_store import private_server

from warmfleet.settings import POLICIES
from warmfleet_loadtest.replay import Target, replay, summary
from warmfleet_loadtest.stacks.fleets import Setup, ours, running
from warmfleet_loadtest.stacks.peers import MODEL
from warmfleet_loadtest.traces.trace import generate

LATE_MS = 10.0


@pytest.mark.long(
    minutes=1,
    shows="the virtual clock of the benchmarks gives the figures of real processes (needs a quiet machine)",
)
def test_both_clocks_tell_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test needs a quiet machine. Over HTTP the engines sleep, but routers, Redis and client compute."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    trace, speed = generate(300), 6.0
    engines, blocks = 8, 1_953
    setup = Setup(engines, blocks, mode="step", step_time="trace", decode_s=0.0, haproxy=False)
    with running(ours("cost", "2", POLICIES)[0], setup) as up:
        replies, client = uvloop.run(replay(trace, Target(up.urls, MODEL, speed)))
    real = summary(replies, speed)
    config = engine(WORKLOADS["conversation"].costs, blocks)
    with private_server() as url:
        virtual = figures(uvloop.run(play(url, trace, Plan((config,) * engines, replicas=2, speed=speed))))
    print(real, virtual, client)
    assert real["errors"] == 0
    if real["late_p99_ms"] > LATE_MS:
        pytest.skip(f"the machine is not quiet: requests left {real['late_p99_ms']} ms late")
    assert virtual["hit_ratio"] == pytest.approx(real["hit_ratio"], abs=0.02)
    for name in ("ttft_mean_s", "ttft_p90_s"):
        assert virtual[name] == pytest.approx(real[name], rel=0.1)
