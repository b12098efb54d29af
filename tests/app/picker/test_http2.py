"""The port for gateways as an HTTP/2 server: what it serves, its limits, and that a fault ends no more than it must."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from functools import partial
from sys import getsizeof
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.polling import poll
from tests.support.requests.http2 import Peer, peer

from warmfleet.metrics import Metrics
from warmfleet.picker import connection, frames, health, limits
from warmfleet.picker.connection import Http2Connection
from warmfleet.picker.frames import Code, Status
from warmfleet.picker.limits import Limits
from warmfleet.picker.memory import Memory
from warmfleet.picker.port import Port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from warmfleet.errors import WarmfleetError
    from warmfleet.picker.stream import Stream

ECHO, BROKEN, LAST, ACKNOWLEDGE = b"/test/Echo", b"/test/Broken", b"/test/Last", b"/test/Acknowledge"
SMALL = Limits(streams=4, all_streams=6, connections=3, message_bytes=1_000_000, preface_s=0.2)


class Echo:
    """Sends each message back, and tells what else came."""

    def __init__(self, told: list[str], stream: Stream) -> None:
        self.told, self.stream = told, stream

    def message(self, data: bytes) -> None:
        if data == b"break":
            raise RuntimeError("a bug")
        self.stream.send(frames.message(data))

    def too_long(self) -> None:
        self.told.append("too long")
        self.stream.fail(Status.RESOURCE_EXHAUSTED, "100 % too long")

    def ended(self) -> None:
        self.told.append("ended")
        self.stream.finish()

    def lost(self) -> None:
        self.told.append("lost")

    def give_up_body(self, error: WarmfleetError) -> None:
        self.told.append("no memory")
        self.stream.fail(Status.RESOURCE_EXHAUSTED, error.message)


class Last(Echo):
    """Sends the first message back as its last one, later: as an answer that took time."""

    answered = False

    def message(self, data: bytes) -> None:
        if self.answered:
            self.told.append(data.decode())
        else:
            self.answered = True
            asyncio.get_running_loop().call_soon(
                self.stream.send_last, frames.message(data), lambda: self.told.append("left")
            )


class Acknowledge(Echo):
    """Acknowledges each message, as a picker does with headers before a body."""

    def message(self, data: bytes) -> None:
        self.stream.send(frames.message(data), answers=False)


class Served:
    """A port that listens. ``told``: what its handlers were told."""

    def __init__(self, port: Port, number: int, told: list[str], opened: set[Any]) -> None:
        self.port, self.number, self.told, self.opened = port, number, told, opened

    async def ended(self, code: Code) -> None:
        """Return once the server has ended a connection for this reason, and has none."""
        counter = self.port._metrics.connections_closed.labels(code.name.lower())
        await poll(lambda: counter._value.get() == 1 and not self.port.connections, 20, f"a connection ends by {code}")


@asynccontextmanager
async def serving(chosen: Limits = SMALL, memory: Memory | None = None) -> AsyncIterator[Served]:
    told: list[str] = []
    routes: dict[bytes, Any] = {ECHO: partial(Echo, told), LAST: partial(Last, told)}
    routes |= {ACKNOWLEDGE: partial(Acknowledge, told), **health.checks(lambda: True)}
    port, opened = Port(routes, chosen, Metrics(), memory), set[Any]()
    server = await asyncio.get_running_loop().create_server(partial(Http2Connection, port, opened), "127.0.0.1", 0)
    try:
        yield Served(port, server.sockets[0].getsockname()[1], told, opened)
    finally:
        server.close()
        for connection in [*port.connections]:
            cast("Http2Connection", connection)._transport.abort()
        await poll(lambda: not port.connections, 10, "all connections are closed")
        assert port.streams == port.memory.held == 0
        assert opened == set()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as found:
        yield found


@pytest.fixture
async def client(served: Served) -> AsyncIterator[Peer]:
    async with peer(served.number) as made:
        made.greet()
        yield made


async def echoed(client: Peer, stream: int, message: bytes) -> None:
    """Send a message on an open call, and expect it back."""
    client.data(stream, message)
    found = await client.until(frames.DATA, stream)
    assert found.payload == frames.message(message)


# ---------------------------------------------------------------- calls


async def test_calls_on_one_connection(served: Served, client: Peer) -> None:
    for stream in (1, 3):
        client.call(stream, ECHO)
    await echoed(client, 1, b"one")
    await echoed(client, 3, b"three")
    client.send(frames.frame(frames.DATA, frames.END_STREAM, 1))
    assert (await client.trailers(1))[b"grpc-status"] == b"0"
    assert served.told == ["ended"]
    await echoed(client, 3, b"still open")
    assert served.port.streams == 1


async def test_a_message_in_many_frames_and_many_in_one(client: Peer) -> None:
    client.call(1, ECHO)
    for byte in frames.message(b"slow"):
        client.send(frames.frame(frames.DATA, 0, 1, bytes((byte,))))
    assert (await client.until(frames.DATA)).payload == frames.message(b"slow")
    client.send(frames.frame(frames.DATA, 0, 1, b"".join(frames.message(b"%d" % number) for number in range(5))))
    found = b"".join([(await client.until(frames.DATA)).payload for _ in range(5)])
    assert found == b"".join(frames.message(b"%d" % number) for number in range(5))


async def test_padding_and_priority_are_passed_over(client: Peer) -> None:
    block = client.encoder.encode(
        [(b":method", b"POST"), (b":path", ECHO), (b"content-type", b"application/grpc+proto")]
    )
    flags = frames.END_HEADERS | frames.PADDED | frames.HAS_PRIORITY
    client.send(frames.frame(frames.HEADERS, flags, 1, b"\3" + bytes(5) + block + bytes(3)))
    client.send(frames.frame(frames.DATA, frames.PADDED, 1, b"\2" + frames.message(b"padded") + bytes(2)))
    assert (await client.until(frames.DATA)).payload == frames.message(b"padded")
    client.send(frames.frame(frames.PRIORITY, 0, 1, bytes(5)), frames.frame(99, 0, 0, b"unknown"))
    await echoed(client, 1, b"goes on")


async def test_what_is_no_call(client: Peer) -> None:
    client.call(1, b"/test/Unknown")
    assert (await client.trailers(1))[b"grpc-status"] == b"%d" % Status.UNIMPLEMENTED
    client.send(frames.frame(frames.HEADERS, 5, 3, client.encoder.encode([(b":method", b"GET"), (b":path", b"/")])))
    assert (await client.trailers(3))[b":status"] == b"415"
    client.call(5, ECHO)
    await echoed(client, 5, b"the connection goes on")


async def test_a_bug_ends_its_call_alone(served: Served, client: Peer, caplog: pytest.LogCaptureFixture) -> None:
    for stream in (1, 3):
        client.call(stream, ECHO)
    client.data(1, b"break")
    assert (await client.trailers(1))[b"grpc-status"] == b"%d" % Status.INTERNAL
    assert served.told == ["lost"]
    assert "a bug" in caplog.text
    await echoed(client, 3, b"goes on")


async def test_compressed_messages_are_refused(served: Served, client: Peer) -> None:
    client.call(1, ECHO)
    client.send(frames.frame(frames.DATA, 0, 1, b"\1" + frames.message(b"gzip")[1:]))
    assert (await client.trailers(1))[b"grpc-status"] == b"%d" % Status.UNIMPLEMENTED
    assert served.told == ["lost"]


async def test_a_huge_message_is_refused_before_it_comes(served: Served, client: Peer) -> None:
    client.call(1, ECHO)
    client.send(frames.frame(frames.DATA, 0, 1, b"\0" + (2**31).to_bytes(4, "big")))
    told = await client.trailers(1)
    assert told[b"grpc-status"] == b"%d" % Status.RESOURCE_EXHAUSTED
    assert told[b"grpc-message"] == b"100 %25 too long"
    assert served.told == ["too long"]


# ---------------------------------------------------------------- header blocks


async def test_blocks_are_read_in_order_until_the_peers_table_is_gone(served: Served, client: Peer) -> None:
    """Before the peer knows the setting its blocks refer to earlier ones; afterwards equal blocks mean the same."""
    for stream in (1, 3):
        client.call(stream, ECHO, grpc_timeout=b"10S")
        await echoed(client, stream, b"with a table")
    assert served.port.heads == {}
    client.send(frames.frame(frames.SETTINGS, frames.ACK, 0))
    client.encoder.header_table_size = 0
    for stream in (5, 7):
        client.call(stream, ECHO, grpc_timeout=b"10S")
        await echoed(client, stream, b"without")
    assert {head.path for head in served.port.heads.values()} == {ECHO}


async def test_a_peer_that_keeps_its_table_is_refused(client: Peer) -> None:
    client.call(1, ECHO)
    await echoed(client, 1, b"with a table")
    client.send(frames.frame(frames.SETTINGS, frames.ACK, 0))
    client.call(3, ECHO)
    assert (await client.goaway())[1] == Code.COMPRESSION_ERROR


async def test_a_block_in_continuations(client: Peer) -> None:
    block = client.encoder.encode([(b":method", b"POST"), (b":path", ECHO), (b"content-type", b"application/grpc")])
    client.send(frames.frame(frames.HEADERS, 0, 1, block[:5]), frames.frame(frames.CONTINUATION, 0, 1, block[5:9]))
    client.send(frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[9:]))
    await echoed(client, 1, b"whole")


@pytest.mark.parametrize("piece", [b"", b"x" * 16_000], ids=["empty", "long"])
async def test_a_flood_of_continuations(client: Peer, piece: bytes) -> None:
    client.send(frames.frame(frames.HEADERS, 0, 1, b"\x82"))
    for _ in range(limits.CONTINUATIONS + 2):
        client.send(frames.frame(frames.CONTINUATION, 0, 1, piece))
    assert (await client.goaway())[1] == Code.ENHANCE_YOUR_CALM
    assert await client.closed()


async def test_headers_that_unpack_to_too_much(client: Peer) -> None:
    more: dict[str, Any] = {f"x-{number}": b"y" * 8_000 for number in range(9)}
    client.call(1, ECHO, **more)
    assert (await client.goaway())[1] in (Code.COMPRESSION_ERROR, Code.FRAME_SIZE_ERROR)


# ---------------------------------------------------------------- windows


async def test_a_body_of_16_mib_does_not_stall() -> None:
    """Both windows are renewed as bytes come in: of the connection, and of the call."""
    async with serving(Limits(4, 4, 4, 2**25)) as served, peer(served.number) as client:
        client.greet(window=2**30)
        client.send(frames.frame(frames.WINDOW_UPDATE, 0, 0, frames.number(2**30)))
        client.call(1, ECHO)
        left = frames.message(bytes(2**24))
        windows = {0: limits.CONNECTION_WINDOW, 1: limits.STREAM_WINDOW}
        got = 0
        async with asyncio.timeout(30):
            while left or got < 2**24 + 5:
                while left and (size := min(frames.MAX_FRAME, *windows.values())):
                    client.send(frames.frame(frames.DATA, 0, 1, left[:size]))
                    left = left[size:]
                    windows = {number: window - size for number, window in windows.items()}
                found = await client.frame()
                if found.kind == frames.WINDOW_UPDATE and found.stream in windows:
                    windows[found.stream] += int.from_bytes(found.payload, "big")
                elif found.kind == frames.DATA:
                    got += len(found.payload)


@pytest.mark.parametrize("size", [3, 40_000], ids=["one frame", "several frames"])
async def test_the_end_goes_out_in_one_write_with_the_last_message(
    served: Served, client: Peer, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Else a peer acts on the message before it reads of the end."""
    client.call(1, LAST)
    await poll(lambda: served.opened, 10, "the connection is open")
    [opened] = served.opened
    written: list[bytes] = []
    write = opened._transport.write

    def kept(data: bytes) -> None:
        written.append(data)
        write(data)

    monkeypatch.setattr(opened._transport, "write", kept)
    client.data(1, b"x" * size)
    assert (await client.trailers(1))[b"grpc-status"] == b"0"
    assert served.told == ["left"]
    assert frames.OK_TRAILERS in written[-1]
    assert b"x" * (size % frames.MAX_FRAME) in written[-1]


