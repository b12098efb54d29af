"""The overlay `dev`, run as processes, answers; each part has its own rights in Redis and no more."""

from __future__ import annotations

import re
import shlex
import ssl
import subprocess
from functools import partial
from typing import TYPE_CHECKING

import httpx
import pytest
import redis
from redis.exceptions import NoPermissionError
from tests.envoy.envoy import envoy
from tests.k8s.objects import Manifest, probes_of
from tests.k8s.pods import Pods, RunningPod
from tests.k8s.render import K8S, MODEL, parse, render
from tests.support.certificates import certificate
from tests.support.redis.servers import redis7_binary, valkey_binary
from tests.support.run.required_tools import require

from warmfleet_loadtest.stacks.processes import Processes, answers, free_ports

if TYPE_CHECKING:
    from pathlib import Path

PASSWORDS = {name: f"{name}-secret" for name in ("admin", "router", "worker", "replica", "sentinel")}


def test_the_root_answers(rendered: dict[str, str], tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        pods = Pods(parse(rendered["root"]), processes, tmp_path, _programs(valkey_binary()))
        store = pods.start("StatefulSet/redis")
        worker = pods.start("Deployment/worker-demo")
        router = pods.start("Deployment/router")
        for name, made in ("worker-demo-0.engine", worker), ("router-0.router", router):
            processes.wait(name, partial(_ready, made))
        # A replica that found no engine within 15 s is ready nevertheless, which happens on a busy machine.
        processes.wait("router-0.router", lambda: _chat(router).status_code != 503)

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


@pytest.mark.long(
    minutes=1, shows="simulated engines and routers reach a Redis that speaks TLS only, by their manifests"
)
def test_tls_to_redis(tmp_path: Path) -> None:
    authority = certificate(tmp_path, "authority")
    pair = certificate(tmp_path, "redis", authority)
    files = {"ca.crt": authority.certificate, "tls.crt": pair.certificate, "tls.key": pair.key}
    secrets = {"redis-passwords": PASSWORDS, "redis-tls": {name: path.read_text() for name, path in files.items()}}
    with Processes(tmp_path) as processes:
        pods = Pods(
            _rendered(["redis", "redis-tls"], tmp_path), processes, tmp_path, _programs(redis7_binary()), secrets
        )
        store = pods.start("StatefulSet/redis")
        pods.start("Deployment/worker-chat")
        router = pods.start("Deployment/router")

        processes.wait("router-0.router", lambda: _decided(router))

        with redis.Redis(port=store.ports[6379]) as client, pytest.raises(redis.ConnectionError):
            client.ping()


@pytest.mark.long(
    minutes=1,
    shows="simulated engines and routers trust the private authority of a Redis elsewhere, by their manifests",
)
def test_a_redis_elsewhere_with_a_private_authority(tmp_path: Path) -> None:
    authority = certificate(tmp_path, "authority")
    pair = certificate(tmp_path, "localhost", authority)
    (port,) = free_ports(1)
    words = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no", "--save", ""]
    words += ["--tls-cert-file", str(pair.certificate), "--tls-key-file", str(pair.key)]
    urls = dict.fromkeys(("router", "worker"), f"rediss://localhost:{port}/0")
    secrets = {"redis-urls": urls, "redis-ca": {"ca.crt": authority.certificate.read_text()}}
    with Processes(tmp_path) as processes:
        words += ["--tls-ca-cert-file", str(authority.certificate)]
        processes.spawn("store", "store", [redis7_binary(), *words], {})
        objects = _rendered(["redis-external", "redis-external-ca"], tmp_path)
        pods = Pods(objects, processes, tmp_path, _programs(redis7_binary()), secrets)
        pods.start("Deployment/worker-chat")
        router = pods.start("Deployment/router")

        processes.wait("router-0.router", lambda: _decided(router))


@pytest.mark.long(
    minutes=1, shows="routers enter the pools of the manifests, and engines that know the model only join them"
)
def test_routers_enter_the_pools_and_engines_find_one(tmp_path: Path) -> None:
    objects = _rendered(["redis", "pools"], tmp_path)
    for item in objects:
        if item["metadata"]["name"].startswith("router-settings"):
            item["data"]["POOLS"] = "Qwen/Qwen3-0.6B#1 Qwen/Qwen3-0.6B#2"
    with Processes(tmp_path) as processes:
        pods = Pods(objects, processes, tmp_path, _programs(valkey_binary()), {"redis-passwords": PASSWORDS})
        store = pods.start("StatefulSet/redis")
        router = pods.start("Deployment/router")
        for number in range(2):
            pods.start("Deployment/worker-chat", number)

        processes.wait("router-0.router", lambda: _decided(router))

        with redis.Redis(port=store.ports[6379], username="admin", password=PASSWORDS["admin"]) as client:
            assert {*client.hkeys("wf:{Qwen~Qwen3-0.6B}:pools")} == {b"Qwen/Qwen3-0.6B#1", b"Qwen/Qwen3-0.6B#2"}
            processes.wait(
                "worker-chat-1.engine", lambda: all(client.hlen(f"wf:{{Qwen~Qwen3-0.6B#{n}}}:workers") for n in (1, 2))
            )


@pytest.mark.long(minutes=1, shows="one router answers for two models, each with engines from a folder of its own")
def test_a_fleet_of_two_models_answers_for_both(tmp_path: Path) -> None:
    objects = _rendered(["redis"], tmp_path, MODEL, "overlays/dev/demo")
    with Processes(tmp_path) as processes:
        pods = Pods(objects, processes, tmp_path, _programs(valkey_binary()), {"redis-passwords": PASSWORDS})
        store = pods.start("StatefulSet/redis")
        for name in ("chat", "demo"):
            pods.start(f"Deployment/worker-{name}")
        router = pods.start("Deployment/router")

        for model in ("Qwen/Qwen3-0.6B", "demo"):
            processes.wait("router-0.router", partial(_decided, router, model))

        with redis.Redis(port=store.ports[6379], username="admin", password=PASSWORDS["admin"]) as client:
            assert [client.hlen(f"wf:{{{tag}}}:workers") for tag in ("Qwen~Qwen3-0.6B", "demo")] == [1, 1]


@pytest.mark.long(
    minutes=1, shows="a master of Redis that dies is replaced by the Sentinels of `redis-sentinel`, and joins again"
)
def test_a_dead_master_is_replaced(tmp_path: Path) -> None:
    secrets = {"redis-passwords": PASSWORDS}
    with Processes(tmp_path) as processes:
        pods = Pods(_rendered(["redis-sentinel"], tmp_path), processes, tmp_path, _programs(valkey_binary()), secrets)
        stores = [pods.start("StatefulSet/redis", number) for number in range(3)]
        pods.start("Deployment/worker-chat")
        router = pods.start("Deployment/router")
        processes.wait("router-0.router", lambda: _decided(router))
        ports = stores[0].ports
        processes.wait("redis-1.redis", lambda: _replicas("127.0.1.1", ports[6379]) == 2)
        assert _master(ports[26379]) == "127.0.1.1"
        with (
            redis.Redis(host="127.0.1.2", port=ports[26379]) as client,
            pytest.raises(redis.ResponseError, match="permissions"),
        ):
            client.execute_command("SENTINEL", "REMOVE", "warmfleet")

        for name in ("redis-0.redis", "redis-0.sentinel"):
            processes.kill(name)
        processes.wait("redis-1.redis", lambda: _master(ports[26379]) != "127.0.1.1")
        processes.wait("router-0.router", lambda: _decided(router))
        pods.start("StatefulSet/redis", 0, again=stores[0])

        processes.wait("redis-0.redis", lambda: _replicas(_master(ports[26379]), ports[6379]) == 2)


@pytest.mark.long(
    minutes=1,
    shows="a gateway asks a router at the port and by the certificate of `gateway-inference`, and is answered",
)
async def test_a_gateway_asks_a_router(tmp_path: Path) -> None:
    """An Envoy stands for the gateway that a controller would make of these objects. It goes only where it is told."""
    objects = _rendered(["redis", "gateway", "gateway-inference"], tmp_path)
    (pool,) = [item["spec"] for item in objects if item["kind"] == "InferencePool"]
    with Processes(tmp_path) as processes:
        secrets = {"redis-passwords": PASSWORDS, "picker-tls": _certificate(tmp_path)}
        pods = Pods(objects, processes, tmp_path, _programs(valkey_binary()), secrets)
        pods.start("StatefulSet/redis")
        worker, router = pods.start("Deployment/worker-chat"), pods.start("Deployment/router")
        with httpx.Client(verify=ssl.create_default_context(cafile=tmp_path / "tls.crt")) as trusting:
            url = f"https://localhost:{router.ports[9090]}"
            processes.wait("router-0.router", partial(_sees_engine, trusting, url))
        picker = f"127.0.0.1:{router.ports[pool['endpointPickerRef']['port']['number']]}"
        engine = f"127.0.0.1:{worker.ports[pool['targetPorts'][0]['number']]}"

        async with envoy(tmp_path / "envoy", [picker], [engine], tls=True) as gateway, httpx.AsyncClient() as client:
            body = {"model": "Qwen/Qwen3-0.6B", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
            answer = await client.post(f"{gateway.urls['duplex']}/v1/completions", json=body, timeout=90)

        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        words = shlex.split(_told("env SSL_CERT_FILE"))
        pods.run(router, router.spec["containers"][0], words)


def _certificate(folder: Path) -> dict[str, str]:
    """The files that the README's command makes."""
    subprocess.run(["bash", "-c", _told("openssl req")], cwd=folder, check=True, capture_output=True)
    return {name: (folder / name).read_text() for name in ("tls.crt", "tls.key")}


def _sees_engine(client: httpx.Client, url: str) -> bool:
    """Whether the router answers by TLS that it can use an engine."""
    try:
        found = client.get(f"{url}/workers").json()["models"]
    except httpx.TransportError:
        return False
    return any(worker["routable"] and worker["proof"] == "proven" for each in found for worker in each["workers"])


def _told(begin: str) -> str:
    """The command of k8s/README.md that begins so."""
    (found,) = re.findall(rf"^ +({begin}(?:.*\\\n)*.*)$", (K8S / "README.md").read_text(), re.MULTILINE)
    return str(found)


def _rendered(store: list[str], tmp_path: Path, *models: str) -> list[Manifest]:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return parse(render([*(models or [MODEL]), "simulated-engines", *store], scratch))


def _decided(router: RunningPod, model: str = "Qwen/Qwen3-0.6B") -> bool:
    """Whether a chat is answered with a decision of Redis."""
    try:
        answer = _chat(router, model)
    except httpx.TransportError:
        return False
    return answer.status_code == 200 and answer.headers["x-warmfleet-reservation"] != "fallback"


def _master(sentinel_port: int) -> str:
    """The master's address by the second pod's Sentinel."""
    with redis.Redis(host="127.0.1.2", port=sentinel_port, decode_responses=True) as client:
        told: list[str] = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "warmfleet")
        return told[0]


def _replicas(host: str, port: int) -> int:
    """The number of replicas that follow the server, if it is a master."""
    with redis.Redis(host=host, port=port, username="admin", password=PASSWORDS["admin"]) as client:
        return int(client.info("replication")["connected_slaves"])


def _chat(router: RunningPod, model: str = "demo") -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    return httpx.post(f"{router.url(8080)}/v1/chat/completions", json=body, timeout=90)


def _programs(server: str) -> dict[str, list[str]]:
    """server: Valkey, as in the manifests; with TLS it is Redis 7.0, as the Valkey of the tests speaks no TLS."""
    return {"valkey-server": [server], "valkey-cli": [require("redis-cli")]}


def _ready(made: RunningPod) -> bool:
    """Whether all probes of the first container are answered as the kubelet wants it."""
    container: Manifest = made.spec["containers"][0]
    numbers = {port["name"]: port["containerPort"] for port in container["ports"]}
    asked = [probe["httpGet"] for _, probe in probes_of(container)]
    return all(answers(made.url(numbers[probe["port"]]) + probe["path"]) for probe in asked)


def _rights(port: int) -> None:
    """Redis refuses clients without a password, and gives each user only the rights that it needs."""
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
