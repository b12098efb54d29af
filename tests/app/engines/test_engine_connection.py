"""Answers of engines, byte by byte: they come out alike however they are cut, and hostile ones are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmfleet.engines import engine_connection
from warmfleet.engines.engine_connection import UNREAD_MAX_BYTES, Connection, EngineResponse, KeptConnections
from warmfleet.errors import UpstreamError, UpstreamGone

NEVER_ENDS = Path("/dev/null").open("rb")  # noqa: SIM115 - as long as the tests run


class Wire(asyncio.Transport):
    """A transport that keeps what is written, and says whether reading is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.unsent = 0
        self.closed = self.paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self  # the socket, whose options are tried on a real one

    def setsockopt(self, *_: int) -> None:
        pass

    def fileno(self) -> int:
        return NEVER_ENDS.fileno()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True


class Talk:
    """A connection whose engine is the test, with one request on it."""

    def __init__(self, method: str = "POST") -> None:
        loop = cast("asyncio.AbstractEventLoop", Clock())
        self.kept = KeptConnections(loop)
        self.wire = Wire()
        self.connection = Connection(self.kept)
        self.connection.connection_made(self.wire)
        self.answer = self.ask(method)

    def ask(self, method: str = "POST") -> EngineResponse:
        loop = cast("asyncio.AbstractEventLoop", Clock())
        self.answer = EngineResponse(loop, (b"request",), without_body=method == "HEAD")
        self.connection.send(self.answer)
        return self.answer

    def says(self, *pieces: bytes) -> Talk:
        for piece in pieces:
            if not self.wire.closed:
                self.connection.data_received(piece)
        return self

    def closes(self, error: Exception | None = None) -> Talk:
        self.connection.connection_lost(error)
        return self

    @property
    def result(self) -> Result:
        """The answer as it is now."""
        answer = self.answer
        kind = type(answer._error) if answer._error is not None else None
        kept = self.kept.take() is not None
        return Result(answer.status, tuple(answer.headers), b"".join(answer.pieces), answer.complete, kind, kept)


class Clock:
    def time(self) -> float:
        return 1_000.0


class Result(NamedTuple):
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    complete: bool
    error: type[UpstreamError] | None
    kept: bool


OK = b"HTTP/1.1 200 OK\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"

