"""The metrics count without the library's locks, and a scrape shows the same text as the library's."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest
from tests.support.fleet.constants_alone import ConstantsAlone

from warmfleet import metrics
from warmfleet.api.service_routes import Health, ServiceRoutes
from warmfleet.metrics import Metrics
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.pool import Pool
from warmfleet.pools.reasons import FALLBACK
from warmfleet.pools.served_models import Pools
from warmfleet.settings import Settings

if TYPE_CHECKING:
    from warmfleet.api.access.operators import Operators
    from warmfleet.fleet import Fleet
    from warmfleet.routing.router import Router

IDLE_FLEET = ConstantsAlone()


def shown(made: object) -> str:
    """The text of a scrape after fixed calls. made: a module with the three classes."""
    registry = CollectorRegistry()
    counter = made.Counter("served", "text", ["status"], registry=registry)  # type: ignore[attr-defined]
    gauge = made.Gauge("open", "text", registry=registry)  # type: ignore[attr-defined]
    asked = made.Gauge("asked", "text", registry=registry)  # type: ignore[attr-defined]
    waits = made.Histogram("waits", "text", ["model"], registry=registry, buckets=(0.1, 0.5, 1.0))  # type: ignore[attr-defined]
    for status, amount in ((200, 1), ("200", 2.5), (404, 1)):
        counter.labels(status).inc(amount)
    gauge.inc()
    gauge.inc(3)
    gauge.dec()
    gauge.set(gauge._value.get() + 0.5)
    asked.set_function(lambda: 7)
    for seconds in (0.0, 0.1, 0.100001, 0.5, 0.99, 1.0, 1.01, 1e9):
        waits.labels("m").observe(seconds)
    return generate_latest(registry).decode()


def test_a_scrape_shows_what_the_library_would_show() -> None:
    Metrics()  # switches off the library's creation timestamps, as in a replica
    assert shown(metrics) == shown(prometheus_client)


def test_every_metric_is_one_of_ours() -> None:
    kinds = {type(one) for name, one in vars(Metrics()).items() if name != "registry"}
    assert kinds == {metrics.Counter, metrics.Gauge, metrics.Histogram}


def test_a_rate_sees_the_first_refusal_fallback_and_retry() -> None:
    """A sample that appears with its first event has no rate before the second: alerts and dashboards would miss it."""
    page = Metrics(("m",)).render().decode().splitlines()
    wanted = {f'warmfleet_queue_rejections_total{{model="m",reason="{word}"}} 0.0' for word in metrics.REJECTIONS}
    wanted |= {f'warmfleet_fallback_requests_total{{model="m",reason="{word}"}} 0.0' for word in metrics.FALLBACKS}
    wanted |= {f'warmfleet_retries_total{{where="{word}"}} 0.0' for word in ("same", "another")}
    assert wanted - set(page) == set()
    assert set(metrics.FALLBACKS) == set(FALLBACK)


async def test_requests_go_on_while_a_large_page_is_made() -> None:
    made = Metrics(("m",))
    router = SimpleNamespace(tenancy=None, pools=Pools([Pool("m", cast("Fleet", IDLE_FLEET), DegradedMode(1.0))]))
    routes = ServiceRoutes(
        cast("Router", router),
        *(cast("Any", None), Settings(), made, Health()),
        cast("Operators", SimpleNamespace(may_read_sums=lambda _: None)),
    )
    page = asyncio.create_task(routes.metrics(cast("Any", None)))
    turns = 0
    while not page.done():
        await asyncio.sleep(0)
        turns += 1
    families = sum(line.startswith(b"# HELP") for line in bytes(page.result().body).splitlines())
    assert families == sum(1 for _ in made.registry.collect())
    assert turns >= families > 50
