"""Error messages name the models that are served, the path that was probably meant, and a remedy."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from tests.support.engines.scripted import engine
from tests.support.replicas.replica import replica

from warmfleet.api.error_answers import UnknownPath
from warmfleet.pools.fleet_view import View
from warmfleet.pools.served_models import NAMED_MODELS, Pools
from warmfleet.prompt.engine_paths import KNOWN

if TYPE_CHECKING:
    from tests.support.replicas.replica import Replica

PATHS = UnknownPath([*KNOWN, "/v1/models", "/v1/models/{model:path}", "/readyz", "/version"])


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chta/completions", "/v1/chat/completions"),
        ("/v1/completions/", "/v1/completions"),
        ("/v1/model", "/v1/models"),
        ("/ready", "/readyz"),
    ],
)
def test_the_path_that_was_meant(path: str, meant: str) -> None:
    assert PATHS._hint(path) == f"Did you mean {meant}?"


@pytest.mark.parametrize("path", ["/", "/admin", "/wp-login.php", "/v1/chat/completions" * 100, ""])
def test_a_path_that_resembles_none(path: str) -> None:
    assert PATHS._hint(path) == ""


async def test_the_port_for_operators_names_the_status_page() -> None:
    for paths, hint in (((), ""), (("/status",), " The status page is /status.")):
        ask = Request({"type": "http", "method": "GET", "path": "/", "headers": []})
        answer = await UnknownPath(paths).handle(ask, HTTPException(404))
        told = json.loads(bytes(answer.body))["error"]["message"]
        assert told == f"GET / is not served here.{hint} GET /openapi.json lists every path."


def test_the_port_for_operators_sends_clients_to_theirs() -> None:
    hint = "This port is for operators; clients ask WARMFLEET_PORT."
    assert UnknownPath(["/status", "/metrics"])._hint("/v1/chat/completions") == hint
    assert UnknownPath([*KNOWN, "/v1/models", "/status"])._hint("/v1/nothing") == "The status page is /status.", (
        "one port for all"
    )


def test_paths_that_are_served_elsewhere() -> None:
    assert "WARMFLEET_ADMIN_PORT" in PATHS._hint("/metrics")
    for path in ("/sleep", "/v1/responses/resp_1/cancel"):
        assert PATHS._hint(path) == "It is about one engine: ask that engine itself."


def pools(*names: str) -> Pools:
    made: Any = [SimpleNamespace(name=name, tag=name, view=View()) for name in names]
    return Pools(made)


def test_an_unknown_model_names_the_models_of_the_client() -> None:
    found = pools("b", "a", "c")
    assert found.not_found("x").message == "The model `x` does not exist here. Served are: `a`, `b`, `c`."
    assert found.not_found("x", frozenset({"a", "z"})).message.endswith(" Served are: `a`.")
    assert found.not_found("x", frozenset({"z"})).message.endswith(" There is none that this key may use.")
    many = pools(*(f"{number:03}" + "x" * 500 for number in range(200))).not_found("y" * 1_000)
    assert many.message.endswith(f" and {200 - NAMED_MODELS} more, which GET /v1/models lists.")
    assert len(many.message) < 2_000


async def message(router: Replica, wanted: int, body: Any, path: str = "/v1/completions") -> str:
    status, _, answer = await router.post(body, path)
    error = json.loads(answer)["error"]
    assert status == wanted, error
    return cast("str", error["message"])


async def test_over_http(valkey_url: str, model: str) -> None:
    async with replica(valkey_url, model) as router:
        ask = {"model": model, "prompt": "x"}
        told = await message(router, 503, ask)
        assert told.startswith(f"No engine of `{model}` has joined this fleet.")
        assert "WARMFLEET_STATIC_WORKERS" in told
        assert "`warmfleet doctor`" in told
        assert f"`{model}`" in await message(router, 404, {"model": "no", "prompt": "x"})
        told = await message(router, 404, ask, "/v1/completion")
        assert told.endswith("Did you mean /v1/completions? GET /openapi.json lists every path.")
        assert "It takes " in await message(router, 405, ask, "/v1/models")
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url, admin_port=1) as router:
        assert "It is for operators" in await message(router, 404, ask, "/explain")
        (worker,) = await router.fleet.workers.read()
        await router.fleet.workers.drain(worker.worker_id, draining=True)
        assert f"The only engine of `{model}` takes no requests" in await message(router, 503, ask)