async def test_a_call_goes_on_if_its_peer_sends_more_before_the_end_is_out(served: Served) -> None:
    """An engine may answer before all of a request was sent."""
    async with peer(served.number) as client:
        client.greet(window=10)
        client.call(1, LAST)
        client.data(1, b"x" * 40)
        await client.until(frames.DATA, 1)
        client.data(1, b"more")
        await poll(lambda: served.told, 10, "the message was read")
        client.send(frames.frame(frames.WINDOW_UPDATE, 0, 1, frames.number(100)))
        await client.until(frames.DATA, 1)
        client.data(1, b"again", ends=True)
        assert (await client.trailers(1))[b"grpc-status"] == b"0"
    assert served.told == ["more", "again", "ended"]


async def test_answers_wait_for_the_peers_windows(served: Served) -> None:
    async with peer(served.number) as client:
        client.greet(window=10)
        client.call(1, ECHO)
        client.call(3, ECHO)
        client.data(1, b"x" * 45)
        client.data(3, b"y" * 5)
        client.send(frames.frame(frames.DATA, frames.END_STREAM, 1))
        found = [await client.until(frames.DATA) for _ in range(2)]
        assert {frame.stream: len(frame.payload) for frame in found} == {1: 10, 3: 10}
        client.send(frames.frame(frames.WINDOW_UPDATE, 0, 1, frames.number(15)))
        assert len((await client.until(frames.DATA, 1)).payload) == 15
        client.send(frames.settings({frames.INITIAL_WINDOW: 50}))
        assert len((await client.until(frames.DATA, 1)).payload) == 25
        assert (await client.trailers(1))[b"grpc-status"] == b"0"


