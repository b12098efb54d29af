"""The paths of engines that a replica passes on, those that it refuses, and pages of other origins."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from tests.support.engines.scripted import Engine, Seen, engine, reply
from tests.support.engines.simulated import simulated
from tests.support.replicas.replica import Replica, replica

from warmfleet.prompt.engine_paths import KNOWN, NEVER

ORIGIN = "https://chat.example.com"
UNREAD = [path for path, known in KNOWN.items() if known.form in ("unknown", "none")]


async def answer_any(_engine: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
    reply(writer, json.dumps({"path": seen.path, "bytes": len(seen.body)}).encode())


def code_of(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


async def test_every_known_path_passes_its_body_on_unchanged(valkey_url: str, model: str) -> None:
    async with engine(model, answer_any) as upstream, replica(valkey_url, model, upstream.url) as router:
        for path in UNREAD:
            body = json.dumps({"model": model, "input": ["some text"] * 40, "spaces": "kept"}).encode()
            status, headers, answer = await router.post(body, path)
            assert (status, json.loads(answer)["path"]) == (200, path)
            assert upstream.seen[-1].body == body
            assert headers["x-warmfleet-reservation"] == "booked"
            booked = int(headers["x-warmfleet-prompt-tokens"])
            assert booked == (1 if KNOWN[path].form == "none" else 95), path
        await router.unloaded()
        told = await router.metric('warmfleet_load_only_requests_total{reason="endpoint"}')
        assert told == len(UNREAD)
        reranked = await router.metric('warmfleet_requests_total{endpoint="rerank",reservation="booked",status="200"}')
        assert reranked == sum(KNOWN[path].name == "rerank" for path in UNREAD)


async def test_a_form_names_its_model_in_a_field(valkey_url: str, model: str) -> None:
    form = aiohttp.FormData()
    form.add_field("file", b"\r\n\r\n" + bytes(range(256)) * 1_000, filename="model.wav", content_type="audio/wav")
    form.add_field("model", model)
    other = aiohttp.FormData()
    other.add_field("file", b"RIFF", filename="a.wav")
    other.add_field("model", "no/such")
    path = "/v1/audio/transcriptions"
    async with engine(model, answer_any) as upstream, replica(valkey_url, model, upstream.url) as router:
        async with router.client.post(router.url + path, data=form) as answer:
            assert (answer.status, answer.headers["x-warmfleet-prompt-tokens"]) == (200, "640")
        assert upstream.seen[-1].headers["content-type"].startswith("multipart/form-data; boundary=")
        assert len(upstream.seen[-1].body) > 256_000
        async with router.client.post(router.url + path, data=other) as answer:
            assert (answer.status, code_of(await answer.read())) == (404, "model_not_found")
        assert len(upstream.seen) == 1
        await router.unloaded()


async def test_a_request_without_a_model_goes_to_the_only_one(replica_and_engine: tuple[Replica, Engine]) -> None:
    router, upstream = replica_and_engine
    status, _, _ = await router.post({"tokens": [1, 2]}, "/detokenize")
    assert (status, upstream.seen[-1].path) == (200, "/detokenize")
    status, _, body = await router.post({"model": 7}, "/detokenize")
    assert (status, json.loads(body)["error"]["param"]) == (400, "model")
    status, _, body = await router.post(b"[1]", "/detokenize")
    assert (status, code_of(body)) == (400, "bad_request")
    status, _, body = await router.post({"chat_template": "x", "messages": []}, "/tokenize")
    assert (status, json.loads(body)["error"]["param"]) == (400, "chat_template")


async def test_many_requests_without_a_body_pass_at_once(valkey_url: str, model: str) -> None:
    async with engine(model, answer_any) as upstream, replica(valkey_url, model, upstream.url) as router:
        answers = await asyncio.gather(*(router.post(b"", "/rerank") for _ in range(20)))
    assert [status for status, _, _ in answers] == [200] * 20


@pytest.mark.parametrize("patterns", [(), ("/*",)])
async def test_paths_that_steer_an_engine_never_pass(valkey_url: str, model: str, patterns: tuple[str, ...]) -> None:
    below = ["/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/adapters/a", "/v1/models/x/y", "/static/a.js"]
    odd = ["/v1/audio/../sleep", "/v1/audio//speech", "/v1/audio/%2e%2e/sleep", "/sleep/", "//sleep", "/%73leep"]
    async with engine(model, answer_any) as upstream:
        more: dict[str, Any] = {"passed_paths": patterns} if patterns else {}
        async with replica(valkey_url, model, upstream.url, **more) as router:
            for path in (*sorted(NEVER), *below, *odd):
                status = await sent(router, "POST", path)
                assert status in (400, 404, 405), (path, status)
            assert not upstream.seen


async def sent(router: Replica, method: str, path: str) -> int:
    """The status of the answer to a request whose path is sent without normalization."""
    host, port = router.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{{}}".encode())
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1])


async def test_an_operator_names_further_paths(valkey_url: str, model: str) -> None:
    async with engine(model, answer_any) as upstream:
        patterns = ("/v1/images/*", "/v1/moderations")
        async with replica(valkey_url, model, upstream.url, passed_paths=patterns) as router:
            status, _, answer = await router.post({"model": model}, "/v1/images/generations?size=1%20a")
            assert (status, json.loads(answer)["path"]) == (200, "/v1/images/generations?size=1%20a")
            assert (await router.post({}, "/v1/moderations"))[0] == 200
            assert (await router.post({}, "/v1/moderations/x"))[0] == 404
            assert (await router.post({}, "/v1/audio/speech"))[0] == 404
            assert (await router.get("/v1/images/1"))[0] == 200
            async with router.client.delete(router.url + "/v1/images/1") as answer_:
                assert (answer_.status, answer_.headers["allow"]) == (405, "GET, POST")
            await router.unloaded()


async def test_models_and_health_as_vllms_server_has_them(valkey_url: str, model: str) -> None:
    async with simulated(valkey_url, model), replica(valkey_url, model) as router:
        await router.routable(1)
        status, body = await router.get(f"/v1/models/{model}")
        assert (status, json.loads(body)["id"]) == (200, model)
        status, body = await router.get("/v1/models/no/such")
        assert (status, code_of(body)) == (404, "model_not_found")
        assert (await router.get("/v1/models/"))[0] == 404
        assert (await router.get("/health"))[0] == (await router.get("/ping"))[0] == 200
        assert (await router.post({}, "/ping"))[0] == 200
        version = json.loads((await router.get("/version"))[1])
        assert version["engines"] == {version["version"]: 1}


async def test_a_page_of_a_named_origin_may_call(valkey_url: str, model: str) -> None:
    asks = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    async with engine(model) as upstream:
        async with replica(valkey_url, model, upstream.url, cors_origins=(ORIGIN,)) as router:
            for path in ("/v1/completions", "/v1/models"):
                async with router.client.options(router.url + path, headers=asks) as answer:
                    assert (answer.status, answer.headers["access-control-allow-headers"]) == (204, "x-a")
                    assert answer.headers["access-control-allow-origin"] == ORIGIN
            _, headers, _ = await router.post({"model": model, "prompt": "hi"}, Origin=ORIGIN)
            assert headers["access-control-allow-origin"] == ORIGIN
            _, headers, _ = await router.post({"model": model, "prompt": "hi"}, Origin="https://evil.example.com")
            assert "access-control-allow-origin" not in headers
        async with (
            replica(valkey_url, model, upstream.url) as router,
            router.client.options(router.url + "/v1/completions", headers=asks) as answer,
        ):
            assert (answer.status, answer.headers["allow"]) == (405, "POST")
            assert "access-control-allow-origin" not in answer.headers


async def test_a_tenants_salt_goes_only_where_engines_read_it(valkey_url: str, model: str) -> None:
    key = "a secret of the operator"
    async with (
        engine(model, answer_any) as upstream,
        replica(valkey_url, model, upstream.url, tenant_key=key) as router,
    ):
        for path in UNREAD:
            await router.post({"model": model, "cache_salt": "mine"}, path, Authorization="Bearer x")
            salt = upstream.seen[-1].json["cache_salt"]
            assert (salt != "mine") == KNOWN[path].takes_salt, path
