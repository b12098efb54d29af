"""A whole fleet on this machine: a store, engines, and router replicas behind one address, for ``up`` and ``demo``."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import httpx

from warmfleet.cli.client import admin_headers
from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local.children import Child, Children
from warmfleet.cli.local.engines import (
    EngineLoadingError,
    EngineOptions,
    demo_template_sha256,
    engine_command,
    pools_of,
    require_simulator,
    served_names,
)
from warmfleet.cli.local.ports import check_rows, claim_shared, free_port
from warmfleet.cli.local.store import check_store, start_store
from warmfleet.settings import ADMIN_PORT

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

POLL_SECONDS = 0.1  # time between two HTTP requests to a replica that is not ready yet
REPLICA_SECONDS = 120.0
WORKER_SECONDS = 240.0  # longest start of engines: real ones load a model first, and a busy machine takes its time
LISTED_SECONDS = 1_800.0  # longest wait for the user's engines, because the largest models load for 30 min
LISTED_POLL_SECONDS = 1.0
#: The text before the message in a line of vLLM's log: process, level, time, and place in the source.
_ENGINE_LINE = re.compile(r"^(\(\S+[^)]*\) )?([A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] )?")
SHUTDOWN_GRACE_SECONDS = "2"  # longest wait for running answers when the stack stops; longer answers are cut off


@dataclass(frozen=True)
class Plan:
    """The parts of a stack. workers: URLs of engines that already run; with any, the stack starts no engine.

    redis_url: the store to use; if empty, the stack starts one. environment: more settings of its replicas.
    """

    engines: EngineOptions = field(default_factory=EngineOptions)
    replicas: int = 2
    policy: str = "cost"
    host: str = "127.0.0.1"
    port: int = 0
    redis_url: str = ""
    workers: tuple[str, ...] = ()
    worker_api_key: str = ""
    tokenizer: str = ""
    logs: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def simulated(self) -> bool:
        """Whether the engines to start are simulated ones."""
        return not self.workers and self.engines.kind == "sim"


@dataclass(frozen=True)
class Member:
    """An engine or replica. child: its process, unless the user runs it. operators: a replica's URL for operators."""

    name: str
    url: str
    child: Child | None = None
    operators: str = ""


