"""Peers: routers of other projects, installed once into an environment of their own, and their command lines.

They run with their defaults, also for threads; the options below only name their model and their engines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from warmfleet_loadtest.stacks.processes import StackError
from warmfleet_loadtest.traces.trace import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from warmfleet_loadtest.simulator.step_costs import StepCosts

MODEL = "sim"  # the name that the engines of a fleet serve
ROOT = Path(__file__).resolve().parents[3]
REQUIREMENTS = ROOT / "loadtest/peers-requirements.txt"
FOLDER = ROOT / ".cache/peers"
INSTALL_S = 900.0


def install() -> Path:
    """Install the peers at the first call (100 MB); return the folder of their commands. Raises StackError."""
    ready, wanted = FOLDER / "ready", REQUIREMENTS.read_text()
    if ready.is_file() and ready.read_text() == wanted:
        return FOLDER / "bin"
    print(f"installing routers of other projects into {FOLDER} ...", file=sys.stderr, flush=True)
    argv = [str(FOLDER / "bin/python"), "-m", "pip", "install", "-q", "--no-compile", "-r", str(REQUIREMENTS)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        venv.create(FOLDER, clear=True, with_pip=True)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_S, env=environment)
    except (OSError, subprocess.CalledProcessError) as error:
        raise StackError(f"no environment can be made in {FOLDER} (Debian: package python3-venv): {error}") from error
    except subprocess.TimeoutExpired as error:
        raise StackError(f"pip took more than {INSTALL_S:.0f} s to install {REQUIREMENTS.name}") from error
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise StackError(f"{REQUIREMENTS.name} cannot be installed; is a package registry reachable? pip: {why}")
    ready.write_text(wanted)
    return FOLDER / "bin"


def missing(names: Sequence[str], folder: Path = FOLDER) -> list[str]:
    """Return the peers of these names that the environment in ``folder`` lacks."""
    look = "import sys\nfrom importlib.util import find_spec\nprint(*(n for n in sys.argv[1:] if not find_spec(n)))"
    packages = {name.removesuffix("-kv").removesuffix("-programs").replace("-", "_"): name for name in names}
    argv = [str(folder / "bin/python"), "-I", "-c", look, *packages]
    try:
        absent = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return list(names)
    return [packages[name] for name in absent]


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a peer: URLs, ports of KV events, blocks of a cache, step times. Only some peers need all."""

    urls: Sequence[str]
    events: Sequence[int] = ()
    blocks: int = 0
    costs: StepCosts | None = None


def vllm_router_kv(port: int, metrics_port: int, engines: Engines) -> list[str]:
    """Return the command of vllm-router with policy ``kv_aware``, which listens to the engines' KV events."""
    argv = _command(["vllm-router"], port, metrics_port, engines, "kv_aware")
    argv += ["--kv-event-model", MODEL, "--kv-event-block-size", str(BLOCK_TOKENS)]
    for url, event_port in zip(engines.urls, engines.events, strict=True):
        argv += ["--kv-event-source", f"{url}=tcp://127.0.0.1:{event_port}"]
    return argv


def smg(port: int, metrics_port: int, engines: Engines) -> list[str]:
    """Return SMG's command. Policy ``cache_aware``: a tree of sent prompts. (Over HTTP SMG reads no KV events.)"""
    # The package sglang-router installs a command `smg`, too, so the module is run by its name.
    argv = _command(["python", "-m", "smg", "launch"], port, metrics_port, engines)
    return [*argv, "--backend", "vllm", "--disable-tokenizer-autoload", "--prometheus-host", "127.0.0.1"]


def vllm_router(port: int, metrics_port: int, engines: Engines) -> list[str]:
    """Return vllm-router's command. Its default policy lets every engine tokenize every prompt."""
    return _command(["vllm-router"], port, metrics_port, engines)


def vllm_router_programs(port: int, metrics_port: int, engines: Engines) -> list[str]:
    """Return the command of vllm-router with its Program scheduling, set up as its documentation recommends.

    A session is named by X-Session-ID. The router must be told the size of a cache, and how long steps take.
    """
    assert engines.costs is not None
    costs = engines.costs
    prefill = {
        "intercept_seconds": costs.base_s,
        "linear_seconds_per_1k_tokens": 1e3 * costs.prefill_token_s,
        "quadratic_seconds_per_1k_tokens_squared": 0.5e6 * costs.prefill_pair_s,
        "decode_throughput_alpha": 0.15,
    }
    decode = {
        "fixed_step_seconds": costs.base_s + costs.weights_s,
        "batch_step_seconds_per_request": costs.decode_request_s,
        "context_step_seconds_per_token": costs.decode_context_s,
    }
    config = {
        "program_scheduling_enable_key": "auto",
        "global_queue": True,
        "token_capacity_per_target": (engines.blocks - 1) * BLOCK_TOKENS,
        "prefill_cost_model": prefill,
        "decode_throughput_model": decode,
    }
    argv = _command(["vllm-router"], port, metrics_port, engines)
    return [*argv, "--enable-program-scheduling", "--program-scheduling-config-json", json.dumps(config)]


def sglang_router(port: int, metrics_port: int, engines: Engines) -> list[str]:
    """Return the command of sglang-router with its default policy, a tree of the prompts that it has sent."""
    return _command(["sglang-router", "launch"], port, metrics_port, engines)


def _command(
    begin: list[str], port: int, metrics_port: int, engines: Engines, policy: str = "cache_aware"
) -> list[str]:
    """Return the command line with the options that all peers have."""
    argv = [*begin, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *engines.urls, "--policy", policy]
    return [*argv, "--prometheus-port", str(metrics_port), "--worker-startup-check-interval", "1"]


PEERS: dict[str, Callable[[int, int, Engines], list[str]]] = {
    "vllm-router-kv": vllm_router_kv,
    "smg": smg,
    "vllm-router": vllm_router,
    "vllm-router-programs": vllm_router_programs,
    "sglang-router": sglang_router,
}
PROGRAMS = ("vllm-router-programs",)  # those that schedule sessions, which clients must name

if __name__ == "__main__":
    print(install())
