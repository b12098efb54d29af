"""Requests go to allowed addresses only, and a machine that vanished is noticed."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
from tests.app.engine import Engine, Seen, engine, reset
from tests.app.replica import replica

from warmfleet.background.stock_engines import worker_id
from warmfleet.engines.allowed_addresses import Addresses
from warmfleet.engines.upstream import TCP_OPTIONS, Upstream
from warmfleet.errors import UpstreamError, UpstreamGone
from warmfleet.pools import fleet_view as view
from warmfleet.prompt.request import TOKEN_BYTES
from warmfleet.settings import Settings
from warmfleet_worker.protocol.wire import check_name

if TYPE_CHECKING:
    import asyncio


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://10.1.2.3:8000", True),
        ("https://192.168.1.1", True),
        ("http://[::1]:8000", True),
        ("http://[::ffff:127.0.0.1]:8000", True),
        ("http://engine.example:8000", True),  # a name: the resolver decides
        ("http://8.8.8.8:8000", False),
        ("http://169.254.169.254/latest", False),
        ("http://[::ffff:8.8.8.8]:1", False),
        ("file:///etc/passwd", False),
        ("http://", False),
    ],
)
def test_addresses(url: str, allowed: bool) -> None:
    addresses = Addresses(Settings().worker_addresses)
    if allowed:
        addresses.check(url)
    else:
        with pytest.raises(UpstreamError):
            addresses.check(url)


def test_hosts_of_the_settings_are_always_allowed() -> None:
    Addresses((), ["http://8.8.8.8:1", "http://Gpu1:8000"]).check("http://8.8.8.8:1")
    assert Addresses((), ["http://Gpu1:8000"]).allows("gpu1")


async def test_a_name_that_resolves_elsewhere_is_not_asked() -> None:
    upstream = Upstream(Addresses(("10.0.0.0/8",)), 1.0)
    await upstream.open()
    with pytest.raises(UpstreamGone):
        await upstream.send("POST", "http://localhost:9", "/v1/completions", b"{}", {})
    await upstream.close()


async def test_connections_notice_a_machine_that_vanished(model: str) -> None:
    upstream = Upstream(Addresses(Settings().worker_addresses), 1.0)
    await upstream.open()
    async with engine(model) as one:
        answer = await upstream.send("POST", one.url, "/v1/completions", b'{"stream": true, "max_tokens": 500}', {})
        assert answer.connection is not None
        assert answer.connection.transport is not None
        made = answer.connection.transport.get_extra_info("socket")
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = [getattr(socket, name) for name in TCP_OPTIONS]
        assert [made.getsockopt(socket.IPPROTO_TCP, option) for option in options] == list(TCP_OPTIONS.values())
        answer.close()
    await upstream.close()


@pytest.mark.parametrize(
    ("url", "name"), [("http://gpu1:8000", "gpu1-8000"), ("https://a/", "a-443"), ("http://[::1]:80", "--1-80")]
)
def test_static_workers_are_named_by_host_and_port(url: str, name: str) -> None:
    assert worker_id(url) == name


def test_static_workers_that_host_and_port_do_not_tell_apart_have_names_of_their_own() -> None:
    urls = ["http://gpu1:8000/a", "http://gpu1:8000/b", *(f"http://{first * 60}.{'x' * 60}:8000" for first in "ab")]
    names = {check_name(worker_id(url)) for url in urls}
    assert len(names) == len(urls)


async def test_a_prompt_too_long_for_every_engine_is_tried_once(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt may be what killed the first engine."""
    monkeypatch.setattr(view, "MAX_MODEL_LEN", 1_000)

    async def fails(_: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        reset(writer)

    async with (
        engine(model, fails) as one,
        engine(model, fails) as other,
        replica(valkey_url, model, one.url, other.url) as router,
    ):
        status, _, _ = await router.post({"model": model, "prompt": "x" * (1_000 * TOKEN_BYTES + 1)})
        assert status == 502
        assert bool(one.seen) != bool(other.seen)
        assert await router.metric('warmfleet_retries_total{where="another"}') == 0
        assert await router.metric('warmfleet_load_only_total{reason="too_long"}') == 1
        await router.unloaded()
