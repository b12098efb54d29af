"""The images and compose.yaml without a registry and without docker: built by podman, run in namespaces of their own.

A base image is made by mmdebstrap: Debian 12 with its Python 3.11 in place of the Python image, with which it shares
the version. A second one stands for the images of Valkey and haproxy. Packages come from a folder that pip filled
before, so that the steps need no network. Each container gets a network namespace with one address; the namespaces meet
in another one, from which tests send requests, as the host of a real stack would.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import pytest
from tests.k8s.compose import FOLDER, Compose
from tests.k8s.render import K8S, ROOT
from tests.support.run.os_tools import find

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

#: Command -> the Debian package that brings it. Only these tests need them, so `make deps` does not install them.
TOOLS = {"podman": "podman", "runc": "runc", "mmdebstrap": "mmdebstrap", "ip": "iproute2"}
LOCKS = ("app/requirements.lock", "app/build.lock", "loadtest/requirements.lock", "worker_plugin/requirements.lock")
BASE, OTHERS = "localhost/base:1", "localhost/others:1"
PYTHON = "python3-minimal,python3,python3-venv,python-is-python3,ca-certificates"
SERVERS = "redis-server,redis-tools,haproxy,wget"
#: Redis under the names in Valkey's image; Debian lets no other user read the folder of its file.
AS_VALKEY = (
    'ln -s redis-server "$1/usr/bin/valkey-server"',
    'ln -s redis-cli "$1/usr/bin/valkey-cli"',
    'chmod 755 "$1/etc/redis"',
)
#: haproxy's image adds these options by its entry point.
ADDED = {"haproxy": ["-W", "-db"]}
HEALTHY_S = 240.0
POLL_S = 0.2
ANSWER_S = 60
ASK = """
import sys, urllib.request
body = sys.argv[2].encode() if len(sys.argv) > 2 else None
request = urllib.request.Request(sys.argv[1], body, {"content-type": "application/json"})
print(urllib.request.urlopen(request, timeout=30).read().decode())
"""


def require_tools() -> None:
    """Skip the test, with the reason, where images cannot be built and run."""
    missing = [package for command, package in TOOLS.items() if find(command) is None]
    if missing:
        pytest.skip(f"images cannot be built here: apt-get install {' '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("images are built and run by root here")


@dataclass
class Podman:
    """podman with its images and containers in one folder, which ``close`` removes."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = self.folder / "containers.conf"
        settings.write_text(
            '[containers]\ndefault_ulimits = ["nofile=1024:4096", "nproc=4096:4096"]\n'
            '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\n'
        )
        storage = self.folder / "storage.conf"
        storage.write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{self.folder}/images"\nrunroot = "{self.folder}/run"\n'
        )
        self.environment |= {**os.environ, "CONTAINERS_CONF": str(settings), "CONTAINERS_STORAGE_CONF": str(storage)}

    def __call__(self, *arguments: str, seconds: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["podman", *arguments], env=self.environment, capture_output=True, text=True, timeout=seconds, check=False
        )
        assert done.returncode == 0 or not check, f"podman {' '.join(arguments)}\n{done.stdout}{done.stderr}"
        return done

    def close(self) -> None:
        self("rm", "--all", "--force", "--time", "0", check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def fetch_packages(wheels: Path) -> None:
    """Fill a folder with everything that the locks of the images pin, checked by its hashes."""
    for number, lock in enumerate(LOCKS):
        # pip asks the running Python whether a condition holds, and that of Debian 12 is older: 3.11.2.
        wanted = wheels / f"{number}.lock"
        wanted.write_text((ROOT / lock).read_text().replace(" ; python_full_version < '3.11.3'", ""))
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(wheels), "--no-deps"]
        argv += ["--python-version", "3.11", "--only-binary", ":all:", "--require-hashes", "-r", str(wanted)]
        subprocess.run(argv, check=True, timeout=600)


def make_base(podman: Podman, image: str, packages: str, *changes: str) -> None:
    """Make an image of Debian 12 with these packages. changes: commands for the shell; $1 is the new root."""
    archive = podman.folder / "base.tar"
    hooks = [f"--customize-hook={change}" for change in changes]
    argv = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", *hooks, "bookworm", str(archive)]
    subprocess.run(argv, check=True, timeout=900)
    podman("import", "--quiet", str(archive), image, seconds=300)
    archive.unlink()


def build(podman: Podman, containerfile: str, image: str, wheels: Path, *options: str) -> None:
    """Build an image by the steps of its Containerfile, without a network for pip."""
    offline = podman.folder / "pip.conf"
    offline.write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    podman(
        *("build", "--quiet", "--isolation=chroot", "--pull=never", "--layers=false"),
        *("--build-arg", f"BASE={BASE}", "--build-arg", f"VLLM={BASE}"),
        *("--volume", f"{wheels}:/wheels:ro", "--volume", f"{offline}:/etc/pip.conf:ro"),
        *("--file", str(K8S / "images" / containerfile), "--tag", image, *options, str(ROOT)),
        seconds=900,
    )


