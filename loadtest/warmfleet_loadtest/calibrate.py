"""Fit the simulator's step times to a real vLLM, and check them on a load that the fit has not used.

    python -m warmfleet_loadtest.calibrate measure --url http://127.0.0.1:8000 --model small --out samples.json
    python -m warmfleet_loadtest.calibrate fit samples.json --out costs.json
    python -m warmfleet_loadtest.calibrate check --url http://127.0.0.1:8000 --model small --costs costs.json

``measure`` sends prompts of many lengths one at a time, cold and with cached prefixes, and then groups of decoding
streams. ``fit`` finds the non-negative coefficients with the smallest relative error. ``fit`` uses no mixed load,
because it would take contention on a busy machine for a property of the engine. ``check`` runs mixed loads over HTTP on
the real engine and on the simulator and compares the quantiles of TTFT. Believe the result of ``check`` only if
``load_average`` shows that nothing else ran: the simulator sleeps where vLLM computes, so contention slows only vLLM.
Start vLLM with a cache that holds everything (no evictions) and with --enable-prompt-tokens-details.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from warmfleet_loadtest.engine import Engine, EngineConfig
from warmfleet_loadtest.measuring.client import Client, Reply
from warmfleet_loadtest.measuring.figures import failures, hit_ratio, quantile
from warmfleet_loadtest.replay import Target, replay
from warmfleet_loadtest.simulator.api import Served
from warmfleet_loadtest.simulator.scheduler import Limits
from warmfleet_loadtest.simulator.step_costs import StepCosts, load_costs
from warmfleet_loadtest.stacks.processes import StackError
from warmfleet_loadtest.tokens.prompt_tokenizer import PromptTokenizer
from warmfleet_loadtest.traces.trace import FIRST_TOKEN, TOKENS
from warmfleet_loadtest.traces.workload import Mix, mixed
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Sequence


REPEATS = 7
DECODED_TOKENS = 64
COLD_TOKENS = (32, 128, 256, 512, 1_024, 1_536, 2_016, 3_072, 4_064, 6_112)
CACHED_TOKENS = ((1_024, 32), (1_024, 512), (4_096, 32), (4_096, 512), (4_096, 1_536), (6_144, 64))
STREAMS = ((1, 64), (1, 2_048), (4, 64), (4, 1_024), (8, 256), (16, 64), (16, 512), (32, 64))
NAMES = tuple(field.name for field in fields(StepCosts))
TOLERANCE = 0.15


class Measurements:
    """Measurements on one engine. Every prompt has new random tokens, except for a prefix that is to be cached."""

    def __init__(self, client: Client, url: str, seed: int) -> None:
        self._client = client
        self._url = url
        self._random = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        return [FIRST_TOKEN + int(self._random.random() * TOKENS) for _ in range(count)]

    async def alone(self, cached: int, new: int) -> float:
        """Measure the TTFT in seconds of ``new`` tokens after a cached prefix, on an otherwise idle engine."""
        prefix = self.tokens(cached)
        if cached:
            await self._send([*prefix, *self.tokens(1)], 1)
        replies = [await self._send(prefix + self.tokens(new), 1) for _ in range(REPEATS)]
        return quartile([reply.ttft_s for reply in replies])

    async def decode(self, streams: int, context: int) -> float:
        """Measure the seconds between tokens while ``streams`` cached prompts of ``context`` tokens decode.

        The result is the difference between long and short answers, because several chunks may arrive together.
        """
        prompts = [self.tokens(context) for _ in range(streams)]
        await self._slowest(prompts, 1)
        intervals = []
        for _ in range(REPEATS):
            short, long = await self._slowest(prompts, 1), await self._slowest(prompts, 1 + DECODED_TOKENS)
            intervals.append((long - short) / DECODED_TOKENS)
        return quartile(intervals)

    async def _slowest(self, prompts: list[list[int]], output_tokens: int) -> float:
        replies = await asyncio.gather(*(self._send(prompt, output_tokens) for prompt in prompts))
        return max(reply.total_s for reply in replies)

    async def _send(self, prompt: list[int], output_tokens: int) -> Reply:
        reply = await self._client.complete(self._url, prompt, output_tokens)
        if reply.error is not None:
            raise StackError(f"{self._url}: {reply.error}")
        return reply


def quartile(seconds: Sequence[float]) -> float:
    """Return the lower quartile, because disturbances only make a measurement longer."""
    return quantile(sorted(seconds), 0.25)


async def measure(url: str, model: str, seed: int) -> dict[str, Any]:
    """Measure a real engine; return the samples for ``fit``."""
    async with Client(model) as client:
        measurements = Measurements(client, url, seed)
        await measurements.alone(0, 2_016)  # warm up
        prefill = [[0, new, await measurements.alone(0, new)] for new in COLD_TOKENS]
        prefill += [[cached, new, await measurements.alone(cached, new)] for cached, new in CACHED_TOKENS]
        decode = [[streams, context, await measurements.decode(streams, context)] for streams, context in STREAMS]
    return {"prefill": prefill, "decode": decode, "load_average": os.getloadavg()[0]}


# ---------------------------------------------------------------- fit


def fit(samples: dict[str, Any], limits: Limits) -> StepCosts:
    """Fit non-negative costs by least squares of relative errors. Raises ValueError if a measured time is 0 or less."""
    rows, seconds = [], []
    for cached, new, ttft in samples["prefill"]:
        held = cached // limits.block_tokens * limits.block_tokens
        rows.append(_prefill_row(held, cached + new, limits.step_tokens))
        seconds.append(ttft)
    for streams, context, interval in samples["decode"]:
        work = {"base_s": 1, "decode_request_s": streams, "decode_context_s": streams * (context + DECODED_TOKENS // 2)}
        rows.append(np.array([float(work.get(name, 0)) for name in NAMES]))
        seconds.append(interval)
    target = np.array(seconds)
    if not (target > 0).all():
        raise ValueError("a sample is not positive: measure again, on a quiet machine")
    matrix = np.array(rows) / target[:, None]
    values = non_negative(matrix, np.ones(len(target)))
    return StepCosts(**dict(zip(NAMES, map(float, values), strict=True)))


def _prefill_row(held: int, tokens: int, step_tokens: int) -> np.ndarray[Any, Any]:
    """Return the factor of each cost (in the order of NAMES) in one prompt's TTFT. held: number of cached tokens."""
    work = dict.fromkeys(NAMES, 0.0)
    work["request_s"], work["request_token_s"] = 1.0, float(tokens)
    done = held
    while done < tokens:
        chunk = min(step_tokens, tokens - done)
        work["base_s"] += 1
        work["prefill_token_s"] += chunk
        work["prefill_pair_s"] += chunk * (done + chunk / 2)
        done += chunk
    return np.array([work[name] for name in NAMES])


