"""Engines that sort by priority get one from the router, which is combined with a client's own priority."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest
from tests.app.routing.test_ranks import reporting
from tests.support.engines.plugin_worker import SCHEME, proof, worker
from tests.support.engines.scripted import engine
from tests.support.replicas.replica import replica

from warmfleet.engines.engine_priority import CLASS_MS, PATIENCE, UNKNOWN_TPS, priority
from warmfleet_worker.protocol.wire import NO_CACHE, Scheme
from warmfleet_worker.tracker import Tracker

if TYPE_CHECKING:
    from warmfleet_worker.worker_publisher import WorkerPublisher

NOW_S = 1.8e9
NOTHING = Scheme(NO_CACHE, SCHEME.none_hash, 16)


def test_of_requests_that_come_together_the_least_work_goes_first() -> None:
    sizes = [random.Random(7).randrange(100_000) for _ in range(50)]
    assert sorted(sizes, key=lambda size: priority(None, NOW_S, size, 5_000)) == sorted(sizes)


def test_nothing_that_comes_later_than_patience_times_its_work_overtakes_a_request() -> None:
    long = priority(None, NOW_S, 100_000, 10_000)  # 10 s of work
    assert (
        priority(None, NOW_S + 10 * PATIENCE - 1, 1, 10_000)
        < long
        < priority(None, NOW_S + 10 * PATIENCE + 1, 1, 10_000)
    )


def test_the_clients_own_priority_counts_first() -> None:
    long, short = 1_000_000, 1
    assert (
        priority(-1, NOW_S + 9_999, long, 10) < priority(None, NOW_S, short, 10) < priority(1, NOW_S - 9_999, short, 10)
    )
    assert priority("urgent", NOW_S, short, 10) == priority(0, NOW_S, short, 10)


@pytest.mark.parametrize("given", [-(2**70), -(2**17), 0, 2**17, 2**70])
def test_the_number_fits_into_64_bits(given: int) -> None:
    assert abs(priority(given, 2**33, 2**22, 1)) < 2**63


def test_an_engine_without_a_known_speed_has_an_assumed_one() -> None:
    assert priority(None, NOW_S, 500, 0) == priority(None, NOW_S, 500, UNKNOWN_TPS)
    assert 0 < priority(None, NOW_S, 500, 0) < CLASS_MS


@pytest.mark.parametrize(("setting", "takes"), [(True, True), (True, False), (False, True)])
async def test_only_an_engine_that_sorts_is_sent_a_priority_and_only_if_the_operator_wants_it(
    valkey_url: str, model: str, setting: bool, takes: bool
) -> None:
    cores: list[WorkerPublisher] = []
    async with (
        engine(model, reporting(cores)) as upstream,
        replica(valkey_url, model, engine_priority=setting) as router,
        worker(valkey_url, model, upstream.url, Tracker(), NOTHING, takes_priority=takes) as publisher,
    ):
        cores.append(publisher)
        await proof(router, "identity")
        await router.routable(1)
        began = time.time()
        for own in (None, 3):
            body = {"model": model, "prompt": list(range(100)), **({} if own is None else {"priority": own})}
            status, _, _ = await router.post(body, **{"X-Vllm-Priority": "-5"})
            assert status == 200
            seen = upstream.seen[-1]
            assert seen.json.get("priority") == own, "the body is the client's"
            sent = seen.headers.get("x-vllm-priority")
            if not (setting and takes):
                assert sent is None
                continue
            assert sent is not None
            came_s = (int(sent) - (own or 0) * CLASS_MS) / 1e3
            assert began <= came_s <= time.time() + 60
