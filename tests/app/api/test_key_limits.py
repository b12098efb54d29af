"""Limits of clients' keys hold over real replicas: refusals, counting each request once, and the time without Redis."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.engines.scripted import STREAM_HEAD, Engine, Seen, answer_well, chunk, engine, event, reply, reset
from tests.support.polling import poll
from tests.support.redis.gate import gate
from tests.support.replicas.replica import replica
from tests.support.requests.client_keys import line, put

from warmfleet.__main__ import main
from warmfleet.api.access.client_keys import parse
from warmfleet.engines.output_tokens import OutputTokens
from warmfleet.errors import BadArgument
from warmfleet.main import create_app
from warmfleet.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.replicas.replica import Replica

KEY = {"authorization": "Bearer wf-good"}
PER_MINUTE = 1_000_000


def limited(tmp_path: Path, **limits: int) -> dict[str, Any]:
    """Settings with a single client key, which has these limits."""
    path = tmp_path / "keys.jsonl"
    path.write_text(line("team-a", "wf-good", **limits) + line("team-b", "wf-free"))
    return {"client_keys_file": str(path), "admin_port": 1}


async def asked(router: Replica, model: str, **body: Any) -> tuple[int, dict[str, str], Any]:
    status, headers, answer = await router.post({"model": model, "prompt": "hello " * 50} | body, **KEY)
    return status, headers, answer if body.get("stream") else json.loads(answer)


def left(headers: dict[str, str]) -> int:
    return int(headers["x-ratelimit-remaining-tokens"])


def pools_of(model: str, count: int) -> dict[str, Any]:
    """Settings of a model with ``count`` pools."""
    return {"models": tuple(f"{model}#{number}" for number in range(count)) if count > 1 else (model,)}


def says_four_in_flight(headers: dict[str, str], body: Any) -> None:
    """Assert that a 429 in OpenAI's format tells a client of four requests in flight."""
    assert headers["retry-after"] == "1"
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("4", "0")
    assert {name: body["error"][name] for name in ("type", "code", "param")} == {
        "type": "requests", "code": "rate_limit_exceeded", "param": None,
    }  # fmt: skip
    assert "team-a has 4 requests in flight" in body["error"]["message"]


@pytest.mark.parametrize("pools", [1, 3])
async def test_two_replicas_let_as_many_requests_through_as_the_limit_is(
    valkey_url: str, model: str, tmp_path: Path, pools: int
) -> None:
    """Of 40 simultaneous requests 4 reach the engine, and stay there until all others have been refused."""
    at_once = most = 0
    go_on = asyncio.Event()

    async def held(_engine: Engine, _seen: Seen, writer: Any) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await go_on.wait()
        at_once -= 1
        reply(writer, b'{"choices": [{"index": 0, "text": "x"}]}')

    settings = limited(tmp_path, concurrency=4) | pools_of(model, pools)
    async with (
        engine(model, held) as upstream,
        replica(valkey_url, model, upstream.url, **settings) as one,
        replica(valkey_url, model, upstream.url, **settings) as two,
    ):
        calls = [asyncio.ensure_future(asked(router, model)) for router in (one, two) for _ in range(20)]
        await poll(lambda: sum(call.done() for call in calls) == 36, 60, "36 are refused")
        await poll(lambda: at_once == 4, 30, "four are at the engine")
        for _, headers, body in [call.result() for call in calls if call.done()]:
            says_four_in_flight(headers, body)
        go_on.set()
        answers = await asyncio.gather(*calls)
        assert most == 4
        assert sorted(status for status, _, _ in answers) == [200] * 4 + [429] * 36
        for _, headers, _ in (answer for answer in answers if answer[0] == 200):
            assert int(headers["x-ratelimit-remaining-requests"]) in range(4)

        pattern = f"wf:{{{model.replace('/', '~')}*}}:client:*"

        async def free() -> bool:
            return not [key async for key in two.fleet.redis.scan_iter(match=pattern, count=1_000)]

        await poll(free, 15, "all places are free again")
        status, headers, _ = await asked(two, model)
        assert (status, headers["x-ratelimit-remaining-requests"]) == (200, "3")
        counted = [
            await router.metric('warmfleet_limited_requests_total{client="team-a",result="requests"}')
            for router in (one, two)
        ]
        assert sum(counted) == 36
        others = [
            router.post({"model": model, "prompt": "x"}, authorization="Bearer wf-free") for router in (one, two) * 4
        ]
        assert {status for status, _, _ in await asyncio.gather(*others)} == {200}, "a key without limits has none"


