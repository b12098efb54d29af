"""Prefill and decode on different simulated engines: the two steps, as vLLM with NIXL answers them."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.support.engines.transferring import CONSUMER, PRODUCER, Transferring, pair, text_of, transferring
from tests.support.polling import poll

from warmfleet.fleet import Fleet
from warmfleet.fleet.client import connect
from warmfleet_loadtest.engine import parser, transfer_config
from warmfleet_loadtest.simulator.fleet_membership import Membership
from warmfleet_loadtest.simulator.step_costs import StepCosts
from warmfleet_loadtest.simulator.transfers.config import Link, read_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PROMPT = list(range(500, 700))  # 12 full blocks and half a one
BLOCK_BYTES = 16 * Link().token_bytes
SHORT_LEASE = replace(PRODUCER, lease_s=0.3)


@pytest.fixture
async def two() -> AsyncIterator[tuple[Transferring, Transferring]]:
    async with pair() as made:
        yield made


async def plain(prompt: list[int] = PROMPT) -> str:
    """Return what one engine answers."""
    async with transferring(None) as engine:
        return text_of(await engine.ask(prompt))


def streamed(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_the_decode_engine_answers_as_one_engine_would(two: tuple[Transferring, Transferring]) -> None:
    prefill, decode = two
    first = (await prefill.ask(PROMPT, {"do_remote_decode": True}, max_tokens=1)).json()
    params = first["kv_transfer_params"]
    assert len(first["choices"][0]["text"].split()) == 1
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(1, 14))],
        "remote_engine_id": (await prefill.counts())["engine_id"],
        "remote_request_id": params["remote_request_id"],
        "remote_host": "127.0.0.1",
        "remote_port": (await prefill.counts())["side_channel"],
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 200,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }
    assert (await prefill.counts())["pinned_blocks"] == 13
    answer = await decode.ask(PROMPT, params)
    assert text_of(answer) == await plain()
    assert answer.json()["kv_transfer_params"] is None
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert (await prefill.counts())["pinned_blocks"] == 0
    counts = await decode.counts()
    assert counts["by_source"] == {"local_cache_hit": 0, "external_kv_transfer": 200, "local_compute": 0}
    assert (counts["bytes"], counts["violations"], counts["wrong_answers"]) == (13 * BLOCK_BYTES, {}, 0)
    again = (await decode.ask(PROMPT)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert again == 192, "received blocks are in the cache"


async def test_usage_tells_what_the_prefill_engine_had_cached(two: tuple[Transferring, Transferring]) -> None:
    prefill, decode = two
    await prefill.ask(PROMPT[:100])
    params = await prefill.prefill(PROMPT)
    answer = await decode.ask(PROMPT, params)
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    params = await prefill.prefill(PROMPT[::-1])
    del params["remote_prefill_cached_tokens"]  # vLLM before 0.31
    answer = await decode.ask(PROMPT[::-1], params)
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 200


async def test_only_missing_blocks_travel(two: tuple[Transferring, Transferring]) -> None:
    prefill, decode = two
    await decode.ask(PROMPT[:100])
    await decode.ask(PROMPT, await prefill.prefill(PROMPT))
    assert (await decode.counts())["bytes"] == 7 * BLOCK_BYTES
    await decode.ask(PROMPT, await prefill.prefill(PROMPT))
    assert (await decode.counts())["bytes"] == 8 * BLOCK_BYTES, "the last block is never a hit"


async def test_a_chat_takes_the_same_ids_in_both_steps(two: tuple[Transferring, Transferring]) -> None:
    prefill, decode = two
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "ignore_eos": True}
    ids = {"prompt_token_ids": PROMPT}
    body = chat | {"kv_transfer_params": ids | {"do_remote_decode": True}}
    params = (await prefill.http.post("/v1/chat/completions", json=body)).json()["kv_transfer_params"]
    body = chat | {"kv_transfer_params": ids | params, "stream": True, "max_tokens": 4}
    chunks = streamed(await decode.http.post("/v1/chat/completions", json=body))
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == await plain()
    assert (await decode.counts())["violations"] == {}


async def test_a_streamed_first_step_tells_nothing_and_pins_its_blocks(two: tuple[Transferring, Transferring]) -> None:
    prefill, _decode = two
    answer = await prefill.ask(PROMPT, {"do_remote_decode": True}, max_tokens=1, stream=True)
    assert "kv_transfer_params" not in answer.text
    assert (await prefill.counts())["pinned_blocks"] == 13


# ---------------------------------------------------------------- mistakes that vLLM does not notice


@pytest.mark.parametrize("stream", [False, True])
async def test_parameters_used_twice_give_wrong_answers(two: tuple[Transferring, Transferring], stream: bool) -> None:
    """Later requests with the same prefix are wrong, too, until the blocks are gone; other requests are right."""
    prefill, decode = two
    params = await prefill.prefill(PROMPT)
    right = text_of(await decode.ask(PROMPT, params))
    decode.engine.core.scheduler.pool.reset()
    answer = await decode.ask(PROMPT, params, stream=stream)
    assert answer.status_code == 200
    assert answer.text.count("WRONG-BLOCKS") == 4
    assert (await decode.counts())["violations"] == {"twice": 1}
    longer = text_of(await decode.ask([*PROMPT, 1, 2, 3]))
    assert "WRONG-BLOCKS" in longer, "its cache is poisoned"
    assert (await decode.counts())["wrong_answers"] == 2
    assert "WRONG-BLOCKS" not in text_of(await decode.ask(PROMPT[::-1]))
    pool = decode.engine.core.scheduler.pool
    pool.release(pool.allocate(pool.free))
    assert text_of(await decode.ask(PROMPT)) == right, "evicted"
    assert text_of(await decode.ask(PROMPT)) == right, "and the same blocks hold right content now"


async def test_parameters_used_at_two_engines_give_wrong_answers(two: tuple[Transferring, Transferring]) -> None:
    prefill, decode = two
    async with transferring(CONSUMER) as other:
        params = await prefill.prefill(PROMPT)
        answers = await asyncio.gather(decode.ask(PROMPT, params), other.ask(PROMPT, params))
        assert sorted("WRONG-BLOCKS" in text_of(answer) for answer in answers) == [False, True]
        found = [(await engine.counts())["violations"] for engine in (decode, other)]
        assert sorted(found, key=len) == [{}, {"two_engines": 1}]


async def test_a_poisoned_engine_hands_wrong_blocks_on(two: tuple[Transferring, Transferring]) -> None:
    prefill, decode = two
    params = await prefill.prefill(PROMPT)
    longer = [*PROMPT, *range(50)]
    async with transferring(replace(PRODUCER, role="kv_both")) as third:
        await decode.ask(PROMPT, params)
        assert "WRONG-BLOCKS" in text_of(await third.ask(PROMPT, params))
        assert "WRONG-BLOCKS" in text_of(await decode.ask(longer, await third.prefill(longer)))
        assert (await decode.counts())["violations"] == {}


async def test_blocks_are_free_when_the_lease_has_ended() -> None:
    async with pair(SHORT_LEASE) as (prefill, decode):
        params = await prefill.prefill(PROMPT)
        await poll(lambda: _is(prefill, pinned_blocks=0, expired=1))
        assert "WRONG-BLOCKS" in text_of(await decode.ask(PROMPT, params))
        assert (await decode.counts())["violations"] == {"expired": 1}
        metrics = (await prefill.http.get("/metrics")).text
        assert 'vllm:nixl_num_notifications_after_expiry_total{engine="0",model_name="demo"} 1' in metrics


async def _is(engine: Transferring, **wanted: object) -> bool:
    counts = await engine.counts()
    return all(counts[name] == value for name, value in wanted.items())


@pytest.mark.parametrize("other", [PROMPT[::-1], PROMPT[:100]])
async def test_another_prompt_gives_a_wrong_answer(two: tuple[Transferring, Transferring], other: list[int]) -> None:
    prefill, decode = two
    assert "WRONG-BLOCKS" in text_of(await decode.ask(other, await prefill.prefill(PROMPT)))
    assert (await decode.counts())["violations"] == {"prompt": 1}


async def test_a_prefill_of_several_tokens_leaves_other_blocks(
    two: tuple[Transferring, Transferring],
) -> None:
    prefill, decode = two
    params = await prefill.prefill(PROMPT, max_tokens=16)
    assert params["remote_num_tokens"] == 215
    assert "WRONG-BLOCKS" in text_of(await decode.ask(PROMPT, params))


async def test_a_made_up_request_gives_a_wrong_answer(two: tuple[Transferring, Transferring]) -> None:
    prefill, decode = two
    params = await prefill.prefill(PROMPT)
    assert "WRONG-BLOCKS" in text_of(await decode.ask(PROMPT, params | {"remote_request_id": "cmpl-x"}))
    assert (await decode.counts())["violations"] == {"unknown_request": 1}


async def test_a_step_at_an_engine_of_the_other_role_is_counted(two: tuple[Transferring, Transferring]) -> None:
    prefill, decode = two
    assert text_of(await prefill.ask(PROMPT, await decode.prefill(PROMPT))) == await plain()
    assert (await decode.counts())["violations"] == (await prefill.counts())["violations"] == {"role": 1}


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    "params", [{"do_remote_prefill": True}, {"remote_block_ids": [[1, 2]]}], ids=["incomplete", "longer_prompt"]
)
async def test_such_parameters_end_the_engine(two: tuple[Transferring, Transferring], params: dict[str, Any]) -> None:
    prefill, decode = two
    offered = await prefill.prefill(PROMPT) | params if "remote_block_ids" in params else params
    assert (await decode.ask(PROMPT, offered)).status_code == 500
    await poll(lambda: _refuses(decode))


async def _refuses(engine: Transferring) -> bool:
    try:
        await engine.http.get("/health")
    except httpx.TransportError:
        return True
    return False


@pytest.mark.parametrize(
    "change", [{"remote_engine_id": "other"}, {"remote_port": 9}], ids=["another engine", "nobody"]
)
async def test_a_failed_transfer_is_computed(two: tuple[Transferring, Transferring], change: dict[str, Any]) -> None:
    prefill, decode = two
    answer = await decode.ask(PROMPT, await prefill.prefill(PROMPT) | change)
    assert text_of(answer) == await plain()
    counts = await decode.counts()
    assert (counts["failed_transfers"], counts["recomputed"], counts["wrong_answers"]) == (1, 1, 0)
    assert counts["by_source"]["local_compute"] == 200
    assert counts["violations"] == ({"unknown_engine": 1} if "remote_engine_id" in change else {})


async def test_a_restarted_engine_gives_no_blocks_of_its_past(two: tuple[Transferring, Transferring]) -> None:
    prefill, decode = two
    params = await prefill.prefill(PROMPT)
    await decode.ask(PROMPT[::-1], await prefill.prefill(PROMPT[::-1]))  # the engines know each other
    prefill.engine.transfers.prefill.engine_id = "restarted"  # type: ignore[union-attr]
    assert text_of(await decode.ask(PROMPT, params)) == await plain()
    assert (await decode.counts())["violations"] == {"unknown_engine": 1}


async def test_engines_of_different_versions_exchange_nothing() -> None:
    async with pair(PRODUCER, replace(CONSUMER, version="0.33.0")) as (prefill, decode):
        assert text_of(await decode.ask(PROMPT, await prefill.prefill(PROMPT))) == await plain()
        assert (await decode.counts())["violations"] == {"settings": 1}


async def test_a_failed_transfer_fails_its_request_by_policy() -> None:
    async with pair(PRODUCER, replace(CONSUMER, recomputes=False)) as (prefill, decode):
        params = await prefill.prefill(PROMPT) | {"remote_engine_id": "other"}
        answer = await decode.ask(PROMPT, params)
        error = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
        assert (answer.status_code, answer.json()) == (500, {"error": error})
        assert streamed(await decode.ask(PROMPT, params, stream=True)) == [{"error": error}]
        ids = params | {"prompt_token_ids": PROMPT}
        chat = {"messages": [{"role": "user", "content": "x"}], "stream": True, "kv_transfer_params": ids}
        begin, end = streamed(await decode.http.post("/v1/chat/completions", json=chat))
        assert begin["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert end == {"error": error}
        assert text_of(await decode.ask(PROMPT)) == await plain()


@pytest.mark.parametrize("moment", ["answered", "read"])
async def test_a_prefill_engine_that_dies_costs_a_computation(
    two: tuple[Transferring, Transferring], moment: str
) -> None:
    prefill, decode = two
    await decode.ask(PROMPT[::-1], await prefill.prefill(PROMPT[::-1]))  # the engines know each other
    await prefill.order(die=moment)
    assert text_of(await decode.ask(PROMPT, await prefill.prefill(PROMPT))) == await plain()
    counts = await decode.counts()
    assert (counts["failed_transfers"], counts["violations"]) == (1, {})
    assert await _refuses(prefill)


async def test_a_prefill_engine_dies_in_the_first_step(two: tuple[Transferring, Transferring]) -> None:
    prefill, _decode = two
    await prefill.order(die="prefill")
    with pytest.raises(httpx.TransportError):
        await prefill.prefill(PROMPT)


async def test_a_request_waits_for_an_engine_that_hangs(two: tuple[Transferring, Transferring]) -> None:
    """Others go on, and its blocks come when the engine goes on."""
    prefill, decode = two
    await decode.ask(PROMPT[::-1], await prefill.prefill(PROMPT[::-1]))
    params = await prefill.prefill(PROMPT)
    await prefill.order(hang="read")
    waiting = asyncio.create_task(decode.ask(PROMPT, params))
    await poll(lambda: not prefill.engine.core.runs.is_set())
    assert text_of(await decode.ask(PROMPT[:50]))
    assert 'num_requests_waiting{engine="0",model_name="demo"} 1' in (await decode.http.get("/metrics")).text
    assert not waiting.done()
    await prefill.order(resume=True)
    assert text_of(await waiting) == await plain()


async def test_heartbeats_keep_the_lease_while_blocks_travel() -> None:
    async with pair(replace(PRODUCER, lease_s=1.5), replace(CONSUMER, lease_s=1.5)) as (prefill, decode):
        await decode.ask(PROMPT[::-1], await prefill.prefill(PROMPT[::-1]))
        params = await prefill.prefill(PROMPT)
        await prefill.order(bytes_per_s=13 * BLOCK_BYTES / 2.5)  # longer than the lease
        assert text_of(await decode.ask(PROMPT, params)) == await plain()
        assert (await prefill.counts())["expired"] == 0


async def test_a_slow_handshake_costs_the_lease() -> None:
    async with pair(SHORT_LEASE) as (prefill, decode):
        await prefill.order(handshake_s=0.4)
        assert "WRONG-BLOCKS" in text_of(await decode.ask(PROMPT, await prefill.prefill(PROMPT)))


async def test_a_lease_that_ends_while_blocks_travel_gives_a_wrong_answer() -> None:
    """The decode engine's lease is longer, so that its heartbeats come too late."""
    async with pair(SHORT_LEASE) as (prefill, decode):
        await prefill.order(bytes_per_s=13 * BLOCK_BYTES / 0.6)
        assert "WRONG-BLOCKS" in text_of(await decode.ask(PROMPT, await prefill.prefill(PROMPT)))
        assert (await decode.counts())["violations"] == {"expired": 1}
        counts = await prefill.counts()
        assert (counts["expired"], counts["late"]) == (1, 1)


