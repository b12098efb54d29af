"""Engines without the plugin behind `warmfleet bridge`, a process of its own: the index equals the engines' tables."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import pytest
from tests.support.engines.simulated import SCHEME, SCHEMES, config, demo_identity, running
from tests.support.polling import poll
from tests.support.replicas.replica import Replica, replica

from warmfleet_loadtest.engine import Engine
from warmfleet_loadtest.simulator.api import Served
from warmfleet_loadtest.simulator.kv_events import KvEvents
from warmfleet_loadtest.simulator.step_costs import StepCosts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from warmfleet_worker.protocol import wire


@asynccontextmanager
async def publishing(model: str, blocks: int = 256, scheme: wire.Scheme = SCHEME) -> AsyncIterator[Engine]:
    """A simulated engine that publishes KV events and belongs to no fleet."""
    engine = Engine(config(blocks=blocks, scheme=scheme), demo_identity(), Served((model,)))
    async with running(ready=engine):
        engine.publish_kv_events()
        yield engine


def option(engine: Engine) -> str:
    assert engine.kv_events is not None
    ports = engine.kv_events.port, engine.kv_events.replay_port
    return f"http://127.0.0.1:{engine.port}=tcp://127.0.0.1:{ports[0]},replay=tcp://127.0.0.1:{ports[1]}"


@contextmanager
def bridge(redis_url: str, *engines: Engine, tokenizer: str = "none") -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-m", "warmfleet_worker.bridge", "--redis", redis_url, "--tokenizer", tokenizer]
    for engine in engines:
        argv += ["--engine", option(engine)]
    with subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as process:
        try:
            yield process
        finally:
            process.kill()


async def ask(engine: Engine, model: str, prompt: list[int], tokens: int = 8) -> None:
    """Send a request to the engine itself, without a router."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens}
    async with aiohttp.ClientSession() as client:
        answer = await client.post(f"http://127.0.0.1:{engine.port}/v1/completions", json=body)
        assert answer.status == 200, await answer.text()


async def indexed(router: Replica) -> dict[str, set[bytes]]:
    """The blocks of each worker by the index, by worker_id."""
    found = {}
    for worker in await router.fleet.workers.read():
        found[worker.worker_id] = await cast(
            "Any", router.fleet.redis.smembers(router.fleet.keys.slot(worker.load.slot))
        )
    return found


async def equal(router: Replica, *engines: Engine) -> None:
    """Return when the index equals the tables of all these engines."""

    async def same() -> bool:
        index = await indexed(router)
        tables = {f"127.0.0.1-{engine.port}.0": set(engine.core.scheduler.pool.held()) for engine in engines}
        return index == tables

    await poll(same, 30, "the index equals the tables")


def prompt(seed: int, tokens: int = 200) -> list[int]:
    return [1_000 + (seed * 7_919 + index * 31) % 5_000 for index in range(tokens)]


async def test_bridged_engines_are_proven_and_matched_and_a_killed_bridge_costs_nothing(
    valkey_url: str, model: str
) -> None:
    """Two engines have served requests before. The bridge is killed, misses events, and is started again."""
    async with publishing(model) as one, publishing(model) as two:
        for seed in range(12):
            await ask(one, model, prompt(seed))
        async with replica(valkey_url, model) as router:
            with bridge(valkey_url, one, two) as process:
                await router.routable(2)
                await equal(router, one, two)
                body = {"model": model, "prompt": prompt(3), "max_tokens": 1}
                status, headers, _ = await router.post(body)
                assert status == 200
                assert headers["x-warmfleet-worker"] == f"127.0.0.1-{one.port}.0"
                assert int(headers["x-warmfleet-matched-tokens"]) == 192
                process.send_signal(signal.SIGKILL)
            for seed in range(20, 40):  # these prompts also evict blocks
                await asyncio.gather(ask(one, model, prompt(seed)), ask(two, model, prompt(-seed)))
            with bridge(valkey_url, one, two):
                await equal(router, one, two)
                await router.routable(2)


