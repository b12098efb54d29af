"""The counters of a bridge in Prometheus' text form, on a port of their own."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from warmfleet_worker.bridge.bridge import Bridge

#: Metrics with one sample per worker: name, type, help.
METRICS = (
    ("blocks", "gauge", "block hashes that the index is told this engine core holds"),
    ("complete", "gauge", "1: every event of the engine was applied; 0: some were lost, so blocks may be missing"),
    ("batches_total", "counter", "batches of events applied"),
    ("gaps_total", "counter", "gaps in the numbers of batches, each followed by a replay"),
    ("lost_total", "counter", "batches that no replay could give"),
    ("malformed_total", "counter", "batches that are not as any known engine writes them"),
)


def text(bridge: Bridge) -> str:
    """The exposition."""
    return "\n".join([*_engines(bridge), *_ranks(bridge), ""])


def _engines(bridge: Bridge) -> Iterator[str]:
    yield "# HELP warmfleet_bridge_engine_up 1: the engine is healthy and reported"
    yield "# TYPE warmfleet_bridge_engine_up gauge"
    for engine in list(bridge.engines.values()):
        yield f'warmfleet_bridge_engine_up{{engine="{engine.options.name}"}} {int(engine.state == "reported")}'


def _ranks(bridge: Bridge) -> Iterator[str]:
    counts = [(rank.config.worker_id, rank.counts) for engine in list(bridge.engines.values()) for rank in engine.ranks]
    for name, kind, about in METRICS:
        yield f"# HELP warmfleet_bridge_{name} {about}"
        yield f"# TYPE warmfleet_bridge_{name} {kind}"
        for worker_id, count in counts:
            yield f'warmfleet_bridge_{name}{{worker="{worker_id}"}} {int(getattr(count, name.removesuffix("_total")))}'
    yield "# HELP warmfleet_bridge_unproved_total blocks left out because their hash could not be proved, by reason"
    yield "# TYPE warmfleet_bridge_unproved_total counter"
    for worker_id, count in counts:
        for reason, blocks in sorted(count.unproved.items()):
            yield f'warmfleet_bridge_unproved_total{{worker="{worker_id}",reason="{reason}"}} {blocks}'


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
            """Scrapes need no log."""

    server = ThreadingHTTPServer(("", port), Handler)
    threading.Thread(target=server.serve_forever, name="warmfleet-status", daemon=True).start()
    return server
