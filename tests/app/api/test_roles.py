"""Prefill and decode engines at a real replica: pairs are shown, and each engine serves requests alone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from tests.support.engines.plugin_worker import caching, worker
from tests.support.engines.scripted import engine
from tests.support.fleet.transfers import DECODE, PREFILL
from tests.support.polling import poll
from tests.support.replicas.doctor import doctor
from tests.support.replicas.replica import Replica, replica

from warmfleet.cli import workers
from warmfleet.cli.doctor.finding import State
from warmfleet.cli.terminal.output import plain
from warmfleet_worker.tracker import Tracker


async def told(router: Replica, path: str) -> dict[str, Any]:
    status, body = await router.get(path)
    assert status == 200
    [model] = json.loads(body)["models"]
    return dict(model)


async def test_pairs_are_shown_and_requests_are_served_by_one_engine_each(valkey_url: str, model: str) -> None:
    trackers = [Tracker() for _ in range(3)]
    async with (
        engine(model, caching(trackers[0], [])) as one,
        engine(model, caching(trackers[1], [])) as two,
        engine(model, caching(trackers[2], [])) as three,
        replica(valkey_url, model, admin_port=1) as router,
        worker(valkey_url, model, one.url, trackers[0], name="p", transfer=PREFILL),
        worker(valkey_url, model, two.url, trackers[1], name="d", transfer=DECODE),
        worker(valkey_url, model, three.url, trackers[2], name="e", transfer=replace(DECODE, recomputes=False)),
    ):
        await router.routable(3)
        shown = await told(router, "/workers")
        assert [shown["pairs"][name] for name in ("prefill", "decode", "both", "pairs")] == [1, 2, 0, 1]
        by_name = {row["worker_id"]: row["pairs"] for row in shown["workers"]}
        assert [(name, row["role"], row["partners"], row["of"]) for name, row in sorted(by_name.items())] == [
            *(("d.0", "decode", 1, 1), ("e.0", "decode", 0, 1), ("p.0", "prefill", 1, 2)),
        ]
        assert "-> start the decode engine with" in plain(workers.parts_of({"models": [shown]}))

        async def page() -> Any:
            found = await told(router, "/status.json")
            return found if len(found["workers"]) == 3 and all(row["routable"] for row in found["workers"]) else None

        found: Any = await poll(page, 15, "the page has all workers")
        assert (found["pairs"], {row["worker_id"]: row["pairs"] for row in found["workers"]}) == (
            shown["pairs"],
            by_name,
        )

        report = await doctor(valkey_url, model)
        [fine] = report.of("pairs", State.OK)
        assert fine.detail == f"p.0 can prefill for d.0 (1 pairs); {shown['pairs']['told']}"
        report.names("pairs", "p.0 cannot prefill for e.0: kv_load_failure_policy", '"recompute"', State.NOTE)

        asked = [one, two, three]
        before = [len(upstream.seen) for upstream in asked]
        for number in range(12):
            status, _, _ = await router.post({"model": model, "prompt": [number] * 100})
            assert status == 200
        bodies = [seen.json for upstream, at in zip(asked, before, strict=True) for seen in upstream.seen[at:]]
        served = [body for body in bodies if body and "prompt" in body]
        assert len(served) == 12, "one engine serves each request"
        assert not any("kv_transfer_params" in body for body in served)
        status, _, answer = await router.post(
            {"model": model, "prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}}
        )
        assert (status, b"kv_transfer_params" in answer) == (400, True), "it would end a NIXL engine"
