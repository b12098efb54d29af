"""The Locust users against a small OpenAI server that can misbehave, in a Locust process as `make loadtest` runs it."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.topology import until

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENTS = 8  # those of the locustfile, so that one of nine questions is about a document asked about before
LOCUSTFILE = Path(__file__).parents[2] / "loadtest/locustfile.py"


class Engine(BaseHTTPRequestHandler):
    """Streams three words. faults: the faults of the first requests, one each."""

    faults: list[str]
    bodies: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._head(200, "application/json")
        self.wfile.write(json.dumps({"data": [{"id": "m"}]}).encode())

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "reset":
            self._reset()
        elif fault == "500":
            self._head(500, "application/json")
            self.wfile.write(b'{"error": {"message": "broken engine"}}')
        else:
            self._stream(fault)

    def _stream(self, fault: str) -> None:
        self._head(200, "text/event-stream")
        for word in ("one", "two", "three"):
            self._event({"choices": [{"delta": {"content": f"{word} "}}]})
            if fault == "cut":
                return None  # the stream ends without an error, but also without [DONE]
            if fault == "reset in the stream":
                return self._reset()
        if fault == "error in the stream":
            self._event({"error": {"message": "engine died"}})
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def _event(self, data: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("x-warmfleet-worker", "w1")
        self.send_header("x-warmfleet-reservation", "booked")
        self.send_header("x-warmfleet-matched-tokens", "32")
        self.send_header("x-warmfleet-prompt-tokens", "40")
        self.end_headers()

    def _reset(self) -> None:
        """Send RST instead of FIN, as the kernel does for a killed process."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.rfile.close()
        self.wfile.close()
        self.connection.close()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        """Quiet."""


@contextmanager
def engine(*faults: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    bodies: list[dict[str, Any]] = []
    handler = type("Handler", (Engine,), {"faults": list(faults), "bodies": bodies})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # resets are made on purpose
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", bodies
    finally:
        server.shutdown()
        server.server_close()


def drive(url: str, folder: Path, user: str, bodies: list[dict[str, Any]], count: int) -> tuple[dict[str, Any], int]:
    """Run one user until it has begun ``count`` + 1 requests, so that ``count`` have ended: (summary, exit status)."""
    target = folder / "summary.json"
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), user, "--host", url, "--headless"]
    command += ["--users", "1", "--stop-timeout", "60", "--html", str(folder / "report.html")]
    environment = {**os.environ, "WARMFLEET_LOADTEST_SUMMARY": str(target), "WARMFLEET_LOADTEST_PACE_S": "0.05"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        until(lambda: len(bodies) > count or process.poll() is not None, f"{count} requests", seconds=60)
        process.send_signal(signal.SIGUSR1)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert target.exists(), said
    return json.loads(target.read_text()), process.returncode


def test_a_chat_user_grows_a_conversation_and_is_measured(tmp_path: Path) -> None:
    with engine() as (url, bodies):
        summary, status = drive(url, tmp_path, "ChatUser", bodies, 3)

    turns = summary["rows"]["chat chat"]["requests"]
    assert status == 0
    assert len(bodies) >= turns >= 3
    assert bodies[1]["messages"][: len(bodies[0]["messages"])] == bodies[0]["messages"]
    assert bodies[1]["messages"][2] == {"role": "assistant", "content": "one two three "}
    assert summary["rows"]["TTFT chat"]["requests"] == turns
    assert summary["workers"] == {"w1": turns}
    assert summary["reservations"] == {"booked": turns}
    assert (summary["matched_tokens"], summary["prompt_tokens"]) == (32 * turns, 40 * turns)
    assert summary["broken"] == []
    assert "TTFT" in (tmp_path / "report.html").read_text()


def test_rag_users_share_documents(tmp_path: Path) -> None:
    with engine() as (url, bodies):
        summary, status = drive(url, tmp_path, "RagUser", bodies, DOCUMENTS + 1)

    documents = [body["messages"][0]["content"].split("\n\nQuestion:")[0] for body in bodies]
    questions = {body["messages"][0]["content"] for body in bodies}
    assert status == 0
    assert summary["rows"]["chat rag"]["requests"] >= 3
    assert len(set(documents)) < len(documents) == len(questions)


@pytest.mark.parametrize(("fault", "kind"), [("reset", "retried"), ("cut", "cut"), ("reset in the stream", "cut")])
def test_a_broken_connection_is_sent_again_and_counted(tmp_path: Path, fault: str, kind: str) -> None:
    with engine("", fault) as (url, bodies):
        summary, status = drive(url, tmp_path, "ChatUser", bodies, 3)

    assert status == 0
    assert [found for _, found in summary["broken"]] == [kind]
    assert bodies[1] == bodies[2]
    assert summary["rows"]["chat chat"]["failures"] == 0


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (["500"], "500"),
        (["error in the stream"], "engine died"),
        (["reset", "reset", "reset"], "retried"),
    ],
)
def test_what_sending_again_cannot_mend_is_a_failure(tmp_path: Path, faults: list[str], message: str) -> None:
    with engine(*faults) as (url, bodies):
        summary, status = drive(url, tmp_path, "ChatUser", bodies, len(faults))

    assert status == 1
    assert summary["rows"]["chat chat"]["failures"] == 1
    assert message in summary["errors"][0]
