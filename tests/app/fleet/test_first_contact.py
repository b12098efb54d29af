"""A new replica that cannot use its Redis logs one line with the address, the reason and the consequence."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from tests.support.polling import poll
from tests.support.redis.gate import gate
from tests.support.redis.topology import tls_server
from tests.support.replicas.replica import replica

from warmfleet.errors import BadArgument
from warmfleet.fleet import connect
from warmfleet.fleet.first_contact import THEN, first_contact
from warmfleet.main import create_app
from warmfleet.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from tests.support.redis.topology import Secured

    Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    with tls_server() as made:
        yield made


async def said(url: str, caplog: pytest.LogCaptureFixture, tag: str = "", timeout_s: float = 10) -> str:
    """The single line that is logged about the Redis at ``url``. tag: the pool, for a Cluster."""
    caplog.clear()
    client = connect(url, tag, timeout_s=timeout_s)
    trying = asyncio.create_task(first_contact([client], url))
    await poll(lambda: caplog.messages or trying.done(), 30, "something is said")
    trying.cancel()
    await asyncio.wait([trying])
    await client.aclose()
    (line,) = caplog.messages
    assert line.endswith(THEN)
    return line.removesuffix(f". {THEN}")


@asynccontextmanager
async def server(serve: Serve) -> AsyncIterator[int]:
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as made:
        yield made.sockets[0].getsockname()[1]


async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n<html>")
    writer.close()


async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


def redis_of(answers: dict[str, bytes]) -> Serve:
    """A server that answers a command by its first word with the bytes in ``answers``, and other commands with OK."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            words = []
            for _ in range(int(line[1:])):
                length = int((await reader.readline())[1:])
                words.append((await reader.readexactly(length + 2))[:-2])
            writer.write(answers.get(words[0].decode().upper(), b"+OK\r\n"))
        writer.close()

    return serve


def info(version: str) -> bytes:
    text = f"# Server\r\nredis_version:{version}\r\n".encode()
    return b"$%d\r\n%b\r\n" % (len(text), text)


OLD = {"HELLO": b"%1\r\n+proto\r\n:3\r\n", "INFO": info("6.2.14")}
OLDER = {"HELLO": b"-ERR unknown command `HELLO`, with args beginning with: `3`\r\n"}


async def test_a_redis_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    assert await said("redis://127.0.0.1:1/0", caplog) == (
        "Redis at 127.0.0.1:1 cannot be reached (Connection refused)"
    )
    assert (await said("unix:///no/such/socket", caplog)).startswith("Redis at /no/such/socket cannot be reached (")
    told = await said("redis+sentinel://u:secret@127.0.0.1:1,127.0.0.1:2/main/0", caplog)
    assert told.startswith("The Redis master 'main' of the Sentinels at 127.0.0.1:1, 127.0.0.1:2 cannot be reached (")
    assert "secret" not in told
    assert "The Redis Cluster at 127.0.0.1:1 cannot" in await said("redis+cluster://127.0.0.1:1", caplog)


async def test_a_wrong_password(valkey_url: str, caplog: pytest.LogCaptureFixture) -> None:
    told = await said(valkey_url.replace("://", "://nobody:wrong@", 1), caplog)
    assert "refuses the user or the password of WARMFLEET_REDIS_URL" in told
    assert "wrong" not in told.replace("WRONGPASS", "")


async def test_tls_that_does_not_fit(secured: Secured, valkey_url: str, caplog: pytest.LogCaptureFixture) -> None:
    told = await said(f"{secured.url}&ssl_ca_certs={secured.other_ca}", caplog)
    assert "shows a certificate that is not trusted, see WARMFLEET_REDIS_CA (" in told
    told = await said(f"redis://127.0.0.1:{secured.port}", caplog, timeout_s=0.5)
    assert re.search(r"(ends the connection|does not answer in time|is no Redis).*begins with rediss://", told), told
    async with gate(valkey_url) as door:
        told = await said(f"rediss://127.0.0.1:{door.port}", caplog, timeout_s=0.5)
        assert re.search(r"(does not speak TLS|perhaps it has no TLS there)", told), told


async def test_what_is_no_redis(caplog: pytest.LogCaptureFixture) -> None:
    async with server(web) as port:
        assert "is no Redis: what answers there speaks another protocol" in await said(
            f"redis://127.0.0.1:{port}", caplog
        )
    async with server(mute) as port:
        assert "does not answer in time" in await said(f"redis://127.0.0.1:{port}", caplog, timeout_s=0.5)


async def test_a_redis_that_is_too_old(caplog: pytest.LogCaptureFixture) -> None:
    async with server(redis_of(OLD)) as port:
        told = await said(f"redis://127.0.0.1:{port}", caplog)
        assert told.endswith("is version 6.2.14, but routers need 7.0 or newer (or Valkey)")
    async with server(redis_of(OLDER)) as port:
        assert "is older than version 6, or no Redis" in await said(f"redis://127.0.0.1:{port}", caplog)


async def test_a_replica_says_it_once_and_goes_on_when_redis_comes(
    valkey_url: str, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warmfleet")
    async with gate(valkey_url) as door:
        await door.shut()
        async with replica(f"redis://127.0.0.1:{door.port}", model, look_url=valkey_url) as router:
            await poll(lambda: "cannot be reached" in caplog.text, 30, "it is said")
            assert (await router.get("/readyz"))[0] == 503
            await asyncio.sleep(1)
            told = [record for record in caplog.records if record.levelno >= logging.WARNING]
            assert len(told) == 1, [record.getMessage() for record in told]
            await door.open()

            async def read() -> bool:
                return b"no contact" not in (await router.get("/readyz"))[1]

            await poll(read, 30, "it reads the fleet")
            assert any("answers now" in line for line in caplog.messages)
            assert "Traceback" not in caplog.text


def test_a_tokenizer_that_is_not_there_ends_the_start() -> None:
    with pytest.raises(BadArgument, match="WARMFLEET_TOKENIZER='/no/such/model': there is no such file or folder"):
        create_app(Settings(models=("m",), tokenizer="/no/such/model"))


async def test_a_lost_master_of_a_cluster_is_named_and_not_the_whole_cluster(caplog: pytest.LogCaptureFixture) -> None:
    """While only the master with the registry is away, the pools that the settings name can be served."""
    slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$9\r\n127.0.0.1\r\n:1\r\n$0\r\n\r\n"
    async with server(redis_of({"CLUSTER": slots})) as port:
        url = f"redis+cluster://127.0.0.1:{port}"
        line = await said(url, caplog, "demo")
        assert line.startswith(
            "The master 127.0.0.1:1 of the Redis Cluster, which has the keys of demo, cannot be reached"
        )
        assert "WARMFLEET_MODELS=demo#1,demo#2" in line
        assert "WARMFLEET_MODELS" not in await said(url, caplog, "demo#2"), "it is a pool that was named"
