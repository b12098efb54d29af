"""The fleets that a trace is played through: Warmfleet replicas, routers of other projects, and no router at all.

Every run gets a fresh store, fresh engines (in one process), fresh routers and haproxy in front of them, all on this
machine and on free ports.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from warmfleet_loadtest.simulator.step_costs import load_costs
from warmfleet_loadtest.stacks import peers
from warmfleet_loadtest.stacks.peers import MODEL
from warmfleet_loadtest.stacks.processes import (
    HAPROXY_CONFIG,
    Processes,
    StackError,
    free_ports,
    get_json,
    haproxy_binary,
    replica_ready,
    start_haproxy,
    start_store,
    with_servers,
    workers_of,
)
from warmfleet_loadtest.tokens.prompt_tokenizer import PromptTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from warmfleet_loadtest.simulator.step_costs import StepCosts

#: Fleets without a router: the client itself chooses the engine, by this balance (see ``replay.Balance``).
DIRECT = {"session-sticky": "session", "least-loaded": "least"}
#: Fleets without a router: a chooser beside the engines, which looks into them (``simulator/choosers/chooser_port``).
CHOSEN = ("oracle", "central")
AFFINITY = "session-affinity"  # Warmfleet with policy cost; the client sends a session always to the same router
#: Warmfleet with policy cost, behind a gateway that asks the replicas; one of them is killed and started again.
PICKER = "picker"
WITHOUT_LEDGER = "no-ledger"  # Warmfleet with policy cost, which sends every step of a session at once
#: Fleets whose engines have no plugin. Warmfleet learns what they hold from their KV events, through
#: `warmfleet bridge`; or from the requests that it sent to them. In a mixed fleet every third engine has the plugin.
CONNECTIONS = ("bridge", "approximate", "mixed")


class Gateway(Protocol):
    """Starts a gateway before replicas and engines (ports of this machine), and returns its port."""

    def __call__(self, processes: Processes, pickers: Sequence[int], engines: Sequence[int]) -> int: ...


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet under comparison.

    kind: ``warmfleet``, a name in ``peers.PEERS``, in DIRECT or in CHOSEN. balance: how the client chooses among
    several URLs. connection: how the engines of a Warmfleet fleet are connected: ``plugin`` or one of CONNECTIONS.
    ledger: replicas may hold sessions of agents back. asked: by a gateway, which sends requests to engines itself.
    """

    name: str
    kind: str
    policy: str
    replicas: int
    balance: str = "random"
    connection: str = "plugin"
    ledger: bool = True
    asked: bool = False

    @property
    def needs_names(self) -> bool:
        """True if clients must name their sessions, for else the fleet knows none."""
        return self.kind in peers.PROGRAMS

    @property
    def takes_ids(self) -> bool:
        """True if prompts may be token ids. SMG 1.13.0 answers those with 400; the others were not tried."""
        return self.kind not in ("smg", "vllm-router", "vllm-router-programs", "sglang-router")


@dataclass(frozen=True, slots=True)
class Setup:
    """The engines of a run, as the options of their command line, and whether haproxy stands before the routers.

    blocks: per engine. decode_s: wall seconds per token of an answer in fcfs mode. haproxy: even before one router.
    time_scale: of all step times. step_tokens: most tokens of a step. gateway: starts that of fleets that are asked.
    """

    engines: int
    blocks: int
    mode: str
    step_time: str
    decode_s: float
    haproxy: bool
    time_scale: float = 1.0
    step_tokens: int = 2_048
    gateway: Gateway | None = None

    @property
    def costs(self) -> StepCosts:
        return load_costs(self.step_time).scaled(self.time_scale)