async def test_one_transfer_at_a_time_over_a_link(two: tuple[Transferring, Transferring]) -> None:
    prefill, decode = two
    prompts = [[start, *PROMPT[1:]] for start in range(3)]
    offers = [await prefill.prefill(prompt) for prompt in prompts]
    await prefill.order(bytes_per_s=13 * BLOCK_BYTES / 0.2)
    started = time.monotonic()
    await asyncio.gather(*(decode.ask(prompt, offer) for prompt, offer in zip(prompts, offers, strict=True)))
    assert time.monotonic() - started >= 0.6


@pytest.mark.parametrize(
    ("wrong", "left"), [({"max_tokens": 100_000}, 0), ({"model": "other"}, 0), ({"n": "many"}, 13)], ids=str
)
async def test_a_refused_decode_frees_the_blocks_if_its_body_is_valid(
    two: tuple[Transferring, Transferring], wrong: dict[str, Any], left: int
) -> None:
    prefill, decode = two
    params = await prefill.prefill(PROMPT)
    answer = await decode.ask(PROMPT, params, **wrong)
    assert answer.status_code in (400, 404)
    if left:
        await prefill.ask(PROMPT[:40])
        assert (await prefill.counts())["pinned_blocks"] == left
    else:
        await poll(lambda: _is(prefill, pinned_blocks=0), 15)
        assert "WRONG-BLOCKS" in text_of(await decode.ask(PROMPT, params))
        assert (await decode.counts())["violations"] == {"twice": 1}