async def test_a_request_that_is_tried_again_counts_once(valkey_url: str, model: str, tmp_path: Path) -> None:
    tries = 0

    async def first_dies(one: Engine, seen: Seen, writer: Any) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            reset(writer)
        else:
            await answer_well(one, seen, writer)

    settings = limited(tmp_path, concurrency=1, tokens_per_minute=PER_MINUTE)
    async with (
        engine(model, first_dies) as one,
        engine(model, first_dies) as two,
        replica(valkey_url, model, one.url, two.url, **settings) as router,
    ):
        status, headers, _ = await asked(router, model)
        assert (status, tries) == (200, 2)
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert PER_MINUTE - left(headers) == int(headers["x-warmfleet-prompt-tokens"])
        status, headers, _ = await asked(router, model)
        assert status == 200, "the place is free"


async def test_a_failed_request_costs_nothing(valkey_url: str, model: str, tmp_path: Path) -> None:
    async def refuses(one: Engine, seen: Seen, writer: Any) -> None:
        if seen.json.get("max_tokens") == 1:
            reply(writer, b"{}", "400 Bad Request")
        else:
            await answer_well(one, seen, writer)

    settings = limited(tmp_path, tokens_per_minute=PER_MINUTE)
    async with engine(model, refuses) as one, replica(valkey_url, model, one.url, **settings) as router:
        assert (await asked(router, model, prompt="long " * 50_000, max_tokens=1))[0] == 400
        status, headers, _ = await asked(router, model)
        assert (status, PER_MINUTE - left(headers)) == (200, int(headers["x-warmfleet-prompt-tokens"]))


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_answers_count_until_they_are_paid_back(
    valkey_url: str, model: str, tmp_path: Path, stream: bool
) -> None:
    usage = b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2000000, "total_tokens": 2000009}}'

    async def long_one(_engine: Engine, _seen: Seen, writer: Any) -> None:
        if not stream:
            reply(writer, usage)
            return
        writer.write(STREAM_HEAD)
        for piece in (event("x"), b"data: " + usage + b"\n\n", b"data: [DONE]\n\n", b""):
            chunk(writer, piece)

    settings = limited(tmp_path, tokens_per_minute=PER_MINUTE)
    async with engine(model, long_one) as one, replica(valkey_url, model, one.url, **settings) as router:
        assert (await asked(router, model, stream=stream))[0] == 200
        await router.unloaded()
        status, headers, answer = await asked(router, model)
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (429, "tokens", "rate_limit_exceeded")
        assert 30 < int(headers["retry-after"]) <= 61
        assert f"try again in {headers['retry-after']} s" in answer["error"]["message"]
        assert (headers["x-ratelimit-limit-tokens"], left(headers)) == (str(PER_MINUTE), 0)
        assert float(headers["x-ratelimit-reset-tokens"].removesuffix("s")) > 60
        assert await router.metric('warmfleet_limited_requests_total{client="team-a",result="tokens"}') == 1


@pytest.mark.parametrize("pools", [1, 3])
async def test_what_gateways_place_counts(valkey_url: str, model: str, tmp_path: Path, pools: int) -> None:
    settings = limited(tmp_path, concurrency=1, tokens_per_minute=PER_MINUTE) | pools_of(model, pools)
    path, gateway = "/route?endpoint=/v1/completions", {"x-warmfleet-tenant": "team-a"}
    body = {"model": model, "prompt": "hello"}
    async with engine(model) as one, replica(valkey_url, model, one.url, **settings) as router:
        operators = replace(router, url=router.operators)
        status, _, answer = await operators.post(body, path, **gateway)
        assert status == 200
        placed = json.loads(answer)
        named = {"model": model, "reservation": placed["reservation"]}
        assert (await operators.post(named, "/renew", **gateway))[0] == 200
        status, headers, answer = await operators.post(body, path, **gateway)
        assert (status, headers["retry-after"], json.loads(answer)["error"]["type"]) == (429, "1", "requests")
        assert (await asked(router, model))[0] == 429, "its own request counts together with the gateway's"
        ended = named | {"outcome": "finished"}
        for bad in (-1, "5", 1.5, True):
            assert (await operators.post(ended | {"output_tokens": bad}, "/settle", **gateway))[0] == 400
        assert (await operators.post(ended | {"output_tokens": 900_000}, "/settle", **gateway))[0] == 200
        status, headers, _ = await asked(router, model)
        assert status == 200
        assert left(headers) < 700_000
        other = gateway | {"x-warmfleet-tenant": "nobody"}
        assert (await operators.post(body, path, **other))[0] == 200


