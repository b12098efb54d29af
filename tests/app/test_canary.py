"""A marked prompt, its token ids and its salt appear in no log, metric, Redis key or error."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import redis.asyncio as aioredis
from tests.support.engines.scripted import STREAM_HEAD, Seen, chunk, engine, reset
from tests.support.engines.simulated import identity, simulated
from tests.support.polling import poll
from tests.support.replicas.replica import replica

from warmfleet.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest
    from tests.support.engines.scripted import Engine
    from tests.support.replicas.replica import Replica

CANARY = "Zq canary 7 Wv"
SALT = "salt-canary-Xk"
TEXT = f"{CANARY} sings. " * 40

COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": TEXT},
    {"prompt": [TEXT, TEXT + "!"], "n": 2},
    {"prompt": TEXT, "prompt_logprobs": 1},
    {"prompt": TEXT, "max_tokens": "1" + CANARY},
    {"prompt": {"text": TEXT}},
    {"prompt": TEXT, "chat_template": TEXT},
    {"prompt": TEXT, "cache_salt": [SALT]},
    {"prompt": TEXT * 1_000},
]
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": TEXT}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}, {"type": CANARY, "x": TEXT}]}]},
    {"messages": [{"role": CANARY, "content": TEXT}], "tools": [{"type": "function", "function": {"name": CANARY}}]},
    {"messages": [{"role": "assistant", "content": TEXT, "tool_calls": [{"function": CANARY}]}]},
    {"messages": [{"role": "user", "content": {"text": TEXT}}]},
    {"messages": [{"content": TEXT}]},
    {"messages": TEXT},
    {"messages": [{"role": "user", "content": TEXT + "\ud800"}], "reasoning_effort": CANARY},
    {"messages": [{"role": "user", "content": TEXT}], "chat_template_kwargs": {"a": {"b": CANARY}}, "tools": [CANARY]},
]


@cache
def ids() -> list[int]:
    return identity().completion_ids(TEXT)


@cache
def secrets() -> list[str]:
    """The prompt, its salt, and four of its ids as programs would print them; four equal ids are no coincidence."""
    return [CANARY, SALT, str(ids()[:4])[1:-1], ",".join(map(str, ids()[:4]))]


@contextmanager
def everything_logged() -> Iterator[list[str]]:
    """All records of all loggers, at every level, with their tracebacks."""
    lines: list[str] = []
    form = logging.Formatter("%(name)s %(message)s")

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(form.format(record) + repr(record.args))

    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    before = [logger.level for logger in loggers]
    handler = Keep(logging.DEBUG)
    logging.getLogger().addHandler(handler)
    try:
        for logger in loggers:
            logger.setLevel(logging.DEBUG)
        yield lines
    finally:
        logging.getLogger().removeHandler(handler)
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


async def keys(redis_url: str) -> set[bytes]:
    async with aioredis.Redis.from_url(redis_url) as store:
        return {key async for key in store.scan_iter(count=1_000)}


async def stored(redis_url: str, but: set[bytes]) -> list[str]:
    """Every key of the store with its value, as text. but: keys of other tests, which are omitted."""
    store = aioredis.Redis.from_url(redis_url)
    read: dict[Any, Any] = {
        b"string": store.get,
        b"hash": store.hgetall,
        b"set": store.smembers,
        b"zset": lambda key: store.zrange(key, 0, -1, withscores=True),
        b"list": lambda key: store.lrange(key, 0, -1),
        b"stream": store.xrange,
    }
    try:
        found = [(key, await store.type(key)) for key in await keys(redis_url) - but]
        return [f"{key!r} {await read[kind](key)!r}" for key, kind in found if kind != b"none"]  # none: expired
    finally:
        await store.aclose()


def clean(where: str, text: str) -> None:
    assert [secret for secret in secrets() if secret in text] == [], f"{where}: {text[:2000]}"


async def ask_everything(router: Replica, model: str) -> set[int]:
    """Send each listed request and broken JSON, assert that the router's errors are clean, and return the statuses."""
    statuses = set()
    completions = [*COMPLETIONS, {"prompt": ids(), "stream": True}, {"prompt": [*ids(), TEXT]}]
    for path, bodies in ("/v1/completions", completions), ("/v1/chat/completions", CHATS):
        sent = [json.dumps({"cache_salt": SALT, "max_tokens": 1, "model": model} | body).encode() for body in bodies]
        broken = [sent[0][:-9], sent[0] + b"}", b'"' + TEXT.encode() + b'"', sent[0].replace(b"Zq", b"Zq\xff")]
        for body in sent + broken:
            status, headers, answer = await router.post(body, path, authorization=f"Bearer {SALT}")
            statuses.add(status)
            clean("headers", str(headers))
            if status >= 400 and "x-warmfleet-worker" not in headers:
                clean("error", answer.decode())
            _, _, answer = await router.post(body, "/explain")
            clean("explain", answer.decode())
    return statuses


async def test_no_output_tells_a_prompt(valkey_url: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    others = await keys(valkey_url)
    with everything_logged() as lines:
        async with simulated(valkey_url, model), replica(valkey_url, model, approved_templates=()) as router:
            await router.proven()
            assert {200, 400} <= await ask_everything(router, model)
            code = await asyncio.to_thread(main, ["explain", "--url", router.url, "--model", model, "--prompt", TEXT])
            assert code == 0
            assert await asyncio.to_thread(main, ["workers", "--url", router.url]) == 0
            why = [f"/why?count=100&order={order}" for order in ("slowest", "last", "failed")]
            for path in ("/metrics", "/workers", "/v1/models", "/readyz", "/nothing", "/status.json", *why):
                clean(path, (await router.get(path))[1].decode())
            assert await asyncio.to_thread(main, ["why", "--url", router.url]) == 0
            await router.unloaded()
            entries = await stored(valkey_url, but=others)
            assert len(entries) > 50
            for entry in entries:
                clean("store", entry)
    printed = capsys.readouterr()
    clean("command", printed.out + printed.err)
    assert len(lines) > 20  # debug levels included
    clean("log", "\n".join(lines))


async def test_not_even_when_engines_die(valkey_url: str, model: str) -> None:
    async def dies(_: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        reset(writer)

    with everything_logged() as lines:
        async with engine(model, dies) as one, engine(model, dies) as two:  # noqa: SIM117  the replica needs both
            async with replica(valkey_url, model, one.url, two.url) as router:
                body = {"model": model, "prompt": TEXT, "cache_salt": SALT}
                status, headers, answer = await router.post(body)
                assert status == 502
                clean("error", answer.decode() + str(headers))
                await one.die()
                await two.die()
                await poll(lambda: _nobody(router, body), 10, "nobody is left")
                await poll(lambda: any("does not answer" in line for line in lines), 30, "the dead engines are logged")
    clean("log", "\n".join(lines))


async def test_not_even_when_an_engine_repeats_it_in_an_error(valkey_url: str, model: str) -> None:
    async def repeats(_: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        error = {"code": 500, "message": f"cannot serve {TEXT}"}
        writer.write(STREAM_HEAD)
        chunk(writer, b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
        await writer.drain()

    with everything_logged() as lines:
        async with engine(model, repeats) as one, replica(valkey_url, model, one.url) as router:
            await router.post({"model": model, "prompt": TEXT, "stream": True})
            told = (await router.get("/why"))[1].decode()
            assert "stream began with an error" in told
            clean("why", told)
    clean("log", "\n".join(lines))


async def _nobody(router: Replica, body: dict[str, Any]) -> bool:
    status, _, answer = await router.post(body)
    clean("error", answer.decode())
    return status in (502, 503)