async def test_a_client_that_leaves_frees_the_blocks_of_both() -> None:
    slow = StepCosts(base_s=0.3, prefill_token_s=0.0)
    async with transferring(PRODUCER, slow) as prefill, transferring(CONSUMER) as decode:
        with suppress(httpx.ReadTimeout):
            await prefill.http.post("/v1/completions", json={"prompt": PROMPT}, timeout=0.1)
        await poll(lambda: prefill.engine.core.scheduler.pool.usage == 0)
        params = await prefill.prefill(PROMPT)
        await prefill.order(bytes_per_s=1_000)
        body = {"prompt": PROMPT, "kv_transfer_params": params}
        with suppress(httpx.ReadTimeout):
            await decode.http.post("/v1/completions", json=body, timeout=0.2)
        await poll(lambda: _is(prefill, pinned_blocks=0), 15, "freed before the lease ends")
        await poll(lambda: decode.engine.core.scheduler.pool.usage == 0)


async def test_a_long_prompt_delays_tokens_of_its_own_engine_only() -> None:
    """The gap that a prefill makes in a stream beside it is gone where another engine computes the prompt."""
    costs = StepCosts(base_s=0.002, prefill_token_s=1e-3, decode_request_s=1e-4)
    async with transferring(PRODUCER, costs) as prefill, transferring(CONSUMER, costs) as decode:
        prompt = list(range(800))  # 0.8 s
        beside = await _longest_gap(decode, lambda: decode.ask(prompt))
        split = await _longest_gap(decode, lambda: _both(prefill, decode, prompt[::-1]))
    assert beside > 0.6
    assert split < 0.4


