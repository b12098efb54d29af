"""Routers and the plugin accept Redis' certificate only from the authority in their settings, and log refusals."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from tests.support.polling import poll, until
from tests.support.redis.servers import PATIENT
from tests.support.redis.topology import tls_server

from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local.store import check_store
from warmfleet.errors import BadArgument, FleetUnavailable
from warmfleet.fleet import Fleet, connect
from warmfleet.main import create_app
from warmfleet.settings import Settings
from warmfleet_worker.config import PublisherConfig
from warmfleet_worker.protocol import wire
from warmfleet_worker.protocol.redis_address import RedisAddressError, with_ca
from warmfleet_worker.tracker import Tracker
from warmfleet_worker.worker_publisher import WorkerPublisher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.redis.topology import Secured

SCHEME = wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor"), 16)


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    with tls_server() as made:
        yield made


def publisher(url: str, model: str, tracker: Tracker) -> WorkerPublisher:
    return WorkerPublisher(PublisherConfig(url, model, "w1.0", "w1", 0, SCHEME, 9_999, 32_768, "test"), tracker)


@pytest.mark.parametrize("by", ["setting", "option", "sentinel"])
async def test_both_ways_over_tls(secured: Secured, model: str, by: str) -> None:
    url = f"{secured.url}&ssl_ca_certs={secured.ca}"
    if by != "option":
        url = with_ca(secured.sentinel_url if by == "sentinel" else secured.url, str(secured.ca))
    tracker = Tracker()
    tracker.stored([os.urandom(8) for _ in range(300)])
    core = publisher(url, model, tracker)
    fleet = Fleet(connect(url, timeout_s=5), model, timeouts=PATIENT)
    core.start()

    async def indexed() -> bool:
        await fleet.upkeep.step()
        [*views] = await fleet.workers.read()
        return bool(views) and await fleet.index.holds(views[0].record["slot"], list(tracker.table)) == [True] * 300

    await poll(indexed)
    await asyncio.to_thread(core.stop, 5)
    await fleet.close()


async def test_a_wrong_authority_is_named_to_the_router(secured: Secured, model: str) -> None:
    fleet = Fleet(connect(with_ca(secured.url, str(secured.other_ca)), timeout_s=5), model, timeouts=PATIENT)
    with pytest.raises(FleetUnavailable, match=r"WARMFLEET_REDIS_CA.*certificate verify failed"):
        await fleet.index.counts()
    await fleet.close()


async def test_a_wrong_authority_is_named_in_the_plugins_log(
    secured: Secured, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "warmfleet")
    core = publisher(with_ca(secured.url, str(secured.other_ca)), model, Tracker())
    core.start()
    await poll(lambda: core.state.errors > 0)
    await asyncio.to_thread(core.stop, 5)
    assert "certificate verify failed" in caplog.text
    assert "WARMFLEET_REDIS_CA" in caplog.text


async def test_who_has_no_certificate_stays_out(secured: Secured, model: str) -> None:
    for url in (f"rediss://127.0.0.1:{secured.port}?ssl_ca_certs={secured.ca}", f"redis://127.0.0.1:{secured.port}"):
        fleet = Fleet(connect(url, timeout_s=5), model, timeouts=PATIENT)
        with pytest.raises(FleetUnavailable):
            await fleet.index.counts()
        await fleet.close()


@pytest.mark.parametrize(
    ("url", "ca", "why"),
    [
        ("redis://127.0.0.1", "/any.pem", "does not begin with rediss"),
        ("rediss://127.0.0.1", "/not/there.pem", "ssl_ca_certs=/not/there.pem: there is no such file"),
        ("rediss://127.0.0.1?ssl_certfile=/not/there", "", "ssl_certfile=/not/there: there is no such file"),
        ("http://127.0.0.1", "", "begins with redis://"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_start(url: str, ca: str, why: str) -> None:
    with pytest.raises(BadArgument, match=f"WARMFLEET_REDIS_URL.* {why}"):
        create_app(Settings(models=("m",), redis_url=url, redis_ca=ca))
    with pytest.raises(RedisAddressError, match=why):
        publisher(with_ca(url, ca), "m", Tracker())


def test_warmfleet_up_looks_for_the_store_with_tls(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMFLEET_REDIS_CA", str(secured.ca))
    assert check_store(secured.url) == with_ca(secured.url, str(secured.ca))
    answered: list[str] = []

    def answers() -> bool:
        with suppress(CommandError):  # a handshake takes longer on a busy machine
            answered.append(check_store(secured.sentinel_url))
        return bool(answered)

    until(answers, "a Sentinel names the master", 30)
    assert answered == [with_ca(secured.sentinel_url, str(secured.ca))]
    monkeypatch.setenv("WARMFLEET_REDIS_CA", str(secured.other_ca))
    with pytest.raises(CommandError, match="certificate verify failed"):
        check_store(secured.url)
    with pytest.raises(CommandError, match="rediss"):
        check_store("redis://127.0.0.1")
