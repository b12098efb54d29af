"""The page of metrics has samples for each worker while the worker is in the fleet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from warmfleet.background.index_health import IndexHealthWatch
from warmfleet.background.worker_gauges import MAX_VERSION, set_worker_gauges
from warmfleet.fleet import Truth, WorkerTruth, WorkerView
from warmfleet.fleet.rows import LoadRow
from warmfleet.fleet.worker.state import WorkerState
from warmfleet.metrics import Metrics

if TYPE_CHECKING:
    from warmfleet.pools.served_models import Pools

LOAD = LoadRow(
    prefill_tokens=100, foreign_prefill_tokens=20, decode_tokens=7, foreign_decode_tokens=3, in_flight=4, speed_tps=900,
    blocks=30, capacity_blocks=40,
)  # fmt: skip
WORKER = WorkerView("gpu1.0", {"version": "0.32.0"}, None, LOAD, 0.5, WorkerState.PROVEN, "proven", "http://h", ["m"])
SILENT = WorkerView("gpu2.0", {"version": "x" * 999}, None, LoadRow(), None, WorkerState.SILENT, "pending", "", [])


def samples(metrics: Metrics) -> dict[str, float]:
    """The samples of workers, by name with labels."""
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith("warmfleet_worker_")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def pools(*workers: WorkerView) -> Pools:
    return cast("Pools", SimpleNamespace(all=[SimpleNamespace(tag="m", view=SimpleNamespace(workers=workers))]))


def test_a_worker_s_samples_tell_its_state_and_load_and_go_with_it() -> None:
    metrics = Metrics()
    set_worker_gauges(pools(WORKER, SILENT), metrics)
    found, of = samples(metrics), '{model="m",worker="gpu1.0"}'
    info = '{model="m",proof="proven",state="proven",version="0.32.0",worker="gpu1.0"}'
    assert {name: value for name, value in found.items() if "gpu1.0" in name} == {
        f"warmfleet_worker_info{info}": 1,
        f"warmfleet_worker_routable{of}": 1,
        f"warmfleet_worker_in_flight_requests{of}": 4,
        f"warmfleet_worker_prefill_tokens{of}": 120,
        f"warmfleet_worker_decode_tokens{of}": 10,
        f"warmfleet_worker_prefill_tokens_per_second{of}": 900,
        f"warmfleet_worker_held_blocks{of}": 30,
        f"warmfleet_worker_cache_blocks{of}": 40,
        f"warmfleet_worker_heartbeat_age_seconds{of}": 0.5,
    }
    assert found['warmfleet_worker_routable{model="m",worker="gpu2.0"}'] == 0
    assert [name for name in found if "heartbeat" in name and "gpu2.0" in name] == [], "it was never heard"
    assert max(len(name) for name in found) < 150 + MAX_VERSION
    set_worker_gauges(pools(SILENT), metrics)
    assert [name for name in samples(metrics) if "gpu1.0" in name] == []


def test_a_worker_s_lag_goes_with_it() -> None:
    metrics = Metrics()
    watch = IndexHealthWatch(pools(WORKER), metrics)
    for there, wanted in (
        ({"gpu1.0": WorkerTruth(lag_batches=3, lag_s=1.5), "gpu2.0": WorkerTruth()}, {"gpu1.0": (3.0, 1.5)}),
        ({"gpu2.0": WorkerTruth()}, {}),
    ):
        watch._last["m"] = Truth(workers=there)
        watch._set_each()
        found = samples(metrics)
        assert len(found) == 2 * len(there)
        for worker, values in wanted.items():
            names = (
                f'warmfleet_worker_apply_lag_{unit}{{model="m",worker="{worker}"}}' for unit in ("batches", "seconds")
            )
            assert tuple(found[name] for name in names) == values
