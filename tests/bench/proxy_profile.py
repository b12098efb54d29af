"""Shows where a replica's CPU time goes, for each kind of request: the part ``--profile`` of ``bench_proxy``."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.bench.proxy_requests import KINDS

from warmfleet_loadtest.stacks.processes import StackError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.bench.proxy_rounds import Rounds
    from tests.bench.proxy_routers import Router

PROFILED = ("200b", "500t", "40kb_warm", "10kt_warm", "200b_stream", "slow_long")
WRITTEN_S = 10.0
ROWS = 25  # of a printed table


async def profile(rounds: Rounds, cpu_s: float) -> dict[str, Any]:
    """CPU µs per request by place and by module of warmfleet, for each kind. cpu_s: for which each kind is sampled."""
    file = rounds.fleet.folder / "samples.json"
    program = ("-m", "tests.bench.sampled_replica", str(file))
    router = rounds.fleet.replica("sampled", {}, program)
    found: dict[str, Any] = {}
    for kind in KINDS:
        if kind.key not in PROFILED or kind not in rounds.plan.kinds:
            continue
        count = rounds.plan.requests(kind)
        await rounds.burst(router, kind, kind.requests(f"profile {kind.key} warm", count))
        samples(router, file)
        spent_us, bursts = 0.0, 0
        while spent_us < cpu_s * 1e6:
            requests = kind.requests(f"profile {kind.key} {bursts}", count)
            spent_us += (await rounds.burst(router, kind, requests))["us"] * count
            bursts += 1
        found[kind.key] = shares(samples(router, file), spent_us / bursts / count)
        show(kind.key, found[kind.key])
    return found


def samples(router: Router, file: Path) -> list[tuple[str, str, int]]:
    """The samples of the replica since the last call. Raises StackError."""
    file.unlink(missing_ok=True)
    os.kill(router.pids[0], signal.SIGUSR1)
    deadline = time.monotonic() + WRITTEN_S
    while not file.exists():
        if time.monotonic() > deadline:
            raise StackError("the sampled replica writes nothing")
        time.sleep(0.05)  # the sampled process gives no signal
    return [(place, module, count) for place, module, count in json.loads(file.read_text())]


def shares(rows: list[tuple[str, str, int]], us: float) -> dict[str, Any]:
    """The samples as µs of a request that takes ``us``."""
    total = sum(count for _, _, count in rows) or 1
    places, modules = Counter[str](), Counter[str]()
    for place, module, count in rows:
        places[place] += count
        modules[module or "none of ours"] += count
    table = {
        name: {key: round(us * count / total, 1) for key, count in found.most_common()}
        for name, found in (("place", places), ("module", modules))
    }
    return {"us": round(us), "samples": total, **table}


def show(key: str, found: dict[str, Any]) -> None:
    """Print both tables of a kind beside each other."""
    print(f"\n{key}: {found['us']} us, {found['samples']} samples", file=sys.stderr)
    print(f"{'spent in':38}{'us':>7}   {'called by':38}{'us':>7}", file=sys.stderr)
    left, right = (list(found[name].items())[:ROWS] for name in ("place", "module"))
    for number in range(max(len(left), len(right))):
        cells = [f"{name:38}{us:7.1f}" if us else "" for name, us in (_row(left, number), _row(right, number))]
        print(f"{cells[0]:45}   {cells[1]}".rstrip(), file=sys.stderr)


def _row(rows: list[tuple[str, float]], number: int) -> tuple[str, float]:
    return rows[number] if number < len(rows) else ("", 0.0)