async def test_calls_share_the_connections_window(served: Served) -> None:
    async with peer(served.number) as client:
        client.greet(window=2**20)
        for stream in (1, 3):
            client.call(stream, ECHO)
            client.data(stream, b"z" * 100_000)
        got = {1: 0, 3: 0}
        while sum(got.values()) < frames.FIRST_WINDOW:
            found = await client.until(frames.DATA)
            got[found.stream] += len(found.payload)
        client.send(frames.frame(frames.WINDOW_UPDATE, 0, 0, frames.number(2**20)))
        while sum(got.values()) < 2 * 100_005:
            found = await client.until(frames.DATA)
            got[found.stream] += len(found.payload)
        assert got == {1: 100_005, 3: 100_005}


async def test_a_peer_that_takes_nothing_gets_no_more_credit(served: Served) -> None:
    """What waits for a peer is bounded, because its own messages are not read further; to ignore that is a fault."""
    async with peer(served.number) as client:
        client.greet(window=0)
        client.call(1, ECHO)
        for _ in range(90):
            client.data(1, bytes(10_000))
        await served.ended(Code.FLOW_CONTROL_ERROR)
        assert served.told == ["lost"]


async def test_a_window_above_its_limit(client: Peer) -> None:
    client.send(frames.frame(frames.WINDOW_UPDATE, 0, 0, frames.number(frames.MAX_WINDOW)))
    assert (await client.goaway())[1] == Code.FLOW_CONTROL_ERROR


