"""``warmfleet why``: which replicas it asks, and what it prints of their answers."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from tests.support.replicas.fixed_answers import replica

from warmfleet.__main__ import main
from warmfleet.cli.local import ports, running_stack
from warmfleet.cli.local.running_stack import RunningStack, announced, replicas_to_ask

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

REQUEST = {
    "request_id": "id-1",
    "method": "POST",
    "path": "/v1/chat/completions",
    "at": 1_700_000_000.5,
    "running": False,
    "status": 200,
    "ms": 4_200.5,
    "first_ms": 3_300.0,
    "gap_ms": 20.0,
    "queue_ms": 2_900.0,
    "predicted_ms": None,
    "prompt_tokens": 4_100,
    "cached_tokens": 0,
    "stream": True,
    "worker": "gpu1.0",
    "because": "3.3 s to the first token: 2.9 s in the queue: the engines that suit it were busy. Then 0.9 s.",
    "remedy": "more engines shorten the queue",
    "attempts": [
        {
            "reservation": "wf-0abc",
            "worker": "gpu1.0",
            "outcome": "finished",
            "error": None,
            "queue_ms": 2_900.0,
            "engine_ms": 400.0,
        }
    ],
}


def answer(*requests: dict[str, Any], name: str = "router-1, process 7") -> tuple[int, Any]:
    return 200, {"replica": name, "kept": 17, "since": 1_700_000_000.0, "requests": list(requests)}


def test_the_sentences_and_the_facts_of_one_request(capsys: pytest.CaptureFixture[str]) -> None:
    with replica({"/why?id=id-1": answer(REQUEST)}) as (url, _):
        assert main(["why", "id-1", "--url", url]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("id-1  POST /v1/chat/completions at ")
    assert "by router-1, process 7\n3.3 s to the first token: 2.9 s in the queue" in printed
    assert "\n-> more engines shorten the queue\n" in printed
    facts = {line.rpartition("  ")[0].strip(): line.rpartition("  ")[2] for line in printed.splitlines()}
    assert facts["first byte after"] == "3,300.0 ms"
    assert facts["prompt tokens"] == "4,100"
    assert facts["found in cache"] == "0"
    assert "predicted" not in printed, "what is not known has no line"
    assert "wf-0abc" in printed


def test_an_id_is_asked_of_every_named_replica_and_may_hold_anything(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/why?id=a%26b%3Dc%2F%3F"
    with (
        replica({path: answer(name="router-1")}) as (first, requests),
        replica({path: answer(REQUEST, name="router-2")}) as (second, _),
    ):
        assert main(["why", "a&b=c/?", "--url", first, "--url", second]) == 0
        assert len(requests) == 1
        assert "by router-2" in capsys.readouterr().out
        assert main(["why", "a&b=c/?", "--url", first]) == 1
    printed = capsys.readouterr().out
    assert "No request with the id a&b=c/? is known:" in printed
    assert f"router-1 at {first} keeps 17 requests, back to " in printed
    assert "kubectl" in printed


def test_without_an_id_the_requests_of_all_replicas_are_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    slower = REQUEST | {"request_id": "id-2", "first_ms": None, "running": True, "ms": 60_000.0, "worker": None}
    stalled = REQUEST | {"request_id": "id-3", "gap_ms": 9_000.0}
    path = "/why?order=slowest&count=3"
    with (
        replica({path: answer(REQUEST, stalled)}) as (first, _),
        replica({path: answer(slower)}) as (second, _),
    ):
        assert main(["why", "--count", "3", "--url", first, "--url", second]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[1:4]] == ["id-2", "id-3", "id-1"]
    assert "60,000.0 ms  none    under way  2.9 s in the queue" in lines[1]
    assert all(name in lines[-1] for name in (first, second))
    with replica({"/why?order=failed&count=10": answer()}) as (first, _):
        assert main(["why", "--failed", "--url", first]) == 1
    assert "No request has failed" in capsys.readouterr().out


def test_the_answers_as_they_came(capsys: pytest.CaptureFixture[str]) -> None:
    with replica({"/why?order=last&count=10": answer(REQUEST)}) as (url, _):
        assert main(["why", "--last", "--json", "--url", url]) == 0
    assert json.loads(capsys.readouterr().out)[url]["requests"] == [REQUEST]


def test_a_named_replica_must_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with replica({"/why?id=x": answer(REQUEST)}) as (url, _):
        nobody = f"http://127.0.0.1:{ports.free_port()}"
        assert main(["why", "x", "--url", url, "--url", nobody]) == 2
    assert f"no replica answers at {nobody}" in capsys.readouterr().err


def test_all_replicas_of_a_stack_are_asked_and_one_may_be_stopped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with replica({"/why?id=x": answer(REQUEST)}) as (url, _):
        nobody = f"http://127.0.0.1:{ports.free_port()}"
        stack = RunningStack("http://127.0.0.1:1", "redis://x", ("m",), os.getpid(), (url, nobody))
        with announced(stack):
            assert replicas_to_ask([]) == [url, nobody]
            assert replicas_to_ask(["http://other"]) == ["http://other"]
            assert main(["why", "x"]) == 0
        assert "id-1" in capsys.readouterr().out
    with announced(stack):
        assert main(["why", "x"]) == 2, "none of them answers"


def test_the_other_replicas_of_the_fleet_are_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with replica({"/why?id=x": answer(REQUEST, name="router-2:9090")}) as (second, requests):
        nobody = f"http://127.0.0.1:{ports.free_port()}"
        rows = [
            {"replica": "router-1:9090", "url": "http://127.0.0.1:1"},
            {"replica": "router-2:9090", "url": second},
            {"replica": "router-3:9090", "url": ""},
            {"replica": "router-4:9090", "url": nobody},
        ]
        listed = (200, {"fresh": True, "replicas": rows})
        with replica({"/why?id=x": answer(name="router-1:9090"), "/replicas": listed}) as (first, _):
            assert main(["why", "x", "--url", first]) == 0
            assert main(["why", "x", "--url", second]) == 0, "it has it, so no other is asked"
    assert len(requests) == 2
    assert capsys.readouterr().out.count("by router-2:9090") == 2


def test_replicas_of_one_machine_have_ports_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    there = {f"http://127.0.0.1:{port}" for port in (9090, 9091, 9092, 9095)}
    monkeypatch.setattr(running_stack, "listens", there.__contains__)
    assert replicas_to_ask([]) == [f"http://127.0.0.1:{port}" for port in (9090, 9091, 9092)]
    there.clear()
    assert replicas_to_ask([]) == ["http://127.0.0.1:9090"]