def non_negative(matrix: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Solve by least squares; set the most negative coefficient to 0 until none is negative."""
    active = [column for column in range(matrix.shape[1]) if np.any(matrix[:, column])]
    while True:
        scale = np.linalg.norm(matrix[:, active], axis=0)
        found = np.linalg.lstsq(matrix[:, active] / scale, target, rcond=None)[0] / scale
        if (found >= 0).all():
            values = np.zeros(matrix.shape[1])
            values[active] = found
            return values
        del active[int(np.argmin(found * scale))]


def _config(costs: StepCosts, limits: Limits, blocks: int) -> EngineConfig:
    scheme = wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor"), limits.block_tokens)
    return EngineConfig(scheme, limits, blocks, costs)


# ---------------------------------------------------------------- check


async def check(url: str, model: str, config: EngineConfig, mixes: Sequence[Mix]) -> list[dict[str, Any]]:
    """Run mixed loads over HTTP on the real engine and on the simulator; return a line of quantiles of TTFT per mix.

    Raises StackError if the real engine or the simulator answers no request.
    """
    lines = []
    for mix in mixes:
        load = os.getloadavg()[0]
        real, client = await replay(mixed(mix), Target((url,), model))
        engine = Engine(config, PromptTokenizer.load(), Served((model,)))
        await engine.start("127.0.0.1", 0)
        try:
            simulated, _client = await replay(mixed(mix), Target((f"http://127.0.0.1:{engine.port}",), model))
        finally:
            await engine.stop()
        line: dict[str, Any] = {"rate": mix.rate, "seed": mix.seed, "requests": len(real), "client": client}
        line["load_average"] = load
        for name, replies in (("real", real), ("sim", simulated)):
            ttft = sorted(reply.ttft_s for reply in replies if reply.error is None)
            if not ttft:
                raise StackError(f"no request of the {name} engine was answered: {failures(replies)[1]}")
            line[f"{name}_hit"] = round(hit_ratio(replies), 4)
            line |= {f"{name}_p{q}_ms": round(1e3 * quantile(ttft, q / 100), 1) for q in (50, 90)}
            line[f"{name}_errors"] = len(replies) - len(ttft)
        for q in (50, 90):
            line[f"p{q}_error"] = round(line[f"sim_p{q}_ms"] / line[f"real_p{q}_ms"] - 1, 3)
        lines.append(line)
    return lines


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m warmfleet_loadtest.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(dest="command", required=True)
    for name in ("measure", "fit", "check"):
        command = commands.add_parser(name)
        if name == "fit":
            command.add_argument("samples", type=Path)
        else:
            command.add_argument("--url", required=True)
            command.add_argument("--model", required=True)
            command.add_argument("--seed", type=int, default=1 if name == "measure" else 100)
        if name == "check":
            command.add_argument("--costs", required=True, help="the file that fit wrote, or a preset")
            command.add_argument("--rate", type=float, action="append", help="requests per second of the mixed load")
            command.add_argument("--seconds", type=float, default=90.0, help="of each mixed load")
        else:
            command.add_argument("--out", type=Path, required=True)
        command.add_argument("--block-size", type=int, default=32, help="as vLLM was started (default %(default)s)")
        command.add_argument("--blocks", type=int, default=1_024)
        command.add_argument("--max-num-batched-tokens", type=int, default=2_048)
        command.add_argument("--max-num-seqs", type=int, default=64)
        command.add_argument("--max-model-len", type=int, default=8_192)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done; 1 a check is off by more than TOLERANCE; 2 wrong arguments, or nothing could be measured."""
    args = parser().parse_args(argv)
    try:
        return _command(args)
    except (OSError, ValueError, StackError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _command(args: argparse.Namespace) -> int:
    limits = Limits(args.max_num_batched_tokens, args.max_num_seqs, args.max_model_len, args.block_size)
    if args.command == "fit":
        costs = fit(json.loads(args.samples.read_text()), limits)
        args.out.write_text(json.dumps({"costs": asdict(costs)}, indent=1) + "\n")
        print(args.out.read_text())
        return 0
    if args.command == "measure":
        args.out.write_text(json.dumps(uvloop.run(measure(args.url, args.model, args.seed)), indent=1))
        return 0
    mixes = [Mix(rate, args.seconds, args.seed + index) for index, rate in enumerate(args.rate or [1.0])]
    config = _config(load_costs(args.costs), limits, args.blocks)
    lines = uvloop.run(check(args.url, args.model, config, mixes))
    for line in lines:
        print(json.dumps(line))
    return int(any(abs(line[f"p{q}_error"]) > TOLERANCE for line in lines for q in (50, 90)))


if __name__ == "__main__":
    sys.exit(main())
