"""The virtual clock: scripts use virtual time, several replicas decide like one, and no load is left at the end."""

from __future__ import annotations

from dataclasses import replace

from tests.bench.virtual_figures import figures
from tests.bench.virtual_fleet import Plan, Played, play
from tests.bench.virtual_plans import WORKLOADS, engine
from tests.bench.virtual_store import BEGINNING_US, VirtualStore
from tests.bench.virtual_workers import MODEL

from warmfleet.fleet import LoadRow, QueueLimits, Weights
from warmfleet_loadtest.traces.trace import generate

SMALL = engine(WORKLOADS["generated"].costs, 512)


def chosen(played: Played) -> list[tuple[float, int, int]]:
    return [(answered.at_s, answered.session, answered.engine) for answered in played.served]


async def test_scripts_take_the_time_from_the_bench(url: str) -> None:
    store = VirtualStore(url)
    fleet = store.fleet(MODEL, Weights())
    store.clock.now = 12.5
    assert (await fleet.upkeep.tick()).ran
    store.clock.now = 12.52  # 20 virtual ms later, and hardly any real time
    assert not (await fleet.upkeep.tick()).ran
    store.clock.now = 12.53
    assert (await fleet.upkeep.tick()).ran
    assert store.sync.get(fleet.keys.tick).split()[0] == b"%d" % ((BEGINNING_US + 12_530_000) // 1_000)
    await store.close()


async def test_a_run_is_reproducible_and_its_books_close_at_zero(url: str) -> None:
    trace, plan = generate(60), Plan((SMALL,) * 3, speed=3.0)
    first, again = [await play(url, trace, plan) for _ in range(2)]
    assert chosen(first) == chosen(again)
    assert len(first.served) == 60
    for row in (LoadRow.unpack(packed) for packed in first.cluster.rows.values()):
        assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, 0, 0)
        assert 0 < row.speed_tps < 1_300  # speed by heartbeats: 8e-4 s a token, and the time of the steps
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
    assert sorted(request.session for request in waiting.served) == sorted(
        request.session for request in at_once.served
    )
    assert figures(waiting, skip=0.0)["foreseen"] == 1.0
    assert figures(waiting)["ttft_mean_s"] < 1.3 * figures(at_once)["ttft_mean_s"], "no engine stands idle meanwhile"
    for row in (LoadRow.unpack(packed) for packed in cluster.rows.values()):
        assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, 0, 0)
    assert not cluster.queued
