"""``warmfleet serve --workers``: replicas that share a port, as processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
from tests.app.test_stop import Traffic
from tests.support.engines.scripted import STREAM_HEAD, engine, event, freezing
from tests.support.polling import poll

from warmfleet.cli.local.ports import free_port
from warmfleet.fleet import Fleet, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


def free_ports(count: int) -> int:
    """The first of so many ports in a row that are free now."""
    while True:
        begin = free_port()
        try:
            for port in range(begin, begin + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return begin


class Parent:
    """The command as a process. ``lines``: what the command and its replicas have printed."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process, self.port, self.lines = process, port, list[str]()

    async def read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode().rstrip())

    def matches(self, pattern: str) -> list[str]:
        """The text of the pattern's group in each line that has it."""
        return [found[1] for line in self.lines if (found := re.search(pattern, line))]

    def ready(self) -> list[str]:
        """The processes that were ready, in that order."""
        return self.matches(r"replica \d is ready \(process (\d+)\)")

    async def metric(self, place: int, name: str, label: str = "") -> float:
        """A metric of the replica at this place, by its port for operators, summed over all samples with this label."""
        url = f"http://127.0.0.1:{self.port + 1 + place}/metrics"
        async with aiohttp.ClientSession() as client, client.get(url) as answer:
            page = await answer.text()
        lines = [line for line in page.splitlines() if line.startswith(name) and label in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@asynccontextmanager
async def workers(
    folder: Path, valkey_url: str, model: str, engine_url: str, count: int = 2, **settings: str
) -> AsyncIterator[Parent]:
    """The command with so many replicas, all of them ready."""
    port = free_ports(count + 1)
    chosen = {"REDIS_URL": valkey_url, "MODELS": model, "STATIC_WORKERS": engine_url, "DRAIN_S": "1.5"}
    chosen |= {"PORT": str(port), "ADMIN_PORT": str(port + 1), "DECIDE_TIMEOUT_S": "2"}
    environment = os.environ | {f"WARMFLEET_{name}": value for name, value in (chosen | settings).items()}
    (folder / "env").touch()
    command = (sys.executable, "-m", "warmfleet", "serve", "--workers", str(count), "--env-file", str(folder / "env"))
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=asyncio.subprocess.PIPE)
    parent = Parent(process, port)
    reading = asyncio.create_task(parent.read())
    try:
        await poll(lambda: len(parent.ready()) == count, 60, "all replicas are ready")
        yield parent
    except BaseException:
        print("\n".join(parent.lines))
        raise
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 30)
        await reading
        for pid in map(int, parent.matches(r"started \(process (\d+)\)")):
            await poll(lambda: not alive(pid), 20, "every replica ended with its parent")  # noqa: B023


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class At:
    """The shared port, as ``Traffic`` knows a replica."""

    ready = True

    def __init__(self, port: int) -> None:
        self.port = port


async def test_a_reload_replaces_all_replicas_and_fails_no_request(valkey_url: str, model: str, tmp_path: Path) -> None:
    """Clients keep their connections and send nothing again; the new replicas go by the changed file."""
    async with engine(model) as upstream, workers(tmp_path, valkey_url, model, upstream.url) as parent:
        before, statuses = parent.ready(), list[int]()
        looking = asyncio.create_task(watch_ready(parent.port, statuses))
        traffic = Traffic(model, [At(parent.port)])  # type: ignore[list-item]
        clients = [asyncio.create_task(traffic.client(number)) for number in range(24)]
        await poll(lambda: traffic.answered > 200, 60, "all clients have connections")
        shares = [await parent.metric(place, "warmfleet_requests_total") for place in (0, 1)]
        assert min(shares) > 0, "both replicas serve"
        (tmp_path / "env").write_text("# changed\nWARMFLEET_POLICY=round_robin\n")
        parent.process.send_signal(signal.SIGHUP)
        await poll(lambda: any("every replica was replaced" in line for line in parent.lines), 60, "it was reloaded")
        after, answered = parent.ready()[-2:], traffic.answered
        await poll(lambda: traffic.answered > answered + 100, 60, "the new ones serve")
        traffic.over = True
        await asyncio.gather(*clients)
        looking.cancel()
        assert traffic.failed == []
        assert set(statuses) == {200}, "a balancer notices nothing"
        assert traffic.connections < traffic.answered / 3, "they keep their connections"
        assert not set(before) & set(after)
        for place in (0, 1):
            assert await parent.metric(place, "warmfleet_decisions_total", 'policy="round_robin"') > 0
            assert await parent.metric(place, "warmfleet_decisions_total", 'policy="cost"') == 0