async def _both(prefill: Transferring, decode: Transferring, prompt: list[int]) -> httpx.Response:
    return await decode.ask(prompt, await prefill.prefill(prompt))


async def _longest_gap(engine: Transferring, work: Any) -> float:
    """Return the longest time between two tokens of a stream beside which ``work`` is done."""
    gaps: list[float] = []
    done: asyncio.Task[Any] | None = None
    body = {"prompt": [1, 2, 3], "max_tokens": 1_000, "ignore_eos": True, "stream": True}
    async with engine.http.stream("POST", "/v1/completions", json=body) as answer:
        last = 0.0
        async for _line in answer.aiter_lines():
            now = time.monotonic()
            if done is None:
                done = asyncio.create_task(work())
            else:
                gaps.append(now - last)
            last = now
            if done.done():
                break
    return max(gaps)


# ---------------------------------------------------------------- settings


def test_the_option_reads_as_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.1")
    told: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
    }
    told |= {"kv_buffer_device": "cpu", "kv_connector_extra_config": {"kv_lease_duration": 6, "num_threads": 0}}
    found = read_config(json.dumps(told))
    assert (found.role, found.recomputes, found.lease_s, found.host) == ("kv_consumer", True, 6, "10.0.0.1")
    assert not read_config('{"kv_connector": "NixlConnector", "kv_role": "kv_both"}').recomputes


