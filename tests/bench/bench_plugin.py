"""Measures the plugin's cost: ``python -m tests.bench.bench_plugin`` prints one JSON object as its last line.

Real vLLM's own core (Scheduler, block pool, hasher; no model) works off prompts of 4,000 tokens that no other one
shares, in blocks of 16, through a cache that is full: each request stores 250 blocks and evicts 250. It runs in several
processes, one for each way: without the plugin, and with it while Redis is healthy, slow (every answer 200 ms late) or
away, where each conversation ends, and with T-LRU eviction besides. They take turns of a few requests, so that other
work on the machine hits all ways alike. A pause of 2 ms after each step stands for the model's work.

``thread_ms``: CPU of the engine's thread for a request, that of the block hashes left out, which vLLM computes
elsewhere. ``process_ms``: CPU of the whole process for a request, the plugin's own thread with it. Both are those of
the least disturbed turn. ``noted_us``: the median of the CPU in which that thread notes a finished request for the
order of eviction. ``ended_us``: the CPU in which it notes a request as new and reports its end. Other work empties the
CPU's caches between such calls, so they take several times as long as in a loop, most of all on a busy machine.
``step_...``: how long a step takes (``schedule`` and ``update_from_output``), in ms of wall time; ``step_cpu_p99_ms``
in ms of its thread's CPU, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.drills.toxic import Toxic
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.engine import MODEL, ROOT, VENV
from tests.vllm.trees import environment, tree

from warmfleet.background.supervisor import stop
from warmfleet.cli.local.ports import free_port
from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import Fleet, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOKENS, ANSWER, PAUSE_S = 4_000, 16, 0.002
BLOCK_TOKENS, BLOCKS = 16, 1_500
TURN = 16  # requests of one way before the turn of the next way
LATE_S = 0.2
UPKEEP_S = 0.05
TTFT_TARGET_S = "0.5"  # an objective by which T-LRU gives up the ends of prompts


class Core:
    """A process of ``tests/vllm/core.py``."""

    def __init__(self, environ: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        command = [str(VENV / "bin" / "python"), "-m", "tests.vllm.core"]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  it lives as long as the process
        self.process = subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, stderr=self.log, text=True)
        self.turns: list[dict[str, Any]] = []
        self.process_s = 0.0

    def line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"the core died:\n{self.log.read()[-4_000:]}")
        return json.loads(line)

    def ask(self, what: str, **more: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"ask": what} | more) + "\n")
        self.process.stdin.flush()
        return self.line()["answer"]

    def turn(self) -> None:
        done = self.ask("bench", requests=TURN, tokens=TOKENS, answer=ANSWER, pause_s=PAUSE_S)
        used, self.process_s = done["process_s"] - self.process_s, done["process_s"]
        self.turns.append(done | {"process_s": used})

    def figures(self) -> dict[str, float]:
        turns = self.turns[1:]  # the first turn fills the cache
        walls, cpus = (sorted(1e3 * step[at] for turn in turns for step in turn["steps_s"]) for at in (0, 1))
        thread = [1e3 * sum(cpu for _, cpu in turn["steps_s"]) / TURN for turn in turns]
        noted = [1e6 * seconds for turn in turns for seconds in turn["noted_s"]]
        ended = [1e6 * sum(turn["ended_s"]) / TURN for turn in turns]
        process = [1e3 * turn["process_s"] / TURN for turn in turns]
        return {
            "thread_ms": round(min(thread), 3),
            "thread_median_ms": round(statistics.median(thread), 3),
            "process_ms": round(min(process), 3),
            "noted_us": round(statistics.median(noted or [0.0]), 1),
            "ended_us": round(statistics.median(ended), 1),
            "step_p50_ms": round(walls[len(walls) // 2], 3),
            "step_p99_ms": round(walls[len(walls) * 99 // 100], 3),
            "step_cpu_p99_ms": round(cpus[len(cpus) * 99 // 100], 3),
            "step_longest_ms": round(walls[-1], 3),
            "steps": len(walls),
        }

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()


@asynccontextmanager
async def applied(url: str, model: str) -> AsyncIterator[None]:
    """Apply the stream of this model's worker, as routers do; without them the plugin would join again and again."""
    fleet = Fleet(connect(url, timeout_s=5), model)

    async def upkeep() -> None:
        while True:
            with suppress(FleetUnavailable):
                await fleet.upkeep.step()
            await asyncio.sleep(UPKEEP_S)

    task = asyncio.create_task(upkeep())
    try:
        yield
    finally:
        await stop([task])
        await fleet.close()


async def measure(ways: dict[str, dict[str, str]], version: str, turns: int) -> dict[str, Any]:
    """Figures by way. ways: name -> the environment of the plugin; without WARMFLEET_REDIS_URL it is inactive."""
    base = environment(tree(version)) if version else environment(ROOT / ".cache" / "installed")
    base |= {"CORE_MODEL": str(MODEL), "CORE_BLOCK_TOKENS": str(BLOCK_TOKENS), "CORE_BLOCKS": str(BLOCKS)}
    base["CORE_MODEL_LEN"] = "8192"
    with ExitStack() as stack:
        cores = {}
        for name, more in ways.items():
            cores[name] = core = Core(base | more)
            stack.callback(core.close)
        for core in cores.values():
            await asyncio.to_thread(core.line)
        for number in range(turns + 1):
            for core in cores.values():
                await asyncio.to_thread(core.turn)
            print(f"turn {number} of {turns}", file=sys.stderr, flush=True)
        found = {name: core.figures() for name, core in cores.items()}
        for name, core in cores.items():
            joined = any("joined" in line for line in await asyncio.to_thread(core.ask, "log"))
            assert joined == (name not in ("off", "away")), f"{name}: the plugin has joined: {joined}"
    plain = found["off"]
    for name, figures in found.items():
        if name != "off":
            figures["added_thread_ms"] = round(figures["thread_ms"] - plain["thread_ms"], 3)
            figures["added_process_ms"] = round(figures["process_ms"] - plain["process_ms"], 3)
    return found


async def bench(options: argparse.Namespace) -> dict[str, Any]:
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        server(options.server or valkey_binary(), "--port", str(port)) as url,
    ):
        toxic = Toxic(port)
        async with AsyncExitStack() as stack:
            await toxic.start()
            stack.push_async_callback(toxic.stop)
            toxic.late_s = LATE_S / 2  # each of the two directions
            urls = {
                "healthy": url,
                "slow": f"redis://127.0.0.1:{toxic.port}",
                "away": f"unix://{Path(folder) / 'nobody'}",
            }
            ways: dict[str, dict[str, str]] = {name: {"WARMFLEET_REDIS_URL": where} for name, where in urls.items()}
            ways["healthy, ends"] = ways["healthy"] | {"CORE_ENDS": "1"}
            ways["healthy, T-LRU"] = ways["healthy"] | {"WARMFLEET_TTFT_TARGET_S": TTFT_TARGET_S}
            ways = {"off": {}} | ways
            for number, (name, environ) in enumerate(ways.items()):
                environ |= {"WARMFLEET_WORKER_ID": "core", "WARMFLEET_MODEL": f"way-{number}"}
                if name not in ("off", "away"):
                    await stack.enter_async_context(applied(url, f"way-{number}"))
            return await measure(ways, options.version, options.turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12, help=f"of {TURN} requests for each way")
    parser.add_argument(
        "--version", default="", help="a version of vLLM from tests/vllm/trees.py; default: the installed"
    )
    parser.add_argument("--server", default="", help="path of redis or valkey")
    print(json.dumps(asyncio.run(bench(parser.parse_args()))))


if __name__ == "__main__":
    main()