async def test_a_reload_that_cannot_work_leaves_the_replicas_alone(valkey_url: str, model: str, tmp_path: Path) -> None:
    async with engine(model) as upstream, workers(tmp_path, valkey_url, model, upstream.url) as parent:
        (tmp_path / "env").write_text("WARMFLEET_POLICY=nonsense\n")
        parent.process.send_signal(signal.SIGHUP)
        await poll(lambda: any("reload given up" in line for line in parent.lines), 60, "it was given up")
        assert any("WARMFLEET_POLICY" in line for line in parent.lines)
        assert len(parent.ready()) == 2
        for pid in parent.ready():
            assert alive(int(pid))
        assert await ready_status(parent.port) == 200


async def watch_ready(port: int, statuses: list[int]) -> None:
    """Ask for /readyz again and again, as a balancer does."""
    while True:
        statuses.append(await ready_status(port))
        await asyncio.sleep(0.02)


async def ready_status(port: int) -> int:
    """The status of /readyz on a new connection."""
    connector = aiohttp.TCPConnector(force_close=True)
    url = f"http://127.0.0.1:{port}/readyz"
    async with aiohttp.ClientSession(connector=connector) as client, client.get(url) as answer:
        return answer.status


async def test_a_killed_replica_is_started_again_and_the_others_serve_for_it(
    valkey_url: str, model: str, tmp_path: Path
) -> None:
    async with engine(model) as upstream, workers(tmp_path, valkey_url, model, upstream.url) as parent:
        for _ in range(2):
            os.kill(int(parent.ready()[-1]), signal.SIGKILL)
            count, answered = len(parent.ready()), 0
            while len(parent.ready()) == count:  # until the new one is ready, every connection gets an answer
                assert await asyncio.wait_for(ready_status(parent.port), 20) == 200
                answered += 1
                await asyncio.sleep(0.01)
            assert answered > 20, "none waited for the new one"
        assert parent.matches(r"killed by (SIGKILL); again in 0.5 s \(time 1 in a row\)")
        assert parent.matches(r"killed by (SIGKILL); again in 1.0 s \(time 2 in a row\)")


async def test_replicas_stop_when_their_parent_is_killed(valkey_url: str, model: str, tmp_path: Path) -> None:
    async with engine(model) as upstream, workers(tmp_path, valkey_url, model, upstream.url) as parent:
        parent.process.kill()  # on the way out it is looked whether they have ended


async def test_a_second_ctrl_c_ends_all_in_order_under_load(valkey_url: str, model: str, tmp_path: Path) -> None:
    """Streams that would run for a minute are told that they end, and nothing of them stays booked."""
    answer = freezing(STREAM_HEAD, event(" one"))
    async with (
        engine(model, answer) as upstream,
        workers(tmp_path, valkey_url, model, upstream.url) as parent,
        aiohttp.ClientSession() as client,
    ):
        url, body = f"http://127.0.0.1:{parent.port}/v1/completions", {"model": model, "prompt": "x", "stream": True}
        streams = [await client.post(url, json=body) for _ in range(12)]  # each has its first event by now
        looking = Fleet(connect(valkey_url, timeout_s=2), model)
        assert (await looking.workers.read())[0].load.in_flight == len(streams)
        pids = [int(pid) for pid in parent.ready()]
        parent.process.send_signal(signal.SIGINT)
        await poll(lambda: len(parent.matches("(stops: no new connection)")) == 2, 20, "both replicas stop")
        assert parent.process.returncode is None, "streams may go on for a while"
        parent.process.send_signal(signal.SIGINT)
        ends = await asyncio.wait_for(asyncio.gather(*(stream.read() for stream in streams)), 20)
        assert await asyncio.wait_for(parent.process.wait(), 20) == 0
        assert not any(map(alive, pids))
        [load] = [worker.load for worker in await looking.workers.read()]
        await looking.close()
    assert all(b'"stopping"' in end for end in ends), "each client is told why its stream ends"
    assert (load.in_flight, load.prefill_tokens, load.decode_tokens) == (0, 0, 0)
    assert len(parent.matches("(stopped)$")) == 2
    assert not [line for line in parent.lines if "Traceback" in line or "Error" in line]


async def test_a_wrong_setting_ends_the_command() -> None:
    wrong = {
        "WARMFLEET_ADMIN_PORT other than 0": {"WARMFLEET_MODELS": "m", "WARMFLEET_ADMIN_PORT": "0"},
        "WARMFLEET_MODELS is empty": {"WARMFLEET_ADMIN_PORT": str(free_ports(2)), "WARMFLEET_PORT": "0"},
    }
    for message, environment in wrong.items():
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "warmfleet", "serve", "--workers", "2"),
            env=os.environ | environment,
            stderr=asyncio.subprocess.PIPE,
        )
        _, stderr = await asyncio.wait_for(process.communicate(), 120)  # its imports alone take long on a busy machine
        assert process.returncode == 2
        assert message in stderr.decode()
        assert "Traceback" not in stderr.decode()
