"""k8s/compose/compose.yaml as a program sees it, and one named check for each kind of mistake in it.

A check takes the parsed file and returns problems, each with the name of its service.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import yaml
from tests.k8s.render import K8S, ROOT, tool
from tests.support.run.required_tools import require

from warmfleet.errors import BadArgument
from warmfleet.settings import PREFIX, Settings

FOLDER = K8S / "compose"
COMPOSE = FOLDER / "compose.yaml"
HAPROXY = FOLDER / "haproxy.cfg"
#: Variables that the simulated engine reads; its --help names them.
ENGINE_VARIABLES = {"WARMFLEET_REDIS_URL", "WARMFLEET_MODEL", "WARMFLEET_WORKER_ID", "WARMFLEET_WORKER_URL"}
#: The only ports of this machine: the balancer's for clients, and each router's for operators.
PUBLISHED = {"balancer": "8080", "router-1": "9090", "router-2": "9090"}

Compose = dict[str, Any]
Check = Callable[[Compose], list[str]]


def load() -> Compose:
    """The file, with its anchors and merges resolved."""
    found: Compose = yaml.safe_load(COMPOSE.read_text())
    return found


def services(compose: Compose, prefix: str = "") -> dict[str, Any]:
    """The services whose names begin with ``prefix``."""
    return {name: service for name, service in compose["services"].items() if name.startswith(prefix)}


def schema_problems(compose: Compose) -> list[str]:
    """Faults by the published schema of the compose specification. The package check-jsonschema carries it."""
    checker = Path(require("check-jsonschema", tool("check-jsonschema")))
    [schema] = checker.parents[1].glob("lib/python*/site-packages/check_jsonschema/*/vendor/compose-spec.json")
    published = json.loads(schema.read_text())
    validator = jsonschema.validators.validator_for(published)
    return [f"{error.json_path}: {error.message}" for error in validator(published).iter_errors(compose)]


def hardened(compose: Compose) -> list[str]:
    """Every service runs as an unprivileged user on a read-only root, within limits, and is checked."""
    wanted = {
        "user": "65532:65532",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "unless-stopped",
    }
    problems = []
    for name, service in services(compose).items():
        problems += [
            f"{name}: {key} is {service.get(key)}" for key, value in wanted.items() if service.get(key) != value
        ]
        problems += [f"{name}: no {key}" for key in ("mem_limit", "pids_limit", "healthcheck") if key not in service]
        problems += [f"{name}: {key}" for key in ("privileged", "cap_add", "network_mode", "pid") if key in service]
    return problems


def images(compose: Compose) -> list[str]:
    """Each image is built by the Containerfile that names it, or is pinned by its digest."""
    problems = []
    for name, service in services(compose).items():
        image = service["image"]
        if "build" not in service:
            if not re.fullmatch(r"docker\.io/\S+:\S+@sha256:[0-9a-f]{64}", image):
                problems.append(f"{name}: {image} is not pinned by a digest")
            continue
        context = (FOLDER / service["build"]["context"]).resolve()
        containerfile = context / service["build"]["dockerfile"]
        if context != ROOT or not containerfile.exists():
            problems.append(f"{name}: there is no {containerfile}")
        elif image.partition(":")[0] != f"localhost/warmfleet-{containerfile.stem}":
            problems.append(f"{name}: {containerfile.name} does not build {image}")
    return problems


def reach(compose: Compose) -> list[str]:
    """Only this machine reaches published ports, the store and engines have none, and they have no way out."""
    problems = []
    for name, service in services(compose).items():
        ports = service.get("ports", [])
        problems += [f"{name}: {port} is open to everybody" for port in ports if not port.startswith("127.0.0.1:")]
        targets = [port.rpartition(":")[2] for port in ports]
        if targets != ([PUBLISHED[name]] if name in PUBLISHED else []):
            problems.append(f"{name}: publishes {targets}")
        if name not in PUBLISHED and service["networks"] != ["fleet"]:
            problems.append(f"{name}: is in {service['networks']}")
    if not (compose["networks"]["fleet"] or {}).get("internal"):
        problems.append("networks: fleet has a way out")
    hosts = [port.rpartition(":")[0] for service in services(compose).values() for port in service.get("ports", [])]
    return problems + ["networks: two services publish one port"] * (len(hosts) != len(set(hosts)))


def settings(compose: Compose) -> list[str]:
    """The program of each service reads all its variables, routers accept the values, and all name the same model."""
    known = {PREFIX + item.name.upper() for item in fields(Settings)}
    problems, models = [], set()
    for name, service in services(compose).items():
        given = service.get("environment", {})
        read = known if name.startswith("router") else ENGINE_VARIABLES if name.startswith("engine") else set()
        problems += [f"{name}: {variable} is read by nobody" for variable in given if variable not in read]
        if name.startswith("router"):
            try:
                loaded = Settings.from_environment({key: str(value) for key, value in given.items()})
                models |= set(loaded.models)
            except BadArgument as error:
                problems.append(f"{name}: {error}")
        if name.startswith("engine"):
            models |= {option.partition("=")[2] for option in service["command"] if option.startswith("--model=")}
    return problems + [f"models: {sorted(models)}"] * (len(models) != 1)


def ports(compose: Compose) -> list[str]:
    """Checks, published ports and the balancer's servers meet the ports on which programs listen."""
    problems, servers = [], set(re.findall(r"^ +server (\S+) (\S+):(\d+)$", HAPROXY.read_text(), re.MULTILINE))
    listening: dict[str, set[str]] = {}
    for name, service in services(compose).items():
        given = service.get("environment", {})
        options = [option.partition("=")[2] for option in service.get("command", []) if option.startswith("--port=")]
        own = {*options, *(str(given[key]) for key in ("WARMFLEET_PORT", "WARMFLEET_ADMIN_PORT") if key in given)}
        own |= set(re.findall(r"^ +bind :(\d+)$", HAPROXY.read_text(), re.MULTILINE)) if name == "balancer" else set()
        listening[name] = own | ({"6379"} if name == "store" else set())
        asked = set(re.findall(r"127\.0\.0\.1:(\d+)/", " ".join(service["healthcheck"]["test"])))
        published = {port.rpartition(":")[2] for port in service.get("ports", [])}
        problems += [f"{name}: nothing listens on {port}" for port in sorted((asked | published) - listening[name])]
    routers = {
        (name, name, str(router["environment"]["WARMFLEET_PORT"]))
        for name, router in services(compose, "router").items()
    }
    return problems + [f"balancer: its servers are {sorted(servers)}"] * (servers != routers)


