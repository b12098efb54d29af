"""A trace leads from a client's span over the router to real vLLM's own span, through a collector's process."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
import venv
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.support.polling import poll
from tests.support.trace_collector import CLIENT, Span, collector
from tests.vllm.conftest import TAG
from tests.vllm.engine import ROOT, TRUTH, VENV, EngineOptions, running
from tests.vllm.replicas import PATIENT_SECONDS, running_replicas

from warmfleet.cli.local.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=2,
        shows=(
            "one trace from a client's span over the router's two to real vLLM's own, through the process of a "
            "collector; printed as a tree. OpenTelemetry's packages and the collector are downloaded from PyPI"
        ),
    ),
    pytest.mark.timeout(900),
]

ROTEL = "rotel"  # a collector that is on PyPI as a program
VLLM_PACKAGES = ("opentelemetry-sdk", "opentelemetry-exporter-otlp")
SHOWN = (
    *("warmfleet.worker", "warmfleet.why", "warmfleet.matched_tokens", "warmfleet.prompt_tokens"),
    *("warmfleet.identity", "gen_ai.usage.prompt_tokens", "gen_ai.latency.time_to_first_token"),
)
MESSAGES = [{"role": "user", "content": "the cat sat on the mat " * 12}]
BODY = {"model": TAG, "messages": MESSAGES, "max_tokens": 8}
PROTOBUF = {"content-type": "application/x-protobuf"}


def installed(folder: Path, python: Path, *packages: str) -> Path:
    """A folder with ``packages``, for the path of the given interpreter."""
    command = [str(python), "-m", "pip", "install", "-qq", "--target", str(folder), *packages]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@contextmanager
def collecting(folder: Path, forwards_to: str) -> Iterator[tuple[str, str]]:
    """A collector's process that takes OTLP and passes it on; yields its addresses for HTTP and for gRPC."""
    venv.create(folder / "env", with_pip=True)
    found = installed(folder / "rotel", folder / "env/bin/python", ROTEL)
    [program] = [path for path in found.rglob("rotel*") if path.is_file() and os.access(path, os.X_OK)][:1]
    http, grpc = free_port(), free_port()
    argv = [str(program), "start", "--otlp-http-endpoint", f"127.0.0.1:{http}", "--batch-timeout", "100ms"]
    argv += ["--otlp-grpc-endpoint", f"127.0.0.1:{grpc}", "--pid-file", str(folder / "pid")]
    argv += ["--exporter", "otlp", "--otlp-exporter-protocol", "http", "--otlp-exporter-endpoint", forwards_to]
    with (folder / "rotel.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{http}", f"http://127.0.0.1:{grpc}"
    finally:
        process.terminate()
        process.wait(20)


def client_span(trace_id: str, span_id: str, began_ns: int) -> bytes:
    """The span that a client would send if it traced its requests."""
    message = ExportTraceServiceRequest()
    described = message.resource_spans.add()
    described.resource.attributes.add(key="service.name").value.string_value = "chat-app"
    span = described.scope_spans.add().spans.add(name="ask", kind=CLIENT)
    span.trace_id, span.span_id = bytes.fromhex(trace_id), bytes.fromhex(span_id)
    span.start_time_unix_nano, span.end_time_unix_nano = began_ns, time.time_ns()
    return bytes(message.SerializeToString())


def tree(spans: Sequence[Span], parent_id: str = "", indent: str = "") -> list[str]:
    """Return a line for each span: its service, its name, when it began and how long it was, and some attributes."""
    origin = min(span.began_ns for span in spans)
    lines = []
    for child in sorted((span for span in spans if span.parent_id == parent_id), key=lambda span: span.began_ns):
        at, took = (child.began_ns - origin) / 1e6, (child.ended_ns - child.began_ns) / 1e6
        told = " ".join(f"{name.split('.')[-1]}={child.attributes[name]}" for name in SHOWN if name in child.attributes)
        lines.append(
            f"{indent}{child.resource['service.name']}: {child.name}  +{at:.1f} ms, {took:.1f} ms  {told}".rstrip()
        )
        lines += tree(spans, child.span_id, indent + "  ")
    return lines


async def test_a_trace_from_the_client_to_vllms_own_span(vllm_store: str, tmp_path: Path) -> None:
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    async with collector() as found:
        with collecting(tmp_path, found.url) as (http, grpc):
            packages = installed(tmp_path / "packages", VENV / "bin/python", *VLLM_PACKAGES)
            path = os.pathsep.join(map(str, (TRUTH, ROOT / "worker_plugin", packages)))
            options = EngineOptions(
                redis_url=vllm_store,
                model_tag=TAG,
                arguments=("--otlp-traces-endpoint", grpc),
                environment={"PYTHONPATH": path, "OTEL_SERVICE_NAME": "vllm"},
            )
            settings = {"WARMFLEET_DECIDE_TIMEOUT_S": PATIENT_SECONDS, "OTEL_EXPORTER_OTLP_ENDPOINT": http}
            with running(options), running_replicas(vllm_store, 1, 1, **settings) as [replica]:
                for number in range(2):  # the second request finds the blocks of the first
                    began_ns, own = time.time_ns(), f"{int(span_id, 16) ^ number:016x}"
                    headers = {"traceparent": f"00-{trace_id}-{own}-01", "X-Request-Id": f"ask-{number}"}
                    async with httpx.AsyncClient(timeout=120) as client:
                        answer = await client.post(f"{replica.url}/v1/chat/completions", json=BODY, headers=headers)
                        assert answer.status_code == 200
                        body = client_span(trace_id, own, began_ns)
                        sent = await client.post(f"{http}/v1/traces", content=body, headers=PROTOBUF)
                        assert sent.status_code == 200

                def whole() -> list[Span]:
                    spans = [span for span in found.spans if span.trace_id == trace_id]
                    return spans if len(spans) >= 8 else []

                await poll(whole, 60, "two requests with four spans each")
                spans = whole()
    lines = tree(spans)
    print("\n".join(["", *lines]))
    one = ["chat-app: ask", "  warmfleet: POST /v1/chat/completions", "    warmfleet: try", "      vllm: llm_request"]
    assert [line.partition("  +")[0] for line in lines] == one * 2
    engine_ids = [span.attributes["gen_ai.request.id"] for span in spans if span.name == "llm_request"]
    for span in spans:
        if span.name == "try":
            assert any(span.attributes["warmfleet.engine_request_id"] in id_ for id_ in engine_ids)
    matched = sorted(span.attributes["warmfleet.matched_tokens"] for span in spans if span.name == "try")
    assert matched[0] < matched[1]
