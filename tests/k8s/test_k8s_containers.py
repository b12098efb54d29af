"""The images are built by the steps of their Containerfiles, and compose.yaml is run with them: chats are answered."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from tests.k8s.compose import load
from tests.k8s.containers import (
    AS_VALKEY,
    BASE,
    OTHERS,
    PYTHON,
    SERVERS,
    Network,
    Podman,
    Stack,
    build,
    fetch_packages,
    make_base,
    require_tools,
    size_mb,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.long(
        minutes=6,
        shows="all four images are built by podman on a Debian base, and the services of compose.yaml run in them, "
        "read-only, as uid 65532, without capabilities: chats are answered, also after a router is killed; sizes and "
        "start times (skipped where podman, runc, mmdebstrap or root are missing)",
    ),
    pytest.mark.timeout(3_600),  # the first test's fixture builds all images
]

ROUTER, DEV = "localhost/warmfleet-router:0.1.0", "localhost/warmfleet-dev:0.1.0"
WORKER, PLUGIN = "localhost/warmfleet-worker:0.1.0", "localhost/warmfleet-plugin:0.1.0"
ENTRY_POINT = (
    "from importlib.metadata import entry_points as e; print(*[p.load() for p in e(group='vllm.general_plugins')])"
)
TEXT = "The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """podman with all images, built."""
    require_tools()
    made = Podman(tmp_path_factory.mktemp("podman"))
    wheels = tmp_path_factory.mktemp("wheels")
    try:
        fetch_packages(wheels)
        make_base(made, BASE, PYTHON)
        make_base(made, OTHERS, SERVERS, *AS_VALKEY)
        build(made, "router.Containerfile", ROUTER, wheels)
        build(made, "dev.Containerfile", DEV, wheels)
        build(made, "worker.Containerfile", PLUGIN, wheels, "--target", "plugin")
        build(made, "worker.Containerfile", WORKER, wheels, "--target", "worker")
        yield made
    finally:
        made.close()


def test_images_hold_what_they_need_and_no_more(podman: Podman) -> None:
    without = ("--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--rm")
    for image in (ROUTER, DEV):
        shell = ("run", *without, "--entrypoint", "sh", image, "-c")
        assert podman(*shell, "id -u").stdout.strip() == "65532"
        assert podman(*shell, "python -m pip --version", check=False).returncode != 0
        assert podman(*shell, "touch /opt/warmfleet/x", check=False).returncode != 0
        compilers = "command -v gcc cc make; find / -xdev -path '*/site-packages/warmfleet*' -name tests"
        assert podman(*shell, compilers, check=False).stdout == ""
    assert "usage: warmfleet" in podman("run", *without, ROUTER, "--help").stdout
    for image, place in ((WORKER, "/opt/warmfleet"), (PLUGIN, "/plugin")):
        asked = podman("run", *without, "--env", f"PYTHONPATH={place}", image, "python", "-c", ENTRY_POINT).stdout
        assert re.search(r"<function register", asked), asked
    copied = "cp -r /plugin/. /tmp && ls /tmp"
    assert "warmfleet_worker" in podman("run", *without, "--tmpfs=/tmp", PLUGIN, "sh", "-c", copied).stdout
    base = size_mb(podman, BASE)
    print(
        f"\nbase {base} MB; above it:", {name: size_mb(podman, name) - base for name in (ROUTER, DEV, WORKER, PLUGIN)}
    )


def test_compose_answers_and_survives_a_killed_router(podman: Podman) -> None:
    compose = load()
    engines = [name for name in compose["services"] if name.startswith("engine")]
    with Network(list(compose["services"])) as network:
        stack = Stack(podman, compose, network)
        stack.start()
        chat = {"model": "demo", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}

        answers = [network.ask("balancer", 8080, "/v1/chat/completions", chat) for _ in range(4)]

        assert [answer["usage"]["completion_tokens"] for answer in answers] == [4] * 4
        assert answers[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        for router in ("router-1", "router-2"):
            [model] = network.ask(router, 9090, "/workers")["models"]
            assert (
                sorted(worker["worker_id"].partition(".")[0] for worker in model["workers"] if worker["routable"])
                == engines
            )
        _unprivileged(stack)
        told = podman("exec", "router-1", "warmfleet", "workers", "--url", "http://127.0.0.1:9090").stdout
        assert [name for name in engines if name not in told] == []
        [shown] = network.ask("router-2", 9090, "/status.json")["models"]
        assert len(shown["workers"]) == len(engines)
        podman("kill", "router-1")
        assert network.ask("balancer", 8080, "/v1/chat/completions", chat)["usage"]["completion_tokens"] == 4
        logs = "".join(map(stack.log, compose["services"]))
        assert "NOPERM" not in logs
        assert "Read-only file system" not in logs
        print("\nseconds to the first good check:", {name: round(took, 1) for name, took in stack.healthy_s.items()})


def _unprivileged(stack: Stack) -> None:
    """The first process of every container has no rights to lose."""
    for name in stack.compose["services"]:
        status = stack.podman("exec", name, "cat", "/proc/1/status").stdout
        found = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert found["Uid"].split() == ["65532"] * 4, name
        assert int(found["CapEff"], 16) == 0, name
        assert found["NoNewPrivs"] == "1", name
        assert stack.podman("exec", name, "sh", "-c", "echo > /written", check=False).returncode != 0, name