class Stack:
    """A context manager: starts a fleet, and stops all of it at the end.

    ``say`` is called with a line about each step of the start, ``busy`` with the running step and its progress. All
    replicas share ``address``; each also answers at its own URLs in ``replicas``, for clients and for operators.
    """

    def __init__(
        self,
        plan: Plan,
        say: Callable[[str], None] = lambda _line: None,
        busy: Callable[[str, int, int, str], None] = lambda _text, _done, _of, _detail: None,
    ) -> None:
        self.plan = plan
        self.engines: list[Member] = []
        self.replicas: list[Member] = []
        self.redis_url = plan.redis_url
        self.models: tuple[str, ...] = ()
        self.names: tuple[str, ...] = ()
        self._say, self._busy = say, busy
        self._claimed: socket.socket | None = None
        self._children: Children | None = None
        # One HTTP client for all calls, because making one reads the system's CA certificates; no connection is kept.
        self._http = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:  # also Ctrl-C: without __exit__, the children would live on
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop replicas, engines and store. Idempotent."""
        if self._children is not None:
            self._busy("stopping replicas, engines and store", 0, 0, "")
            self._children.close()
        self._busy("", 0, 0, "")
        if self._claimed is not None:
            self._claimed.close()

    @property
    def children(self) -> Children:
        """The processes of the stack. Raises CommandError before the start."""
        if self._children is None:
            raise CommandError("the stack was not started")
        return self._children

    @property
    def address(self) -> str:
        """The base URL that all replicas share. Raises CommandError before the start."""
        if self._claimed is None:
            raise CommandError("the stack was not started")
        host, port = self._claimed.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104  compared, not bound
        return f"http://{host}:{port}"

    def _start(self) -> None:
        plan = self.plan
        if plan.simulated:
            require_simulator()
        self._claimed = claim_shared(plan.host, plan.port)
        if plan.workers:
            listed = self._listed_names()
            self.names = tuple(dict.fromkeys(name for names in listed for name in names))
            self.models = pools_of(listed)
        self._children = Children(plan.logs)
        if plan.redis_url:
            self.redis_url = check_store(plan.redis_url)
            self._say("store     yours")
        else:
            self.redis_url = start_store(self._children)
            self._say(f"store     embedded Valkey on a private socket: {self.redis_url}")
        if plan.workers:
            self.engines = [Member(f"worker-{n}", url.rstrip("/")) for n, url in enumerate(plan.workers, 1)]
        else:
            self._start_engines()
        self._say(f"engines   {_list(self.engines)}")
        for _ in range(plan.replicas):
            self.add_replica()
        self._say(f"replicas  {_list(self.replicas)}")
        self.wait_routable(len(self.engines))
        self.wait_ready(self.replicas)
        self._busy("", 0, 0, "")

    def _listed_names(self) -> list[list[str]]:
        """Wait until all the user's engines answer, and return the names that each serves. Raises CommandError."""
        names: dict[str, list[str]] = {}
        waiting, count = list(self.plan.workers), len(self.plan.workers)
        started, announced = time.monotonic(), False
        while waiting:
            loading: EngineLoadingError | None = None
            for url in list(waiting):
                try:
                    names[url] = served_names(url, self.plan.worker_api_key)
                except EngineLoadingError as error:
                    loading = loading or error
                else:
                    waiting.remove(url)
            if loading is None:
                break
            if time.monotonic() - started > LISTED_SECONDS:
                raise CommandError(f"{loading} after {LISTED_SECONDS:.0f} s")
            if not announced:
                self._say(f"engines   waiting for {len(waiting)} of {count}: {loading}")
                announced = True
            self._busy("waiting for engines", count - len(waiting), count, f"; {loading}")
            time.sleep(LISTED_POLL_SECONDS)
        return [names[url] for url in self.plan.workers]

    def _start_engines(self) -> None:
        options = self.plan.engines
        self.models = self.names = (options.served_name,)
        for number in range(1, options.count + 1):
            name, port = options.name(number), free_port()
            argv, environment = engine_command(options, name, port, self.redis_url, options.kv_role(number))
            child = self.children.start(name, argv, environment, stop_seconds=30 if options.kind == "vllm" else 3)
            self.engines.append(Member(name, f"http://127.0.0.1:{port}", child))

    def add_replica(self) -> Member:
        """Start one more replica behind the shared address, without waiting until it is ready."""
        plan, name, port = self.plan, f"replica-{len(self.replicas) + 1}", free_port()
        usual = ADMIN_PORT if plan.port and not self.replicas else 0  # the first replica has the usual port
        admin_port = free_port(plan.host, usual)
        shared = self.address.rsplit(":", 1)[1]
        argv = [sys.executable, "-m", "warmfleet", "serve", "--host", plan.host, "--port", str(port)]
        log = os.environ.get("WARMFLEET_DECISION_LOG", "")
        environment = {
            "WARMFLEET_REDIS_URL": self.redis_url,
            "WARMFLEET_REDIS_CA": "",  # the store's URL names the CA already
            "WARMFLEET_MODELS": ",".join(self.models),
            "WARMFLEET_POLICY": plan.policy,
            "WARMFLEET_STATIC_WORKERS": ",".join(plan.workers),
            "WARMFLEET_WORKER_API_KEY": plan.worker_api_key,
            "WARMFLEET_TOKENIZER": plan.tokenizer,
            "WARMFLEET_DECISION_LOG": log and f"{log}.{name}",
            "WARMFLEET_SHUTDOWN_GRACE_S": SHUTDOWN_GRACE_SECONDS,
            "WARMFLEET_ADMIN_PORT": str(admin_port),
            **ports_for_gateways(os.environ, len(self.replicas)),
            "WARMFLEET_TLS_CERT": "",
            "WARMFLEET_TLS_KEY": "",
            "WARMFLEET_TLS_CLIENT_CA": "",
            "WARMFLEET_DRAIN_S": "0",  # the stack stops as a whole, so no client can turn to another replica
            **self._approvals(),
            **plan.environment,
        }
        child = self.children.start(name, [*argv, "--reuse-port", shared], environment)
        host = self.address.rsplit(":", 1)[0]
        member = Member(name, f"{host}:{port}", child, f"{host}:{admin_port}")
        self.replicas.append(member)
        return member

    def _approvals(self) -> dict[str, str]:
        """Make settings that approve the chat templates of the engines that this command starts.

        Only these engines write into a private store, so every template there is trusted. In a store that the user
        names, only the template of simulated engines is approved.
        """
        if not self.plan.redis_url:
            return {"WARMFLEET_APPROVED_TEMPLATES": "*"}
        if not self.plan.simulated:
            return {}
        approved = os.environ.get("WARMFLEET_APPROVED_TEMPLATES", "")
        return {"WARMFLEET_APPROVED_TEMPLATES": ",".join(filter(None, [approved, demo_template_sha256()]))}

    def wait_ready(self, members: Sequence[Member]) -> None:
        """Return once all these replicas are ready. Raises CommandError if a replica ends or needs REPLICA_SECONDS.

        Every POLL_SECONDS each replica that is not ready yet is asked.
        """
        late, deadline = list(members), time.monotonic() + REPLICA_SECONDS
        while late := [member for member in late if not self._ready(member)]:
            if time.monotonic() >= deadline:
                tail = late[0].child.tail() if late[0].child else ""
                raise CommandError(f"{late[0].name} does not answer /readyz after {REPLICA_SECONDS:.0f} s:\n{tail}")
            time.sleep(POLL_SECONDS)

    def _ready(self, member: Member) -> bool:
        """Tell whether a replica answers 200 at /readyz. Raises CommandError if its process has ended."""
        self._check_alive([member])
        try:
            return self._http.get(f"{member.url}/readyz", timeout=2).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def wait_routable(self, count: int) -> None:
        """Return once every live replica has ``count`` usable workers and can identify prompts. Raises CommandError."""
        started, printed = time.monotonic(), -1
        deadline = started + WORKER_SECONDS
        while True:
            alive = [replica for replica in self.replicas if replica.child and replica.child.alive]
            states = [self.fleet(replica) for replica in alive]
            ready = min((sum(map(usable, _workers(models))) for models in states), default=0)
            self._busy("waiting for workers", ready, count, self._still_busy(states))
            if ready != printed:
                printed = ready
                self._say(f"workers   {ready} of {count} ready ({time.monotonic() - started:.1f} s)")
            if ready >= count and all(model["identity"] != "none" for models in states for model in models):
                return
            self._check_alive([*self.engines, *self.replicas])
            if time.monotonic() > deadline:
                waited = f"only {ready} of {count} workers ready after {WORKER_SECONDS:.0f} s"
                raise CommandError(f"{waited}:\n{_reasons(states)}")
            time.sleep(POLL_SECONDS)

    def _still_busy(self, states: Sequence[Sequence[dict[str, Any]]]) -> str:
        """Return the last log line of a vLLM engine that has not joined yet, which tells why the start takes long."""
        if self.plan.engines.kind != "vllm":
            return ""
        known = {worker["worker_id"].rpartition(".")[0] for models in states for worker in _workers(models)}
        for engine in self.engines:
            if engine.child is not None and engine.name not in known and (line := engine.child.tail(1).strip()):
                return f"; {engine.name}: {_ENGINE_LINE.sub('', line)[:80]}"
        return ""

    def workers(self, replica: Member | None = None) -> list[dict[str, Any]]:
        """Return the workers of ``GET /workers`` at a replica, or at the first that lives; none if nothing answers."""
        return _workers(self.fleet(replica))

    def fleet(self, replica: Member | None = None) -> list[dict[str, Any]]:
        """Return the models of ``GET /workers`` at a replica, or at the first that lives; none if nothing answers."""
        alive = [member for member in self.replicas if member.child is not None and member.child.alive]
        try:
            url = f"{(replica or alive[0]).operators}/workers"
            answer = self._http.get(url, headers=admin_headers(), timeout=5)
            return list(answer.raise_for_status().json()["models"])
        except (httpx.HTTPError, IndexError):
            return []

    def _check_alive(self, members: Sequence[Member]) -> None:
        for member in members:
            if member.child is not None and not member.child.alive:
                raise CommandError(f"{member.name} ended ({member.child.ending}):\n{member.child.tail()}")


