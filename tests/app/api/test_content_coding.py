"""Compressed bodies are decoded within the limits for bodies; engines get them decoded."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import time
import zlib
from typing import TYPE_CHECKING

import pytest
from tests.app.api.test_bodies import CHAT, EMBED, FILE, MESSAGE, RESPONSE, SPEECH, TEXT, answer_all
from tests.support.engines.scripted import engine
from tests.support.replicas.replica import replica

from warmfleet.api import connections
from warmfleet.api.content_coding import MAX_MEMBERS

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.engines.scripted import Engine
    from tests.support.replicas.replica import Replica

LIMIT = 2_000_000


def bare(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=-15)
    return made.compress(data) + made.flush()


def wide(data: bytes) -> bytes:
    made = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    return made.compress(data) + made.flush()


def body_of(model: str) -> bytes:
    text = "".join(f"{number} " for number in range(20_000))
    return json.dumps(
        {
            "model": model,
            "input": text,
            "prompt": text,
            "max_tokens": 5,
            "messages": [{"role": "user", "content": text}],
        }
    ).encode()


@pytest.fixture
async def pair(valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Replica, Engine]]:
    monkeypatch.setattr(connections, "BODIES", 2)
    async with (
        engine(model, answer_all) as upstream,
        replica(valkey_url, model, upstream.url, body_max_bytes=LIMIT) as router,
    ):
        yield router, upstream
        assert await router.metric("warmfleet_body_bytes") == 0


async def test_engines_get_decoded_bodies(pair: tuple[Replica, Engine], model: str) -> None:
    router, upstream = pair
    body = body_of(model)
    half = len(body) // 2
    asked = {
        "gzip": gzip.compress(body),
        "x-gzip": gzip.compress(body),
        "GZIP": gzip.compress(body),
        "gzip ": gzip.compress(body[:half]) + gzip.compress(body[half:]),
        "deflate": zlib.compress(body),
        "Deflate": bare(body),
        "zstd": zstd.compress(body),
        "ZSTD": zstd.compress(body[:half]) + zstd.compress(body[half:]),
        "identity": body,
        "": body,
        "gzip, zstd": zstd.compress(gzip.compress(body)),
        "identity, gzip": gzip.compress(body),
    }
    for coding, sent in asked.items():
        status, _, answer = await router.post(sent, EMBED, **{"Content-Encoding": coding})
        assert (status, coding, answer[:100]) == (200, coding, answer[:100])
        seen = upstream.seen[-1]
        assert (seen.body, seen.headers["content-length"]) == (body, str(len(body)))
        assert "content-encoding" not in seen.headers


@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGE, RESPONSE, "/tokenize", "/rerank"])
async def test_every_door_decodes(pair: tuple[Replica, Engine], model: str, path: str) -> None:
    router, upstream = pair
    status, headers, _ = await router.post(zstd.compress(body_of(model)), path, **{"Content-Encoding": "zstd"})
    assert (status, upstream.seen[-1].sent) == (200, body_of(model))
    assert "x-warmfleet-worker" in headers


async def test_forms_and_the_operators_doors_decode(pair: tuple[Replica, Engine], model: str) -> None:
    router, upstream = pair
    form = FILE + f'--b0\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n--b0--\r\n'.encode()
    headers = {"Content-Encoding": "gzip", "Content-Type": "multipart/form-data; boundary=b0"}
    status, _, _ = await router.post(gzip.compress(form), SPEECH, **headers)
    assert (status, upstream.seen[-1].body) == (200, form)
    for path in ("/explain", "/route"):
        status, _, answer = await router.post(gzip.compress(body_of(model)), path, **{"Content-Encoding": "gzip"})
        assert (status, path, answer[:80]) == (200, path, answer[:80])
    reservation = json.dumps({"model": model, "reservation": json.loads(answer)["reservation"], "outcome": "finished"})
    status, _, _ = await router.post(zlib.compress(reservation.encode()), "/settle", **{"Content-Encoding": "deflate"})
    assert status == 200


@pytest.mark.parametrize("path", [CHAT, EMBED, "/settle"])
@pytest.mark.parametrize(
    "coding", ["br", "compress", "gzip, br", "aws-chunked", "gzip, gzip, gzip", "gzip;q=1", "\xff"]
)
async def test_other_codings_are_refused_with_those_that_are_read(
    pair: tuple[Replica, Engine], coding: str, path: str
) -> None:
    router, upstream = pair
    reader, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Encoding: {coding}\r\nContent-Length: 4\r\n\r\nbody"
    for _ in range(2):  # the connection stays open
        writer.write(head.encode("latin-1"))
        answered = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert answered.startswith("http/1.1 415 ")
        assert "accept-encoding: gzip, deflate, zstd\r\n" in answered
        length = int(answered.partition("content-length: ")[2].partition("\r")[0])
        error = json.loads(await reader.readexactly(length))["error"]
        assert (error["code"], error["param"]) == ("unsupported_coding", "Content-Encoding")
    writer.close()
    assert upstream.seen == []


WRONG = {
    "no gzip": ("gzip", b'{"model": "m"}'),
    "cut off": ("gzip", gzip.compress(b"x" * 1_000)[:-9]),
    "no checksum": ("gzip", gzip.compress(b"x" * 1_000)[:-8] + bytes(8)),
    "bytes behind it": ("gzip", gzip.compress(b"{}") + b"junk"),
    "no deflate": ("deflate", b"\xff" * 20),
    "deflate cut off": ("deflate", zlib.compress(b"x" * 1_000)[:-3]),
    "bare deflate cut off": ("deflate", bare(bytes(range(256)))[:-3]),
    "no zstd": ("zstd", b"{}" * 9),
    "zstd cut off": ("zstd", zstd.compress(bytes(range(256)))[:-3]),
    "a window beyond 8 MiB": ("zstd", wide(b"x" * 1_000)),
    "no end of empty streams": ("gzip", gzip.compress(b"") * (MAX_MEMBERS + 1)),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_broken_body_names_its_coding(pair: tuple[Replica, Engine], name: str) -> None:
    coding, sent = WRONG[name]
    status, _, answer = await pair[0].post(sent, CHAT, **{"Content-Encoding": coding})
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, "Content-Encoding")
    assert coding in error["message"]


async def test_bombs_are_refused_while_others_are_served(pair: tuple[Replica, Engine], model: str) -> None:
    """Bodies of 900 MB in 900 kB, 2 GB in 200 kB, and a nested bomb get 413, and no other request waits for them."""
    router, _ = pair
    zeros = bytes(100_000_000)
    in_zstd = zstd.compress(zeros) * 20
    bombs = [
        ("gzip", gzip.compress(zeros, 9) * 9),
        ("zstd", in_zstd),
        ("zstd, gzip", gzip.compress(in_zstd)),
        ("deflate", bare(zeros)),
    ]
    longest = 0.0
    for coding, sent in bombs:
        running = asyncio.ensure_future(router.post(sent, CHAT, **{"Content-Encoding": coding}))
        while not running.done():
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - began)
        status, _, answer = await running
        assert (status, json.loads(answer)["error"]["code"]) == (413, "body_too_large"), coding
    assert longest < 0.25
    status, _, _ = await router.post(gzip.compress(body_of(model)), CHAT, **{"Content-Encoding": "gzip"})
    assert status == 200


async def test_many_large_bodies_at_once_keep_the_memory_for_bodies(pair: tuple[Replica, Engine], model: str) -> None:
    """Two bodies fit, since each has 95 % of the largest allowed size; the other requests are asked to retry."""
    router, _ = pair
    sent = zstd.compress(json.dumps({"model": model, "prompt": "x" * (LIMIT * 19 // 20)}).encode())
    asked = await asyncio.gather(*[router.post(sent, TEXT, **{"Content-Encoding": "zstd"}) for _ in range(30)])
    statuses = {status for status, _, _ in asked}
    assert statuses == {200, 503}
    assert {json.loads(answer)["error"]["code"] for status, _, answer in asked if status == 503} == {"uploads_full"}


async def test_bodies_that_grow_displace_no_upload_that_is_smaller(pair: tuple[Replica, Engine], model: str) -> None:
    router, _ = pair
    small = json.dumps({"model": model, "prompt": "x" * 100_000}).encode()
    reader, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
    writer.write(f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(small)}\r\n\r\n".encode() + small[:-1])
    await writer.drain()
    sent = zstd.compress(json.dumps({"model": model, "prompt": "x" * (LIMIT * 19 // 20)}).encode())
    asked = await asyncio.gather(*[router.post(sent, TEXT, **{"Content-Encoding": "zstd"}) for _ in range(30)])
    assert {status for status, _, _ in asked} == {200, 503}
    writer.write(small[-1:])
    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_a_client_that_hangs_up_while_its_body_is_decoded_leaves_nothing(pair: tuple[Replica, Engine]) -> None:
    router, _ = pair
    sent = gzip.compress(bytes(1_900_000), 9)
    for _ in range(20):
        _, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: {len(sent)}\r\n\r\n"
        writer.write(head.encode() + sent)
        await writer.drain()
        writer.transport.abort()
