"""Simulated vLLM engines: tokens, block hashes and prefix cache are real, modelled step times replace the model.

    python -m warmfleet_loadtest.engine --port 8001                       # one engine without the plugin
    python -m warmfleet_loadtest.engine --count 4 --port 8001 \\
        --redis unix:///tmp/store.sock                                    # four engines that join a fleet
    python -m warmfleet_loadtest.engine --step-time fit.json --blocks 4096    # step times from a calibration
    python -m warmfleet_loadtest.engine --kv-role kv_producer             # computes prompts for other engines

Then: curl http://127.0.0.1:8001/v1/completions -H 'content-type: application/json' \\
          -d '{"model": "demo", "prompt": "Once upon a time", "max_tokens": 8}'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import uvloop
from aiohttp import web

from warmfleet_loadtest.simulator.api import Api, Served
from warmfleet_loadtest.simulator.choosers.chooser_port import ChooserApi, ChosenCore
from warmfleet_loadtest.simulator.engine_core import EngineCore
from warmfleet_loadtest.simulator.fcfs_scheduler import FcfsScheduler
from warmfleet_loadtest.simulator.fleet_membership import Halves, Membership
from warmfleet_loadtest.simulator.plugin_pool import PluginPool
from warmfleet_loadtest.simulator.scheduler import Limits, Scheduler
from warmfleet_loadtest.simulator.step_costs import PRESETS, StepCosts, load_costs
from warmfleet_loadtest.simulator.transfers.config import ROLES, Link, config_of_role, read_config
from warmfleet_loadtest.simulator.transfers.engine_side import Transfers
from warmfleet_loadtest.simulator.transfers.faults import Faults
from warmfleet_loadtest.simulator.transfers.scheduler import TransferScheduler
from warmfleet_loadtest.tokens.prompt_tokenizer import PromptTokenizer
from warmfleet_worker.eviction.eviction import Eviction
from warmfleet_worker.eviction.tail_eviction import tail_eviction_of
from warmfleet_worker.protocol import wire
from warmfleet_worker.protocol.redis_address import with_ca
from warmfleet_worker.server_address import default_server_id, worker_url
from warmfleet_worker.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from warmfleet_loadtest.simulator.kv_events import KvEvents
    from warmfleet_loadtest.simulator.transfers.config import TransferConfig

REPLAY_PORTS = 100  # port of an engine's event replays minus port of its KV events
INSTALL_KV_EVENTS = "pip install './worker_plugin[bridge]' in a checkout of Warmfleet"  # what --kv-events needs
EXTRA_KEYS = {"none": "tagged", "lookahead": "lookahead_1", "drop": "tagged_drop"}  # Scheme.extra_keys by --eagle
STOP_SECONDS = 2.0  # longest time for open requests to end when the engine stops


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """An engine's settings, except how it joins a fleet.

    mode: ``step`` for vLLM's scheduler, ``fcfs`` for one prefill at a time. fcfs_decode_s: seconds per token of an
    answer in mode fcfs. ttft_target: WARMFLEET_TTFT_TARGET_S of the plugin: evict by T-LRU, too. transfer: how it hands
    blocks to other engines; needs mode ``step``.
    """

    scheme: wire.Scheme
    limits: Limits
    blocks: int
    costs: StepCosts
    mode: str = "step"
    fcfs_decode_s: float = 0.02
    ttft_target: str = ""
    transfer: TransferConfig | None = None

    def scheduler(self, listener: Tracker | None = None, clock: Callable[[], float] = time.monotonic) -> Scheduler:
        """Return a scheduler with an empty cache. clock: monotonic seconds, real or simulated."""
        pool = PluginPool(self.blocks, self._eviction(), listener, clock)
        if self.transfer is not None:
            made: Scheduler = TransferScheduler(pool, self.scheme, self.limits)
        elif self.mode == "fcfs":
            made = FcfsScheduler(pool, self.scheme, self.limits, self.fcfs_decode_s)
        else:
            made = Scheduler(pool, self.scheme, self.limits)
        made.follower = pool
        return made

    def _eviction(self) -> Eviction:
        size, tail = self.limits.block_tokens, None
        if self.ttft_target:
            speed = round(1 / self.costs.prefill_token_s)  # the plugin measures this speed on a real engine
            tail = tail_eviction_of(self.ttft_target, lambda: speed, size, self.blocks)
        return Eviction(size, self.blocks, tail)


class Engine:
    """A simulated engine: its HTTP port, its core and, in a fleet, its publishers."""

    def __init__(self, config: EngineConfig, tokenizer: PromptTokenizer, served: Served) -> None:
        self.tracker = Tracker()
        self.core = EngineCore(config.scheduler(self.tracker), config.costs)
        self.tokenizer = tokenizer
        self.served = served
        self.port = 0
        self.halves: Halves | None = None
        self.kv_events: KvEvents | None = None
        self._runner: web.AppRunner | None = None
        self._steps: asyncio.Task[None] | None = None
        self.transfers = self._transfers(config)
        self._side_channel: web.AppRunner | None = None
        self._ends: list[asyncio.Task[None]] = []  # of ports, if the engine dies

    def _transfers(self, config: EngineConfig) -> Transfers | None:
        scheduler = self.core.scheduler
        if config.transfer is None or not isinstance(scheduler, TransferScheduler):
            return None
        faults = Faults(self.die, runs=self.core.runs)
        same = {"model path": self.served.models[0], "block scheme": str(config.scheme.scheme_id)}
        return Transfers(config.transfer, self.core, scheduler, faults, same)

    async def start(self, host: str, port: int) -> None:
        """Listen (0: on any free port) and run the core. Raises OSError if a port is taken."""
        if self.transfers is not None:
            side = self.transfers.prefill
            self._side_channel = await listening(side.app(), host, side.config.port)
            side.port = self._side_channel.addresses[0][1]
        self._runner = await listening(Api(self.core, self.tokenizer, self.served, self.transfers).app(), host, port)
        self.port = self._runner.addresses[0][1]
        self._steps = asyncio.create_task(self.core.run())

    def join(self, membership: Membership, artifacts: Mapping[str, bytes]) -> None:
        """Join a fleet: start the publishers, which have threads of their own."""
        transfer = self.transfers.announced() if self.transfers else None
        self.halves = Halves(membership, self.core, self.tracker, self.tokenizer, artifacts, transfer)
        halves = self.halves
        self.core.arrived, self.core.progress, self.core.ended = halves.arrived, halves.progress, halves.ended
        self.halves.start()

    def publish_kv_events(self, ports: tuple[int, int] = (0, 0)) -> KvEvents:
        """Publish vLLM's KV events over ZMQ; return the publisher, which knows its ports.

        ports: of events and replays; 0: any free one.
        """
        # Imported here, because the module needs pyzmq and msgpack, which `make run` does not install.
        from warmfleet_loadtest.simulator.kv_events import KvEvents

        self.core.scheduler.follower = None  # an engine that needs the bridge has no plugin
        self.kv_events = KvEvents(self.core.scheduler, ports)
        self.core.stepped = self.kv_events.publish
        return self.kv_events

    def die(self) -> None:
        """Close all connections and listen no more, as a killed process; only the fleet is told."""
        for runner in (self._runner, self._side_channel):
            if runner is None or runner.server is None:
                continue
            self._ends += [asyncio.create_task(site.stop()) for site in runner.sites]
            for connection in runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
        self.core.runs.clear()
        if self.halves is not None:
            Thread(target=self.halves.stop, daemon=True).start()
            self.halves = None

    async def stop(self) -> None:
        """Leave the fleet, then give open requests STOP_SECONDS to end."""
        if self.halves is not None:
            await asyncio.to_thread(self.halves.stop)
        if self.transfers is not None:
            self.transfers.faults.runs.set()
            await self.transfers.decode.close()
        for runner in (self._runner, self._side_channel):
            if runner is not None:
                await runner.cleanup()
        if self._steps is not None:
            self._steps.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._steps
        if self.kv_events is not None:
            self.kv_events.close()


async def listening(app: web.Application, host: str, port: int) -> web.AppRunner:
    """Serve an application. Raises OSError if the port is taken."""
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, shutdown_timeout=STOP_SECONDS, keepalive_timeout=5.0
    )
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=1_024).start()
    return runner


async def serve(args: argparse.Namespace) -> None:
    """Run the engines of the command line until SIGTERM or SIGINT. Raises OSError if an engine cannot listen."""
    tokenizer = PromptTokenizer.load(args.tokenizer)
    config = engine_config(args)
    served = Served(tuple(args.model), args.api_key)
    artifacts = tokenizer.artifacts() if args.redis else {}
    engines = [Engine(config, tokenizer, served) for _ in range(args.count)]
    front: web.AppRunner | None = None
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        for index, engine in enumerate(engines):
            await engine.start(args.host, args.port + index if args.port else 0)
            if args.redis:
                engine.join(membership(args, engine.port, index), artifacts)
            if engine.transfers is not None:
                engine.transfers.faults.die = partial(os._exit, 1)  # the whole process, as a killed one
            url = f"http://{args.host}:{engine.port}"
            if args.kv_events is not None:
                first = args.kv_events + index if args.kv_events else 0
                events = engine.publish_kv_events((first, first and first + REPLAY_PORTS))
                print(f"engine {index} publishes KV events on port {events.port}", flush=True)
                print(f"engine {index} replays KV events on port {events.replay_port}", flush=True)
                source = f"{url}=tcp://127.0.0.1:{events.port},replay=tcp://127.0.0.1:{events.replay_port}"
                options = f"--tokenizer {args.tokenizer or 'none'} --engine {source}"  # none: the demo's is on no hub
                print(f"engine {index} is bridged by: warmfleet bridge --redis URL {options}", flush=True)
            print(f"engine {index} serves {args.model[0]} on {url}", flush=True)
        if args.chooser:
            core = ChosenCore([engine.core for engine in engines], args.chooser)
            front = await listening(ChooserApi(core, tokenizer, served).app(), args.host, 0)
            print(f"{args.chooser} chooses among them on http://{args.host}:{front.addresses[0][1]}", flush=True)
        await stopping.wait()
    finally:
        if front is not None:
            await front.cleanup()
        await asyncio.gather(*(engine.stop() for engine in engines))


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the engine settings that the command line asks for. Raises ValueError if no engine can have them."""
    none_hash = wire.default_none_hash(args.hash_algo)
    scheme = wire.Scheme(args.hash_algo, none_hash, args.block_size, EXTRA_KEYS[args.eagle])
    length = args.max_model_len or min(32_768, (args.blocks - 1) * args.block_size)
    limits = Limits(args.max_num_batched_tokens, args.max_num_seqs, length, args.block_size)
    costs = load_costs(args.step_time).scaled(args.time_scale)
    decode_s = args.fcfs_decode * args.time_scale
    transfer = transfer_config(args)
    config = EngineConfig(scheme, limits, args.blocks, costs, args.mode, decode_s, transfer=transfer)
    config.scheduler()
    return config


