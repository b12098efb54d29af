"""Real vLLM with Mooncake, a prefill and a decode engine behind a router: conversations are split, and answered as by
one engine. And why the steps of a request are not sent at once: a decode engine that waits in vain keeps its memory."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import re
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.vllm import trees
from tests.vllm.engine import ROOT, SERVED_NAME, SLEEPS, TRUTH, EngineOptions, running
from tests.vllm.replicas import replicas
from tests.vllm.test_disaggregated import CLOSE, Answer, ask, late_transfers, plain_texts

from warmfleet.cli.local.ports import free_port

if TYPE_CHECKING:
    from tests.vllm.engine import VllmEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1_800),
    pytest.mark.long(
        minutes=6,
        shows=(
            "60 conversations on real vLLM with Mooncake, a prefill and a decode engine: every answer is that of one "
            "engine, as much is cached as predicted; a decode engine whose partner dies keeps the memory of its prompt "
            "if it got its step at once"
        ),
    ),
]
CONVERSATIONS, AT_ONCE = 60, 12
#: Needs libibverbs1, libnuma1, libnl-3-200, libnl-route-3-200 and librdmacm1 of Debian.
PACKAGE, NEEDED = (
    "mooncake-transfer-engine-non-cuda==0.3.13.post1",
    ("libibverbs.so.1", "libnuma.so.1", "librdmacm.so.1"),
)
ABORT_S = 60
TIMED = 20  # requests with steps at once, and as many with one after the other


def options(redis_url: str, name: str, role: str) -> EngineOptions:
    for library in NEEDED:
        try:
            ctypes.CDLL(library)
        except OSError:
            pytest.fail("install libibverbs1 libnuma1 libnl-3-200 libnl-route-3-200 librdmacm1, which Mooncake needs")
    config = {"kv_connector": "MooncakeConnector", "kv_role": role, "kv_load_failure_policy": "recompute"}
    config["kv_connector_extra_config"] = {"mooncake_protocol": "tcp"}  # type: ignore[assignment]
    path = os.pathsep.join(map(str, (TRUTH, ROOT / "worker_plugin", trees.installed("mooncake", PACKAGE))))
    environment = {"TORCHDYNAMO_DISABLE": "1", **SLEEPS, "ENGINE_TRUTH_ACCELERATOR": "1", "PYTHONPATH": path}
    environment |= {
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(free_port()),
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": f"{ABORT_S}",
    }
    arguments = ("--kv-transfer-config", json.dumps(config))
    return EngineOptions(redis_url, name, blocks=400, arguments=arguments, environment=environment)


async def test_answers_are_those_of_one_engine() -> None:
    rng = random.Random(3)
    talks = [plain_texts(rng) for _ in range(CONVERSATIONS)]
    answers: list[tuple[dict[str, Any], Answer]] = []
    with server(valkey_binary()) as redis_url:
        wanted = options(redis_url, "p", "kv_producer"), options(redis_url, "d", "kv_consumer")
        with running(*wanted) as [prefill, decode], replicas(redis_url, 1, engines=2) as [url]:
            async with httpx.AsyncClient(timeout=240) as client:
                places = asyncio.Semaphore(AT_ONCE)

                async def talk(turns: list[dict[str, Any]]) -> None:
                    async with places:
                        answers.extend([(body, await ask(client, url, body)) for body in turns])

                await asyncio.gather(*map(talk, talks))
                split = Counter(bool(one.prefill) for _, one in answers)
                off = [one for _, one in answers if one.predicted != one.cached]
                late = await late_transfers(client, url)
                print(f"\nsplit: {dict(split)}; predicted otherwise than cached: {len(off)}; late: {late}")
                for engine in (prefill, decode):
                    assert not [body for body, one in answers if not await alike(client, engine, body, one)]
            assert split[True] > len(answers) // 10
            assert len(off) <= late


async def alike(client: httpx.AsyncClient, engine: VllmEngine, body: dict[str, Any], ours: Answer) -> bool:
    alone = await ask(client, engine.url, body)
    near = all(abs(one - other) <= CLOSE for one, other in zip(alone.logprobs, ours.logprobs, strict=False))
    return alone.tokens == ours.tokens and near


async def test_a_decode_engine_that_waits_for_a_dead_partner_keeps_its_memory() -> None:
    """So a router sends it nothing before the prefill engine has answered, though both steps at once are quicker."""
    with server(valkey_binary()) as redis_url:
        wanted = options(redis_url, "p", "kv_producer"), options(redis_url, "d", "kv_consumer")
        with running(*wanted) as [prefill, decode]:
            async with httpx.AsyncClient(timeout=240) as client:
                steps = await Steps.find(client, prefill, decode, wanted[0])
                took_s: dict[bool, list[float]] = {True: [], False: []}
                for number in range(2 * TIMED + 2):
                    began_at = time.perf_counter()
                    await steps.take(f"t{number}", at_once=number % 2 == 0)
                    took_s[number % 2 == 0].append(time.perf_counter() - began_at)
                at_once, later = (statistics.median(took_s[which][1:]) for which in (True, False))
                print(f"\nboth steps at once take {at_once:.3f} s, one after the other {later:.3f} s")
                waits = asyncio.create_task(steps.second("never"))
                await poll(lambda: usage(decode) > 0.05, 30, "the decode engine holds the prompt's memory")
                prefill.kill()
                waits.cancel()  # the router gives the request up
                gone = time.monotonic()
                await poll(lambda: usage(decode) < 0.01, 4 * ABORT_S, "the memory is free again")
                print(f"held for {time.monotonic() - gone:.0f} s after the request was given up")
                assert time.monotonic() - gone > ABORT_S / 2


@dataclass
class Steps:
    """Both steps of a request with a new prompt. place, told: the prefill engine's bootstrap server, and id there."""

    client: httpx.AsyncClient
    prefill: VllmEngine
    decode: VllmEngine
    place: str
    told: str
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    ids: list[int] = field(default_factory=list)

    @classmethod
    async def find(
        cls, client: httpx.AsyncClient, prefill: VllmEngine, decode: VllmEngine, started: EngineOptions
    ) -> Steps:
        place = f"http://127.0.0.1:{started.environment['VLLM_MOONCAKE_BOOTSTRAP_PORT']}"
        told = (await client.get(f"{place}/query")).json()["0"]["engine_id"]
        return cls(client, prefill, decode, place, told)

    async def take(self, name: str, *, at_once: bool) -> None:
        self.ids = self.rng.choices(range(3, 900), k=1_000)
        if at_once:
            await asyncio.gather(self.first(name), self.second(name))
        else:
            await self.first(name)
            await self.second(name)

    async def first(self, name: str) -> None:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
        await self._post(self.prefill, params, 1)

    async def second(self, name: str) -> None:
        params = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": name}
        await self._post(self.decode, params | {"remote_engine_id": self.told, "remote_bootstrap_addr": self.place}, 1)

    async def _post(self, engine: VllmEngine, params: dict[str, Any], tokens: int) -> None:
        body = {"model": SERVED_NAME, "prompt": self.ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = await self.client.post(f"{engine.url}/v1/completions", json=body | {"kv_transfer_params": params})
        answer.raise_for_status()


def usage(engine: VllmEngine) -> float:
    text = httpx.get(f"{engine.url}/metrics", timeout=30).text
    return max(map(float, re.findall(r"^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)", text, re.MULTILINE)))
