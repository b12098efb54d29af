"""A relayed stream stays whole however it is cut, and waits while the client accepts no more."""

from __future__ import annotations

import asyncio

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.app.engines.test_engine_connection import BROKEN, CHUNKED, CUT, OK, WHOLE, Talk, split

from warmfleet.engines.engine_connection import UNREAD_MAX_BYTES
from warmfleet.errors import UpstreamError, UpstreamGone
from warmfleet.routing.client_answer import ClientAnswer
from warmfleet.routing.relay import _stream


class Client:
    """A client's connection that keeps all writes, and after every ``slow``-th write waits for ``accepts``."""

    def __init__(self, slow: int = 0) -> None:
        self.lost = False
        self.writable: asyncio.Future[None] | None = None
        self.writes: list[bytes] = []
        self.slow = slow

    def write(self, data: bytes) -> None:
        assert self.writable is None, "the client was given more before it had accepted what waits"
        self.writes.append(data)
        if self.slow and len(self.writes) % self.slow == 0:
            self.writable = asyncio.get_running_loop().create_future()

    def write_chunk(self, data: bytes) -> bool:
        self.write(b"%x\r\n%b\r\n" % (len(data), data))
        return self.writable is None

    def accepts(self) -> None:
        if self.writable is not None:
            self.writable.set_result(None)
            self.writable = None

    def keeps_open(self) -> bool:
        return True

    def peer(self) -> str:
        return "127.0.0.1"

    def answered(self, *, keep: bool) -> None:
        pass

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_message_complete(self) -> None:
        self.whole = True

    def reads(self) -> tuple[bytes, bool]:
        """The body as the client reads it, and whether the body is whole."""
        self.body, self.whole = b"", False
        httptools.HttpResponseParser(self).feed_data(b"".join(self.writes))
        return self.body, self.whole


class Way:
    """A stream that the test sends as an engine to a client, relayed up to the first bytes."""

    def __init__(self, *, chunks: bool = True, slow: int = 0) -> None:
        self.talk, self.client = Talk(), Client(slow)
        self.talk.answer._loop = asyncio.get_running_loop()
        self.answer = ClientAnswer(self.client, chunks=chunks)
        self.task = asyncio.create_task(self._relay())

    async def _relay(self) -> None:
        response = self.talk.answer
        await response.head()
        first = await response.read_any()
        await self.answer.start(200, [])
        try:
            await _stream(response, self.answer, first)
        finally:
            response.close()


async def rest(times: int = 5) -> None:
    """Let all tasks run until they wait for more data."""
    for _ in range(times):
        await asyncio.sleep(0)


STREAM = CHUNKED + b"".join(b"3;x\r\n%03d\r\n" % number for number in range(30)) + b"0\r\n\r\n"
ALL = (
    [STREAM]
    + [data for data, _, _ in WHOLE.values()]
    + [data for data in (*BROKEN.values(), *CUT.values()) if len(data) < 300]
)
PLANS = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 3)), max_size=40)


@given(st.sampled_from(ALL), PLANS, st.integers(0, 3), st.booleans())
@settings(max_examples=400, deadline=None)
def test_a_client_gets_the_same_bytes_however_they_come(
    data: bytes, plan: list[tuple[int, int]], slow: int, chunks: bool
) -> None:
    """plan: the cuts of the bytes into packets, and the turns of the event loop after each packet."""

    async def relayed() -> tuple[bytes, bool, type | None]:
        way = Way(chunks=chunks, slow=slow)
        await rest()
        for number, packet in enumerate(split(data, [point for point, _ in plan])):
            way.talk.says(packet)
            await rest(plan[number % len(plan)][1] if plan else 0)
            if number % 2:
                way.client.accepts()
        if not way.talk.wire.closed:
            way.talk.closes()
        while not way.task.done():
            await rest()
            way.client.accepts()
        error = way.task.exception()
        if not way.client.writes:
            return b"", way.answer.complete, type(error)
        body, whole = way.client.reads()
        return body, way.answer.complete and (whole or not chunks), type(error)

    expected = Talk().says(data)
    if not expected.wire.closed:
        expected.closes()
    body, complete, kind = expected.result[2:5]
    assert asyncio.run(relayed()) == (body, complete, kind or type(None))


