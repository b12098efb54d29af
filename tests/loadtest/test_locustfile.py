"""The Locust users against a small OpenAI server that can misbehave, in processes as `make loadtest` has them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.loadtest.openai_server import engine
from tests.loadtest.test_trace import write
from tests.support.polling import until

from warmfleet_loadtest.stacks.processes import free_ports, get_json
from warmfleet_loadtest.users.report_figures import ALL, by_name, figures
from warmfleet_loadtest.users.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.loadtest.openai_server import Engine

LOCUSTFILE = Path(__file__).parents[2] / "loadtest/locustfile.py"


def locust(url: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", url, "--loglevel", "WARNING"]
    command += ["--summary", str(folder / "summary.json"), *more]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def drive(url: str, folder: Path, enough: Callable[[], bool], *more: str) -> tuple[dict[str, Any], int]:
    """Run Locust until ``enough()``, then let it finish its requests: (summary, exit status)."""
    process = locust(url, folder, "--headless", "--html", str(folder / "report.html"), "--seconds", "0", *more)
    try:
        until(lambda: enough() or process.poll() is not None, "enough requests", seconds=60)
        process.send_signal(signal.SIGUSR1)
        _, output = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (folder / "summary.json").exists(), output
    return json.loads((folder / "summary.json").read_text()), process.returncode


def continued(server: type[Engine]) -> list[dict[str, Any]]:
    """The requests whose conversation has an answer in it."""
    return [body for body in server.bodies if any(message["role"] == "assistant" for message in body["messages"])]


def test_conversations_grow_and_are_measured(tmp_path: Path) -> None:
    with engine() as (url, server):
        summary, status = drive(url, tmp_path, lambda: bool(continued(server)), "ChatUser", "--rate", "15")

    tally = Tally.from_json(summary["tally"])
    found = figures(tally, 0.0)
    later = continued(server)[0]["messages"]
    assert status == 0
    assert later[:-2] in [body["messages"] for body in server.bodies]
    assert later[-2] == {"role": "assistant", "content": "one two three "}
    assert list(found) == ["chat", ALL]
    assert found["chat"]["sent"] == found["chat"]["answered"] == len(server.bodies)
    assert found["chat"]["hit_ratio"] == 0.8
    assert found["chat"]["ttft_p50"] > 0
    assert by_name(tally, "worker") == {"w1": len(server.bodies)}
    assert by_name(tally, "reservation") == {"booked": len(server.bodies)}
    assert summary["tally"]["broken"] == []
    assert "TTFT" in (tmp_path / "report.html").read_text()


def test_all_kinds_in_two_processes(tmp_path: Path) -> None:
    with engine() as (url, server):
        more = ("--rate", "40", "--processes", "2", "--arrivals", "burst")
        summary, status = drive(url, tmp_path, lambda: len(server.bodies) > 80, *more)

    tally = Tally.from_json(summary["tally"])
    found = figures(tally, 0.0)
    sessions = {headers["X-Session-ID"] for headers in server.headers_seen}
    assert status == 0
    assert set(found) == {"chat", "rag", "agent", "one-off", ALL}
    assert found[ALL]["sent"] == found[ALL]["answered"] == len(server.bodies)
    assert {"master", "worker 1", "worker 2"} == set(by_name(tally, "cpu"))
    assert {name.split("-")[-2].split(".")[0] for name in sessions} == {"0", "1"}  # both processes sent


def test_broken_connections_are_sent_again_and_others_fail(tmp_path: Path) -> None:
    faults = ["reset", "", "cut", "", "reset in the stream", "", "500", "error in the stream"]
    with engine(*faults) as (url, server):
        # A request at a time, so that each fault meets the request for which it is meant.
        more = ("OneOffUser", "--rate", "2", "--arrivals", "constant")
        summary, status = drive(url, tmp_path, lambda: len(server.bodies) > len(faults), *more)

    found = figures(Tally.from_json(summary["tally"]), 0.0)
    assert status == 1
    assert [kind for _, kind in summary["tally"]["broken"]] == ["retried", "cut", "cut"]
    times = Counter(json.dumps(body) for body in server.bodies)
    assert sorted(times.values(), reverse=True)[:4] == [2, 2, 2, 1], "three requests came twice, no other did"
    assert found[ALL]["failed"] == 2
    assert any("500" in error for error in summary["errors"])
    assert any("engine died" in error for error in summary["errors"])


def test_a_trace_is_played_to_its_end(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"t": 0.0, "s": 0, "in": 32, "out": 3, "k": 0, "new": [1, 2]}]
    rows += [{"t": 0.2, "s": 1, "in": 16, "out": 3, "k": 0, "new": [1]}]
    rows += [{"t": 0.5, "s": 0, "in": 48, "out": 3, "k": 2, "new": [3]}]
    trace = write(tmp_path / "t.jsonl.xz", rows, block=16, timing="synthetic")
    with engine() as (url, server):
        process = locust(url, tmp_path, "--headless", "--trace", str(trace), "--seconds", "0", "--speed", "2")
        _, output = process.communicate(timeout=60)

    assert process.returncode == 0, output
    prompts = sorted((body["prompt"] for body in server.bodies), key=len)
    assert [len(prompt) for prompt in prompts] == [16, 32, 48]
    assert prompts[2][:32] == prompts[1]
    assert prompts[1][:16] == prompts[0]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert figures(Tally.from_json(summary["tally"]), 0.0)["trace"]["answered"] == 3


def test_the_web_page_starts_a_run_and_shows_the_caches(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    page = f"http://127.0.0.1:{port}"
    with engine() as (url, server):
        process = locust(url, tmp_path, "OneOffUser", "--web-host", "127.0.0.1", "--web-port", str(port))
        try:
            until(lambda: get_json(f"{page}/stats/requests") is not None, "the page", seconds=60)
            form = b"rate=20&arrivals=constant&seconds=1&host=" + url.encode()
            with urllib.request.urlopen(f"{page}/swarm", form, timeout=10) as answer:
                assert json.load(answer)["success"]
            until(lambda: get_json(f"{page}/stats/requests")["state"] == "stopped", "the end", seconds=60)
            stats = get_json(f"{page}/stats/requests")
        finally:
            process.kill()
            process.communicate()

    ((tab),) = stats["extended_stats"]
    row = {row["kind"]: row for row in tab["data"]}["one-off"]
    assert row["sent"] == len(server.bodies) == 20
    assert row["hit"] == 80.0


def test_its_own_help_names_every_option() -> None:
    done = subprocess.run([sys.executable, LOCUSTFILE, "--help"], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    for option in "--rate", "--arrivals", "--seconds", "--mix", "--trace":
        assert f"  {option} " in done.stdout
    assert "diurnal: poisson" in " ".join(done.stdout.split())


def test_wrong_options_are_told_before_anything_is_sent(tmp_path: Path) -> None:
    process = locust("http://127.0.0.1:9", tmp_path, "--headless", "--mix", "cat=1")
    _, output = process.communicate(timeout=60)

    assert process.returncode == 2
    assert "kinds: chat, rag, agent, one-off" in output


def test_a_trace_that_breaks_off_is_told_before_anything_is_sent(tmp_path: Path) -> None:
    whole: dict[str, object] = {"t": 0.0, "s": 0, "in": 16, "out": 3, "k": 0, "new": [1]}
    trace = write(tmp_path / "t.jsonl.xz", [whole, {"t": "soon"}], block=16)

    process = locust("http://127.0.0.1:9", tmp_path, "--headless", "--trace", str(trace))
    _, output = process.communicate(timeout=60)

    assert process.returncode == 2
    assert f"error: {trace} is no trace" in output


def test_a_server_without_an_answer_fails_the_run(tmp_path: Path) -> None:
    process = locust("http://127.0.0.1:9", tmp_path, "OneOffUser", "--headless", "--seconds", "5")
    _, output = process.communicate(timeout=60)

    assert process.returncode == 1
    assert "no model at http://127.0.0.1:9" in output