def transfer_config(args: argparse.Namespace) -> TransferConfig | None:
    """Return how the engine hands blocks to others. Raises ValueError if no engine can."""
    if not args.kv_transfer_config and not args.kv_role:
        return None
    if args.mode == "fcfs":
        raise ValueError("--kv-role and --kv-transfer-config need --mode step")
    link = Link(args.kv_gbit * 1e9 / 8 / args.time_scale, 0.005 * args.time_scale, token_bytes=args.kv_token_bytes)
    if args.kv_role:
        return config_of_role(args.kv_role, link, args.kv_version)
    return read_config(args.kv_transfer_config, link, args.kv_version)


def membership(args: argparse.Namespace, port: int, index: int) -> Membership:
    """Return how the engine with this port joins. Raises UrlRefusedError for an address that routers cannot reach."""
    server_id = args.worker_id or default_server_id([*sys.argv, str(args.port or port)])
    if args.count > 1:
        server_id = f"{server_id}-{index}"
    url = worker_url(args.redis, args.host, port)
    redis_url = with_ca(args.redis, os.environ.get("WARMFLEET_REDIS_CA", ""))
    return Membership(redis_url, args.fleet or args.model[0], tuple(args.model), server_id, url)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m warmfleet_loadtest.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    env = os.environ.get
    add = made.add_argument_group("where").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--port", type=int, default=8001, help="of the first engine; 0 = any free (default %(default)s)")
    add("--count", type=int, default=1, help="engines in this process, on consecutive ports")
    add("--model", action="append", metavar="NAME", help="served name; may be repeated (default demo)")
    add("--api-key", help="refuse /v1 requests without this bearer token")
    add = made.add_argument_group("fleet (without --redis the engine publishes nothing)").add_argument
    add("--redis", metavar="URL", default=env("WARMFLEET_REDIS_URL"), help="$WARMFLEET_REDIS_URL")
    add("--fleet", metavar="TAG", default=env("WARMFLEET_MODEL"), help="model tag in Redis (--model)")
    add("--worker-id", metavar="ID", default=env("WARMFLEET_WORKER_ID"), help="--count appends -0, -1, ...")
    add(
        "--kv-events",
        metavar="PORT",
        type=int,
        nargs="?",
        const=0,
        help="publish vLLM's KV events over ZMQ on this port and those behind it, one for each engine, and replays "
        f"{REPLAY_PORTS} ports further; without PORT on free ones, which are printed",
    )
    add(
        "--chooser",
        choices=("oracle", "central"),
        help="one more port, which is printed: it sends requests to the engine that is best now, or keeps them back "
        "until one is free and takes the shortest first",
    )
    _add_machine(made)
    return made