def size_mb(podman: Podman, image: str) -> int:
    """The size of an image with its base, unpacked."""
    return round(int(podman("image", "inspect", "--format", "{{.Size}}", image).stdout) / 1e6)


@dataclass
class Network:
    """A network namespace for each container, and one in which they meet. Addresses are 10.213.N.2."""

    names: Sequence[str]
    middle: str = field(default_factory=lambda: f"wf{os.getpid()}")

    def __enter__(self) -> Self:
        self._ip("netns", "add", self.middle)
        self._ip("-n", self.middle, "link", "set", "lo", "up")
        for number, name in enumerate(self.names):
            inner, outer = self.namespace(name), f"v{number}"
            self._ip("netns", "add", inner)
            self._ip("-n", self.middle, "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", inner)
            self._ip("-n", self.middle, "address", "add", f"10.213.{number}.1/30", "dev", outer)
            self._ip("-n", inner, "address", "add", f"{self.address(name)}/30", "dev", "eth0")
            for namespace, device in ((self.middle, outer), (inner, "eth0"), (inner, "lo")):
                self._ip("-n", namespace, "link", "set", device, "up")
            self._ip("-n", inner, "route", "add", "default", "via", f"10.213.{number}.1")
        self.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
        return self

    def __exit__(self, *_: object) -> None:
        for namespace in (*map(self.namespace, self.names), self.middle):
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)

    def namespace(self, name: str) -> str:
        return f"{self.middle}-{self.names.index(name)}"

    def address(self, name: str) -> str:
        return f"10.213.{self.names.index(name)}.2"

    def run(self, *argv: str) -> str:
        """Run a command where the namespaces meet, and return its output."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.middle, *argv], capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ask(self, name: str, port: int, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON that a container answers with."""
        words = [f"http://{self.address(name)}:{port}{path}", *([json.dumps(body)] if body else [])]
        return json.loads(self.run(sys.executable, "-c", ASK, *words))

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


class Stack:
    """The services of compose.yaml as containers, each started once those it depends on are healthy."""

    def __init__(self, podman: Podman, compose: Compose, network: Network) -> None:
        self.podman, self.compose, self.network = podman, compose, network
        #: Seconds from the start of a container to its first good check.
        self.healthy_s: dict[str, float] = {}

    def start(self) -> None:
        waiting = dict(self.compose["services"])
        while waiting:
            ready = [name for name, service in waiting.items() if not set(service.get("depends_on", {})) & set(waiting)]
            assert ready, f"services wait for each other: {sorted(waiting)}"
            begun = {name: self._run(name, waiting.pop(name)) for name in ready}
            for name, since in begun.items():
                self.wait_healthy(name, since)

    def wait_healthy(self, name: str, since: float) -> None:
        """Wait until the service's own check succeeds."""
        check = self.compose["services"][name]["healthcheck"]["test"]
        assert check[0] == "CMD"
        while (done := self.podman("exec", name, *check[1:], check=False)).returncode != 0:
            state = self.podman("inspect", "--format", "{{.State.Status}}", name).stdout.strip()
            what = f"{name}: {state}\n{done.stderr}\n{self.log(name)}"
            assert state == "running", what
            assert time.monotonic() - since < HEALTHY_S, what
            time.sleep(POLL_S)  # a container gives no signal when its check would succeed
        self.healthy_s[name] = time.monotonic() - since

    def log(self, name: str) -> str:
        done = self.podman("logs", name, check=False)
        return done.stdout + done.stderr

    def _run(self, name: str, service: dict[str, Any]) -> float:
        ours = "build" in service
        hosts = [
            word for other in self.network.names for word in ("--add-host", f"{other}:{self.network.address(other)}")
        ]
        given = [word for key, value in service.get("environment", {}).items() for word in ("--env", f"{key}={value}")]
        mounts = [word for place in service.get("tmpfs", []) for word in ("--tmpfs", place)]
        for mount in service.get("configs", []):
            file = (FOLDER / self.compose["configs"][mount["source"]]["file"]).resolve()
            mounts += ["--volume", f"{file}:{mount['target']}:ro"]
        command = list(service.get("command", []))
        command[1:1] = ADDED.get(command[0], []) if command else []
        started = time.monotonic()
        self.podman(
            *("run", "--detach", "--name", name, "--hostname", name, "--pull=never"),
            *("--network", f"ns:/run/netns/{self.network.namespace(name)}", *hosts),
            *("--user", service["user"], "--read-only", "--read-only-tmpfs=false"),
            *(f"--cap-drop={service['cap_drop'][0]}", "--security-opt=no-new-privileges"),
            *("--pids-limit=-1", *given, *mounts, service["image"] if ours else OTHERS, *command),
        )
        return started