def test_a_role_alone_is_short_for_nixl_that_computes_lost_prompts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    long = {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_load_failure_policy": "recompute"}
    speed = ("--kv-gbit", "10", "--kv-version", "0.33")

    of_role, of_json = (
        transfer_config(parser().parse_args([*speed, *option]))
        for option in (("--kv-role", "kv_producer"), ("--kv-transfer-config", json.dumps(long)))
    )

    assert of_role == of_json
    assert of_role is not None
    assert of_role.recomputes


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "no JSON"),
        ("[]", "JSON object"),
        ('{"kv_connector": "MoRIIOConnector"}', "kv_connector is 'MoRIIOConnector'"),
        ('{"kv_connector": "NixlConnector", "kv_role": "decode"}', "kv_producer"),
        ('{"kv_connector": "NixlConnector", "kv_rank": 1}', "have no kv_rank"),
    ],
)
def test_an_option_that_no_simulated_engine_can_have(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_config(text)


@pytest.mark.parametrize("order", [[], {"hang": "later"}, {"bytes_per_s": "1"}, {"pause": True}])
async def test_an_unknown_fault_is_refused(two: tuple[Transferring, Transferring], order: object) -> None:
    assert (await two[0].http.post("/sim/faults", json=order)).status_code == 400


async def test_an_engine_without_the_option_refuses_the_parameters() -> None:
    async with transferring(None) as engine:
        assert (await engine.ask(PROMPT, {"do_remote_decode": True})).status_code == 400


async def test_engines_announce_their_roles_and_pair(valkey_url: str, model: str) -> None:
    store = connect(valkey_url, timeout_s=5)
    fleet = Fleet(store, model)
    async with pair() as (prefill, decode):
        for name, engine in (("p", prefill), ("d", decode)):
            url = str(engine.http.base_url).rstrip("/")
            engine.engine.join(Membership(valkey_url, model, ("demo",), name, url), {})

        async def joined() -> bool:
            await fleet.upkeep.step()
            return all(worker.server for worker in await fleet.workers.read()) and len(await fleet.workers.read()) == 2

        await poll(joined, 20)
        told = {worker.worker_id: worker.transfer for worker in await fleet.workers.read()}
        first, second = told["p.0"], told["d.0"]
        counts = await prefill.counts()
    assert first is not None
    assert second is not None
    assert (first.role, second.role, second.recomputes) == ("prefill", "decode", True)
    assert (first.engine_id, first.port, first.lease_s) == (counts["engine_id"], counts["side_channel"], 30)
    assert first.kin == second.kin
    await store.aclose()