#: name -> (what the engine sends, the body that comes out, whether the connection may be used again)
WHOLE = {
    "length": (OK + b"Content-Length: 5\r\n\r\nhello", b"hello", True),
    "no bytes": (OK + b"Content-Length: 0\r\n\r\n", b"", True),
    "chunks": (CHUNKED + b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n", b"hello", True),
    "chunk with an extension": (CHUNKED + b"5;a=b\r\nhello\r\n0\r\n\r\n", b"hello", True),
    "trailers": (CHUNKED + b"5\r\nhello\r\n0\r\nx-a: 1\r\nx-b: 2\r\n\r\n", b"hello", True),
    "nothing to tell": (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b"", True),
    "interim": (INTERIM + OK + b"content-length: 1\r\n\r\nx", b"x", True),
    "closes": (OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello", b"hello", False),
    "1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello", False),
    "another answer": (2 * (OK + b"Content-Length: 2\r\n\r\nhi"), b"hi", False),
    "garbage behind": (OK + b"Content-Length: 2\r\n\r\nhi!", b"hi", False),
    "line behind": (CHUNKED + b"2\r\nhi\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n", b"hi", False),
}  # fmt: skip

BROKEN = {
    "no http": b"hello there, this is no answer\r\n\r\n",
    "tls": b"\x15\x03\x01\x00\x02\x02\x46",
    "two lengths": OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "the same length twice": OK + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "length and chunks": OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "chunks and length": OK + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "negative length": OK + b"Content-Length: -5\r\n\r\n",
    "huge length": OK + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "no chunk": CHUNKED + b"zz\r\nhello\r\n0\r\n\r\n",
    "long chunk": CHUNKED + b"2\r\nhello\r\n0\r\n\r\n",
    "huge chunk": CHUNKED + b"fffffffffffffffff\r\n",
    "bare line feeds": b"HTTP/1.1 200 OK\ncontent-length: 2\n\nhi",
    "folded header": OK + b"x-a: 1\r\n  2\r\ncontent-length: 2\r\n\r\nhi",
    "control byte": OK + b"x-a: a\x01b\r\ncontent-length: 2\r\n\r\nhi",
    "zero byte": OK + b"x-a: a\0b\r\ncontent-length: 2\r\n\r\nhi",
    "space before the colon": OK + b"content-length : 2\r\n\r\nhi",
    "gzipped transfer": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    "status 99": b"HTTP/1.1 099 Low\r\ncontent-length: 2\r\n\r\nhi",
    "status 600": b"HTTP/1.1 600 High\r\ncontent-length: 2\r\n\r\nhi",
    "status 0": b"HTTP/1.1 000 None\r\ncontent-length: 2\r\n\r\nhi",
    "another protocol": b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\nbytes",
    "another protocol, unasked": b"HTTP/1.1 101 Switching\r\n\r\nbytes",
    "huge header": OK + b"x-a: " + b"y" * 70_000 + b"\r\ncontent-length: 2\r\n\r\nhi",
    "many headers": OK + b"a:\r\n" * 3_000 + b"content-length: 2\r\n\r\nhi",
    "endless header": OK + b"x-a: " + b"y" * 200_000,
    "endless header name": OK + b"y" * 200_000,
    "endless reason": b"HTTP/1.1 200 " + b"y" * 200_000,
    "many interim answers": b"HTTP/1.1 100 Continue\r\n\r\n" * 100 + OK + b"content-length: 2\r\n\r\nhi",
    "huge interim answers": (b"HTTP/1.1 103 Hints\r\nlink: " + b"y" * 10_000 + b"\r\n\r\n") * 8 + WHOLE["length"][0],
    "many trailers": CHUNKED + b"2\r\nhi\r\n0\r\n" + b"x: y\r\n" * 5_000 + b"\r\n",
    "endless trailer": CHUNKED + b"2\r\nhi\r\n0\r\nx: " + b"y" * 200_000,
    "endless extension": CHUNKED + b"2;" + b"y" * 200_000,
}  # fmt: skip

CUT = {
    "nothing": b"",
    "head": OK + b"content-le",
    "length": OK + b"Content-Length: 5\r\n\r\nhel",
    "chunk": CHUNKED + b"5\r\nhel",
    "between chunks": CHUNKED + b"3\r\nhel\r\n",
    "last chunk": CHUNKED + b"3\r\nhel\r\n0\r\n",
    "interim only": b"HTTP/1.1 100 Continue\r\n\r\n",
}


def split(data: bytes, at: list[int]) -> list[bytes]:
    ends = [*sorted({point % (len(data) + 1) for point in at}), len(data)]
    return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False) if begin < end]


@pytest.mark.parametrize("name", WHOLE)
def test_an_answer_comes_whole(name: str) -> None:
    data, body, kept = WHOLE[name]
    result = Talk().says(data).result
    assert (result.body, result.complete, result.error, result.kept) == (body, True, None, kept)


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("size", [65_536, 4_096], ids=["large reads", "small reads"])
def test_a_malformed_answer_is_refused(name: str, size: int) -> None:
    data = BROKEN[name]
    talk = Talk().says(*[data[at : at + size] for at in range(0, len(data), size)])
    assert talk.result.error is UpstreamError
    assert not talk.answer.complete
    assert talk.wire.closed


