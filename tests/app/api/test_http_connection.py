"""Connections of clients: which bytes are a request, which are refused, and a client's limits of time and memory."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from typing import TYPE_CHECKING, Any, cast

import httptools
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from uvicorn import Config
from uvicorn.server import ServerState

from warmfleet.api import http_connection
from warmfleet.api.connections import Connections
from warmfleet.api.http_connection import HttpConnection
from warmfleet.api.service_routes import Health
from warmfleet.logs.folding import Folding
from warmfleet.metrics import Metrics
from warmfleet.settings import Settings
from warmfleet.timing import Timing

if TYPE_CHECKING:
    from warmfleet.api.application import Application
    from warmfleet.api.http_request import HttpRequest
    from warmfleet.routing.client_answer import ClientAnswer

HOST = b"Host: x\r\n"
POST = b"POST /p HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /next HTTP/1.1\r\n" + HOST + b"\r\n"


class Wire(asyncio.Transport):
    """The client's side of a connection, in memory. ``accepts``: the client takes all written bytes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.waits, self.ended, self.closed, self.paused = b"", 0, False, False, False
        self.accepts = True
        self.protocol: HttpConnection | None = None

    def write(self, data: Any) -> None:
        self.written += bytes(data)
        if not self.accepts:
            self.waits += len(data)

    def get_write_buffer_size(self) -> int:
        return self.waits

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.waits:
            self.abort()

    def abort(self) -> None:
        if not self.closed:
            self.closed = True
            assert self.protocol is not None
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    @property
    def statuses(self) -> list[int]:
        return [status for status, _, _ in self.answers()]

    def answers(self) -> list[tuple[int, dict[str, str], bytes]]:
        """The status, the headers and the body of every whole answer that the client got."""
        found: list[tuple[int, dict[str, str], bytes]] = []

        class Reading:
            headers: dict[str, str]
            body: bytes

            def on_message_begin(self) -> None:
                self.headers, self.body = {}, b""

            def on_header(self, name: bytes, value: bytes) -> None:
                self.headers[name.decode()] = value.decode()

            def on_body(self, piece: bytes) -> None:
                self.body += piece

            def on_message_complete(self) -> None:
                found.append((parser.get_status_code(), self.headers, self.body))

        parser = httptools.HttpResponseParser(Reading())
        parser.feed_data(self.written)
        return found


class Recorder:
    """An application that answers every request, and remembers it. ``until`` holds its answers back."""

    def __init__(self) -> None:
        self.seen: list[tuple[bytes, bytes, bytes]] = []
        self.until = asyncio.Event()
        self.until.set()
        self.cancelled = 0
        self.engines = True
        self.pieces: list[bytes] = []

    async def serve(self, request: HttpRequest, answer: ClientAnswer, *, engines: bool) -> None:
        self.engines = engines
        self.seen.append((request.method, request.target, request.body))
        try:
            await self.until.wait()
            if self.pieces:
                await answer.start(200, [(b"content-type", b"text/event-stream")])
                for piece in self.pieces:
                    await answer.body(piece, more=True)
                await answer.body(b"", more=False)
            else:
                await answer.whole(200, [], b"ok")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


class Server:
    """Connections of one replica, without sockets."""

    def __init__(self, timing: Timing = Timing(), **chosen: Any) -> None:
        self.app, self.health, self.metrics, self.state = Recorder(), Health(), Metrics(), ServerState()
        made = Settings(models=("m",), **chosen)
        self.shared = Connections(cast("Application", self.app), self.health, made, timing, self.metrics)

    def connect(self) -> tuple[HttpConnection, Wire]:
        wire = Wire()
        made = HttpConnection(self.shared, config=Config(""), server_state=self.state, app_state={})
        wire.protocol = made
        made.connection_made(wire)
        return made, wire

    async def send(self, *pieces: bytes) -> Wire:
        """A new connection that sends these pieces, each after the answer to the piece before, if it gets one."""
        connection, wire = self.connect()
        for piece in pieces:
            if not wire.closed:
                connection.data_received(piece)
                await turns()
        return wire

    def closed(self) -> dict[str, float]:
        """The reasons for which connections were closed."""
        return {
            sample.labels["reason"]: sample.value
            for family in self.metrics.connections_closed.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        }