def users(compose: Compose) -> list[str]:
    """Every URL of the store names a user of users.acl with its password; each engine has a user of its own."""
    lines = [line.split() for line in (FOLDER / "users.acl").read_text().splitlines()]
    digests = {words[1]: [word[1:] for word in words if word.startswith("#")] for words in lines}
    problems = []
    for name, service in services(compose).items():
        if "WARMFLEET_REDIS_URL" not in service.get("environment", {}):
            continue
        url = urlsplit(service["environment"]["WARMFLEET_REDIS_URL"])
        wanted = "router" if name.startswith("router") else f"worker-{service['environment']['WARMFLEET_WORKER_ID']}"
        if url.username != wanted or wanted not in digests:
            problems.append(f"{name}: user {url.username}")
        elif digests[wanted] != [hashlib.sha256((url.password or "").encode()).hexdigest()]:
            problems.append(f"{name}: users.acl has another password of {wanted}")
        if (url.hostname, url.port) != ("store", 6379):
            problems.append(f"{name}: {url.hostname}:{url.port} is not the store")
    return problems


def order(compose: Compose) -> list[str]:
    """Services wait for others that exist and are checked, and files that they mount exist."""
    problems = []
    for name, service in services(compose).items():
        for other, how in service.get("depends_on", {}).items():
            if "healthcheck" not in services(compose).get(other, {}) or how["condition"] != "service_healthy":
                problems.append(f"{name}: waits for {other}")
        for mount in service.get("configs", []):
            source = compose["configs"].get(mount["source"], {}).get("file", "")
            if not source or not (FOLDER / source).is_file():
                problems.append(f"{name}: {mount['source']} is not there")
        if name.startswith("router"):
            loaded = Settings.from_environment({key: str(value) for key, value in service["environment"].items()})
            if int(service["stop_grace_period"].rstrip("s")) <= loaded.drain_s + loaded.shutdown_grace_s:
                problems.append(f"{name}: is killed before its streams have ended")
    return problems


CHECKS: dict[str, Check] = {check.__name__: check for check in (hardened, images, reach, settings, ports, users, order)}
