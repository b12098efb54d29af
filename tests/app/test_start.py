"""A new replica answers requests that come before its first reading of the fleet."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from typing import Any

import pytest
from tests.support.engines.scripted import engine
from tests.support.redis.gate import gate
from tests.support.replicas.replica import replica

from warmfleet import main
from warmfleet.api.listening.server import Sockets
from warmfleet.errors import BadArgument, FleetUnavailable
from warmfleet.fleet import Fleet, connect
from warmfleet.main import create_app
from warmfleet.pools import served_models
from warmfleet.settings import Settings


async def test_requests_wait_for_the_first_reading_of_a_slow_redis(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reading takes several answers of Redis, so longer than the last look of a request that cannot be placed."""
    monkeypatch.setattr(served_models, "FIRST_READING_S", 60.0)
    async with engine(model) as upstream, gate(valkey_url) as door:
        door.delay_s = 0.15
        async with (
            replica(valkey_url, model, upstream.url),
            replica(f"redis://127.0.0.1:{door.port}", model, look_url=valkey_url, decide_timeout_s=0.05) as started,
        ):
            answers = await asyncio.gather(*(started.post({"model": model, "prompt": "x" * 100}) for _ in range(4)))
            assert [status for status, _, _ in answers] == [200] * 4


async def test_without_redis_all_wait_together_and_not_for_long(model: str) -> None:
    async with replica("unix:///nowhere/at/all", model) as started:

        async def ask(name: str) -> float:
            began = time.monotonic()
            status, headers, body = await started.post({"model": name, "prompt": "x" * 100})
            error = json.loads(body)["error"]
            assert (status, headers["retry-after"], error["code"]) == (503, "1", "fleet_unavailable")
            assert "Redis" in error["message"]
            return time.monotonic() - began

        early = asyncio.create_task(ask(model))
        await asyncio.sleep(0.6)
        late = await ask("an adapter of it, perhaps")
        first = await early
        assert 0.9 < first < 5
        assert late < first - 0.3, "it waited with the first one, not as long again"
        assert min([await ask(model) for _ in range(3)]) < first / 2, "nobody waits any more"


def test_the_first_lines_tell_who_this_is_and_what_it_needs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmfleet")
    with socket.create_server(("127.0.0.1", 0)) as clients, socket.create_server(("127.0.0.1", 0)) as operators:
        settings = Settings(models=("a", "b#2"), redis_url="rediss://me:hidden@store:6380/0", policy="sticky")
        main._tell_of_the_start(settings, Sockets([clients, clients], [operators]))
        ports = [listener.getsockname()[1] for listener in (clients, operators)]
    first, *addresses, _keys = caplog.messages
    assert first.endswith(" routes for a, b#2 by policy sticky. It needs Redis at store:6380 first")
    assert addresses == [f"for clients: http://127.0.0.1:{ports[0]}", f"for operators: http://127.0.0.1:{ports[1]}"]
    assert "hidden" not in caplog.text


@pytest.mark.parametrize(
    "guard", [{"client_keys_file": "keys.jsonl"}, {"tenant_key": "t" * 32}, {"answer_headers": "request_id"}, {}]
)
@pytest.mark.parametrize("host", ["", "127.0.0.1"])
@pytest.mark.parametrize("admin_key", ["", "boss"])
def test_an_open_port_for_operators_is_warned_of(
    guard: dict[str, Any], host: str, admin_key: str, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as clients, socket.create_server((host, 0)) as operators:
        settings = Settings(models=("a",), admin_key=admin_key, **guard)
        main._tell_of_the_start(settings, Sockets([clients], [operators]))
        port = operators.getsockname()[1]
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == (1 if guard and not host and not admin_key else 0)
    assert all(
        f"WARMFLEET_ADMIN_KEY is not set: everybody who reaches port {port} of 0.0.0.0 " in warning
        for warning in warned
    )


def test_a_model_may_have_several_pools_but_none_twice() -> None:
    with pytest.raises(BadArgument, match="names a pool twice"):
        create_app(Settings(models=("demo#a", "other", "demo#a")))
    create_app(Settings(models=("demo#a", "other#a", "demo#b")))


async def test_a_wrong_password_is_told_in_one_sentence(valkey_url: str, model: str) -> None:
    fleet = Fleet(connect(valkey_url.replace("://", "://nobody:wrong@", 1)), model)
    told = "^Redis refuses the user or the password, see WARMFLEET_REDIS_URL: "
    try:
        with pytest.raises(FleetUnavailable, match=told) as by_reading:
            await fleet.workers.read()
        with pytest.raises(FleetUnavailable, match=told) as by_script:
            await fleet.bookings.settle("wf-0" + "a" * 21, "finished")
    finally:
        await fleet.close()
    assert "wrong@" not in str(by_reading.value) + str(by_script.value)


async def test_an_engine_that_is_found_is_used_at_once(valkey_url: str, model: str) -> None:
    """A replica uses a found engine before its next reading of the fleet."""
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url, view_interval_s=600.0) as router:
        assert (await router.post({"model": model, "prompt": "hello"}))[0] == 200