async def test_without_redis_requests_pass_unchecked_and_counted(valkey_url: str, model: str, tmp_path: Path) -> None:
    async with engine(model) as one, gate(valkey_url) as door:
        url, settings = f"redis://127.0.0.1:{door.port}/0", limited(tmp_path, concurrency=1)
        async with replica(url, model, one.url, look_url=valkey_url, decide_timeout_s=0.2, **settings) as router:
            await door.shut()
            found = await asyncio.gather(*(asked(router, model) for _ in range(6)))
            assert {status for status, _, _ in found} == {200}
            assert await router.metric('warmfleet_limited_requests_total{client="team-a",result="unchecked"}') == 6
            await door.open()

            async def checked() -> bool:
                return "x-ratelimit-remaining-requests" in (await asked(router, model))[1]

            await poll(checked, 60, "Redis decides again")


async def test_limits_and_their_samples_follow_the_file(valkey_url: str, model: str, tmp_path: Path) -> None:
    settings = limited(tmp_path, tokens_per_minute=1)
    path = tmp_path / "keys.jsonl"
    async with engine(model) as one, replica(valkey_url, model, one.url, **settings) as router:
        assert [(await asked(router, model))[0] for _ in range(2)] == [200, 429]
        put(path, line("team-a", "wf-good", tokens_per_minute=PER_MINUTE))

        async def more() -> bool:
            return (await asked(router, model))[0] == 200

        await poll(more, 30, "the new limit holds")
        assert await router.metric('warmfleet_limited_requests_total{client="team-a"') > 0
        put(path, line("team-c", "wf-good"))

        async def forgotten() -> bool:
            return await router.metric('warmfleet_limited_requests_total{client="team-a"') == 0

        await poll(forgotten, 30, "a name that the file does not have any more has no sample")
        assert "x-ratelimit-limit-tokens" not in (await asked(router, model))[1]


@pytest.mark.parametrize("field", ["concurrency", "tokens_per_minute"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", None, 2**32])
def test_a_limit_that_is_none_ends_the_start(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "keys"
    path.write_text(line("a", "k", **{field: value}))
    with pytest.raises(BadArgument, match=f"line 1: {field} must be an integer from 1"):
        create_app(Settings(models=("m",), client_keys_file=str(path), admin_key="boss"))


def test_the_command_writes_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "batch", "--concurrency", "8", "--tokens-per-minute", "200000"]) == 0
    ((_, found),) = parse(capsys.readouterr().out.encode()).items()
    assert found.limits is not None
    assert (found.limits.name, found.limits.concurrency, found.limits.tokens_per_minute) == ("batch", 8, 200_000)
    for wrong in ("0", str(2**32)):
        with pytest.raises(SystemExit):
            main(["key", "batch", "--concurrency", wrong])
    assert main(["key", "batch", "--days", "365"]) == 0
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["key", "--help"])
    told = capsys.readouterr().out
    assert "429 with Retry-After" in told
    assert "--tokens-per-minute 200000" in told


# ---------------------------------------------------------------- tokens of an answer

CHAT = b'data: {"choices": [{"delta": {"content": "x \\n\\ndata: {\\"completion_tokens\\": 7}"}}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 42, "total_tokens": 47}}\n\n'
MESSAGES = (
    b'event: message_start\ndata: {"type": "message_start", "usage": {"input_tokens": 9, "output_tokens": 0}}\n\n'
    b'event: message_delta\ndata: {"type": "message_delta", "usage": {"output_tokens": 31}}\n\n'
)


@pytest.mark.parametrize("size", [1, 2, 7, 30, 10_000])
@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (CHAT * 12, 12),
        (CHAT * 12 + USAGE + b"data: [DONE]\n\n", 42),
        (MESSAGES, 31),
        (b'{"object":"response","usage":{"input_tokens":1,"output_tokens":8,"total_tokens":9}}', 8),
        (b'{"data": [], "usage": {"prompt_tokens": 5, "total_tokens": 5}}', 0),
        (b"", 0),
    ],
)
def test_tokens_are_counted_however_the_answer_is_cut(body: bytes, tokens: int, size: int) -> None:
    output = OutputTokens()
    for at in range(0, len(body), size):
        output.add(body[at : at + size])
    assert output.count == tokens
