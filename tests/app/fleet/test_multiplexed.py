"""A connection carries many calls: each call is answered once, whatever fails, and the waiting calls are bounded."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import hiredis
import pytest
from tests.support.polling import poll
from tests.support.redis.gate import gate
from tests.support.redis.packed_commands import words_of
from tests.support.redis.servers import PATIENT
from tests.support.redis.topology import free_ports, sentinels

from warmfleet.errors import BadArgument, FleetUnavailable
from warmfleet.fleet import Fleet, Timeouts, connect
from warmfleet.fleet.connection import multiplexed
from warmfleet.fleet.connection.taken_over import take_over

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    import redis.asyncio as aioredis

    from warmfleet.errors import WarmfleetError

Answers = list[tuple[Any, "WarmfleetError | None"]]


@asynccontextmanager
async def fleet_at(url: str, model: str, timeouts: Timeouts = PATIENT) -> AsyncIterator[Fleet]:
    fleet = Fleet(connect(url, timeout_s=5), model, timeouts=timeouts)
    try:
        yield fleet
    finally:
        await fleet.close()


@pytest.fixture
async def told(valkey_url: str, model: str) -> AsyncIterator[Fleet]:
    """A fleet whose connection is open, and whose script Redis knows."""
    async with fleet_at(valkey_url, model) as fleet:
        await fleet.bookings.settle("wf-warm", "finished")
        yield fleet


def channel_of(fleet: Fleet) -> multiplexed.Channel | None:
    channel: multiplexed.Channel | None = cast("Any", fleet.redis).multiplexed._channel
    return channel


def tell_all(fleet: Fleet, names: list[str]) -> Answers:
    answers: Answers = []
    for name in names:
        fleet.bookings.settle_later(name, "failed", lambda answer, error: answers.append((answer, error)))
    return answers


class Server:
    """A stand-in for Redis that answers each call of a script with the result of ``answer`` (None: no answer)."""

    def __init__(self, answer: Callable[[list[bytes]], bytes | None]) -> None:
        self.answer = answer
        self.called: list[bytes] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        parser = hiredis.Reader()
        while data := await reader.read(65_536):
            parser.feed(data)
            while (words := parser.gets()) is not False:
                if words[0] in (b"EVALSHA", b"SCRIPT", b"XREAD"):
                    self.called.append(words[0])
                    if (answer := self.answer(words)) is not None:
                        writer.write(answer)
                elif words[0] == b"HELLO":
                    writer.write(b"%1\r\n+proto\r\n:3\r\n")
                else:
                    writer.write(b"+OK\r\n")


@asynccontextmanager
async def server(answer: Callable[[list[bytes]], bytes | None]) -> AsyncIterator[Server]:
    made = Server(answer)
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = listening.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        listening.close()
        for writer in made.writers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


UNKNOWN = b"*1\r\n$7\r\nUNKNOWN\r\n"


# ------------------------------------------------ calls without trouble


async def test_calls_of_one_turn_leave_in_one_write_and_are_answered_in_order(told: Fleet) -> None:
    channel = channel_of(told)
    assert channel is not None
    written: list[bytes] = []

    class Transport:
        def write(self, data: bytes) -> None:
            written.append(data)
            real.write(data)

    real, channel._transport = cast("Any", channel._transport), cast("Any", Transport())
    assert await asyncio.gather(*(told.bookings.settle(f"wf-{n}", "finished") for n in range(50))) == ["UNKNOWN"] * 50
    with pytest.raises(BadArgument, match="unknown outcome gone"):
        await told.bookings.settle("wf-1", cast("Any", "gone"))
    assert await told.bookings.settle("wf-1", "failed") == "UNKNOWN"
    assert await told.bookings.settle("wf-1", "failed") == "SAME"
    assert len(written) == 4
    channel._transport = real


async def test_a_settle_that_nobody_waits_for_leaves_with_the_next_decision(
    told: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both calls cost Redis and the replica one read and one write. Without another call the settle leaves alone."""
    channel = channel_of(told)
    assert channel is not None
    written: list[bytes] = []

    class Transport:
        def write(self, data: bytes) -> None:
            written.append(data)
            real.write(data)

    real = cast("Any", channel._transport)
    monkeypatch.setattr(channel, "_transport", Transport())
    with monkeypatch.context() as patient:
        patient.setattr(multiplexed, "PATIENCE_S", 20.0)
        answers = tell_all(told, ["wf-1"])
        await asyncio.sleep(0)
        assert not written, "it waits for others"
        async with asyncio.timeout(10):
            assert await told.bookings.settle("wf-2", "finished") == "UNKNOWN"
    assert len(answers) == 1, "it was answered first, for it was sent first"
    assert len(written) == 1
    assert written[0].index(b"wf-1") < written[0].index(b"wf-2")
    answers = tell_all(told, ["wf-3", "wf-4"])
    await poll(lambda: len(answers) == 2)
    assert len(written) == 2


