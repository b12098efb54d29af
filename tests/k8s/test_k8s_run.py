"""The overlay `dev`, run as processes: it answers, and each part has its own rights in Redis and no more."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import httpx
import pytest
import redis
from redis.exceptions import NoPermissionError
from tests.conftest import redis7_binary
from tests.k8s.objects import Manifest, probes_of
from tests.k8s.pods import Pods, RunningPod
from tests.k8s.render import parse
from tests.tools import require

from warmfleet_loadtest.stacks.processes import Processes, answers

if TYPE_CHECKING:
    from pathlib import Path

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def test_the_root_answers(rendered: dict[str, str], tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        pods = Pods(parse(rendered["root"]), processes, tmp_path, _programs())
        store = pods.start("StatefulSet/redis")
        worker = pods.start("Deployment/worker")
        router = pods.start("Deployment/router")
        for name, made in ("worker.engine", worker), ("router.router", router):
            processes.wait(name, partial(_ready, made))
        # A replica that found no engine within 15 s is ready nevertheless, which happens on a busy machine.
        processes.wait("router.router", lambda: _chat(router).status_code != 503)

        answer = _chat(router)

        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert answers(f"{router.url(9090)}/metrics")
        assert not answers(f"{router.url(8080)}/metrics"), "clients do not reach the port for operators"
        # The probes of Redis have no user: an answer is enough for them.
        (server,) = store.spec["containers"]
        for kind, probe in probes_of(server):
            if "exec" in probe:
                command, *rest = probe["exec"]["command"]
                pods.run(store, server, [command, "-p", "6379", *rest])
                assert kind in ("startupProbe", "readinessProbe")
        _rights(store.ports[6379])
        logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
        assert "NOPERM" not in logs
        assert "no permission" not in logs.lower()


def _chat(router: RunningPod) -> httpx.Response:
    return httpx.post(f"{router.url(8080)}/v1/chat/completions", json=CHAT, timeout=30)


def _programs() -> dict[str, list[str]]:
    return {"valkey-server": [redis7_binary()], "valkey-cli": [require("redis-cli")]}


def _ready(made: RunningPod) -> bool:
    """Whether all probes of the first container are answered as the kubelet wants it."""
    container: Manifest = made.spec["containers"][0]
    numbers = {port["name"]: port["containerPort"] for port in container["ports"]}
    asked = [probe["httpGet"] for _, probe in probes_of(container)]
    return all(answers(made.url(numbers[probe["port"]]) + probe["path"]) for probe in asked)


def _rights(port: int) -> None:
    """Nobody without a password, and each user only what it is for."""
    with redis.Redis(port=port) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    with redis.Redis(port=port, username="worker", password="dev-only") as client:
        assert client.ping()
        assert client.xadd("wf:{demo}:events:any.0", {"f": "v"})
        for refused in (("GET", "wf:{demo}:load"), ("XADD", "wf:{other}:hello", "*", "f", "v"), ("FLUSHALL",)):
            with pytest.raises(NoPermissionError):
                client.execute_command(*refused)
    with (
        redis.Redis(port=port, username="router", password="dev-only") as client,
        pytest.raises(NoPermissionError),
    ):
        client.execute_command("CONFIG", "GET", "*")