def _add_machine(made: argparse.ArgumentParser) -> None:
    """Add the options of the machine that is simulated: its cache, its scheduler and its speed."""
    add = made.add_argument_group("cache and scheduler, in vLLM's words").add_argument
    add("--blocks", type=int, default=4_096, help="--num-gpu-blocks-override (default %(default)s)")
    add("--block-size", type=int, default=16, help="tokens in a block (default %(default)s)")
    add("--hash-algo", choices=("sha256_cbor", "sha256"), default="sha256_cbor")
    add(
        "--eagle",
        choices=EXTRA_KEYS,
        default="none",
        help="hash and match blocks as vLLM does with --speculative-config of EAGLE or MTP: lookahead since 0.33, drop "
        "before and beside a KV connector. It drafts no tokens (default %(default)s)",
    )
    add("--max-num-batched-tokens", type=int, default=2_048, help="per step (default %(default)s)")
    add("--max-num-seqs", type=int, default=256, help="running at once (default %(default)s)")
    add("--max-model-len", type=int, help="tokens (default 32768 or what the cache holds)")
    _add_transfers(made)
    add = made.add_argument_group("time").add_argument
    costs = f"preset ({', '.join(PRESETS)}), a factor or a JSON file of calibrate (default demo)"
    add("--step-time", default="demo", help=costs)
    add("--time-scale", type=float, default=1.0, help="all times are multiplied by this")
    add("--mode", choices=("step", "fcfs"), default="step", help="fcfs: one prefill at a time, free decode")
    add("--fcfs-decode", type=float, default=0.02, metavar="S", help="seconds per token in fcfs mode")
    folder = "a model's tokenizer.json and chat_template.jinja"
    made.add_argument("--tokenizer", type=Path, metavar="FOLDER", help=folder)