def usable(worker: dict[str, Any]) -> bool:
    """Tell whether a worker of ``GET /workers`` gets requests, and the routers know what its cache holds."""
    return bool(worker["routable"]) and worker["proof"] in ("proven", "approximate")


def _list(members: Sequence[Member]) -> str:
    return ", ".join(f"{member.name} {member.url.removeprefix('http://')}" for member in members)


def _workers(models: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [worker for model in models for worker in model["workers"]]


def _reasons(states: Sequence[Sequence[dict[str, Any]]]) -> str:
    workers = max(map(_workers, states), key=len, default=[])
    return "\n".join(
        f"  {worker['worker_id']}: {worker['proof']}, {'' if worker['routable'] else 'not '}routable {worker['reason']}"
        for worker in workers
    )


def ports_for_gateways(environment: Mapping[str, str], number: int) -> dict[str, str]:
    """Give the replica with this number (from 0 on) ports of its own, in a row as `serve --workers` does. Raises
    CommandError.
    """
    given = {name: environment.get(name, "") for name in ("WARMFLEET_EPP_PORT", "WARMFLEET_EPP_HEALTH_PORT")}
    firsts = {name: int(port) for name, port in given.items() if port.isdigit() and int(port)}
    check_rows(*firsts.values(), count=number + 1)
    return {name: str(port + number) for name, port in firsts.items()}