async def turns(count: int = 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def error_code(wire: Wire) -> str:
    return str(json.loads(wire.answers()[-1][2])["error"]["code"])


REFUSED = {
    "a length beside a coding": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + GET,
    "a coding beside a length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n" + GET,
    "two lengths": POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\na" + GET,
    "the same length twice": POST + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\na" + GET,
    "a list of lengths": POST + b"Content-Length: 1, 1\r\n\r\na" + GET,
    "a signed length": POST + b"Content-Length: +1\r\n\r\na" + GET,
    "a hexadecimal length": POST + b"Content-Length: 0x1\r\n\r\na" + GET,
    "an empty length": POST + b"Content-Length:\r\n\r\na" + GET,
    "another coding": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + GET,
    "an unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + GET,
    "two codings": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + GET,
    "chunked twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + GET,
    "a coding in HTTP/1.0": b"POST /p HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + GET,
    "a bare LF": b"GET /p HTTP/1.1\n" + HOST + b"\r\n" + GET,
    "a bare LF in a header": b"GET /p HTTP/1.1\r\n" + HOST + b"A: b\nB: c\r\n\r\n" + GET,
    "a bare CR": b"GET /p HTTP/1.1\r\n" + HOST + b"A: b\rB: c\r\n\r\n" + GET,
    "a folded header": b"GET /p HTTP/1.1\r\n" + HOST + b"A: b\r\n c: d\r\n\r\n" + GET,
    "a space before the colon": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + GET,
    "no name": b"GET /p HTTP/1.1\r\n" + HOST + b": b\r\n\r\n" + GET,
    "a control character": b"GET /p HTTP/1.1\r\n" + HOST + b"A: b\x00c\r\n\r\n" + GET,
    "no host": b"GET /p HTTP/1.1\r\n\r\n" + GET,
    "two hosts": b"GET /p HTTP/1.1\r\n" + HOST + HOST + b"\r\n" + GET,
    "a chunk size with LF": CHUNKED + b"1\nx\r\n0\r\n\r\n" + GET,
    "a chunk size with a space": CHUNKED + b"1 \r\nx\r\n0\r\n\r\n" + GET,
    "a negative chunk size": CHUNKED + b"-1\r\nx\r\n0\r\n\r\n" + GET,
    "a chunk size beyond 64 bits": CHUNKED + b"fffffffffffffffff\r\nx\r\n0\r\n\r\n" + GET,
    "a chunk without its end": CHUNKED + b"1\r\nxx0\r\n\r\n" + GET,
    "an extension with LF": CHUNKED + b"1;a\nx\r\n0\r\n\r\n" + GET,
    "a length in the trailers": CHUNKED + b"0\r\nContent-Length: 5\r\n\r\n" + GET,
    "another version": b"GET /p HTTP/1.2\r\n" + HOST + b"\r\n" + GET,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "CONNECT": b"CONNECT a:1 HTTP/1.1\r\n" + HOST + b"\r\n" + GET,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 40,
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_two_readers_could_read_differently_is_refused(name: str) -> None:
    """An ambiguous request does not reach the application, nor do the bytes after it."""
    server = Server()
    wire = await server.send(REFUSED[name])
    assert wire.statuses == [400]
    assert error_code(wire) == "bad_request"
    assert wire.answers()[0][1]["x-request-id"]
    assert wire.ended, "the connection ends at once"
    assert not server.app.seen
    assert server.closed() == {"syntax": 1}


SERVED = {
    "two requests": (POST + b"Content-Length: 2\r\n\r\nab" + GET, [b"ab", b""]),
    "chunks": (CHUNKED + b"1\r\na\r\n2;x=y\r\nbc\r\n0\r\nA: b\r\n\r\n" + GET, [b"abc", b""]),
    "empty lines before a request": (b"\r\n\r\n" + GET, [b""]),
    "the last request": (GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + GET, [b""]),
    "the last request, then nonsense": (GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + b"\0" * 9, [b""]),
    "HTTP/1.0": (b"GET /p HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" + GET, [b""]),
    "another protocol is offered": (
        POST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nab" + GET,
        [b"ab", b""],
    ),
    "another protocol, then the end": (
        POST + b"Connection: close, Upgrade\r\nUpgrade: websocket\r\n\r\n" + GET,
        [b""],
    ),
    "any byte of latin-1": (b"GET /p HTTP/1.1\r\n" + HOST + b"A: \xff\xe9\r\n\r\n", [b""]),
    "a request, then nonsense": (GET + b"\0" * 9, [b""]),
    "five requests": (GET * 5, [b""] * 5),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
async def test_requests_are_served_in_order(name: str) -> None:
    server = Server()
    raw, bodies = SERVED[name]
    wire = await server.send(raw)
    await turns(20)
    assert [body for _, _, body in server.app.seen] == bodies
    assert wire.statuses == [200] * len(bodies) + [400] * (name == "a request, then nonsense")
    assert server.shared.body_bytes == 0


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    raw=st.sampled_from([*REFUSED.values(), *(raw for raw, _ in SERVED.values())]),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_the_split_into_packets_means_nothing(raw: bytes, cuts: list[int]) -> None:
    async def outcome(*pieces: bytes) -> object:
        server = Server()
        wire = await server.send(*pieces)
        await turns(20)
        answers = [(status, headers.get("connection"), body) for status, headers, body in wire.answers()]
        return server.app.seen, answers, server.closed(), wire.ended, wire.closed, server.shared.body_bytes

    places = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    pieces = [raw[start:end] for start, end in itertools.pairwise(places)]
    assert asyncio.run(outcome(*pieces)) == asyncio.run(outcome(raw))


async def test_trailers_and_extensions_are_bounded() -> None:
    """Limits of bodies do not count trailers and extensions; without a bound one connection could take a gigabyte."""
    for framing in (
        b"0\r\n" + b"x: y\r\n" * 18,
        b"0\r\nx: " + b"y" * 9_000 + b"\r\n",
        b"0\r\nx: " + b"y" * 20_000,  # and no end
        b"1;" + b"x" * 20_000,  # and no end
        b"1;" + b"x" * 9_000 + b"\r\na\r\n",
    ):
        server = Server()
        wire = await server.send(CHUNKED, *(framing[at : at + 1_000] for at in range(0, len(framing), 1_000)))
        assert (wire.statuses, error_code(wire)) == ([431], "headers_too_large"), framing[:10]
        assert wire.ended
        assert not server.app.seen
        assert server.shared.body_bytes == 0
    server = Server()
    tiny = b"1\r\na\r\n" * 50_000  # small chunks are allowed
    wire = await server.send(CHUNKED, *(tiny[at : at + 999] for at in range(0, len(tiny), 999)), b"0\r\nx: y\r\n\r\n")
    assert server.app.seen[0][2] == b"a" * 50_000


@pytest.mark.parametrize("step", [1_000, 10**6])
async def test_a_head_is_bounded(step: int) -> None:
    for head in (b"x: " + b"y" * 70_000 + b"\r\n", b"x: y\r\n" * 101):
        server = Server()
        raw = POST + head + b"\r\n"
        wire = await server.send(*(raw[at : at + step] for at in range(0, len(raw), step)))
        assert (wire.statuses, error_code(wire)) == ([431], "headers_too_large")
        assert not server.app.seen
    assert (await Server().send(POST + b"x: y\r\n" * 99 + b"\r\n")).statuses == [200]


async def test_a_body_waits_for_its_invitation() -> None:
    server = Server()
    connection, wire = server.connect()
    connection.data_received(POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert wire.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.data_received(b"ab")
    await turns()
    assert server.app.seen == [(b"POST", b"/p", b"ab")]
    wire = await Server(body_max_bytes=1).send(POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert wire.statuses == [413]


async def test_answers_take_the_form_that_the_client_understands() -> None:
    server = Server()
    server.app.pieces = [b"one", b"two"]
    wire = await server.send(GET)
    ((status, headers, body),) = wire.answers()
    assert headers.pop("date").endswith(" GMT")
    assert (status, headers, body) == (
        200,
        {"content-type": "text/event-stream", "transfer-encoding": "chunked"},
        b"onetwo",
    )
    wire = await server.send(b"GET / HTTP/1.0\r\n\r\n")
    assert wire.written.endswith(b"connection: close\r\n\r\nonetwo")
    assert wire.closed
    wire = await server.send(b"HEAD / HTTP/1.1\r\n" + HOST + b"\r\n")
    assert wire.written.endswith(b"\r\n\r\n")
    server.app.pieces = []
    wire = await server.send(b"HEAD / HTTP/1.1\r\n" + HOST + b"\r\n")
    assert re.sub(rb"date: .*\r\n", b"", wire.written) == b"HTTP/1.1 200 OK\r\n\r\n"


async def test_too_many_pipelined_requests_end_the_connection() -> None:
    server = Server()
    wire = await server.send(GET * 1_000)
    await turns(300)
    assert wire.statuses == [200] * 65
    assert wire.closed


async def test_a_bug_of_ours_is_no_fault_of_the_client(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(http_connection, "framing", broken)
    wire = await Server().send(GET)
    assert (wire.statuses, error_code(wire)) == ([500], "internal_error")
    assert "KeyError: 'a bug'" in caplog.text


# ------------------------------------------------------------------------------------------------------ memory


async def test_bodies_share_one_budget() -> None:
    """The largest unfinished body gives way, so small requests pass beside large uploads; all memory comes back."""
    server = Server(body_max_bytes=60_000)
    server.shared.max_uploads_bytes = 100_000
    large = [server.connect() for _ in range(2)]
    for connection, _ in large:
        connection.data_received(POST + b"Content-Length: 60000\r\n\r\n")
    large[0][0].data_received(b"x" * 55_000)
    large[1][0].data_received(b"x" * 44_000)
    assert server.shared.body_bytes == 99_000
    small = await server.send(POST + b"Content-Length: 2000\r\n\r\n" + b"y" * 2_000)
    assert small.statuses == [200]
    assert (large[0][1].statuses, error_code(large[0][1])) == ([503], "uploads_full")
    assert large[0][1].answers()[0][1]["retry-after"] == "1"
    assert large[0][1].ended
    large[1][0].data_received(b"x" * 16_000)
    await turns()
    assert large[1][1].statuses == [200]
    assert server.shared.body_bytes == 0
    assert server.closed() == {"uploads": 1}


async def test_requests_that_run_count_in_the_budget() -> None:
    server = Server(body_max_bytes=50_000)
    server.shared.max_uploads_bytes = 50_000
    server.app.until.clear()
    running = await server.send(POST + b"Content-Length: 40000\r\n\r\n" + b"x" * 40_000)
    refused = await server.send(POST + b"Content-Length: 20000\r\n\r\n" + b"x" * 20_000)
    assert (refused.statuses, running.written) == ([503], b"")
    server.app.until.set()
    await turns()
    assert running.statuses == [200]
    assert server.shared.body_bytes == 0


async def test_a_client_that_hangs_up_gives_its_memory_back() -> None:
    server = Server()
    server.app.until.clear()
    for raw in (POST + b"Content-Length: 9\r\n\r\nx", POST + b"Content-Length: 1\r\n\r\nx" + GET * 3):
        for yields in (0, 4):
            connection, wire = server.connect()
            connection.data_received(raw)
            await turns(yields)
            wire.abort()
            await turns(8)
            assert (server.shared.body_bytes, server.state.tasks, server.state.connections) == (0, set(), set())


# ------------------------------------------------------------------------------------------------- connections


async def test_a_new_connection_takes_the_place_of_an_idle_one() -> None:
    server = Server(max_connections=3)
    server.app.until.clear()
    _, busy = server.connect()
    assert busy.protocol is not None
    busy.protocol.data_received(GET)
    (_, idle), (_, younger) = server.connect(), server.connect()
    _, new = server.connect()
    assert (idle.closed, younger.closed, new.closed, busy.closed) == (True, False, False, False)
    assert server.closed() == {"crowded": 1}


async def test_slow_uploads_give_way_too_and_a_full_replica_answers_health_checks() -> None:
    server = Server(max_connections=2)
    server.app.until.clear()
    upload = await server.send(POST + b"Content-Length: 9\r\n\r\nx")
    running = [await server.send(GET) for _ in range(2)]
    assert upload.closed
    server.app.until.set()
    await turns()
    served = await server.send(GET)
    assert served.statuses == [200], "the two others are idle by now"
    server.app.until.clear()
    running = [await server.send(GET) for _ in range(2)]
    assert server.app.engines
    health = await server.send(GET)
    assert not server.app.engines, "the application refuses all but requests for itself"
    assert not any(wire.written for wire in [*running, health])
    server.app.until.set()
    await turns()
    assert health.answers()[0][1]["connection"] == "close"
    assert "connection" not in running[0].answers()[0][1]


async def gone(wire: Wire) -> None:
    async with asyncio.timeout(5):
        while not (wire.closed or wire.ended):  # noqa: ASYNC110  a transport sets no event
            await asyncio.sleep(0.005)


async def test_a_slow_body_ends_its_connection_at_once() -> None:
    server = Server(Timing(body_timeout_s=0.05))
    wire = await server.send(POST + b"Content-Length: 9\r\n\r\nx")
    await gone(wire)
    assert (wire.statuses, server.closed()) == ([400], {"body_time": 1})
    assert b"was not complete after" in wire.answers()[0][2]
    assert server.shared.body_bytes == 0


async def test_a_body_has_a_least_rate() -> None:
    server = Server(Timing(body_look_s=0.3))
    quick, quick_wire = server.connect()
    slow, slow_wire = server.connect()
    for connection in (quick, slow):
        connection.data_received(POST + b"Content-Length: 10000000\r\n\r\n")
    while not slow_wire.ended:
        quick.data_received(b"x" * 20_000)
        slow.data_received(b"x")
        await asyncio.sleep(0.01)
    assert slow_wire.statuses == [400]
    assert not quick_wire.written


async def test_idle_connections_are_closed() -> None:
    server = Server(Timing(header_timeout_s=0.01), keepalive_s=0.1)
    begun = asyncio.get_running_loop().time()
    wire = await server.send(GET, GET)
    await gone(wire)
    assert wire.statuses == [200, 200]
    assert asyncio.get_running_loop().time() - begun >= 0.09
    assert not server.closed(), "that is no fault"
    partial = await server.send(GET, GET[:9])
    await gone(partial)
    assert server.closed() == {"head_time": 1}


async def test_a_client_that_never_reads_is_cut_off() -> None:
    server = Server(Timing(write_timeout_s=0.05), keepalive_s=0.05)
    server.app.pieces = [b"x" * 100] * 3
    connection, wire = server.connect()
    wire.accepts = False
    wire.waits = 1_000
    connection.pause_writing()
    connection.data_received(GET)
    await gone(wire)
    await turns()
    assert (server.app.cancelled, server.closed()) == (1, {"slow_reader": 1})
    server.app.pieces = []
    connection, wire = server.connect()
    wire.accepts = False
    connection.data_received(GET)
    await gone(wire)
    assert server.closed() == {"slow_reader": 2}, "nor may it keep an answer that is complete"


async def test_a_client_that_reads_slowly_is_served() -> None:
    server = Server(Timing(write_timeout_s=0.25))
    server.app.pieces = [b"x" * 100] * 3
    connection, wire = server.connect()
    wire.accepts = False
    connection.write(b"x" * 1_000)
    connection.pause_writing()
    connection.data_received(GET)
    for _ in range(20):
        wire.waits -= 10
        await asyncio.sleep(0.03)
    assert not wire.closed
    wire.accepts, wire.waits, wire.written = True, 0, wire.written[1_000:]
    connection.resume_writing()
    await turns()
    assert wire.statuses == [200]


# ---------------------------------------------------------------------------------------------------- stopping


async def test_while_draining_each_answer_ends_its_connection() -> None:
    server = Server()
    idle, idle_wire = server.connect()
    idle.data_received(GET)
    await turns()
    server.app.until.clear()
    running, running_wire = server.connect()
    running.data_received(GET)
    await turns()
    server.health.draining = True
    server.app.until.set()
    idle.data_received(GET)
    await turns()
    first, last = idle_wire.answers()
    assert ("connection" in first[1], last[1]["connection"]) == (False, "close")
    assert idle_wire.closed
    assert running_wire.answers()[0][1]["connection"] == "close"


async def test_idle_connections_are_closed_at_the_end_of_draining() -> None:
    server = Server()
    server.app.pieces = [b"a"]
    kept = await server.send(GET)
    half, half_wire = server.connect()
    half.data_received(GET[:9])
    for connection in list(server.state.connections):
        connection.shutdown()
    assert (kept.closed, half_wire.closed) == (True, False)
    half.data_received(GET[9:])
    await turns()
    assert half_wire.answers()[0][1]["connection"] == "close"
    assert half_wire.closed


async def test_faults_are_told_rarely(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    with caplog.filtering(Folding()):  # as every process joins repeated lines
        for _ in range(50):
            await server.send(b"nonsense\r\n\r\n")
    assert server.closed() == {"syntax": 50}
    assert len([record for record in caplog.records if record.name.startswith("warmfleet")]) == 1