@given(
    st.sampled_from([*WHOLE.values(), *[(data, b"", False) for data in BROKEN.values() if len(data) < 300]]), st.data()
)
@settings(max_examples=400, deadline=None)
def test_every_split_into_packets_gives_the_same_answer(case: tuple[bytes, bytes, bool], draw: st.DataObject) -> None:
    data = case[0]
    pieces = split(data, draw.draw(st.lists(st.integers(0, 400), max_size=40)))
    whole, parts = Talk().says(data), Talk().says(*pieces)
    for talk in (whole, parts):
        talk.closes()
    assert parts.result == whole.result
    assert parts.wire.closed == whole.wire.closed


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("error", [None, ConnectionResetError()], ids=["closed", "reset"])
def test_an_answer_that_breaks_off_is_not_whole(name: str, error: Exception | None) -> None:
    result = Talk().says(*filter(None, [CUT[name]])).closes(error).result
    assert (result.complete, result.error) == (False, UpstreamGone)


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    """Nothing else says where it ends: an engine that closes in the middle cannot be told from one that is done."""
    head = OK + b"Content-Type: text/event-stream; charset=x\r\n\r\n"
    ended = Talk().says(head, b"data: 1\n\n", b"data: 2\n\n")
    assert ended.answer.content_type == b"text/event-stream"
    assert not ended.answer.complete
    result = ended.closes().result
    assert (result.body, result.complete, result.error, result.kept) == (b"data: 1\n\ndata: 2\n\n", True, None, False)
    assert Talk().says(head, b"data: 1\n\n").closes(ConnectionResetError()).result.error is UpstreamGone


@pytest.mark.parametrize("length", [b"0", b"5"])
def test_an_answer_to_head_has_no_body(length: bytes) -> None:
    talk = Talk("HEAD").says(OK + b"content-length: " + length + b"\r\n\r\n")
    assert (talk.answer.complete, talk.answer.status, talk.result.body) == (True, 200, b"")
    assert talk.wire.closed


def test_headers_are_bytes_as_they_came() -> None:
    answer = Talk().says(OK + b"X-Odd: \xff\t\xc3\xa9\r\nContent-Type: A/B ;c\xff\r\ncontent-length: 0\r\n\r\n").answer
    assert answer.headers == [
        (b"x-odd", b"\xff\t\xc3\xa9"), (b"content-type", b"A/B ;c\xff"), (b"content-length", b"0"),
    ]  # fmt: skip
    assert answer.content_type == b"a/b"


def test_a_connection_that_is_not_done_sending_is_not_used_again() -> None:
    """The engine refused the request before it had read it: it would take the rest for the next request."""
    talk = Talk()
    talk.wire.unsent = 1
    assert talk.says(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n").result.kept is False
    assert talk.wire.closed


def test_bytes_between_two_requests_close_the_connection() -> None:
    talk = Talk().says(WHOLE["length"][0])
    talk.connection.data_received(OK)
    assert talk.wire.closed
    assert talk.kept.take() is None


def test_connections_are_used_again_the_youngest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(Clock, "time", lambda _: now)
    kept = KeptConnections(cast("asyncio.AbstractEventLoop", Clock()))
    made = []
    for _ in range(3):
        made.append(Connection(kept))
        made[-1].connection_made(Wire())
        kept.keep(made[-1])
        now += 1.0
    now = engine_connection.KEEPALIVE_S + 0.5
    kept.sweep()
    assert [connection._transport.is_closing() for connection in made] == [True, False, False]
    made[2].connection_lost(None)
    assert kept.take() is made[1]
    assert kept.take() is None
    kept.keep(made[1])
    now += engine_connection.KEEPALIVE_S
    assert kept.take() is None, "no sweep came by, but the connection is too old"
    kept.close()
    kept.keep(made[0])
    assert kept.take() is None


async def test_reading_pauses_while_too_much_is_unread() -> None:
    talk = Talk()
    talk.answer._loop = asyncio.get_running_loop()
    talk.says(OK + b"content-length: 10000000\r\n\r\n", b"x" * UNREAD_MAX_BYTES)
    assert not talk.wire.paused
    talk.says(b"x")
    assert talk.wire.paused
    assert len(await talk.answer.read_any()) == UNREAD_MAX_BYTES + 1
    assert not talk.wire.paused


async def test_what_came_before_an_error_is_read_first() -> None:
    talk = Talk().says(CHUNKED + b"2\r\nhi\r\n").closes()
    assert await talk.answer.read_any() == b"hi"
    with pytest.raises(UpstreamGone):
        await talk.answer.read_any()
