"""The two workloads of the public traces, with the engines that suit them, and the scenarios' own arrivals."""

from __future__ import annotations

import inspect
import os
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from warmfleet.fleet import QUEUE_PATIENCE, QueueLimits
from warmfleet.settings import Settings
from warmfleet_loadtest.engine import EngineConfig
from warmfleet_loadtest.simulator.scheduler import Limits
from warmfleet_loadtest.simulator.step_costs import PRESETS
from warmfleet_loadtest.traces import trace as traces
from warmfleet_loadtest.traces.trace import BLOCK_TOKENS, PUBLIC, Arrival, Trace
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from warmfleet_loadtest.simulator.step_costs import StepCosts

SCHEME = wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor"), BLOCK_TOKENS)
#: The queue of a fleet with default settings.
QUEUE = QueueLimits(inspect.signature(Settings).parameters["max_engine_wait_s"].default, patience=QUEUE_PATIENCE)
DIRECT = 1_000_000  # sessions of this number and above go past the fleet


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace with the engines that suit it: step times, blocks, and the usual speed (trace seconds per second).

    busy: share of time that eight engines compute under ``least_loaded``, per unit of speed; 0 for a closed loop.
    """

    costs: StepCosts
    blocks: int
    speed: float
    busy: float


BUSY = {"conversation": 0.126, "agents": 0.0}
WORKLOADS = {
    name: Workload(PRESETS[public.step_time], public.blocks, public.speed, BUSY[name])
    for name, public in PUBLIC.items()
} | {"generated": Workload(PRESETS["trace"], 1_024, 4.0, 0.111)}


def engine(costs: StepCosts, blocks: int, mode: str = "step", speed: float = 1.0) -> EngineConfig:
    """Return the configuration of an engine. In fcfs mode it decodes a token in 20 ms of the trace's time."""
    limits = Limits(max_model_len=min(32_768, (blocks - 1) * BLOCK_TOKENS))
    return EngineConfig(SCHEME, limits, blocks, costs, mode, traces.DECODE_S / speed)


@cache
def arrivals(workload: str, rows: int | None) -> Trace:
    """Return the arrivals of a trace. $TRACE is its name, its file, or a folder. Raises FileNotFoundError."""
    if workload not in PUBLIC:
        return traces.generate(rows or 600)
    given = os.environ.get("TRACE") or ""
    path = traces.shared(workload) if given in ("", *PUBLIC) else Path(given)
    path = path / PUBLIC[workload].file if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"no trace at {path}: set TRACE, or take the workload `generated`")
    return traces.load(path, rows)


def steady(rate: float, seconds: float, seed: int, *, blocks: float = 2.6, session: int = 0) -> Trace:
    """Return Poisson arrivals of prompts that share nothing, lognormal in length (mean ``exp(blocks + 0.5)``)."""
    generator = random.Random(seed)
    fresh = iter(range(1 + (seed + 1) * (1 << 22) + session, 1 << 40))
    made: list[Arrival] = []
    now = generator.expovariate(rate)
    while now < seconds:
        size = max(1, min(240, round(generator.lognormvariate(blocks, 1.0))))
        prompt = [token for _ in range(size) for token in traces.block(next(fresh))]
        made.append(Arrival(now, session + len(made), prompt, max(1, round(generator.lognormvariate(2.0, 0.8)))))
        now += generator.expovariate(rate)
    return Trace("steady", tuple(made))


def merged(*parts: Trace) -> Trace:
    every = sorted((arrival for part in parts for arrival in part.arrivals), key=lambda arrival: arrival.at_s)
    return Trace("+".join(part.name for part in parts), tuple(every))