async def test_a_timer_runs_while_calls_wait_and_no_longer(told: Fleet) -> None:
    """A replica at rest asks a few calls a second: a timer after each of them would wake it once more."""
    line = cast("Any", told.redis).multiplexed
    assert line._timer is None, "the first call is answered"
    first, second = asyncio.ensure_future(told.bookings.settle("wf-1", "failed")), tell_all(told, ["wf-2"])
    await asyncio.sleep(0)
    assert line._timer is not None
    await first
    await poll(lambda: second)
    assert line._timer is None


async def test_the_connection_is_redis_pys_with_user_database_and_name(valkey_url: str, model: str) -> None:
    """The connection uses private names of redis-py; the test fails if redis-py changes them."""
    async with fleet_at(f"{valkey_url}?db=3&client_name=taken", model) as fleet:
        pool = cast("Any", fleet.redis).connection_pool
        replies: list[bytes] = []

        class Plain(asyncio.Protocol):
            def data_received(self, data: bytes) -> None:
                replies.append(data)

        taken = await take_over(pool, Plain())
        assert taken.address is None
        taken.transport.write(b"*2\r\n$6\r\nCLIENT\r\n$4\r\nINFO\r\n")
        await poll(lambda: replies)
        assert b" db=3 " in replies[0]
        assert b" name=taken " in replies[0]
        taken.transport.abort()
        await asyncio.sleep(0)


async def test_many_models_fill_no_pool(told: Fleet) -> None:
    before = await cast("Any", told.redis).info("clients")
    await asyncio.gather(*(told.bookings.settle(f"wf-{n}", "finished") for n in range(1_000)))
    after = await cast("Any", told.redis).info("clients")
    assert after["connected_clients"] <= before["connected_clients"] + 1


async def test_scripts_that_redis_lost_are_loaded_once_for_all_calls(model: str) -> None:
    known: set[bytes] = set()

    def answer(words: list[bytes]) -> bytes:
        if words[0] == b"SCRIPT":
            known.add(words[2])
            return b"+loaded\r\n"
        return UNKNOWN if known else b"-NOSCRIPT No matching script.\r\n"

    async with server(answer) as redis, fleet_at(f"redis://127.0.0.1:{redis.port}", model) as fleet:
        assert (
            await asyncio.gather(*(fleet.bookings.settle(f"wf-{n}", "failed") for n in range(20))) == ["UNKNOWN"] * 20
        )
        assert redis.called.count(b"SCRIPT") == 1
        known.clear()
        assert await fleet.bookings.settle("wf-1", "failed") == "UNKNOWN"
        assert redis.called.count(b"SCRIPT") == 2


async def test_a_script_that_redis_will_not_take_fails_the_call(model: str) -> None:
    async with (
        server(lambda words: b"-NOPERM no\r\n" if words[0] == b"SCRIPT" else b"-NOSCRIPT none\r\n") as redis,
        fleet_at(f"redis://127.0.0.1:{redis.port}", model) as fleet,
    ):
        with pytest.raises(FleetUnavailable, match="NOSCRIPT"):
            await fleet.bookings.settle("wf-1", "failed")
        assert redis.called == [b"EVALSHA", b"SCRIPT", b"EVALSHA"]


# ------------------------------------------------ callers that go away, calls that take too long


