"""``warmfleet up`` as a user runs it: the commands that it prints work, and no process outlives it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
from tests.e2e.conftest import PATIENT, chat
from tests.support.polling import poll, until
from tests.support.redis.servers import server, valkey_binary

from warmfleet.cli.local.ports import claim_shared, free_port, listen
from warmfleet.fleet import Fleet, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.streams import Stream

ROOT = Path(__file__).parents[2]
SOURCES = os.pathsep.join(str(ROOT / folder) for folder in ("app", "worker_plugin", "loadtest"))


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WARMFLEET_")}
    return kept | PATIENT | {"PYTHONPATH": SOURCES, "PYTHONUNBUFFERED": "1"}


@dataclass
class Up:
    """A running ``warmfleet up`` and what it has printed so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    started: list[psutil.Process] = field(default_factory=list)

    def read_until(self, text: str) -> str:
        """Read until a line has ``text``, and return it; fail if the output ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return line
        pytest.fail(f"no {text!r} in:\n{self.output}")

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_ready(self) -> str:
        """Return the address that ``up`` prints when it is ready."""
        line = self.read_until("Warmfleet is ready")
        self.read_until("Why there")
        self.started = psutil.Process(self.process.pid).children(recursive=True)
        return line.split()[3]

    def running(self) -> list[psutil.Process]:
        """Return the processes that ran when ``up`` was ready and still run."""
        return [
            process for process in self.started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        ]


@contextmanager
def up(*options: str) -> Iterator[Up]:
    argv = [sys.executable, "-m", "warmfleet", "up", "--port", "0", *options]
    process = subprocess.Popen(
        argv, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        yield Up(process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


def test_what_it_prints_works_as_printed_and_ctrl_c_stops_everything() -> None:
    with up() as command:
        command.wait_ready()
        curl = re.search(r"^  ask=.*?error\)\"'$", command.output, re.MULTILINE | re.DOTALL)
        assert curl is not None
        asked = [subprocess.run(["bash", "-c", curl[0]], capture_output=True, text=True, timeout=60) for _ in range(2)]
        first, second = (
            dict(re.findall(r"^x-warmfleet-(\w+)\S*: (\S+)", answer.stdout, re.MULTILINE)) for answer in asked
        )
        assert first["matched"] == "0"
        assert int(second["matched"]) > int(second["prompt"]) / 2
        assert second["worker"] == first["worker"]
        assert '"finish_reason":' in asked[1].stdout, asked
        wrong = curl[0].replace('"model": "demo"', '"model": "no"')
        told = subprocess.run(["bash", "-c", wrong], capture_output=True, text=True, timeout=60).stdout
        assert told.startswith("HTTP/1.1 404 ")
        assert '"model_not_found"' in told, "the filter hides no error"
        explain = re.search(r"^Why there: +(echo .*?) {3}\(", command.output, re.MULTILINE)
        setting = re.search(r"^  ask='.*?'$", command.output, re.MULTILINE | re.DOTALL)
        assert explain is not None
        assert setting is not None
        why = subprocess.run(
            ["bash", "-c", f"{setting[0]}\n{explain[1]}"],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert re.search(rf"^-> +{re.escape(first['worker'])} +{second['matched']} ", why.stdout, re.MULTILINE), why
        snippet = re.search(r"^  from openai .*?\n  print\(.*?\n", command.output, re.MULTILINE | re.DOTALL)
        assert snippet is not None
        code = textwrap.dedent(snippet[0])
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.split()) > 5
        listed = subprocess.run(
            [sys.executable, "-m", "warmfleet", "workers", "--wide"],  # `warmfleet` finds the stack
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert len(re.findall(r"^sim-\d\.0 +proven .+ proven ", listed.stdout, re.MULTILINE)) == 4, (
            listed
        )  # state, proof

        assert len(command.started) >= 8, "store, watchdog, four engines, two replicas"
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(30) == 0
        assert command.running() == []


def test_a_killed_up_takes_everything_it_started_with_it() -> None:
    with up("--engines", "1", "--replicas", "1") as command:
        command.wait_ready()
        [folder] = {
            Path(process.cmdline()[-1]) for process in command.started if "watchdog.py" in " ".join(process.cmdline())
        }
        assert folder.is_dir()
        command.process.kill()
        until(lambda: command.running() == [], "the children of a killed `up` end", 15)
        assert not folder.exists()


def template_of(command: Up) -> str:
    page = re.search(r"^Its metrics: +(\S+)/metrics", command.output, re.MULTILINE)
    assert page is not None
    [model] = httpx.get(f"{page[1]}/workers", timeout=5).json()["models"]
    assert f"{page[1]}/status " in command.output
    assert httpx.get(f"{page[1]}/status", timeout=5).headers["content-type"].startswith("text/html")
    return str(model["template"])


async def test_ctrl_c_in_mid_stream_leaves_no_load_in_the_store(stream: Callable[..., Stream]) -> None:
    with server(valkey_binary()) as url, up("--engines", "1", "--replicas", "1", "--redis", url) as command:
        address = command.wait_ready()
        assert template_of(command) == "approved", "the demo's, in any store"
        stream(address)
        fleet = Fleet(connect(url, timeout_s=5), "demo")

        async def alone() -> bool:
            return sum(worker.load.in_flight for worker in await fleet.workers.read()) == 1

        try:
            await poll(alone, 10, "the stream is booked, and the probes are over")
            command.process.send_signal(signal.SIGINT)
            assert command.process.wait(30) == 0
            rows = [worker.load for worker in await fleet.workers.read()]
        finally:
            await fleet.close()
        assert [(row.prefill_tokens, row.decode_tokens, row.in_flight) for row in rows] == [(0, 0, 0)]
        assert command.running() == []


def test_a_taken_port_is_said_and_nothing_is_started() -> None:
    with closing(claim_shared("127.0.0.1", 0)) as claimed:  # as another `up` does
        port = claimed.getsockname()[1]
        with closing(listen("127.0.0.1", port, shared=True)) as replica:
            replica.listen()
            argv = [sys.executable, "-m", "warmfleet", "up", "--port", str(port)]
            second = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=60)
    assert second.returncode == 2
    assert "choose another with --port" in second.stderr


@contextmanager
def stock_engine(api_key: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """An engine that publishes nothing, like vLLM without the plugin."""
    port = free_port()
    argv = [sys.executable, "-m", "warmfleet_loadtest.engine", "--port", str(port), "--api-key", api_key]
    process = subprocess.Popen(argv, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        try:
            return httpx.get(f"{url}/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        until(healthy, "a stock engine starts", 60)
        yield process, url
    finally:
        process.kill()
        process.wait()


def test_engines_without_the_plugin_keep_their_conversations_and_may_die() -> None:
    with stock_engine("secret") as (one, first_url), stock_engine("secret") as (two, second_url):
        options = ("--worker", first_url, "--worker", second_url, "--worker-api-key", "secret")
        with up(*options) as command:
            address = command.wait_ready()
            messages = [{"role": "user", "content": "a stock engine " * 200}]
            first = chat(address, messages)
            home = first.headers["x-warmfleet-worker"]
            assert "answer" in command.read_until("matched"), "the first answers are told"
            assert "with the plugin" in command.read_until("with the plugin")
            for turn in range(4):
                messages += [first.json()["choices"][0]["message"], {"role": "user", "content": f"turn {turn}"}]
                answer = chat(address, messages)
                assert answer.headers["x-warmfleet-worker"] == home
                assert int(answer.headers["x-warmfleet-matched-tokens"]) > 0
            victim = one if home.endswith(first_url.rsplit(":", 1)[1]) else two
            victim.kill()
            victim.wait()
            for turn in range(4):
                messages += [first.json()["choices"][0]["message"], {"role": "user", "content": f"after {turn}"}]
                assert chat(address, messages).headers["x-warmfleet-worker"] != home


def test_prefill_and_decode_on_different_engines() -> None:
    """The engines are processes, so they can be killed; what a dead one had computed is computed again."""
    with up("--prefill", "1", "--decode", "1", "--replicas", "1") as command:
        command.wait_ready()
        page = re.search(r"^Its metrics: +(\S+)/metrics", command.output, re.MULTILINE)
        assert page is not None
        [model] = httpx.get(f"{page[1]}/workers", timeout=5).json()["models"]
        assert {name: model["pairs"][name] for name in ("prefill", "decode", "pairs")} == {
            "prefill": 1,
            "decode": 1,
            "pairs": 1,
        }
        urls = {worker["worker_id"]: worker["url"] for worker in model["workers"]}
        body = {"prompt": list(range(200)), "max_tokens": 4}

        def step(engine: str, params: dict[str, Any]) -> dict[str, Any]:
            made = httpx.post(f"{urls[engine]}/v1/completions", json={**body, "kv_transfer_params": params}, timeout=30)
            return dict(made.raise_for_status().json())

        first, second = (step("prefill-1.0", {"do_remote_decode": True})["kv_transfer_params"] for _ in range(2))
        whole = step("decode-1.0", first)["choices"][0]["text"]
        with suppress(httpx.TransportError):
            httpx.post(f"{urls['prefill-1.0']}/sim/faults", json={"die": "now"}, timeout=5)
        assert "prefill-1 died (exit code 1)" in command.read_until("died")
        body["prompt"] = list(range(1, 201))
        assert "WRONG" not in step("decode-1.0", second)["choices"][0]["text"] != whole
        counts = httpx.get(f"{urls['decode-1.0']}/sim/transfers", timeout=5).json()
        assert (counts["transfers"], counts["failed_transfers"], counts["recomputed"]) == (1, 1, 1)