def _add_transfers(made: argparse.ArgumentParser) -> None:
    """Add the options of engines that hand the blocks of prompts to one another."""
    group = made.add_argument_group("prefill and decode on different engines")
    config_help = (
        "as vLLM's, with NixlConnector or MooncakeConnector: kv_role kv_producer, kv_consumer or kv_both, "
        "kv_load_failure_policy, engine_id and kv_connector_extra_config.kv_lease_duration; VLLM_NIXL_SIDE_CHANNEL_HOST"
        ", _PORT and VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT as for vLLM, but the default port is any free one"
    )
    role = group.add_mutually_exclusive_group()
    role.add_argument(
        "--kv-role",
        choices=ROLES,
        help="short for NixlConnector with this kv_role and kv_load_failure_policy recompute",
    )
    role.add_argument("--kv-transfer-config", metavar="JSON", default="", help=config_help)
    add = group.add_argument
    link = Link()
    gbit = link.bytes_per_s * 8 / 1e9
    add("--kv-gbit", type=float, default=gbit, help="Gbit/s of an engine's link (default %(default)s)")
    add("--kv-token-bytes", type=int, default=link.token_bytes, help="of a token's KV (default %(default)s)")
    add("--kv-version", default="sim", help="that partners must have in common (default %(default)s)")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 stopped as asked, 1 could not start, 2 wrong arguments."""
    args = parser().parse_args(argv)
    args.model = args.model or ["demo"]
    if args.kv_events is not None and args.redis:
        parser().error("--kv-events is for an engine without --redis: only one publisher can listen to the cache")
    if args.chooser and args.redis:
        parser().error("--chooser is for engines without --redis: the fleet's routers choose there")
    try:
        engine_config(args)
        uvloop.run(serve(args))
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is not installed: {INSTALL_KV_EVENTS}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