async def test_a_bridged_engine_whose_hashes_look_ahead_is_matched(valkey_url: str, model: str) -> None:
    """The bridge learns it from the first events, and the engine joins anew."""
    async with publishing(model, scheme=SCHEMES["lookahead"]) as engine, replica(valkey_url, model) as router:
        await ask(engine, model, prompt(1))
        with bridge(valkey_url, engine):
            await equal(router, engine)
            await router.routable(1)
            for tokens, matched in ((200, 192), (193, 192), (192, 176)):
                body = {"model": model, "prompt": prompt(1, tokens), "max_tokens": 1}
                status, headers, _ = await router.post(body)
                assert (status, int(headers["x-warmfleet-matched-tokens"])) == (200, matched)


async def test_a_bridged_engine_answers_many_plain_requests_at_a_time(valkey_url: str, model: str) -> None:
    """No report tells the ends of the prefills, and the answers take long."""
    async with publishing(model, blocks=2_048) as engine, replica(valkey_url, model, max_engine_wait_s=0.05) as router:
        with bridge(valkey_url, engine):
            await router.routable(1)
            engine.core.costs = StepCosts(base_s=0.05, prefill_token_s=0.0)
            bodies = [{"model": model, "prompt": prompt(100 + seed, 600), "max_tokens": 400} for seed in range(6)]
            sent = [asyncio.create_task(router.post(body | {"ignore_eos": True})) for body in bodies]
            await poll(lambda: len(engine.core.scheduler.running) == len(sent), 15, "all of them are answered")
            assert not any(request.done() for request in sent), "at the same time"
            engine.core.costs = StepCosts(base_s=0.0, prefill_token_s=0.0)
            assert [(await request)[0] for request in sent] == [200] * len(sent)
        await router.unloaded()


async def test_lost_events_a_reset_and_a_restarted_engine(valkey_url: str, model: str) -> None:
    async with publishing(model) as engine, replica(valkey_url, model) as router:
        with bridge(valkey_url, engine):
            await router.routable(1)
            events = cast("KvEvents", engine.kv_events)
            await ask(engine, model, prompt(1))
            sockets, events._socket = events._socket, cast("Any", Silence())
            await ask(engine, model, prompt(2))  # the events of this request are lost
            events._socket = sockets
            await equal(router, engine)
            engine.core.scheduler.pool.reset()
            events.publish()
            await equal(router, engine)
            await ask(engine, model, prompt(3))
            await equal(router, engine)

            slot = (await router.fleet.workers.read())[0].load.slot
            ports = events.port, events.replay_port
            events.close()  # as if another process with an empty cache took over the addresses
            engine.core.scheduler.pool.reset()
            engine.kv_events = KvEvents(engine.core.scheduler, ports)
            engine.core.stepped = engine.kv_events.publish
            await ask(engine, model, prompt(4))
            await equal(router, engine)
            assert (await router.fleet.workers.read())[0].load.slot != slot
            await router.routable(1)


class Silence:
    """A socket that drops all sent frames."""

    def send_multipart(self, _frames: object) -> None:
        pass


@pytest.mark.long(minutes=1, shows="the bridge announces the tokenizer of a folder, and texts are matched")
async def test_the_tokenizer_of_a_folder_makes_texts_match(valkey_url: str, model: str, tmp_path: Path) -> None:
    for name, content in demo_identity().artifacts().items():
        (tmp_path / name).write_bytes(content)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", **demo_identity().special_tokens}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    async with publishing(model) as engine, replica(valkey_url, model) as router:
        with bridge(valkey_url, engine, tokenizer=str(tmp_path)):
            await router.proven()
            messages = [{"role": "user", "content": "Tell me about bridges. " * 30}]
            for _ in range(2):
                status, headers, _ = await router.post({"model": model, "messages": messages}, "/v1/chat/completions")
                assert status == 200
                await equal(router, engine)
            assert int(headers["x-warmfleet-matched-tokens"]) > 100
