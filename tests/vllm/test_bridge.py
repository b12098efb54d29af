"""Stock vLLM behind the bridge: the index is the engines' own block tables, whatever is lost or killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest
import redis
from tests.support.polling import poll
from tests.support.replicas.replica import Replica, replica
from tests.vllm.engine import SERVED_NAME, EngineOptions, VllmEngine

from warmfleet.cli.local.ports import free_port
from warmfleet_worker.bridge.block_table import scheme_of
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=4,
        shows=(
            "vLLM without the plugin behind the bridge: its index equals the engine's block table while blocks are "
            "evicted and copied, after a reset, after the bridge was killed, and after the engine was; and it knows "
            "the prefixes that vLLM loads from CPU memory"
        ),
    ),
]


def stock(*more: str) -> tuple[VllmEngine, str]:
    """An engine with vLLM's usual hash (pickle, sha256), and what it publishes, as the bridge's option."""
    live, replay = free_port(), free_port()
    config = {"enable_kv_cache_events": True, "publisher": "zmq"}
    config |= {"endpoint": f"tcp://*:{live}", "replay_endpoint": f"tcp://*:{replay}"}
    arguments = ("--kv-events-config", json.dumps(config), "--prefix-caching-hash-algo", "sha256", *more)
    engine = VllmEngine(EngineOptions(blocks=140, arguments=arguments, start_s=500))
    return engine, f"{engine.url}=tcp://127.0.0.1:{live},replay=tcp://127.0.0.1:{replay}"


@contextmanager
def bridge(redis_url: str, option: str) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-m", "warmfleet_worker.bridge", "--redis", redis_url, "--engine", option]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(argv, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


async def equal(router: Replica, engine: VllmEngine, *, empty: bool = False) -> int:
    """Return when the index has as many blocks as the engine's table, by group 0; and their number.

    The index is in the bridge's own chain, so hashes differ. That each of its entries is right is shown by matches:
    see ``predicted``.
    """

    async def same() -> bool:
        [worker] = await router.fleet.workers.read()
        held = await cast("Any", router.fleet.redis.scard(router.fleet.keys.slot(worker.load.slot)))
        table = await asyncio.to_thread(engine.table)
        return bool(held == len(table)) and (empty or held > 0)

    await poll(same, 60, "the index equals the table")
    return len(await asyncio.to_thread(engine.table))


async def predicted(router: Replica, body: dict[str, Any]) -> tuple[int, int]:
    """(matched tokens that the router foretold, cached tokens that the engine reports)."""
    body = {"model": SERVED_NAME, "max_tokens": 4, "temperature": 0} | body
    status, headers, answer = await router.post(body, **{"content-type": "application/json"})
    assert status == 200, answer
    usage = json.loads(answer)["usage"]
    return int(headers["x-warmfleet-matched-tokens"]), usage["prompt_tokens_details"]["cached_tokens"]


async def work(router: Replica, chance: random.Random, requests: int) -> int:
    """Send prompts with common heads, some again, some of whole blocks; the predicted tokens must be cached."""
    heads = [[3 + chance.randrange(250) for _ in range(32 * 8)] for _ in range(3)]
    tokens = 0
    for _ in range(requests):
        own = [3 + chance.randrange(250) for _ in range(chance.choice((0, 32, 100, 400)))]
        body: dict[str, Any] = {"prompt": [*chance.choice(heads), *own]}
        if chance.random() < 0.2:
            body["cache_salt"] = "tenant"
        if chance.random() < 0.2:
            body["vllm_xargs"] = {"kv_cache_report_mode": "full"}
        matched, cached = await predicted(router, body)
        assert matched <= cached
        tokens += cached - matched
    return tokens


@pytest.mark.timeout(1_500)
async def test_the_index_is_the_table_of_stock_vllm(valkey_url: str) -> None:
    chance = random.Random(5)
    engine, option = stock()
    try:
        engine.start()
        await asyncio.to_thread(engine.wait)
        for _ in range(6):  # before any bridge listens
            await asyncio.to_thread(engine.complete, [3 + chance.randrange(250) for _ in range(320)])
        async with replica(valkey_url, SERVED_NAME, decide_timeout_s=5.0) as router:
            with bridge(valkey_url, option):
                await router.proven()
                print("blocks at the start", await equal(router, engine))
                short = await work(router, chance, 40)
                print("blocks after work", await equal(router, engine), "tokens cached and not foretold:", short)
                await asyncio.to_thread(engine.reset_prefix_cache)
                await asyncio.to_thread(engine.complete, [5] * 100)  # vLLM tells of a reset with the next request only
                await equal(router, engine)
                await work(router, chance, 10)
                await equal(router, engine)
            for _ in range(20):  # while no bridge listens
                await asyncio.to_thread(engine.complete, [3 + chance.randrange(250) for _ in range(320)])
            with bridge(valkey_url, option):
                print("blocks after the bridge was killed", await equal(router, engine))
                await router.proven()
                engine.kill()
                await poll(lambda: gone(router), 60, "the engine has left")
                engine.start()
                await asyncio.to_thread(engine.wait)
                await router.proven()
                await work(router, chance, 10)
                print("blocks after the engine was killed", await equal(router, engine))
    finally:
        engine.remove()


async def held_by(router: Replica, hashes: list[bytes]) -> tuple[int, int]:
    """(blocks of this prompt that the index says are in the engine's own cache, and with its tier behind them)."""
    fleet, (worker,) = router.fleet, await router.fleet.workers.read()
    own, tier = worker.load.slot, worker.record.get("sets", {}).get("cpu", {}).get("slot", 0)
    slots = [{int(slot) for slot in await cast("Any", fleet.redis.smembers(fleet.keys.block(each)))} for each in hashes]
    device = next((at for at, each in enumerate(slots) if own not in each), len(slots))
    return device, next((at for at, each in enumerate(slots) if at >= device and tier not in each), len(slots))


@pytest.mark.timeout(1_500)
async def test_the_index_has_what_stock_vllm_loads_from_memory(valkey_url: str) -> None:
    """Some 40 prompts overfill the engine's own cache of 140 blocks; the tier has room for all."""
    chance = random.Random(6)
    extra = {"spec_name": "HostTier", "spec_module_path": "host_tier", "cpu_bytes_to_use": 2**25}
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    engine, option = stock("--kv-transfer-config", json.dumps(transfer))
    prompts = [[3 + chance.randrange(250) for _ in range(chance.randrange(40, 600))] for _ in range(40)]
    loaded = 0
    with redis.Redis.from_url(valkey_url) as store:
        store.flushdb()  # other tests' engines have the same model
    try:
        engine.start()
        await asyncio.to_thread(engine.wait)
        async with replica(valkey_url, SERVED_NAME, decide_timeout_s=5.0) as router:
            with bridge(valkey_url, option):
                await router.proven()
                await asyncio.to_thread(engine.complete, prompts[0])
                await poll(lambda: has_tier(router), 60, "the bridge has joined with the tier")
                for number in range(120):
                    await equal(router, engine)
                    prompt = prompts[number] if number < len(prompts) else chance.choice(prompts)
                    digests = wire.chain_hashes(scheme_of(32), prompt[: len(prompt) - 1])
                    device, tier = await held_by(router, [digest[-8:] for digest in digests])
                    matched, cached = await predicted(router, {"prompt": prompt})
                    assert matched == cached, (number, device, tier)
                    assert matched in (32 * tier, len(prompt))
                    loaded += tier > device
                await poll(lambda: has_tier(router, "ps_per_byte"), 30, "it is known how long loads take")
    finally:
        engine.remove()
    assert loaded > 30


async def has_tier(router: Replica, field: str = "slot") -> bool:
    workers = await router.fleet.workers.read()
    return any(field in worker.record.get("sets", {}).get("cpu", {}) for worker in workers if worker.routable)


async def gone(router: Replica) -> bool:
    return not any(worker.routable for worker in await router.fleet.workers.read())
