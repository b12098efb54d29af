"""What a replica knows of its fleet: when it may be sent requests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

from warmfleet import pool as pool_module
from warmfleet.fallback import Fallback
from warmfleet.fleet import LoadRow, WorkerView
from warmfleet.pool import Pool, Pools, View

if TYPE_CHECKING:
    import pytest

    from warmfleet.fleet import Fleet
    from warmfleet.identity import Identity


def worker(routable: bool) -> WorkerView:
    return WorkerView("a.0", {}, {"url": "http://a"}, LoadRow(), 0.0, routable, "proven", "http://a", ["m"])


def pools() -> Pools:
    return Pools([Pool("m", cast("Fleet", None), Fallback(1.0))])


def test_ready_with_a_worker_and_its_tokenizer_and_for_good() -> None:
    fleet, now = pools(), time.monotonic()
    (only,) = fleet.all
    assert fleet.unready() == "no contact with Redis yet"
    only.show(View((worker(False),), read_at=now))
    assert "no worker is routable" in fleet.unready()
    only.show(View((worker(True),), read_at=now))
    assert "tokenizer" in fleet.unready(), "it would route by load"
    only.show(View((worker(True),), identity=cast("Identity", object()), read_at=now))
    assert fleet.unready() == ""
    only.show(View((), read_at=now))
    assert fleet.unready() == "", "what the fleet lacks another replica lacks, too"


def test_ready_after_a_ttl_whatever_the_fleet_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "WORKER_TTL_SECONDS", 0.02)
    fleet = pools()
    fleet.all[0].show(View((), read_at=time.monotonic()))
    assert fleet.unready()
    time.sleep(0.03)
    assert fleet.unready() == ""


def test_every_model_counts() -> None:
    fleet = Pools([*pools().all, *pools().all])
    for one in fleet.all:
        assert fleet.unready()
        one.show(View((worker(True),), text=True, read_at=time.monotonic()))
    assert fleet.unready() == ""
