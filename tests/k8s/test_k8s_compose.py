"""compose.yaml is valid, fits the programs and files that it starts, and each kind of mistake in it is caught.

``test_k8s_containers.py`` runs it.
"""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from tests.k8s.compose import CHECKS, FOLDER, HAPROXY, Compose, load, schema_problems
from tests.support.run.required_tools import require

from warmfleet.__main__ import main

if TYPE_CHECKING:
    from pathlib import Path

Mutation = Callable[[dict[str, Any]], object]


@pytest.fixture
def compose() -> Compose:
    return copy.deepcopy(load())  # anchors share objects, and a mutation must change one service


def test_the_file_is_valid_by_the_published_schema(compose: Compose) -> None:
    assert schema_problems(compose) == []

    compose["services"]["store"]["mem_limits"] = "1g"
    compose["services"]["balancer"]["ports"] = 8080
    problems = " ".join(schema_problems(compose))
    assert "'mem_limits' was unexpected" in problems
    assert "$.services.balancer.ports: 8080 is not of type 'array'" in problems


@pytest.mark.parametrize("check", CHECKS)
def test_what_we_ship_passes(compose: Compose, check: str) -> None:
    assert CHECKS[check](compose) == []


#: a mistake -> (the check that must find it, a part of its words, a function that makes the mistake)
MISTAKES: dict[str, tuple[str, str, Mutation]] = {
    "root can be written": ("hardened", "engine-2: read_only", lambda s: s["engine-2"].pop("read_only")),
    "root's user": ("hardened", "store: user", lambda s: s["store"].update(user="0:0")),
    "capabilities": ("hardened", "balancer: cap_drop", lambda s: s["balancer"].pop("cap_drop")),
    "no limit of memory": ("hardened", "router-1: no mem_limit", lambda s: s["router-1"].pop("mem_limit")),
    "no check": ("hardened", "store: no healthcheck", lambda s: s["store"].pop("healthcheck")),
    "image by its tag": ("images", "not pinned", lambda s: s["store"].update(image="docker.io/valkey/valkey:9.1.2")),
    "image of another name": ("images", "does not build", lambda s: s["router-1"].update(image="localhost/router:1")),
    "containerfile": ("images", "there is no", lambda s: s["engine-1"]["build"].update(dockerfile="Dockerfile")),
    "port open to all": ("reach", "open to everybody", lambda s: s["balancer"].update(ports=["8080:8080"])),
    "port of the store": ("reach", "store: publishes", lambda s: s["store"].update(ports=["127.0.0.1:6379:6379"])),
    "one port twice": ("reach", "two services", lambda s: s["router-2"].update(ports=["127.0.0.1:9091:9090"])),
    "way out": ("reach", "engine-3: is in", lambda s: s["engine-3"].update(networks=["fleet", "outside"])),
    "unknown setting": (
        "settings", "read by nobody", lambda s: s["router-1"]["environment"].update(WARMFLEET_MODELL="demo"),
    ),
    "wrong value": ("settings", "router-1", lambda s: s["router-1"]["environment"].update(WARMFLEET_PORT="x")),
    "other model": ("settings", "models", lambda s: s["engine-1"].update(command=["--port=8000", "--model=other"])),
    "router's port": ("ports", "listens on 8080", lambda s: s["router-1"]["environment"].update(WARMFLEET_PORT=8081)),
    "engine's port": ("ports", "listens on 8000", lambda s: s["engine-1"].update(command=["--port=8001"])),
    "router unknown to the balancer": ("ports", "its servers", lambda s: s.update({"router-3": s["router-1"]})),
    "wrong password": (
        "users", "another password",
        lambda s: s["router-1"]["environment"].update(WARMFLEET_REDIS_URL="redis://router:x@store:6379/0"),
    ),
    "another engine's user": (
        "users", "user worker-engine-2", lambda s: s["engine-1"].update(environment=s["engine-2"]["environment"] | {
            "WARMFLEET_WORKER_ID": "engine-1"}),
    ),
    "waits for nobody": (
        "order", "waits for redis", lambda s: s["engine-1"].update(depends_on={"redis": {}}),
    ),
    "missing file": ("order", "not there", lambda s: s["store"]["configs"].append({"source": "other.conf"})),
    "killed too early": ("order", "is killed", lambda s: s["router-1"].update(stop_grace_period="10s")),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(compose: Compose, mistake: str) -> None:
    check, told, mutate = MISTAKES[mistake]
    apart = {"services": {name: copy.deepcopy(service) for name, service in compose["services"].items()}}
    mutate(apart["services"])

    problems = CHECKS[check](compose | apart)

    assert any(told in problem for problem in problems), problems


def test_users_are_those_that_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engines = [name for name in load()["services"] if name.startswith("engine")]
    names = ["admin", "router", *(f"worker-{name}" for name in engines)]
    (tmp_path / "passwords").write_text("".join(f"{name} dev-only\n" for name in names))
    workers = [word for name in engines for word in ("--worker", name)]

    assert main(["acl", "demo", *workers, "--password-file", str(tmp_path / "passwords")]) == 0

    assert (FOLDER / "users.acl").read_text() == capsys.readouterr().out


def test_haproxy_takes_its_file(tmp_path: Path) -> None:
    def judged(text: str) -> subprocess.CompletedProcess[str]:
        # The names of containers are unknown here, which the file allows for with `init-addr none`.
        (tmp_path / "haproxy.cfg").write_text(text)
        argv = [require("haproxy"), "-c", "-f", str(tmp_path / "haproxy.cfg")]
        return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)

    text = HAPROXY.read_text()
    taken = judged(text)

    assert taken.returncode == 0, taken.stderr
    assert judged(text.replace("balance leastconn", "balance leastcon")).returncode != 0