# ---------------------------------------------------------------- floods and counts


@pytest.mark.parametrize("path", [ECHO, ACKNOWLEDGE], ids=["without a message", "after an acknowledgement"])
async def test_rapid_resets(served: Served, client: Peer, path: bytes) -> None:
    with suppress(ConnectionError):
        for number in range(limits.EARLY_RESETS + limits.EARLY_RESETS_PER_S * 10):
            client.call(2 * number + 1, path)
            if path == ACKNOWLEDGE:
                client.data(2 * number + 1, b"headers")
            client.send(frames.frame(frames.RST_STREAM, 0, 2 * number + 1, frames.number(Code.CANCEL)))
            if number % 100 == 0:
                await client.writer.drain()
    await served.ended(Code.ENHANCE_YOUR_CALM)
    assert served.told.count("lost") <= limits.EARLY_RESETS + limits.EARLY_RESETS_PER_S * 10


@pytest.mark.parametrize(
    "flood",
    [
        frames.frame(frames.PING, 0, 0, bytes(8)),
        frames.settings({frames.INITIAL_WINDOW: 100}),
        frames.frame(frames.PRIORITY, 0, 1, bytes(5)),
        frames.frame(77, 0, 0, b""),
        frames.frame(frames.DATA, 0, 1, b""),
    ],
    ids=["ping", "settings", "priority", "unknown", "empty data"],
)
async def test_floods_of_frames_without_a_use(served: Served, client: Peer, flood: bytes) -> None:
    client.call(1, ECHO)
    client.send(flood * (limits.IDLE_FRAMES + limits.IDLE_FRAMES_PER_S * 10))
    await served.ended(Code.ENHANCE_YOUR_CALM)


