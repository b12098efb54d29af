"""Keys of clients decide about access to models; replicas follow changes of the file of keys while they run."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import aiohttp
import pytest
from tests.support.engines.scripted import engine
from tests.support.polling import poll
from tests.support.replicas.replica import replica
from tests.support.requests.client_keys import line, put

from warmfleet.__main__ import main
from warmfleet.api.access.client_keys import parse
from warmfleet.errors import BadArgument
from warmfleet.main import create_app
from warmfleet.routing.tenants import Tenancy
from warmfleet.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.replicas.replica import Replica

GOOD = {"authorization": "Bearer wf-good"}
AUDIO = "/v1/audio/transcriptions"
FAILURES = 'warmfleet_task_failures_total{task="client_keys"}'


def form(model: str) -> bytes:
    return f'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n--b--\r\n'.encode()


@pytest.fixture
def keys(tmp_path: Path, model: str) -> Path:
    path = tmp_path / "keys.jsonl"
    path.write_text(f"# a comment\n\n{line('team-a', 'wf-good')}{line('elsewhere', 'wf-other', models=['other'])}")
    return path


async def status(router: Replica, model: str, **headers: str) -> int:
    return (await router.post({"model": model, "prompt": "hi"}, **headers))[0]


async def test_nothing_is_served_without_a_key(valkey_url: str, model: str, keys: Path) -> None:
    async with (
        engine(model) as upstream,
        replica(valkey_url, model, upstream.url, client_keys_file=str(keys)) as router,
        aiohttp.ClientSession(router.url) as client,
    ):
        refused = [{}, {"authorization": "Bearer wf-bad"}, {"authorization": "wf-good"}, {"authorization": "Bearer "}]
        refused += [{"x-api-key": "wf-bad"}, {"x-api-key": ""}, {"x-api-key": "wf-good", "authorization": "Basic eA=="}]
        for headers in refused:
            assert await status(router, model, **headers) == 401, headers
        for path in ("/v1/embeddings", "/tokenize", AUDIO, "/v1/audio/anything", "/v1/completions?x=1"):
            code, told, body = await router.post({"model": model, "input": "hi"}, path)
            assert (code, told["www-authenticate"], json.loads(body)["error"]["code"]) == (
                401,
                "Bearer",
                "unauthorized",
            )
            assert b"wf-" not in body
        for path in ("/v1/models", f"/v1/models/{model}"):
            assert (await router.get(path))[0] == 401
        for path in ("/livez", "/readyz", "/health", "/ping", "/version"):
            assert (await router.get(path))[0] == 200
        twice = [("authorization", "Bearer wf-good"), ("authorization", "Bearer wf-bad")]
        async with client.post("/v1/completions", json={"model": model, "prompt": "hi"}, headers=twice) as answer:
            assert answer.status == 401
        assert not upstream.seen
        assert await router.load() == 0


async def test_engines_never_see_a_clients_key(valkey_url: str, model: str, keys: Path) -> None:
    async with engine(model) as upstream:
        async with replica(valkey_url, model, upstream.url, client_keys_file=str(keys)) as router:
            for headers in (GOOD, {"authorization": "bearer  wf-good"}, {"x-api-key": "wf-good"}):
                assert await status(router, model, **headers) == 200
            assert await status(router, model, **GOOD, **{"x-api-key": "wf-bad"}) == 200
        assert len(upstream.seen) == 4
        assert not [seen for seen in upstream.seen if "wf-good" in str(seen) or "authorization" in seen.headers]
        settings = {"client_keys_file": str(keys), "worker_api_key": "engines"}
        async with replica(valkey_url, model, upstream.url, **settings) as router:
            assert await status(router, model, **GOOD) == 200
        assert upstream.seen[-1].headers["authorization"] == "Bearer engines"


async def test_a_key_is_for_its_models(valkey_url: str, model: str, keys: Path) -> None:
    put(keys, line("team-c", "wf-mine", models=[model, "x"]) + line("elsewhere", "wf-other", models=["other"]))
    async with (
        engine(model) as upstream,
        replica(valkey_url, model, upstream.url, client_keys_file=str(keys)) as router,
    ):
        mine, other = {"authorization": "Bearer wf-mine"}, {"x-api-key": "wf-other"}
        assert await status(router, model, **mine) == 200
        for named in (model, ""):  # a replica with a single model serves requests that name no model
            code, _, body = await router.post({"model": named, "prompt": "hi"}, **other)
            assert (code, json.loads(body)["error"]["code"]) == (404, "model_not_found")
        assert (await router.post(b"", AUDIO, **other))[0] == 404
        _, _, strange = await router.post({"model": "none/such", "prompt": "hi"}, **other)
        assert strange.replace(b"none/such", model.encode()) == body.replace(b"``", f"`{model}`".encode())
        for headers, listed in ((mine, [model]), (other, [])):
            async with router.client.get(router.url + "/v1/models", headers=headers) as answer:
                assert [entry["id"] for entry in (await answer.json())["data"]] == listed
            async with router.client.get(router.url + f"/v1/models/{model}", headers=headers) as answer:
                assert answer.status == (200 if listed else 404)
        assert len(upstream.seen) == 1


async def test_a_form_needs_the_right_to_every_name_of_its_pool(valkey_url: str, model: str, keys: Path) -> None:
    put(keys, line("all", "wf-all", models=[model, "adapter"]) + line("one", "wf-one", models=["adapter"]))
    async with (
        engine(model) as upstream,
        engine(model) as second,
        replica(valkey_url, model, upstream.url, second.url, client_keys_file=str(keys)) as router,
    ):
        upstream.names = [model, "adapter"]

        async def both() -> bool:
            async with router.client.get(router.url + "/v1/models", headers={"x-api-key": "wf-all"}) as answer:
                return len((await answer.json())["data"]) == 2

        await poll(both, 30, "both names are known")
        assert (await router.post({"model": "adapter", "prompt": "hi"}, **{"x-api-key": "wf-one"}))[0] == 200
        assert (await router.post(form("adapter"), AUDIO, **{"x-api-key": "wf-one"}))[0] == 404
        sent_as = {"x-api-key": "wf-one", "Content-Type": "multipart/form-data; boundary=b"}
        assert (await router.post(form("adapter"), AUDIO, **sent_as))[0] == 404
        assert (await router.post(b"", AUDIO, **{"x-api-key": "wf-one"}))[0] == 404
        both_ways = json.dumps({"x": f"&model={model}&", "model": "adapter"}).encode()
        sent_as = {"x-api-key": "wf-one", "Content-Type": "application/x-www-form-urlencoded"}
        assert (await router.post(both_ways, AUDIO, **sent_as))[0] == 404


async def test_a_key_ends(valkey_url: str, model: str, keys: Path) -> None:
    now = datetime.now(UTC)
    late, soon = ((now + timedelta(hours=hours)).isoformat() for hours in (-1, 1))
    put(keys, line("late", "wf-late", expires=late) + line("soon", "wf-soon", expires=soon))
    async with (
        engine(model) as upstream,
        replica(valkey_url, model, upstream.url, client_keys_file=str(keys)) as router,
    ):
        assert await status(router, model, authorization="Bearer wf-late") == 401
        assert await status(router, model, authorization="Bearer wf-soon") == 200


async def test_keys_change_without_a_restart(valkey_url: str, model: str, keys: Path) -> None:
    async with (
        engine(model) as upstream,
        replica(valkey_url, model, upstream.url, client_keys_file=str(keys)) as router,
    ):
        assert await status(router, model, **GOOD) == 200
        put(keys, line("team-a", "wf-next"))

        async def next_one() -> bool:
            return await status(router, model, authorization="Bearer wf-next") == 200

        await poll(next_one, 30, "the new key is taken")
        assert await status(router, model, **GOOD) == 401


async def test_a_broken_file_keeps_the_last_keys(
    valkey_url: str, model: str, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        engine(model) as upstream,
        replica(valkey_url, model, upstream.url, client_keys_file=str(keys)) as router,
    ):
        for broken in ("{secret\n", None):
            seen = await router.metric(FAILURES)
            put(keys, broken)

            async def noticed(before: float = seen) -> bool:
                return await router.metric(FAILURES) > before

            await poll(noticed, 30, "the fault is counted")
            assert await status(router, model, **GOOD) == 200
    assert "line 1: this is not JSON" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "line 1: this is not a JSON object"),
        ('\n{"name": "a", "sha256": "AB"}', "line 2: sha256"),
        (line("a b", "k"), "name must"),
        (line("a", "k", model="m"), "known fields"),
        (line("a", "k", models=[]), "models must"),
        (line("a", "k", models="m"), "models must"),
        (line("a", "k", models=None), "models must"),
        (line("a", "k", expires="2027-01-01T00:00:00"), "expires must"),
        (line("a", "k", expires=None), "expires must"),
        (line("a", "k") + line("b", "k"), "line 2: an earlier line"),
    ],
)
def test_a_fault_in_the_file_ends_the_start(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(BadArgument, match=why):
        create_app(Settings(models=("m",), client_keys_file=str(path)))
    with pytest.raises(BadArgument, match="cannot be read"):
        create_app(Settings(models=("m",), client_keys_file=str(tmp_path / "none")))


def test_the_name_of_a_key_is_the_tenant() -> None:
    first, second = [(b"authorization", b"Bearer a")], [(b"authorization", b"bearer b")]
    tenancy = Tenancy("a secret of the operator", "Authorization")
    assert tenancy.of(first, "team-a")[0] == tenancy.of(second, "team-a")[0] != tenancy.of(second, "team-b")[0]
    assert tenancy.of(first, "team-a")[1] == tenancy.of(second, "team-a")[1] != tenancy.of(second, "team-b")[1]
    assert Tenancy("a secret of the operator", "x-user").of([(b"x-user", b"u"), *first], "team-a")[0] == b"u"


def test_the_command_makes_a_line_and_tells_the_key_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "team-a", "--models", "m, n", "--days", "2"]) == 0
    shown = capsys.readouterr()
    key = shown.err.rsplit(" ", 1)[1].strip()
    assert key not in shown.out
    ((digest, found),) = parse(shown.out.encode()).items()
    assert digest == hashlib.sha256(key.encode()).digest()
    assert (found.name, found.models) == ("team-a", frozenset({"m", "n"}))
    assert found.expires_at is not None
    assert main(["key", "team a"]) == 2
    assert main(["key", "team-a", "--models", ","]) == 2
