"""Real vLLM with NIXL: a prefill and a decode engine announce what they are, pair, and do hand over a prompt."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import TYPE_CHECKING

import httpx
import pytest
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.engine import BLOCK_TOKENS, MODEL, SERVED_NAME, SLEEPS, EngineOptions, running
from tests.vllm.replicas import replicas
from tests.vllm.test_doctor import doctor

from warmfleet.cli.doctor.finding import State
from warmfleet.cli.local.ports import free_port
from warmfleet.fleet import Fleet, connect

if TYPE_CHECKING:
    from tests.vllm.engine import VllmEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.long(
        minutes=3,
        shows=(
            "real vLLM with NIXL, a prefill and a decode engine: what they announce is right, `warmfleet doctor` says "
            "that they pair, a prompt handed over by hand is taken, and one engine serves each request of a router"
        ),
    ),
]

LEASE_S = 60
AFTER_EXPIRY = "nixl_num_notifications_after_expiry_total"
STEP_1 = {"do_remote_decode": True, "do_remote_prefill": False}
NIXL = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu", "kv_load_failure_policy": "recompute"}


def options(
    redis_url: str, name: str, role: str, port: int, device: str = "cpu", lease_s: int = LEASE_S
) -> EngineOptions:
    environment = {"UCX_TLS": "tcp,self,sm", "TORCHDYNAMO_DISABLE": "1", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
    environment |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), **SLEEPS}
    extra = {"kv_connector_extra_config": {"kv_lease_duration": lease_s, "num_threads": 0}}
    arguments = ("--kv-transfer-config", json.dumps(NIXL | extra | {"kv_role": role, "kv_buffer_device": device}))
    return EngineOptions(redis_url, worker_id=name, arguments=arguments, environment=environment)


def counted(engine: VllmEngine, name: str, label: str = "") -> float:
    """Return the sum of a metric of vLLM's over the series with this label."""
    text = httpx.get(f"{engine.url}/metrics", timeout=30).text
    return sum(map(float, re.findall(rf"^vllm:{name}\{{[^}}]*{label}[^}}]*\}} (\S+)", text, re.MULTILINE)))


def taken_from_others(engine: VllmEngine) -> int:
    """Tokens of prompts that the engine got from another one."""
    return round(counted(engine, "prompt_tokens_by_source_total", '"external_kv_transfer"'))


async def test_a_prefill_and_a_decode_engine_pair() -> None:
    ports = free_port(), free_port()
    with server(valkey_binary()) as redis_url:
        prefill, decode = (
            options(redis_url, name, role, port)
            for name, role, port in zip("pd", ("kv_producer", "kv_consumer"), ports, strict=True)
        )
        with running(prefill, decode) as [p, d], replicas(redis_url, 1, engines=2) as [url]:
            fleet = Fleet(connect(redis_url, timeout_s=5), SERVED_NAME)
            views = {view.worker_id: view.transfer for view in await fleet.workers.read()}
            await fleet.close()
            ours, theirs = views["p.0"], views["d.0"]
            assert ours is not None
            assert theirs is not None
            assert [ours.role, theirs.role] == ["prefill", "decode"]
            assert [(told.host, told.port) for told in (ours, theirs)] == [("127.0.0.1", port) for port in ports]
            assert [ours.lease_s, ours.recomputes, ours.has_fixed_id] == [LEASE_S, True, False]
            assert ours.engine_id != theirs.engine_id
            assert ours.same == theirs.same
            same = dict(ours.same)
            assert (same["model path"], same["block size"], same["attention backend"]) == (
                *(str(MODEL), str(BLOCK_TOKENS), "CPU_ATTN"),
            )
            assert re.fullmatch("[0-9a-f]{64}", same["NIXL's hash"])

            report, printed = await doctor(redis_url, p)
            fine = [
                finding.detail for _, finding in report.found if (finding.check, finding.state) == ("pairs", State.OK)
            ]
            assert [text.partition(" (")[0] for text in fine] == ["p.0 can prefill for d.0"], printed

            ids = random.Random(7).choices(range(3, 900), k=1_000)
            params = p.complete(ids, kv_transfer_params=STEP_1)["kv_transfer_params"]
            assert (params["remote_engine_id"], params["remote_port"]) == (ours.engine_id, ours.port)
            handed = d.complete(ids, max_tokens=4, kv_transfer_params=params)
            assert taken_from_others(d) >= 960, "the handshake of a pair succeeds"
            alone = p.complete(ids, max_tokens=4)
            assert handed["choices"][0]["text"] == alone["choices"][0]["text"]
            await hang_up_late(p, d)

            async with httpx.AsyncClient(timeout=120) as client:
                for number in range(6):
                    body = {"model": SERVED_NAME, "prompt": [number + 5] * 200, "max_tokens": 2}
                    answer = await client.post(f"{url}/v1/completions", json=body)
                    assert answer.status_code == 200, answer.text
                refused = await client.post(f"{url}/v1/completions", json=body | {"kv_transfer_params": STEP_1})
                assert refused.status_code == 400
            assert taken_from_others(p) == 0


async def hang_up_late(p: VllmEngine, d: VllmEngine) -> None:
    """When the client of an answer that is not streamed leaves, vLLM tells the prefill engine once more that the blocks
    are free, and that engine counts this as if they had been read after its lease."""
    ids = random.Random(8).choices(range(3, 900), k=1_000)
    params = p.complete(ids, kv_transfer_params=STEP_1)["kv_transfer_params"]
    taken, late = taken_from_others(d), counted(p, AFTER_EXPIRY)
    body = {"model": SERVED_NAME, "prompt": ids, "max_tokens": 3_000, "ignore_eos": True, "kv_transfer_params": params}
    async with httpx.AsyncClient(timeout=120) as client:
        answer = asyncio.create_task(client.post(f"{d.url}/v1/completions", json=body))
        await poll(lambda: taken_from_others(d) > taken, 60, "the blocks have come")
        assert counted(p, AFTER_EXPIRY) == late
        answer.cancel()

    def has_counted() -> bool:
        p.complete(ids[:40])  # an idle engine hears nothing
        return counted(p, AFTER_EXPIRY) == late + 1

    await poll(has_counted, 60, "the prefill engine counts it as too late", every_s=1)
