"""A small OpenAI server that can misbehave."""

from __future__ import annotations

import json
import socket
import struct
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class Engine(BaseHTTPRequestHandler):
    """Streams three words. faults: the faults of the first requests, one each. bodies, headers_seen: of requests."""

    faults: list[str]
    bodies: list[dict[str, Any]]
    headers_seen: list[dict[str, str]]

    def do_GET(self) -> None:
        self._head(200, "application/json")
        self.wfile.write(json.dumps({"data": [{"id": "m"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.headers_seen.append(dict(self.headers))
        fault = self.faults.pop(0) if self.faults else ""
        self.bodies.append(body)
        if fault == "reset":
            self._reset()
        elif fault == "500":
            self._head(500, "application/json")
            self.wfile.write(b'{"error": {"message": "broken engine"}}')
        else:
            self._stream(fault, chat="messages" in body)

    def _stream(self, fault: str, *, chat: bool) -> None:
        self._head(200, "text/event-stream")
        self.wfile.write(b": a sign of life\n\n")
        for word in ("one ", "two ", "three "):
            self._event({"choices": [{"delta": {"content": word}} if chat else {"text": word}]})
            if fault == "cut":
                return None  # the stream ends without an error, but also without [DONE]
            if fault == "reset in the stream":
                return self._reset()
        if fault == "error in the stream":
            self._event({"error": {"message": "engine died"}})
        if fault == "no JSON":
            self.wfile.write(b"data: {\n\n")
        usage = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 32}}
        self._event({"choices": [], "usage": usage})
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
def engine(*faults: str) -> Iterator[tuple[str, type[Engine]]]:
    """A server with these faults: (its URL, its handler, which has what it saw)."""
    handler = type("Handler", (Engine,), {"faults": list(faults), "bodies": [], "headers_seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # resets are made on purpose
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", handler
    finally:
        server.shutdown()
        server.server_close()