async def test_no_more_calls_than_the_limit(served: Served, client: Peer) -> None:
    """A call beyond the limit is refused so that the gateway may send it elsewhere; the others go on."""
    for stream in range(1, 2 * SMALL.streams + 2, 2):
        client.call(stream, ECHO)
    refused = await client.until(frames.RST_STREAM)
    assert (refused.stream, refused.payload) == (2 * SMALL.streams + 1, frames.number(Code.REFUSED_STREAM))
    await echoed(client, 1, b"goes on")
    async with peer(served.number) as other:  # all connections together
        other.greet()
        for stream in (1, 3, 5):
            other.call(stream, ECHO)
        assert (await other.until(frames.RST_STREAM)).stream == 5


async def test_no_more_connections_than_the_limit(served: Served) -> None:
    """A connection without a call gives way to a new one; without such a one the new one is refused."""
    async with peer(served.number) as one, peer(served.number) as two, peer(served.number) as three:
        for made in (one, two, three):
            made.greet()
        for made in (two, three):
            made.call(1, ECHO)
            await echoed(made, 1, b"mine")
        async with peer(served.number) as four:
            assert (await one.goaway())[1] == Code.NO_ERROR
            assert await one.closed()
            four.greet()
            four.call(1, ECHO)
            await echoed(four, 1, b"mine")
            async with peer(served.number) as five:
                five.greet()
                assert await five.closed()


async def test_refusals_of_a_full_port_are_no_fault_of_a_connection(served: Served, client: Peer) -> None:
    async with peer(served.number) as other:
        other.greet()
        for number in (1, 3, 5, 7):
            other.call(number, ECHO)
        await read(other)
        for number in (1, 3):
            client.call(number, ECHO)
        assert served.port.limits.all_streams == 6
        for number in range(5, 2 * (limits.EARLY_RESETS + limits.EARLY_RESETS_PER_S * 4), 2):
            client.call(number, ECHO)
            if number % 500 == 5:
                await read(client)
        await echoed(client, 1, b"goes on")


async def test_settings_change_the_windows_once_a_frame(served: Served, client: Peer) -> None:
    client.call(1, ECHO)
    value = frames.INITIAL_WINDOW.to_bytes(2, "big")
    client.send(frames.frame(frames.SETTINGS, 0, 0, b"".join(value + frames.number(n) for n in (2**31 - 1, 70_000))))
    await read(client)
    [found] = served.opened
    assert found.streams[1].window == 70_000
    client.send(frames.frame(frames.SETTINGS, 0, 0, (value + frames.number(5)) * (limits.SETTINGS_MAX + 1)))
    assert (await client.goaway())[1] == Code.ENHANCE_YOUR_CALM


# ---------------------------------------------------------------- memory, time


async def read(client: Peer) -> None:
    """Return once the server has read all that was sent."""
    client.send(frames.frame(frames.PING, 0, 0, bytes(8)))
    await client.until(frames.PING)


