"""The bench ``proxy`` in small: it reports every figure, and stubs answer as the bench takes for granted."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.bench.proxy_client import AnswerError, at_rate, burst_of, connected, in_turn, request
from tests.bench.proxy_profile import shares
from tests.bench.proxy_requests import KINDS, PLAIN, SMALL_BYTES, body, small
from tests.bench.proxy_routers import ROOT, Cores, Engines, Fleet
from tests.bench.sampled_replica import place
from tests.bench.stub_engines import TOKEN_BYTES, Stub, tokenised

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

PROMISED = ("us_200b", "us_500t", "us_40kb_warm", "us_10kt_warm", "us_chunk", "idle_core_share")


def test_a_small_run_reports_every_figure() -> None:
    argv = [sys.executable, "-m", "tests.bench.bench_proxy", "--quick", "--peers", "smg", "--peers-folder", "nowhere"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    keys = [f"us_{kind.key}" for kind in KINDS if not kind.gap_ms]
    assert {*PROMISED, *keys, "redis_us_per_request", "max_rps", "p50_ms", "p99_ms"} <= found.keys()
    assert all(isinstance(found[key], int) for key in keys)
    assert sum(found[key] for key in keys) > 0  # a single request may cost less than the idle use that is subtracted
    assert found["tokens"]["500t"] == pytest.approx(500, rel=0.15)
    assert found["tokens"]["10kt_warm"] == pytest.approx(10_000, rel=0.15)
    assert "smg" not in found
    assert "not installed, and left out: smg; `" in done.stderr
    assert "-m warmfleet_loadtest.stacks.peers` installs" in done.stderr


def test_replicas_find_their_code_under_any_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--python`` may name one that has only the packages of a lock installed."""
    monkeypatch.setenv("PYTHONPATH", "")
    started: dict[str, str] = {}

    class Started:
        def spawn(self, _kind: str, _name: str, _argv: list[str], more: dict[str, str]) -> Any:
            started.update(more)
            return SimpleNamespace(pid=os.getpid())

        def wait(self, _name: str, _ready: object) -> None: ...

    fleet = object.__new__(Fleet)
    fleet.processes, fleet.store_url, fleet.engines = cast("Any", Started()), "", Engines((), ())
    fleet._python, fleet._cores = sys.executable, Cores.of_this_machine()
    fleet.replica("ours", {})
    find = "import warmfleet, sys; sys.stdout.write(warmfleet.__path__[0])"
    bare = [sys.executable, "-S", "-c", find]
    done = subprocess.run(bare, capture_output=True, text=True, check=True, env=started)
    assert done.stdout == str(ROOT / "app" / "warmfleet")


def test_requests_have_the_size_that_their_name_says() -> None:
    assert len(body(small("1 200b0 17"))) == SMALL_BYTES
    large = next(kind for kind in PLAIN if kind.key == "40kb_cold")
    assert len(large.requests("1", 1)[0]) == pytest.approx(40_000, rel=0.03)
    for kind in PLAIN:
        assert kind.requests("1", 2) == kind.requests("1", 2)
        assert kind.key == "40kb_warm" or kind.requests("1", 1) != kind.requests("2", 1)


@asynccontextmanager
async def served(handler: Callable[[], asyncio.Protocol]) -> AsyncIterator[int]:
    """The port of a server."""
    async with await asyncio.get_running_loop().create_server(handler, "127.0.0.1", 0) as server:
        yield int(server.sockets[0].getsockname()[1])


@pytest.mark.parametrize(("chunks", "gap_ms"), [(0, 0), (18, 0), (3, 1)])
async def test_the_client_knows_the_end_of_each_kind_of_answer(chunks: int, gap_ms: int) -> None:
    requests = [request(body(small(str(number)), chunks, gap_ms)) for number in range(8)]
    async with served(lambda: Stub(0)) as port:
        burst = burst_of(requests)
        await in_turn(burst, await connected(port, burst, 2))
        assert len(burst.heads) == len(burst.spans) == len(requests)
        assert len(await at_rate(port, requests, 1_000.0, 1)) == len(requests)


async def test_a_stub_tokenises_what_else_it_would_answer() -> None:
    """Some routers send the whole request, mark and all, to be tokenised first."""
    content = body(small("1"), 18)
    asked = request(content).replace(b"/v1/chat/completions", b"/v1/chat/completions/render", 1)
    async with served(lambda: Stub(0)) as port:
        burst = burst_of([asked])
        await in_turn(burst, await connected(port, burst, 1))
    assert b"content-length" in burst.heads[0]
    assert len(json.loads(tokenised(content).partition(b"\r\n\r\n")[2])["token_ids"]) == len(content) // TOKEN_BYTES


class Failing(asyncio.Protocol):
    """Answers everything with ``answer``, or closes the connection if that is empty."""

    answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(self.answer) if self.answer else self.transport.close()


class Refusing(Failing):
    answer = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize("handler", [Failing, Refusing])
async def test_a_failed_answer_ends_the_run(handler: type[Failing]) -> None:
    async with served(handler) as port:
        burst = burst_of([request(body(small("1")))])
        idle = await connected(port, burst, 1)
        with pytest.raises(AnswerError):
            await in_turn(burst, idle)


async def test_a_router_may_close_connections_that_rest() -> None:
    """Every second connection is closed before it was needed; the run goes on with the others."""
    made = list[Stub]()

    class Closing(Stub):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            made.append(self)
            if len(made) % 2:
                self.transport.close()

    requests = [request(body(small(str(number)))) for number in range(20)]
    async with served(lambda: Closing(0)) as port:
        assert len(await at_rate(port, requests, 100.0, 1)) == len(requests)
    assert len(made) > 1


def test_samples_are_shared_out_over_places_and_modules() -> None:
    rows = [("redis", "warmfleet/fleet/client", 3), ("event loop", "", 1)]
    found = shares(rows, 200.0)
    assert found["place"] == {"redis": 150.0, "event loop": 50.0}
    assert found["module"] == {"warmfleet/fleet/client": 150.0, "none of ours": 50.0}


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("/a/app/warmfleet/routing/relay.py", "warmfleet/routing/relay"),
        ("/v/lib/python3.11/site-packages/redis/asyncio/client.py", "redis"),
        ("/u/lib/python3.11/asyncio/tasks.py", "asyncio"),
        ("/u/lib/python3.11/json/decoder.py", "standard library"),
    ],
)
def test_a_file_has_a_place(file: str, expected: str) -> None:
    assert place(file) == expected
