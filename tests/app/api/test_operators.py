"""Without an admin key, the port for operators answers the replica's own host alone if clients have keys."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from starlette.requests import Request
from tests.support.engines.scripted import engine
from tests.support.replicas.replica import replica

from warmfleet.api.access.operators import Operators, is_loopback
from warmfleet.api.http_connection import HttpConnection
from warmfleet.errors import Forbidden, Unauthorized
from warmfleet.fleet import Line
from warmfleet.fleet.queueing import Next, Queue
from warmfleet.prompt.engine_paths import OPERATORS, OWN_HOST
from warmfleet.settings import Settings

if TYPE_CHECKING:
    from tests.support.replicas.replica import Replica

TENANTS = {"tenant_key": "k" * 32}
HOME = "127.0.0.1"
FIRST = Next("wf-1", 4_000, 0.1, 0.2, 3, "w", has_room=False, any_has_room=True, to_compute_there_s=0.1)


def request(client: str, **headers: str) -> Request:
    """A request from ``client`` to a port of this host; ``headers`` may name another host."""
    headers = {"host": f"{HOME}:9090"} | headers
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "GET", "path": "/", "headers": raw, "client": (client, 0)})


@pytest.mark.parametrize(
    ("settings", "asked", "refused"),
    [
        ({}, request("10.0.0.9"), None),
        (TENANTS, request(HOME), None),
        (TENANTS, request("::ffff:127.0.0.1"), None),
        (TENANTS, request("10.0.0.9"), Forbidden),
        (TENANTS, request("unknown"), Forbidden),
        (TENANTS, request(HOME, x_forwarded_for="10.0.0.9"), Forbidden),
        (TENANTS, request(HOME, forwarded="for=10.0.0.9"), Forbidden),
        (TENANTS, request(HOME, x_real_ip="10.0.0.9"), Forbidden),
        (TENANTS, request(HOME, x_forwarded_proto="http"), Forbidden),
        (TENANTS, request(HOME, via="1.1 proxy"), Forbidden),
        (TENANTS, request("127.0.0.6"), Forbidden),
        (TENANTS, request(HOME, origin="https://page.example"), Forbidden),
        (TENANTS, request(HOME, host="page.example:9090"), Forbidden),
        (TENANTS, request(HOME, host="[::1"), Forbidden),
        (TENANTS, request(HOME, host=""), Forbidden),
        (TENANTS, request("::1", host="[::1]:9090"), None),
        (TENANTS, request(HOME, host="localhost:9090"), None),
        (TENANTS | {"admin_port": 0}, request(HOME), Forbidden),
        ({"client_keys_file": "f"}, request("10.0.0.9"), Forbidden),
        ({"answer_headers": "request_id"}, request("10.0.0.9"), Forbidden),
        (TENANTS | {"admin_key": "boss"}, request("10.0.0.9", authorization="Bearer boss"), None),
        (TENANTS | {"admin_key": "boss"}, request(HOME), Unauthorized),
    ],
)
def test_acting_is_for_the_key_or_the_own_host(
    settings: dict[str, Any], asked: Request, refused: type[Exception] | None
) -> None:
    operators = Operators(Settings(models=("m",), **settings))
    if refused is None:
        operators.may_act(asked)
        return
    with pytest.raises(refused, match="WARMFLEET_ADMIN_KEY"):
        operators.may_act(asked)
    if refused is Forbidden:
        operators.may_read_sums(asked)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_loopback_has_several_spellings(host: str) -> None:
    assert is_loopback(host)
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "unknown", "")))


async def line_of_one(_queue: Queue) -> Line:
    return Line(1, 0.1, {}, next=FIRST)


async def asked(router: Replica, path: str, **headers: str) -> tuple[int, dict[str, Any]]:
    method, query = ("GET", "?order=no") if path == "/why" else ("POST", "") if path in OWN_HOST else ("GET", "")
    url = router.operators + path + query
    async with router.client.request(method, url, headers=headers, data=b"{") as answer:
        body = await answer.read()
        return answer.status, json.loads(body) if answer.content_type == "application/json" else {}


async def test_other_hosts_read_sums_only(valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Queue, "poll", line_of_one)
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url, admin_port=1, **TENANTS) as router:
        assert (await router.post({"model": model, "prompt": "Hi"}))[0] == 200
        at_home = (await asked(router, "/status.json"))[1]
        assert at_home["models"][0]["decisions"]
        assert at_home["slow"]
        assert not at_home["hidden"]
        for path in "/workers", "/status.json":
            queue = (await asked(router, path))[1]["models"][0]["queue"]
            assert queue["next"]["to_compute_s"] == FIRST.to_compute_s, "the rest of that prompt is cached"
        for path in OWN_HOST:
            assert (await asked(router, path))[0] == 400, "the own host is heard"

        async def sums_only(**headers: str) -> None:
            for path in OPERATORS - OWN_HOST:
                assert (await asked(router, path, **headers))[0] == 200, path
            page = (await asked(router, "/status.json", **headers))[1]
            assert page["models"][0]["decisions"] == []
            assert page["models"][0]["decided"] == 1
            assert page["slow"] == []
            assert "WARMFLEET_ADMIN_KEY" in page["hidden"]
            for path in "/workers", "/status.json":
                queue = (await asked(router, path, **headers))[1]["models"][0]["queue"]
                assert (queue["waiting"], queue["next"]) == (1, None), path
            for path in OWN_HOST:
                status, told = await asked(router, path, **headers)
                error = told["error"]
                assert (status, error["type"], error["code"]) == (403, "permission_error", "forbidden"), path
                assert "WARMFLEET_ADMIN_KEY" in error["message"]

        await sums_only(**{"X-Forwarded-For": "10.0.0.9"})
        monkeypatch.setattr(HttpConnection, "peer", lambda _connection: "10.0.0.9")
        await sums_only()
