"""Only operators reach some paths of a replica, and each path has a single accepted spelling."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from tests.support.engines.scripted import engine
from tests.support.replicas.replica import replica

from warmfleet.errors import BadArgument
from warmfleet.settings import Settings

if TYPE_CHECKING:
    from tests.support.replicas.replica import Replica

OPERATORS = (("GET", "/metrics"), ("GET", "/workers"), ("GET", "/replicas"), ("POST", "/explain"))
GATEWAYS = (("POST", "/route"), ("POST", "/renew"), ("POST", "/settle"))
HEALTH = (("GET", "/livez"), ("GET", "/readyz"), ("GET", "/health"), ("POST", "/ping"), ("GET", "/version"))


async def asked(url: str, method: str, target: str) -> tuple[int, bytes]:
    """The status and body of the answer to a request over a new socket; ``target`` is sent without normalization."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode("latin-1"))
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return int(answer.split(b" ", 2)[1]), answer.partition(b"\r\n\r\n")[2]


async def test_operators_have_a_port_of_their_own(valkey_url: str, model: str) -> None:
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url, admin_port=1) as router:
        assert router.operators != router.url
        for method, path in (*OPERATORS, *GATEWAYS):
            assert (await asked(router.url, method, path))[0] == 404, path
            assert (await asked(router.operators, method, path))[0] in (200, 400), path
        for method, path in HEALTH:
            for url in (router.url, router.operators):
                assert (await asked(url, method, path))[0] == 200, (url, path)
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/v1/audio/anything")):
            assert (await asked(router.operators, method, path))[0] == 404, path
        assert (await router.post({"model": model, "prompt": "hi"}))[0] == 200


async def test_the_operators_port_has_the_operators_key(valkey_url: str, model: str) -> None:
    async with replica(valkey_url, model, admin_port=1, admin_key="boss") as router:
        for method, path in (*OPERATORS, *GATEWAYS):
            assert (await asked(router.operators, method, path))[0] == 401, path
            assert (await asked(router.url, method, path))[0] == 404, path
        assert (await asked(router.operators, "GET", "/readyz"))[0] != 401


@pytest.mark.parametrize("guard", [{"TENANT_KEY": "t" * 32}, {"CLIENT_KEYS_FILE": "keys.jsonl"}])
def test_clients_that_are_kept_apart_need_a_key_for_operators(guard: dict[str, str]) -> None:
    environment = {f"WARMFLEET_{name}": value for name, value in guard.items()}
    with pytest.raises(BadArgument, match="set WARMFLEET_ADMIN_KEY or WARMFLEET_ADMIN_PORT") as refused:
        Settings.from_environment(environment | {"WARMFLEET_ADMIN_PORT": "0"})
    assert "t" * 32 not in str(refused.value)
    for mend in ({"WARMFLEET_ADMIN_KEY": "boss", "WARMFLEET_ADMIN_PORT": "0"}, {"WARMFLEET_ADMIN_PORT": "9191"}, {}):
        Settings.from_environment(environment | mend)


#: A spelling of a path -> the status with which a replica without an operators' key answers GET.
SPELLINGS = {
    "/workers": 200,
    "/workers?a=%65//..": 200,
    "http://elsewhere/workers": 200,
    "/work%65rs": 400,
    "/work%45rs": 400,
    "/%77orkers": 400,
    "/%2e%2e/workers": 400,
    "/x%2D": 400,
    "/x/../workers": 400,
    "/x/..": 400,
    "/./workers": 400,
    "/workers/.": 400,
    "//workers": 400,
    "/workers//": 400,
    "/x%2F..%2fworkers": 400,
    "/%2fworkers": 400,
    "/x%5c..%5Cworkers": 400,
    "/x\\..\\workers": 400,
    "/workers%00": 400,
    "/workers%0a": 400,
    "/workers%7F": 400,
    "/workers#x": 400,
    "/workers%": 400,
    "/workers%zz": 400,
    "/workers\xe9": 400,
    "/workers%20": 404,
    "/workers;x": 404,
    "/work%2565rs": 404,
    "/workers/": 404,
    "/WORKERS": 404,
    "/...": 404,
    "/v1/models/no/such": 404,
    "/v1/models/no%2Fsuch": 404,
    "/v1/models/no%20such%3A%C3%A9": 404,
    "/v1/models/%2Fno%2fsuch": 404,
    "/v1/models/%2F%2Fno": 400,
    "/v1/models//no": 400,
    "/v1/models/%2F..%2F..%2Fworkers": 400,
    "/v1/models/%2F/workers": 400,
    "/v1/models/%2e%2e/workers": 400,
    "/v1/models/..%2F..%2fworkers": 400,
    "/v1/models/x%2F%2fy": 400,
    "/v1/models/../../workers": 400,
    "/v1%2Fmodels": 400,
}


async def test_a_path_has_one_spelling(valkey_url: str, model: str) -> None:
    """A proxy in front compares paths as clients send them; its rules hold because no other spelling works here."""
    async with replica(valkey_url, model) as router:
        assert {spelling: await status(router, spelling) for spelling in SPELLINGS} == SPELLINGS


async def status(router: Replica, spelling: str) -> int:
    return (await asked(router.url, "GET", spelling))[0]


@pytest.mark.parametrize("above", ["", "/"])
async def test_models_are_found_under_an_escaped_name(valkey_url: str, model: str, above: str) -> None:
    """Official clients escape a slash in the name of a model; by default vLLM names a model by its folder."""
    name = f"{above}{model}/7b"
    async with engine(name) as upstream, replica(valkey_url, f"{model}/7b", upstream.url) as router:
        for path in (name, name.replace("/", "%2F"), name.replace("/", "%2f")):
            wanted = 400 if path.startswith("/") else 200  # an empty segment: many proxies would remove it
            assert (await asked(router.url, "GET", f"/v1/models/{path}"))[0] == wanted, path
