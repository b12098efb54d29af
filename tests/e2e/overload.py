"""A fleet of processes under more load than it can serve: engines, replicas, and clients that count."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import httpx
import pytest
from tests.support.engines.simulated import TEMPLATE, tokenizer_json

from warmfleet.cli.local.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MODEL = "demo"
READY_S = 120.0


@dataclass
class Processes:
    """The running processes, with the URLs of the replicas."""

    redis_url: str
    urls: list[str] = field(default_factory=list)
    replicas: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def kill(self, number: int) -> None:
        self.replicas[number].send_signal(signal.SIGKILL)
        self.replicas[number].wait()


@contextmanager
def processes(redis_url: str, engines: Sequence[str], replicas: int = 2, **settings: object) -> Iterator[Processes]:
    """Start engines and replicas. engines: further arguments of the simulator. settings: those of the replicas."""
    made, running = Processes(redis_url), []
    folder = Path(tempfile.mkdtemp(prefix="wf-tokenizer-"))
    (folder / "tokenizer.json").write_text(
        tokenizer_json(argparse.__file__, 1_000)
    )  # a small tokenizer, because the tokenizer of the demo takes long to load
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    place = ["--port", "0", "--redis", redis_url, "--model", MODEL, "--worker-id", "eng", "--tokenizer", str(folder)]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        argv = [sys.executable, "-m", "warmfleet_loadtest.engine", *place, *engines]
        running.append(subprocess.Popen(argv, **quiet))
        for _ in range(replicas):
            port = free_port()
            given = {"REDIS_URL": redis_url, "MODELS": MODEL, "PORT": port, "ADMIN_PORT": 0, "APPROVED_TEMPLATES": "*"}
            given |= {"DECIDE_TIMEOUT_S": 2} | {name.upper(): value for name, value in settings.items()}
            environment = os.environ | {f"WARMFLEET_{name}": str(value) for name, value in given.items()}
            made.replicas.append(
                subprocess.Popen([sys.executable, "-m", "warmfleet", "serve"], env=environment, **quiet)
            )
            made.urls.append(f"http://127.0.0.1:{port}")
        running += made.replicas
        count = int(engines[engines.index("--count") + 1])
        for url in made.urls:
            _ready(url, count)
        yield made
    finally:
        for process in reversed(running):
            process.kill()
            process.wait()
        shutil.rmtree(folder)


def _ready(url: str, engines: int) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            workers = httpx.get(url + "/workers", timeout=5).json()["models"][0]["workers"]
            if sum(worker["proof"] == "proven" for worker in workers) == engines:
                return
        except (httpx.HTTPError, KeyError):
            pass
        time.sleep(0.2)  # the engines join the fleet meanwhile
    pytest.fail(f"{url} is not ready after {READY_S} s")


@dataclass(frozen=True)
class Stream:
    """Requests of one tenant at a rate that does not depend on the answers.

    They go to the replica of this number, or to all in turn (None). tokens: prompt lengths and their weights.
    """

    tenant: str
    rate: float
    tokens: tuple[tuple[int, float], ...]
    replica: int | None = None
    max_tokens: int = 2


@dataclass(frozen=True)
class Seen:
    """A request. sent, first (first byte), end: seconds after the load began, or 0 if that never happened."""

    tenant: str
    tokens: int
    sent: float
    status: int
    first: float
    end: float
    retry_after: str = ""


async def load(urls: Sequence[str], streams: Sequence[Stream], seconds: float, seed: int = 1) -> list[Seen]:
    """Send requests for ``seconds``, as open-loop Poisson arrivals; return when all are answered."""
    began, tasks = time.monotonic(), []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as client:

        async def one(stream: Stream, url: str, rng: random.Random) -> Seen:
            (tokens,) = rng.choices([n for n, _ in stream.tokens], [weight for _, weight in stream.tokens])
            ids = [rng.randint(300, 900) for _ in range(tokens)]
            data = {"model": MODEL, "prompt": ids, "max_tokens": stream.max_tokens, "stream": True}
            sent, first = time.monotonic() - began, 0.0
            try:
                headers = {"Authorization": f"Bearer {stream.tenant}"}
                async with client.post(url + "/v1/completions", json=data, headers=headers) as answer:
                    async for _ in answer.content.iter_any():
                        first = first or time.monotonic() - began
                    retry = answer.headers.get("retry-after", "")
                    return Seen(stream.tenant, tokens, sent, answer.status, first, time.monotonic() - began, retry)
            except (aiohttp.ClientError, OSError):
                return Seen(stream.tenant, tokens, sent, 0, first, 0.0)

        async def arrivals(stream: Stream, rng: random.Random) -> None:
            at, number = 0.0, 0
            while (at := at + rng.expovariate(stream.rate)) < seconds:
                await asyncio.sleep(max(0.0, began + at - time.monotonic()))
                number += 1
                url = urls[number % len(urls) if stream.replica is None else stream.replica]
                tasks.append(asyncio.create_task(one(stream, url, random.Random(rng.random()))))

        await asyncio.gather(*(arrivals(stream, random.Random(seed + n)) for n, stream in enumerate(streams)))
        return list(await asyncio.gather(*tasks))


def done_tokens(seen: Sequence[Seen], after: float, before: float, tenant: str = "") -> int:
    """Return the prompt tokens of the good answers that ended between ``after`` and ``before``."""
    good = [
        request
        for request in seen
        if request.status == 200 and after <= request.end < before and tenant in (request.tenant, "")
    ]
    return sum(request.tokens for request in good)