async def test_a_chunk_reaches_the_client_while_it_is_received() -> None:
    """No task runs for a chunk, because a task would cost more than all other work for the chunk."""
    way = Way()
    way.talk.says(CHUNKED + b"2\r\nhi\r\n")
    await rest()
    assert len(way.client.writes) == 1
    for piece in (b"5\r\nhello\r", b"\n3\r", b"\nyou\r\n4\r\n all\r\n"):
        way.talk.says(piece)
    assert way.client.writes[1:] == [b"5\r\nhello\r\n", b"7\r\nyou all\r\n"]
    way.talk.says(b"1\r\n!\r\n0\r\n\r\n")
    await rest()
    assert way.task.done()
    assert way.client.writes[-1] == b"1\r\n!\r\n0\r\n\r\n", "the last bytes and the end are one write"
    assert way.talk.kept.take() is way.talk.connection


async def test_a_slow_client_stops_the_engine_and_is_not_silence() -> None:
    way = Way(slow=2)
    way.talk.says(OK + b"content-length: 10000000\r\n\r\n", b"a")
    await rest()
    answer, wire = way.talk.answer, way.talk.wire
    assert answer.waiting
    way.talk.says(b"b")
    assert answer.unread == 0
    await rest()
    assert not answer.waiting, "the client is slow, not the engine"
    way.talk.says(b"c" * UNREAD_MAX_BYTES)
    assert not wire.paused
    way.talk.says(b"d")
    assert wire.paused
    assert len(way.client.writes) == 2
    way.client.accepts()
    await rest()
    assert not wire.paused
    assert answer.unread == 0
    assert len(way.client.writes) == 3
    assert answer.waiting
    way.task.cancel()


async def test_what_waited_for_a_slow_client_may_be_too_much_for_it_again() -> None:
    way = Way(slow=1)
    way.talk.says(OK + b"content-length: 100\r\n\r\n", b"a")
    for number, piece in enumerate((b"b", b"c", b"d"), 1):
        await rest()
        way.talk.says(piece)
        assert len(way.client.writes) == number, "the client has not accepted what was sent before"
        way.client.accepts()
    await rest()
    way.talk.says(b"e")
    way.talk.says(b"f")
    assert way.talk.answer.unread == 2
    way.task.cancel()


@pytest.mark.parametrize("size", [1, 300_000])
async def test_a_fast_engine_is_paused_only_by_its_client(size: int) -> None:
    way = Way()
    way.talk.says(OK + b"content-length: 10000000\r\n\r\n", b"a")
    await rest()
    way.talk.says(b"b" * size)
    assert (way.talk.wire.paused, way.talk.answer.unread) == (False, 0)
    way.task.cancel()


async def test_nothing_is_passed_on_after_the_relay_was_cancelled() -> None:
    way = Way()
    way.talk.says(CHUNKED + b"2\r\nhi\r\n")
    await rest()
    way.task.cancel()
    await rest()
    assert way.task.cancelled()
    assert way.talk.wire.closed
    way.talk.connection.data_received(b"2\r\nho\r\n")
    assert len(way.client.writes) == 1


async def test_a_reader_that_was_cancelled_is_given_nothing() -> None:
    talk, given = Talk(), list[bytes]()
    talk.answer._loop = asyncio.get_running_loop()
    talk.says(CHUNKED + b"2\r\nhi\r\n")

    def take(piece: bytes) -> bool:
        given.append(piece)
        return True

    reader = asyncio.create_task(talk.answer.pass_on(take))
    await rest()
    reader.cancel()
    await rest()
    talk.says(b"2\r\nho\r\n")
    assert given == [b"hi"]
    assert await talk.answer.read_any() == b"ho"


@pytest.mark.parametrize("slow", [0, 2])
async def test_an_error_ends_a_stream_after_what_came_before_it(slow: int) -> None:
    way = Way(slow=slow)
    way.talk.says(CHUNKED + b"1\r\na\r\n")
    await rest()
    way.talk.says(b"1\r\nb\r\n")
    way.talk.says(b"1\r\nc\r\nzz\r\n")
    await rest()
    way.client.accepts()
    await rest()
    with pytest.raises(UpstreamError):
        way.task.result()
    assert b"".join(way.client.writes).endswith(b"1\r\na\r\n1\r\nb\r\n1\r\nc\r\n")


async def test_a_stream_is_given_up_while_it_waits_for_the_engine() -> None:
    way = Way()
    way.talk.says(CHUNKED + b"1\r\na\r\n")
    await rest()
    assert way.talk.answer.fail(UpstreamGone("no sign of life"))
    await rest()
    assert isinstance(way.task.exception(), UpstreamGone)
    assert way.talk.wire.closed