async def test_half_messages_together_have_a_bound() -> None:
    """The call that takes the most gives way; tiny frames take no more than their bytes."""
    async with serving(memory=Memory(50_000)) as served, peer(served.number) as client:
        client.greet()
        half = frames.message(bytes(100_000))
        for number in (1, 3):
            client.call(number, ECHO)
        client.send(frames.frame(frames.DATA, 0, 1, half[:15_000]) * 2)
        client.send(frames.frame(frames.DATA, 0, 3, half[:5]), frames.frame(frames.DATA, 0, 3, bytes(2)) * 7_000)
        await read(client)
        assert served.port.memory.held == 30_000 + 14_005
        [found] = served.opened
        assert getsizeof(found.streams[3]._buffer) < 20_000
        client.send(frames.frame(frames.DATA, 0, 3, bytes(10_000)))
        assert (await client.trailers(1))[b"grpc-status"] == b"%d" % Status.RESOURCE_EXHAUSTED
        assert served.told == ["no memory"]
        assert served.port.memory.held == 24_005
        client.send(frames.frame(frames.RST_STREAM, 0, 3, frames.number(Code.CANCEL)))
        await read(client)
        assert served.port.memory.held == 0


async def test_answers_that_wait_have_a_bound() -> None:
    async with serving(memory=Memory(50_000)) as served, peer(served.number) as client:
        client.greet(window=0)
        for number in (1, 3):
            client.call(number, ECHO)
        client.data(1, bytes(29_995))
        client.data(3, bytes(14_995))
        await read(client)
        assert served.port.memory.held == 45_000
        client.data(3, bytes(9_990))
        assert (await client.until(frames.RST_STREAM)).stream == 1
        await poll(lambda: served.told == ["lost"], 10, "the handler knows")
        client.send(frames.settings({frames.INITIAL_WINDOW: 60_000}))
        await read(client)
        assert served.port.memory.held == 0


async def test_a_socket_that_takes_no_more_gets_no_more() -> None:
    """What a peer's windows allow stays in the calls, where it is counted, as long as the peer does not read."""
    async with serving(Limits(400, 400, 4, 300_000), Memory(2**30)) as served, peer(served.number) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.greet(window=2**30)
        client.send(frames.frame(frames.WINDOW_UPDATE, 0, 0, frames.number(2**30)))
        for number in range(1, 100, 2):
            client.call(number, ECHO)
        await poll(lambda: served.port.streams == 50, 10, "the calls")
        [found] = served.opened
        for call in found.streams.values():
            call.send(bytes(200_000))
        assert served.port.memory.held > 50 * 200_000 - 6_000_000
        assert found._transport.get_write_buffer_size() <= connection.UNSENT_HIGH + 2 * frames.MAX_FRAME
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        got = 0
        while got < 50 * 200_000:
            got += len((await client.until(frames.DATA)).payload)
        assert served.port.memory.held == 0


