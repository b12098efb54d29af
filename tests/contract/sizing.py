"""The table of large fleets in app/docs/sizing.md, from unit costs that were measured.

    python -m tests.contract.sizing --engines 1000 --requests 10000        # one row of your own

`python -m tests.contract.generate_docs` writes the table into the page.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Measured costs, by the benches of tests/bench/README.md.

    decide_us: a decision with its settlement or cancellation, pools of 64 (`decide --masters`). follow_us: an engine's
    changes of 100 ms are applied (`apply --follow`). block_us: a block stored and one removed (the same). request_us,
    chunk_us: CPU of a replica (`proxy`). block_bytes: of Redis (`apply --sync`).
    """

    decide_us: float = 207.0
    follow_us: float = 69.0
    block_us: float = 5.0
    request_us: float = 479.0
    chunk_us: float = 13.4
    block_bytes: float = 165.0


@dataclass(frozen=True, slots=True)
class Load:
    """engines, and requests/s of them all. new_tokens: of a prompt, computed. chunks: of an answer."""

    engines: int
    requests: float
    prompt_tokens: int = 2_000
    new_tokens: int = 1_000
    chunks: int = 300
    block_tokens: int = 16
    cache_tokens: int = 500_000
    pool: int = 64
    home_pools: int = 2
    busy: float = 0.5  # of a Redis core, at most
    replica_busy: float = 0.6


@dataclass(frozen=True, slots=True)
class Need:
    """redis_cores: work of all masters. network: Gbit/s, of all replicas (answers) and of all masters."""

    pools: int
    redis_cores: float
    masters: int
    redis_gb: float
    router_cores: float
    replicas: int
    router_gbit: float
    redis_gbit: float


CHUNK_BYTES, HASH_BYTES, CALL_BYTES = 250, 8, 400  # on the wire: a chunk; a block hash; a call without hashes


def need(load: Load, unit: UnitCosts) -> Need:
    """The cores, memory and network that a load needs."""
    pools = math.ceil(load.engines / load.pool)
    homes = load.home_pools if pools > 1 else 1
    decisions = load.requests * homes
    blocks = load.requests * load.new_tokens / load.block_tokens
    redis = (decisions * unit.decide_us + load.engines * 10 * unit.follow_us + blocks * unit.block_us) / 1e6
    routers = load.requests * (unit.request_us + load.chunks * unit.chunk_us) / 1e6
    memory = (unit.block_bytes * load.engines * load.cache_tokens / load.block_tokens + 136e6 * pools) / 0.75 / 1e9
    call = CALL_BYTES + HASH_BYTES * load.prompt_tokens / load.block_tokens
    return Need(
        pools,
        redis,
        max(1, math.ceil(redis / load.busy)),
        memory,
        routers,
        max(3, math.ceil(routers / load.replica_busy) + 1),
        load.requests * load.chunks * CHUNK_BYTES * 8 / 1e9,
        (decisions * call + blocks * 2 * HASH_BYTES) * 8 / 1e9,
    )


LOADS = tuple(
    Load(engines, requests)
    for engines, requests in ((8, 80), (64, 640), (256, 2_560), (1_000, 10_000), (4_000, 40_000), (10_000, 100_000))
)


def table(loads: Sequence[Load] = LOADS, unit: UnitCosts | None = None) -> str:
    """A Markdown table with a row for each load."""
    names = (
        "engines",
        "requests/s",
        "pools of 64",
        "Redis cores at work",
        "masters, half busy",
        "Redis, GB",
        "router cores at work",
        "replicas",
        "to clients, Gbit/s",
        "to Redis, Gbit/s",
    )
    rows = [f"| {' | '.join(names)} |\n", "|---" * len(names) + "|\n"]
    for load in loads:
        told = need(load, unit or UnitCosts())
        rows.append(
            f"| {load.engines:,} | {load.requests:,.0f} | {told.pools} | {told.redis_cores:.2f} | {told.masters} "
            f"| {told.redis_gb:.1f} | {told.router_cores:.1f} | {told.replicas} | {told.router_gbit:.1f} "
            f"| {told.redis_gbit:.2f} |\n"
        )
    return "".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(
        prog="python -m tests.contract.sizing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usual = Load(0, 0)
    made.add_argument("--engines", type=int, required=True)
    made.add_argument("--requests", type=float, required=True, help="a second, of the whole fleet")
    for name in ("prompt_tokens", "new_tokens", "chunks", "block_tokens", "cache_tokens", "pool"):
        made.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=getattr(usual, name), help="default %(default)s"
        )
    print(table([replace(usual, **vars(made.parse_args(argv)))]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