async def test_a_caller_that_is_cancelled_takes_no_answer_from_another(told: Fleet) -> None:
    calls = [asyncio.ensure_future(told.bookings.settle(f"wf-{n}", "failed")) for n in range(9)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    await asyncio.wait(calls)
    assert [call.result() for call in calls[1::2]] == ["UNKNOWN"] * 4
    assert await told.bookings.settle("wf-0", "failed") == "SAME", "it was sent, and Redis took it"


async def test_the_late_answer_to_a_call_that_was_given_up_is_dropped(
    valkey_url: str, store: aioredis.Redis, model: str
) -> None:
    timeouts = Timeouts(request_s=0.2, upkeep_s=10)
    async with fleet_at(valkey_url, model, timeouts) as fleet, fleet_at(valkey_url, model) as other:
        await fleet.bookings.settle("wf-warm", "finished")
        await fleet.queue.poll()
        channel = channel_of(fleet)
        await other.redis.client_pause(800)
        settled = asyncio.ensure_future(fleet.bookings.settle("wf-1", "failed"))
        with pytest.raises(FleetUnavailable, match="no answer within the time limit"):
            await fleet.queue.poll(["wf-2"])
        assert not settled.done()
        assert await settled == "UNKNOWN"
        assert (await fleet.queue.poll(["wf-2", "wf-3"])).standings.keys() == {"wf-2", "wf-3"}
        assert channel_of(fleet) is channel, "a slow Redis keeps its connection"


async def test_time_in_which_the_loop_was_late_does_not_count(valkey_url: str, model: str) -> None:
    async with fleet_at(valkey_url, model, Timeouts(request_s=0.4, upkeep_s=0.4)) as fleet:
        await fleet.bookings.settle("wf-warm", "finished")
        for _ in range(3):
            answers = tell_all(fleet, ["wf-1"])
            time.sleep(0.6)  # noqa: ASYNC251  as a large prompt would: the calls of this turn are sent after it
            await poll(lambda answers=answers: answers)  # type: ignore[misc]
            assert answers[0][1] is None


async def test_a_loop_that_is_always_late_ends_the_wait_all_the_same(model: str) -> None:
    async with (
        server(lambda _: None) as redis,
        fleet_at(f"redis://127.0.0.1:{redis.port}", model, Timeouts(upkeep_s=0.1)) as fleet,
    ):
        settled = asyncio.ensure_future(fleet.bookings.settle("wf-1", "finished"))
        began = time.monotonic()
        while not settled.done() and time.monotonic() - began < 10:
            time.sleep(0.05)  # noqa: ASYNC251  makes the loop late
            await asyncio.sleep(0.01)
        with pytest.raises(FleetUnavailable, match="time limit"):
            await settled
        assert time.monotonic() - began < multiplexed.MOST_S + 2


async def test_what_waits_is_bounded(valkey_url: str, model: str) -> None:
    async with gate(valkey_url) as door, fleet_at(f"redis://127.0.0.1:{door.port}", model) as fleet:
        await fleet.bookings.settle("wf-warm", "finished")
        door.swallow = True
        answers = tell_all(fleet, [f"wf-{number}" for number in range(10_000)])
        assert len(answers) == 10_000 - multiplexed.MOST_WAITING
        assert all(isinstance(error, FleetUnavailable) for _, error in answers)
        assert "too many calls wait" in str(answers[0][1])


async def test_the_bytes_that_wait_are_bounded_and_given_back(told: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiplexed, "MOST_BYTES", 20_000)
    answers = tell_all(told, [f"wf-{n}" + "x" * 1_000 for n in range(100)])
    assert 70 < len(answers) < 100
    await poll(lambda: len(answers) == 100)
    assert sum(error is None for _, error in answers) == 100 - len([e for _, e in answers if e])
    assert cast("Any", told.redis).multiplexed._bytes == 0
    assert await told.bookings.settle("wf-1", "finished") == "UNKNOWN"


# ------------------------------------------------ connections that end


async def test_a_connection_cut_in_the_middle_of_a_reply_fails_its_calls_and_no_others(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "warmfleet")
    replies: list[bytes | None] = []

    def answer(_: list[bytes]) -> bytes | None:
        if not replies:
            return UNKNOWN
        asyncio.get_running_loop().call_soon(redis.writers[-1].close)
        return replies.pop()

    async with server(answer) as redis, fleet_at(f"redis://127.0.0.1:{redis.port}", model) as fleet:
        assert await fleet.bookings.settle("wf-1", "finished") == "UNKNOWN"
        replies += [None, None, UNKNOWN[:9]]
        calls = await asyncio.gather(
            *(fleet.bookings.settle(f"wf-{n}", "finished") for n in range(3)), return_exceptions=True
        )
        assert [type(call) for call in calls] == [FleetUnavailable] * 3
        assert "the connection ended: closed by Redis" in caplog.text
        assert (
            await asyncio.gather(*(fleet.bookings.settle(f"wf-{n}", "finished") for n in range(3))) == ["UNKNOWN"] * 3
        )
        assert len(redis.writers) == 2


@pytest.mark.parametrize(
    "refusal",
    ["MOVED 1 127.0.0.1:1", "ASK 1 h:1", "CLUSTERDOWN down", "READONLY no", "LOADING wait", "MASTERDOWN down"],
)
async def test_a_server_that_cannot_serve_is_left(model: str, refusal: str) -> None:
    refuses = [True]

    def answer(_: list[bytes]) -> bytes:
        return f"-{refusal}\r\n".encode() if refuses else UNKNOWN

    async with server(answer) as redis, fleet_at(f"redis://127.0.0.1:{redis.port}", model) as fleet:
        calls = [asyncio.ensure_future(fleet.bookings.settle(f"wf-{n}", "finished")) for n in range(3)]
        await asyncio.wait(calls)
        assert all(isinstance(call.exception(), FleetUnavailable) for call in calls)
        refuses.clear()
        assert await fleet.bookings.settle("wf-1", "finished") == "UNKNOWN"
        assert len(redis.writers) == 2


async def test_a_reply_that_nobody_asked_for_ends_the_connection(model: str) -> None:
    async with (
        server(lambda _: UNKNOWN + UNKNOWN) as redis,
        fleet_at(f"redis://127.0.0.1:{redis.port}", model) as fleet,
    ):
        assert await fleet.bookings.settle("wf-1", "finished") == "UNKNOWN"
        await poll(lambda: channel_of(fleet) is None)
        assert await fleet.bookings.settle("wf-1", "finished") == "UNKNOWN"


async def test_a_push_message_is_no_answer(model: str) -> None:
    async with (
        server(lambda _: b">2\r\n+message\r\n+hello\r\n" + UNKNOWN) as redis,
        fleet_at(f"redis://127.0.0.1:{redis.port}", model) as fleet,
    ):
        assert [await fleet.bookings.settle("wf-1", "finished") for _ in range(2)] == ["UNKNOWN"] * 2


async def test_a_silent_connection_is_replaced(model: str) -> None:
    """A frozen server, or a network that drops all packets, keeps its connections open."""
    silent = [True]
    async with (
        server(lambda _: None if silent else UNKNOWN) as redis,
        fleet_at(f"redis://127.0.0.1:{redis.port}", model) as fleet,
    ):
        with pytest.raises(FleetUnavailable, match="not a byte for 1 s"):
            await fleet.bookings.settle("wf-1", "finished")
        silent.clear()
        assert await fleet.bookings.settle("wf-1", "finished") == "UNKNOWN"
        assert len(redis.writers) == 2


async def test_a_wait_for_events_notices_a_frozen_server(model: str) -> None:
    async with server(lambda _: None) as redis:
        fleet = Fleet(connect(f"redis://127.0.0.1:{redis.port}"), model, timeouts=PATIENT)
        try:
            with pytest.raises(FleetUnavailable, match="not a byte for 2 s"):
                await fleet.upkeep.await_events(("events:s.0",), 0.4)
        finally:
            await fleet.close()


async def test_a_user_that_may_not_wait_is_told_once_and_polls(model: str, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        server(lambda _: b"-NOPERM no permissions to run the 'xread' command\r\n") as redis,
        fleet_at(f"redis://127.0.0.1:{redis.port}", model) as fleet,
    ):
        for _ in range(2):
            await fleet.upkeep.await_events(("events:s.0",), 60)
        assert redis.called == [b"XREAD"]
    assert len([line for line in caplog.messages if "see warmfleet acl" in line]) == 1


async def test_a_wait_for_events_delays_no_other_call_and_ends_with_the_client(valkey_url: str, model: str) -> None:
    async with fleet_at(valkey_url, model) as fleet:
        waiting = asyncio.create_task(fleet.upkeep.await_events(("events:s.0",), 60))
        await poll(lambda: _blocked(fleet), what="the call waits")
        assert await fleet.bookings.settle("wf-1", "finished") == "UNKNOWN"
        assert not waiting.done()
    with pytest.raises(FleetUnavailable, match="closed"):
        await waiting


async def _blocked(fleet: Fleet) -> bool:
    return bool((await fleet.redis.info("clients"))["blocked_clients"])


async def test_a_command_of_redis_that_it_refuses_fails_and_no_other(told: Fleet) -> None:
    with pytest.raises(FleetUnavailable, match="WRONGTYPE"):
        await told.scripts.ask("GET", await _set_of(told))
    assert await told.operator.switched() == ""


async def _set_of(fleet: Fleet) -> str:
    await fleet.redis.sadd("set of " + fleet.keys.prefix, "one")
    return "set of " + fleet.keys.prefix


async def test_while_nobody_listens_calls_fail_at_once_and_it_is_tried_again(tmp_path: Path, model: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Server(lambda _: UNKNOWN).serve(reader, writer)
        writer.close()

    async with fleet_at(f"unix://{tmp_path}/s", model) as fleet:
        with pytest.raises(FleetUnavailable, match="away"):
            await fleet.bookings.settle("wf-1", "finished")
        answers = tell_all(fleet, ["wf-2"])
        assert isinstance(answers[0][1], FleetUnavailable), "no call waits for the next attempt"
        listening = await asyncio.start_unix_server(serve, tmp_path / "s")
        await poll(lambda: channel_of(fleet) is not None, 10, "it is tried again without a call")
        assert await fleet.bookings.settle("wf-1", "finished") == "UNKNOWN"
        listening.close()
    with pytest.raises(FleetUnavailable, match="closed"):
        await fleet.bookings.settle("wf-1", "finished")


async def test_closing_fails_what_waits(model: str) -> None:
    async with server(lambda _: None) as redis:
        fleet = Fleet(connect(f"redis://127.0.0.1:{redis.port}"), model, timeouts=PATIENT)
        early = asyncio.ensure_future(fleet.bookings.settle("wf-1", "finished"))
        await poll(lambda: redis.called)
        await fleet.close()
        with pytest.raises(FleetUnavailable, match="closed"):
            await early


async def test_a_new_master_is_noticed_while_calls_go_on(model: str) -> None:
    """At a planned failover the old master lives on as a replica, so its connections do not end."""
    with sentinels() as watched:
        async with fleet_at(watched.url, model, Timeouts(request_s=1.0)) as fleet:
            await fleet.bookings.settle("wf-1", "finished")
            before = channel_of(fleet)
            assert before is not None
            assert before.address == ("127.0.0.1", watched.master.port)
            watched.sentinels[0].client().execute_command("SENTINEL", "FAILOVER", "kv")  # type: ignore[no-untyped-call]

            async def at_the_new_one() -> bool:
                with suppress(FleetUnavailable):
                    await fleet.bookings.settle("wf-1", "finished")
                channel = channel_of(fleet)
                return channel is not None and channel.address == ("127.0.0.1", watched.replica.port)

            await poll(at_the_new_one, 20)
            assert watched.promoted()
            assert await fleet.bookings.settle("wf-1", "finished") == "UNKNOWN"


async def test_a_former_master_that_answers_quickly_is_left_all_the_same(model: str) -> None:
    """No call waits for long enough that a timer would look for the master."""
    with sentinels() as watched:
        async with fleet_at(watched.url, model) as fleet:
            await fleet.bookings.settle("wf-1", "finished")
            before, line = channel_of(fleet), cast("Any", fleet.redis).multiplexed
            assert await fleet.bookings.settle("wf-1", "finished") == "UNKNOWN"
            assert channel_of(fleet) is before
            line._pool.look = lambda: None
            line._pool.master_address = ("127.0.0.1", watched.replica.port)  # the result of a look for the master
            assert await fleet.bookings.settle("wf-1", "finished") == "UNKNOWN", "the call waits for the new connection"
            assert channel_of(fleet) not in (before, None)


async def test_a_server_that_is_killed_and_comes_back(tmp_path: Path, model: str) -> None:
    from tests.support.redis.servers import valkey_binary, wait_for_server

    (port,) = free_ports(1)
    url = f"redis://127.0.0.1:{port}"

    def started() -> subprocess.Popen[bytes]:
        options = ["--port", str(port), "--save", "", "--dir", str(tmp_path)]
        process = subprocess.Popen([valkey_binary(), *options], stdout=subprocess.DEVNULL)
        wait_for_server(url, process)
        return process

    process = await asyncio.to_thread(started)
    async with fleet_at(url, model) as fleet:
        assert await fleet.bookings.settle("wf-1", "failed") == "UNKNOWN"
        process.send_signal(signal.SIGSTOP)
        answers = tell_all(fleet, ["wf-2", "wf-3"])
        process.kill()
        process.wait()
        await poll(lambda: len(answers) == 2)
        assert all(isinstance(error, FleetUnavailable) for _, error in answers)
        process = await asyncio.to_thread(started)

        async def settled() -> bool:
            with suppress(FleetUnavailable):
                return await fleet.bookings.settle("wf-4", "failed") == "UNKNOWN"
            return False

        await poll(settled, 15, "without its scripts")
    process.kill()
    process.wait()


def test_a_packed_call_is_one_command(fleet: Fleet) -> None:
    command = fleet.bookings.settle_command("wf-1", "finished")
    assert words_of(command)[0] == b"EVALSHA"