async def test_an_end_that_is_not_taken_has_a_limit(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmfleet.picker.stream.UNSENT_END_MAX_S", -1.0)
    async with peer(served.number) as client:
        client.greet(window=0)
        client.call(1, ECHO)
        client.data(1, b"never taken", ends=True)
        await read(client)
        assert served.port.streams == 1
        served.port.look()
        assert (await client.until(frames.RST_STREAM)).stream == 1
        assert served.port.streams == 0
        assert served.told == ["ended"]


async def test_a_health_check_that_does_not_end_has_a_limit(
    served: Served, client: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.call(1, health.CHECK)
    await read(client)
    monkeypatch.setattr(health, "CHECK_MAX_S", -1.0)
    client.call(3, health.CHECK)
    await read(client)
    monkeypatch.undo()
    served.port.look()
    assert (await client.until(frames.RST_STREAM)).stream == 3
    assert served.port.streams == 1


async def test_a_health_check_of_a_cut_off_name(client: Peer) -> None:
    client.call(1, health.CHECK)
    client.data(1, b"\n", ends=True)
    assert (await client.trailers(1))[b"grpc-status"] == b"%d" % Status.NOT_FOUND


# ---------------------------------------------------------------- what is no HTTP/2


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", Code.PROTOCOL_ERROR),
        (frames.PREFACE + frames.frame(frames.PING, 0, 0, bytes(8)), Code.PROTOCOL_ERROR),
        (frames.PREFACE + frames.settings({}) + b"\xff\xff\xff" + bytes(6), Code.FRAME_SIZE_ERROR),
        (frames.PREFACE + frames.settings({}) + frames.frame(frames.PING, 0, 0, b"short"), Code.FRAME_SIZE_ERROR),
        (frames.PREFACE + frames.settings({}) + frames.frame(frames.DATA, 0, 9, b"x"), Code.PROTOCOL_ERROR),
        (frames.PREFACE + frames.settings({}) + frames.frame(frames.HEADERS, 4, 2, b"\x82"), Code.PROTOCOL_ERROR),
        (
            frames.PREFACE + frames.settings({}) + frames.frame(frames.HEADERS, 4, 1, b"\xff\xff"),
            Code.COMPRESSION_ERROR,
        ),
        (
            frames.PREFACE + frames.settings({}) + frames.frame(frames.HEADERS, 4, 1, b"\x7f" + b"\xff" * 9_000),
            Code.COMPRESSION_ERROR,
        ),
        (frames.PREFACE + frames.settings({}) + frames.frame(frames.CONTINUATION, 4, 1, b""), Code.PROTOCOL_ERROR),
        (frames.PREFACE + frames.settings({}) + frames.frame(frames.PUSH_PROMISE, 4, 1, b""), Code.PROTOCOL_ERROR),
        (
            frames.PREFACE + frames.settings({}) + frames.frame(frames.WINDOW_UPDATE, 0, 0, bytes(4)),
            Code.PROTOCOL_ERROR,
        ),
        (frames.PREFACE + frames.settings({frames.MAX_FRAME_SIZE: 5}), Code.PROTOCOL_ERROR),
        (frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0, b"12345"), Code.FRAME_SIZE_ERROR),
        (frames.PREFACE + frames.settings({}) + frames.frame(frames.RST_STREAM, 0, 5, bytes(4)), Code.PROTOCOL_ERROR),
    ],
)
async def test_what_ends_a_connection(served: Served, sent: bytes, code: Code) -> None:
    async with peer(served.number) as client:
        client.send(sent)
        assert (await client.goaway())[1] == code
        assert await client.closed()


async def test_a_silent_connection_is_closed(served: Served) -> None:
    async with peer(served.number) as client:
        assert await client.closed()


# ---------------------------------------------------------------- the end


async def test_a_connection_that_leaves_lets_its_calls_end(served: Served, client: Peer) -> None:
    client.call(1, ECHO)
    await echoed(client, 1, b"open")
    [connection] = served.opened
    connection.shutdown()
    assert await client.goaway() == (frames.MAX_WINDOW, Code.NO_ERROR)
    client.call(3, ECHO)  # was on its way already
    await echoed(client, 3, b"served")
    ping = frames.frame(frames.PING, frames.ACK, 0, b"goodbye!")
    client.send(ping)
    assert await client.goaway() == (3, Code.NO_ERROR)
    client.call(5, ECHO)
    assert (await client.until(frames.RST_STREAM)).payload == frames.number(Code.REFUSED_STREAM)
    for stream in (1, 3):
        await echoed(client, stream, b"goes on")
        client.send(frames.frame(frames.DATA, frames.END_STREAM, stream))
        assert (await client.trailers(stream))[b"grpc-status"] == b"0"
    assert await client.closed()


async def test_a_peer_that_does_not_answer_the_goodbye_delays_no_end(
    served: Served, client: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "GOODBYE_MAX_S", 0.05)
    await read(client)
    [found] = served.opened
    found.shutdown()
    assert await client.goaway() == (frames.MAX_WINDOW, Code.NO_ERROR)
    assert await client.goaway() == (0, Code.NO_ERROR)
    assert await client.closed()
