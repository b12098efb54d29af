"""The bridge's readers of engines: vLLM's and SGLang's own answers, and options of the command line."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from warmfleet_worker.bridge import engine_api, options
from warmfleet_worker.bridge.engine_api import EngineApi, EngineDown, EventSource, Loads, at_rank, reachable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from warmfleet_worker.bridge.options import EngineOptions

VLLM = {
    "/v1/models": {
        "data": [
            {"id": "m", "root": "/models/m", "parent": None, "max_model_len": 4_096},
            {"id": "tuned", "root": "/adapters/tuned", "parent": "m"},
        ]
    },
    "/version": {"version": "0.32.0"},
    "/kv_event_sources": {
        "0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"},
        "1": {"endpoint": "tcp://*:5558", "replay_endpoint": "tcp://*:5658"},
    },
    "/metrics": """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 7.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="1",model_name="m",sleep_state="awake"} 0.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1e+03
vllm:cache_config_info{block_size="32",num_gpu_blocks="900",enable_prefix_caching="True",engine="0"} 1.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 9e+06
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="device"} 70.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="host"} 500.0
vllm:prompt_tokens_cached_by_source_total{engine="1",model_name="m",source="host"} 60.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="disk"} 7.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="external_unspecified"} 8e+06
vllm:kv_offload_load_time_total{engine="0",model_name="m"} 0.5
vllm:kv_offload_tiering_read_time_total{engine="0",model_name="m",tier="1:fs"} 0.25
process_start_time_seconds 1.79e+09
""",
    "/health": {},
}
SGLANG = {
    "/v1/models": {"data": [{"id": "m", "root": "m", "max_model_len": 8_192}]},
    "/server_info": {
        "tokenizer_path": "/models/m",
        "page_size": 64,
        "max_total_num_tokens": 64_000,
        "dp_size": 2,
        "version": "0.5.23",
        "kv_events_config": '{"endpoint": "tcp://*:6000", "replay_endpoint": "tcp://*:6100"}',
    },
    "/health": {},
}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that serves these answers by path; returns the API that asks for them, patiently."""
    monkeypatch.setattr(engine_api, "TIMEOUT_SECONDS", 60.0)  # a test machine may be busy
    servers: list[ThreadingHTTPServer] = []

    def start(answers: dict[str, Any]) -> EngineApi:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = answers.get(self.path)
                body = found.encode() if isinstance(found, str) else json.dumps(found).encode()
                self.send_response(404 if found is None else found if isinstance(found, int) else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return EngineApi(f"http://127.0.0.1:{server.server_address[1]}", "key")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_vllm_describes_itself(serve: Any) -> None:
    api = serve(VLLM)
    facts = api.facts()
    assert (facts.kind, facts.version, facts.models, facts.root) == ("vllm", "vllm-0.32.0", ("m",), "/models/m")
    assert (facts.max_model_len, facts.page_tokens, facts.capacity_blocks) == (4_096, 32, 900)
    assert facts.adapters == {"tuned": "/adapters/tuned"}
    assert api.sources()[1] == EventSource("tcp://127.0.0.1:5558", "tcp://127.0.0.1:5658")
    reading = api.reading()
    assert (reading.running, reading.waiting, reading.work) == ({0: 3, 1: 1}, {1: 7}, 1_000)
    assert (reading.started, reading.asleep) == (1.79e9, {1})
    assert reading.loads == Loads(host_tokens=560, disk_tokens=7, load_s=0.5, read_s=0.25), "none of others"
    api.healthy()


def test_sglang_describes_itself(serve: Any) -> None:
    api = serve(SGLANG)
    facts = api.facts()
    assert (facts.kind, facts.version, facts.root, facts.ranks) == ("sglang", "sglang-0.5.23", "/models/m", 2)
    assert (facts.page_tokens, facts.capacity_blocks) == (64, 1_000)
    assert api.sources() == {
        0: EventSource("tcp://127.0.0.1:6000", "tcp://127.0.0.1:6100"),
        1: EventSource("tcp://127.0.0.1:6001", "tcp://127.0.0.1:6101"),
    }


def test_an_engine_that_is_gone_or_dead(serve: Any) -> None:
    with pytest.raises(EngineDown) as gone:
        EngineApi("http://127.0.0.1:9").healthy()
    assert gone.value.gone
    with pytest.raises(EngineDown, match="/health answered 404") as odd:
        serve({}).healthy()
    assert not odd.value.gone


@pytest.mark.parametrize("path", ["/server_info", "/metrics", "/version", "/kv_event_sources"])
@pytest.mark.parametrize(("status", "known"), [(404, True), (405, True), (501, True), (401, False), (500, False)])
def test_what_an_engine_cannot_tell_now_is_asked_again(serve: Any, path: str, status: int, known: bool) -> None:
    """The bridge reads facts once, at the join: it must not take a failure for an engine without the path."""
    api = serve({**VLLM, path: status})
    if known:
        api.facts()
        api.sources()
    else:
        with pytest.raises(EngineDown, match=f"{path} answered {status}"):
            (api.facts(), api.sources())


def test_addresses() -> None:
    assert reachable("tcp://*:5557", "gpu1") == "tcp://gpu1:5557"
    assert reachable("tcp://10.0.0.1:5557", "gpu1") == "tcp://10.0.0.1:5557"
    assert reachable("tcp://[::]:5557", "fd00::1") == "tcp://[fd00::1]:5557"
    assert [at_rank("tcp://a:5557", rank) for rank in (0, 3)] == ["tcp://a:5557", "tcp://a:5560"]


def parsed(*words: str) -> list[EngineOptions]:
    return options.engines_of(options.parser().parse_args(["--redis", "redis://store:6379", *words]))


def test_engines_of_the_command_line_and_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "engines.json"
    monkeypatch.setenv("WARMFLEET_LABELS", "zone=a")
    file.write_text('[{"url": "http://gpu2:8000", "ranks": 2, "server_id": "second"}]')
    one, two = parsed(
        *("--engine", "http://gpu1:8000=tcp://gpu1:5557,replay=tcp://gpu1:5657,block_tokens=32,labels=a=b&c=d"),
        *("--engines", str(file), "--model", "m#pool", "--tokenizer", "none"),
    )
    assert (one.url, one.endpoint, one.replay) == ("http://gpu1:8000", "tcp://gpu1:5557", "tcp://gpu1:5657")
    assert (one.name, one.block_tokens, one.model, one.tokenizer) == ("gpu1-8000", 32, "m#pool", "none")
    assert (two.name, two.ranks, two.endpoint) == ("second", 2, "")
    assert (one.labels, two.labels) == ("a=b&c=d", "zone=a")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--engine", "gpu1:8000"], "no http URL"),
        (["--engine", "http://127.0.0.1:8000"], "this machine only"),
        (["--engine", "http://a:1=udp://a:2"], "no ZMQ address"),
        (["--engine", "http://a:80000"], "Port out of range"),
        (["--engine", "http://a:8000x"], "is no URL of an engine"),
        (["--engine", "http://[::1"], "is no URL of an engine"),
        (["--engine", "http://a:1=tcp://a:80000"], "no port from 1"),
        (["--engine", "http://a:1=tcp://a:2,replay=tcp://a"], "no port from 1"),
        (["--engine", "http://a:1,ranks=two"], "ranks must be a number"),
        (["--engine", "http://a:1,rank=2"], "no option 'rank'; known are"),
        (["--engine", "http://a:1,ranks"], "is no OPTION=VALUE"),
        (["--engine", "http://a:1", "--engine", "http://a:1/"], "same server_id"),
        (["--engine", "http://a:1,server_id=a b"], "server_id: "),
        (["--engine", "http://a:1", "--model", "m#"], "model: 'm#' names no pool"),
        (["--engine", "http://a:1,labels=zone"], "labels: 'zone' is no label"),
        (["--engines", "/nowhere"], "cannot read /nowhere"),
    ],
)
def test_options_that_cannot_be_used(words: list[str], told: str) -> None:
    with pytest.raises(options.OptionError, match=told):
        parsed(*words)
