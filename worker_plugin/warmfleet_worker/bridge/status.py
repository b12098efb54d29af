"""The counters of a bridge in Prometheus' text form, on a port of their own."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warmfleet_worker.bridge.bridge import Bridge

#: Name, type, help. A counter's samples have the suffix _total.
METRICS = (
    ("warmfleet_bridge_engine_up", "gauge", "1: the engine is healthy and reported"),
    ("warmfleet_bridge_blocks", "gauge", "block hashes that the index is told this engine core holds"),
    ("warmfleet_bridge_complete", "gauge", "1: every event was applied; 0: some were lost, so blocks may be missing"),
    ("warmfleet_bridge_batches", "counter", "batches of events applied"),
    ("warmfleet_bridge_gaps", "counter", "gaps in the numbers of batches, each followed by a replay"),
    ("warmfleet_bridge_lost", "counter", "batches that no replay could give"),
    ("warmfleet_bridge_malformed", "counter", "batches that are not as any known engine writes them"),
    ("warmfleet_bridge_unproved", "counter", "blocks left out because their hash could not be proved, by reason"),
)


def text(bridge: Bridge) -> str:
    """Return the counters as an exposition."""
    engines = list(bridge.engines.values())
    counts = [(rank.config.worker_id, rank.counts) for engine in engines for rank in engine.ranks]
    lines = []
    for name, kind, about in METRICS:
        short = name.removeprefix("warmfleet_bridge_")
        suffix = "_total" if kind == "counter" else ""
        lines += [f"# HELP {name}{suffix} {about}", f"# TYPE {name}{suffix} {kind}"]
        if short == "engine_up":
            lines += [
                f'{name}{{engine="{engine.options.name}"}} {int(engine.state == "reported")}' for engine in engines
            ]
        elif short == "unproved":
            lines += [
                f'{name}{suffix}{{worker="{worker}",reason="{reason}"}} {blocks}'
                for worker, count in counts
                for reason, blocks in sorted(count.unproved.items())
            ]
        else:
            lines += [f'{name}{suffix}{{worker="{worker}"}} {int(getattr(count, short))}' for worker, count in counts]
    return "\n".join([*lines, ""])


def serve(bridge: Bridge, port: int) -> ThreadingHTTPServer:
    """Answer GET /metrics and /health on this port of every address, in daemon threads. Raises OSError."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            known = self.path in ("/metrics", "/health")
            body = text(bridge).encode() if self.path == "/metrics" else b""
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing, because scrapes need no log."""

    server = ThreadingHTTPServer(("", port), Handler)
    threading.Thread(target=server.serve_forever, name="warmfleet-status", daemon=True).start()
    return server