@dataclass(frozen=True, slots=True)
class Running:
    """A running fleet: the URLs that the client calls, and those of the engines. replicas: of Warmfleet."""

    urls: tuple[str, ...]
    engines: tuple[str, ...]
    balance: str
    processes: Processes
    replicas: tuple[Replica, ...] = ()

    def restart(self) -> None:
        """Kill a replica and start it again, without waiting until it is ready."""
        self.processes.kill(self.replicas[-1].name)
        self.replicas[-1].start(self.processes)

    def booked(self) -> int:
        """Return the load of all engines, as a replica reads it from the store: tokens and requests."""
        loads = [worker["load"] for worker in workers_of(self.replicas[0].url)]
        return sum(load[key] for load in loads for key in ("prefill_tokens", "decode_tokens", "in_flight"))


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica of Warmfleet, as it may be started more than once. asked: its port for gateways."""

    name: str
    port: int
    asked: int
    argv: list[str]
    environment: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, processes: Processes) -> None:
        processes.spawn("replicas", self.name, self.argv, self.environment)


def ours(policies: str, replicas: str, known: Sequence[str]) -> list[Fleet]:
    """Return Warmfleet fleets: each policy that is known with each number of replicas. Raises ValueError."""
    names = list(known) if policies == "all" else policies.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no policy {unknown[0]!r}; known are all, {', '.join(known)}")
    try:
        counts = [int(count) for count in replicas.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise ValueError(f"REPLICAS={replicas!r}: numbers from 1 on, joined by commas")
    return [Fleet(f"{name} x {count}", "warmfleet", name, count) for name in names for count in counts]


def others(names: str) -> list[Fleet]:
    """Return the other fleets by names such as ``bridge:4,vllm-router-kv:4,session-sticky``. Raises ValueError."""
    return [_other(name) for name in names.split(",") if name]


def _other(text: str) -> Fleet:
    found = re.fullmatch(r"([a-z-]+)(?::(\d+))?", text)
    kind, replicas = (found[1], int(found[2] or 1)) if found else ("", 0)
    if text in DIRECT:
        return Fleet(kind, kind, "", 0, DIRECT[kind])
    if text in CHOSEN:
        return Fleet(kind, kind, "", 0)
    if kind == AFFINITY and replicas:
        return Fleet(f"{kind} x {replicas}", "warmfleet", "cost", replicas, "session")
    if kind == PICKER and replicas:
        return Fleet(f"{kind} x {replicas}", "warmfleet", "cost", replicas, asked=True)
    if kind == WITHOUT_LEDGER and replicas:
        return Fleet(f"{kind} x {replicas}", "warmfleet", "cost", replicas, ledger=False)
    if kind in CONNECTIONS and replicas:
        return Fleet(f"{kind} x {replicas}", "warmfleet", "cost", replicas, connection=kind)
    if kind in peers.PEERS and replicas:
        return Fleet(f"{kind} x {replicas}", kind, "", replicas)
    known = [
        *(f"{name}:N" for name in (*peers.PEERS, AFFINITY, PICKER, WITHOUT_LEDGER, *CONNECTIONS)),
        *DIRECT,
        *CHOSEN,
    ]
    raise ValueError(f"no fleet {text!r}; known are {', '.join(known)}")


@contextmanager
def running(fleet: Fleet, setup: Setup) -> Iterator[Running]:
    """Start a fleet. Its processes and files are gone after the block. Raises StackError."""
    balanced = setup.haproxy and fleet.replicas > 0 and fleet.balance == "random" and not fleet.asked
    if balanced:
        haproxy_binary()  # raises before anything is started
    if fleet.asked and setup.gateway is None:
        raise StackError("no gateway is known that asks pickers: run `make -s bench NAME=trace`")
    replicas: list[Replica] = []
    with tempfile.TemporaryDirectory(prefix="wf-bench-") as name, Processes(Path(name)) as processes:
        if fleet.kind == "warmfleet":
            store = start_store(processes)
            engines, static = _start_connected(processes, fleet.connection, setup, store)
            replicas = _start_replicas(processes, fleet, store, setup.engines, static)
            ports = [_gateway(processes, setup, replicas, engines)] if fleet.asked else [each.port for each in replicas]
        elif fleet.kind in peers.PEERS:
            engines, events = _start_engines(processes, setup, ["--kv-events"])
            ports = _start_peers(processes, fleet, peers.Engines(engines, events, setup.blocks, setup.costs))
        elif fleet.kind in CHOSEN:
            engines, _events = _start_engines(processes, setup, ["--chooser", fleet.kind])
            yield Running((_chooser_url(processes),), engines, fleet.balance, processes)
            return
        else:
            engines, _events = _start_engines(processes, setup, [])
            yield Running(engines, engines, fleet.balance, processes)
            return
        if balanced:
            ports = [_balanced(processes, ports, readyz=fleet.kind == "warmfleet")]
        urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
        yield Running(urls, engines, fleet.balance, processes, tuple(replicas))


def _start_connected(
    processes: Processes, connection: str, setup: Setup, store: str, name: str = "engines"
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Start engines and connect them to the store. Returns all URLs, and those that routers get by their settings.

    name: of the engines' process.
    """
    if connection == "mixed":
        started: list[str] = []
        static: tuple[str, ...] = ()
        for index, kind in enumerate(("plugin", "bridge", "approximate")):
            share = replace(setup, engines=(setup.engines + 2 - index) // 3)
            if share.engines:
                engines, listed = _start_connected(processes, kind, share, store, f"engines-{kind}")
                started, static = [*started, *engines], (*static, *listed)
        return tuple(started), static
    options = {"plugin": ["--redis", store], "bridge": ["--kv-events"], "approximate": []}[connection]
    engines, events = _start_engines(processes, setup, options, name)
    if connection == "bridge":
        replays = [int(port) for port in re.findall(r"replays .* port (\d+)\n", processes.log(name))]
        _start_bridge(processes, store, list(zip(engines, events, replays, strict=True)))
    return engines, engines if connection == "approximate" else ()


def _start_bridge(processes: Processes, store: str, engines: Sequence[tuple[str, int, int]]) -> None:
    """Start one bridge. engines: URL, port of events, port of replays."""
    folder = processes.folder / "tokenizer"
    folder.mkdir()
    tokenizer = PromptTokenizer.load()
    for name, content in tokenizer.artifacts().items():
        (folder / name).write_bytes(content)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    argv = [sys.executable, "-m", "warmfleet_worker.bridge", "--redis", store, "--tokenizer", str(folder)]
    for url, live, replay in engines:
        argv += ["--engine", f"{url}=tcp://127.0.0.1:{live},replay=tcp://127.0.0.1:{replay}"]
    processes.spawn("bridge", "bridge", argv)


def _start_engines(
    processes: Processes, setup: Setup, more: Sequence[str], name: str = "engines"
) -> tuple[tuple[str, ...], list[int]]:
    """Start engines in one process; return their (URLs, ports of KV events), as they print them."""
    argv = [sys.executable, "-m", "warmfleet_loadtest.engine", "--port", "0", "--count", str(setup.engines)]
    argv += ["--model", MODEL, "--blocks", str(setup.blocks), "--worker-id", name.replace("engines", "sim")]
    argv += [
        "--mode",
        setup.mode,
        "--step-time",
        setup.step_time,
        "--fcfs-decode",
        str(setup.decode_s / setup.time_scale),
    ]
    argv += ["--time-scale", str(setup.time_scale), "--max-num-batched-tokens", str(setup.step_tokens), *more]
    processes.spawn("engines", name, argv)

    def urls() -> list[str]:
        return re.findall(r"serves \S+ on (http://\S+)\n", processes.log(name))

    processes.wait(name, lambda: len(urls()) == setup.engines)
    return tuple(urls()), [int(port) for port in re.findall(r"publishes .* port (\d+)\n", processes.log(name))]


def _chooser_url(processes: Processes) -> str:
    """Wait for the URL of the engines' chooser, which they print, and return it."""

    def urls() -> list[str]:
        return re.findall(r"chooses among them on (http://\S+)\n", processes.log("engines"))

    processes.wait("engines", urls)
    return urls()[0]


def _start_replicas(
    processes: Processes, fleet: Fleet, store: str, engines: int, static_workers: Sequence[str]
) -> list[Replica]:
    ports = free_ports(2 * fleet.replicas)
    environment = {"WARMFLEET_APPROVED_TEMPLATES": "*"}  # the templates are those of our own engines
    environment["WARMFLEET_ADMIN_PORT"] = "0"  # the operators' API is on the same port
    if not fleet.ledger:
        environment["WARMFLEET_SESSION_WAIT_MAX_S"] = "0"
    if static_workers:
        environment["WARMFLEET_STATIC_WORKERS"] = ",".join(static_workers)
    replicas = []
    for number, (port, asked) in enumerate(zip(ports[::2], ports[1::2], strict=True)):
        argv = [sys.executable, "-m", "warmfleet", "serve", "--port", str(port), "--policy", fleet.policy]
        own = environment | ({"WARMFLEET_EPP_PORT": str(asked)} if fleet.asked else {})
        replicas.append(Replica(f"replica-{number}", port, asked, [*argv, "--redis", store, "--models", MODEL], own))
        replicas[-1].start(processes)
    for replica in replicas:
        processes.wait(replica.name, partial(replica_ready, replica.url, engines))
    return replicas


def _gateway(processes: Processes, setup: Setup, replicas: Sequence[Replica], engines: Sequence[str]) -> int:
    """Start the gateway in front of the replicas. Returns its port."""
    assert setup.gateway is not None, "checked before anything was started"
    ports = [int(url.rpartition(":")[2]) for url in engines]
    return setup.gateway(processes, [replica.asked for replica in replicas], ports)


def _start_peers(processes: Processes, fleet: Fleet, engines: peers.Engines) -> list[int]:
    folder = peers.install()
    ports = free_ports(2 * fleet.replicas)
    for number in range(fleet.replicas):
        command, *arguments = peers.PEERS[fleet.kind](ports[number], ports[fleet.replicas + number], engines)
        processes.spawn("routers", f"{fleet.kind}-{number}", [str(folder / command), *arguments], {"PYTHONPATH": ""})
    for number, port in enumerate(ports[: fleet.replicas]):
        url = f"http://127.0.0.1:{port}/readiness"
        processes.wait(f"{fleet.kind}-{number}", partial(_all_healthy, url, len(engines.urls)))
    return ports[: fleet.replicas]


def _all_healthy(url: str, engines: int) -> bool:
    """Return whether a peer router finds all its engines healthy; its /health may answer earlier than that."""
    return bool((get_json(url) or {}).get("healthy_workers") == engines)


def balancer_config(ports: Sequence[int], *, readyz: bool) -> str:
    """Return the load test's haproxy.cfg for these ports. readyz: check servers by GET /readyz, else by connecting."""
    lines = HAPROXY_CONFIG.read_text().splitlines()
    if not readyz:
        lines = [line for line in lines if "httpchk" not in line]
    return with_servers("\n".join(lines), {f"router-{port}": port for port in ports})


def _balanced(processes: Processes, ports: Sequence[int], *, readyz: bool) -> int:
    """Start haproxy in front of these ports. Returns its port."""
    [port] = free_ports(1)
    start_haproxy(processes, balancer_config(ports, readyz=readyz), port)
    return port
