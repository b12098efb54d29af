"""Real vLLM, which finds the plugin by its entry point: the plugin reports what the engine does."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.polling import poll
from tests.vllm.engine import BLOCK_TOKENS, VENV

from warmfleet.fleet.rows import Flag
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from tests.vllm.conftest import Reported
    from tests.vllm.engine import VllmEngine

    from warmfleet.fleet import Fleet
    from warmfleet.fleet.rows import LoadRow

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


def words(count: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(["import", "return", "class", "value", "index", "yield", "self"]) for _ in range(count))


def reservation(number: int) -> str:
    return f"wf-{number:022}"


async def stream(fleet: Fleet, worker_id: str) -> list[dict[bytes, bytes]]:
    """Return the entries of the stream that are not applied yet, in order."""
    found = cast("list[tuple[bytes, dict[bytes, bytes]]]", await fleet.redis.xrange(fleet.keys.events(worker_id)))
    return [entry for _, entry in found]


async def step(fleet: Fleet) -> list[Any]:
    """Apply entries until the streams are empty; return the workers."""
    while (await fleet.upkeep.step()).blocks:
        pass
    return await fleet.workers.read()


async def fresh(reported: Reported, fleet: Fleet) -> Any:
    """Begin a test: empty the cache, wait until that is applied, and return the worker."""
    await asyncio.to_thread(reported.engine.reset_prefix_cache)

    async def empty() -> Any:
        views = await step(fleet)
        return views and not await held(fleet, views[0]) and not reported.engine.table() and views[0]

    return await poll(empty, what="an empty table on both sides")


async def held(fleet: Fleet, view: Any) -> set[bytes]:
    return cast("set[bytes]", await fleet.redis.smembers(fleet.keys.slot(view.record["slot"])))


async def same(reported: Reported, fleet: Fleet) -> set[bytes]:
    """Wait until the index equals the engine's own table, entry by entry; returns it."""

    async def check() -> set[bytes] | None:
        views = await step(fleet)
        truth = {key[-12:-4] for key in reported.engine.table()}
        return truth if truth and await held(fleet, views[0]) == truth else None

    truth = await poll(check, what="index == the engine's table")
    assert isinstance(truth, set)
    slot = (await fleet.workers.read())[0].record["slot"]
    assert all(await fleet.index.holds(slot, list(truth)))
    for block_hash in truth:
        assert await fleet.redis.sismember(fleet.keys.block(block_hash), slot)
    return truth


async def test_both_halves_join_under_one_name(reported: Reported, vllm_fleet: Fleet) -> None:
    async def joined() -> Any:
        views = await step(vllm_fleet)
        return views and views[0].server and views[0]

    view: Any = await poll(joined, 30)
    assert view.worker_id == "vllm-a.0"
    assert (view.server["url"], view.server["models"]) == (reported.engine.url, ["tiny"])
    assert view.load.flags & Flag.SERVER
    assert view.load.flags & Flag.CLOSED
    assert view.record["scheme"]["block_tokens"] == BLOCK_TOKENS
    assert view.record["step_tokens"] >= 512, "vLLM's default, by the kind of device"
    facts = view.server["facts"]
    assert (facts["max_model_len"], facts["content_format"]) == (4_096, "string")


async def test_the_artifacts_give_the_engines_own_tokens(reported: Reported, vllm_fleet: Fleet) -> None:
    from jinja2 import Environment
    from tokenizers import Tokenizer

    view = await fresh(reported, vllm_fleet)
    manifest = view.server["artifacts"]
    files = {name: (await vllm_fleet.artifacts.read("vllm-a", entry)).decode() for name, entry in manifest.items()}
    messages = [{"role": "user", "content": words(40, 1)}, {"role": "assistant", "content": "ok <b>"}]
    messages.append({"role": "user", "content": "and now?"})
    answer = await asyncio.to_thread(reported.engine.chat, messages)
    template = Environment(autoescape=False).from_string(files["chat_template.jinja"])
    text = template.render(messages=messages, add_generation_prompt=True)
    assert (
        Tokenizer.from_str(files["tokenizer.json"]).encode(text, add_special_tokens=False).ids
        == (answer["prompt_token_ids"])
    )


@pytest.mark.parametrize("salt", [None, "tenant-1"])
async def test_hashes_of_the_router_are_those_of_the_stream(
    reported: Reported, vllm_fleet: Fleet, salt: str | None
) -> None:
    """Compare them block by block and in order, for prompt and generated tokens."""
    engine = reported.engine
    view = await fresh(reported, vllm_fleet)
    more = {"cache_salt": salt} if salt else {}
    answer = await asyncio.to_thread(engine.complete, words(700, 2), max_tokens=70, ignore_eos=True, **more)
    choice = answer["choices"][0]
    tokens = choice["prompt_token_ids"] + choice["token_ids"]
    scheme = wire.Scheme.from_dict(view.record["scheme"])
    expected = wire.chain_hashes(scheme, tokens[:-1], salt=salt)  # the last token has no KV yet

    async def stored() -> list[bytes]:
        packed = b"".join(
            entry[b"d"] for entry in await stream(vllm_fleet, engine.worker_id) if entry[b"o"] == b"stored"
        )
        return [packed[at : at + 8] for at in range(0, len(packed), 8)]

    async def complete() -> bool:  # blocks of an earlier test may come first
        return (await stored())[-len(expected) :] == [block[-8:] for block in expected]

    await poll(complete, what="the router's hashes, in order, at the end of the stream")
    assert {key[:-4] for key in engine.table()} == set(expected)


async def test_the_index_is_the_table_under_eviction(reported: Reported, vllm_fleet: Fleet) -> None:
    """Requests fill the cache many times over, with shared prefixes and twins. Nothing differs or is sent again."""
    engine = reported.engine
    await fresh(reported, vllm_fleet)
    before = await vllm_fleet.index.counts()
    for number in range(12):
        prompt = words(600, number % 3) + words(900, 100 + number)
        await asyncio.gather(*[asyncio.to_thread(engine.complete, prompt + " a" * twin) for twin in range(2)])
        if number % 4 == 3:
            await same(reported, vllm_fleet)
    table = await same(reported, vllm_fleet)
    evicted = 12 * 1_500 // BLOCK_TOKENS - len(table)
    assert evicted > 200
    after = await vllm_fleet.index.counts()
    trouble = ("gap", "mismatch", "resync_gap", "resync_digest", "malformed", "nonce", "interleaved")
    assert [after.get(name, 0) - before.get(name, 0) for name in trouble] == [0] * len(trouble)


async def test_progress_says_what_usage_says(reported: Reported, vllm_fleet: Fleet) -> None:
    engine = reported.engine
    await fresh(reported, vllm_fleet)
    told = {}
    turns = [{"role": "user", "content": words(600, 3)}]
    for number in range(3):
        answer = await asyncio.to_thread(engine.chat, turns, f"{reservation(number)}.me")
        usage = answer["usage"]
        told[reservation(number)] = [usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]]
        turns += [{"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]
        turns += [{"role": "user", "content": words(50, 10 + number)}]
    answer = await asyncio.to_thread(engine.complete, words(600, 4), f"{reservation(3)}.me")
    told[reservation(3)] = [0, answer["usage"]["prompt_tokens"]]
    await asyncio.to_thread(engine.complete, words(600, 5))  # without a reservation, so no progress is reported
    seen: dict[str, list[int]] = {}

    async def progress() -> bool:
        for entry in await stream(vllm_fleet, engine.worker_id):
            if entry[b"o"] == b"progress":
                seen.update({name: [cached, prompt] for name, cached, prompt in json.loads(entry[b"d"])})
        return len(seen) >= len(told)

    await poll(progress)
    assert seen == told
    assert told[reservation(2)][0] > told[reservation(1)][0] > 0


async def test_an_idle_reset_is_seen_at_once(reported: Reported, vllm_fleet: Fleet) -> None:
    engine = reported.engine
    await fresh(reported, vllm_fleet)
    await asyncio.to_thread(engine.complete, words(500, 6))
    assert len(await same(reported, vllm_fleet)) > 10

    async def cleared() -> int:
        return [entry[b"o"] for entry in await stream(vllm_fleet, engine.worker_id)].count(b"cleared")

    before = await cleared()
    await asyncio.to_thread(engine.reset_prefix_cache)

    async def again() -> bool:
        return await cleared() > before

    await poll(again)  # although no request follows
    await fresh(reported, vllm_fleet)
    await asyncio.to_thread(engine.complete, words(500, 7))
    assert len(await same(reported, vllm_fleet)) > 10  # the plugin follows the new table, too


async def test_foreign_load_and_speed_are_reported(reported: Reported, vllm_fleet: Fleet) -> None:
    engine = reported.engine
    await fresh(reported, vllm_fleet)
    long: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}
    seen = asyncio.Event()

    async def batches() -> list[int]:
        """Run the same four requests until their load was seen; returns their sizes, that of the fleet's own first.

        They fit into the cache together with their answers, so none is preempted.
        """
        while True:
            jobs = [asyncio.to_thread(engine.complete, words(350, 200 + number), **long) for number in range(3)]
            ours = asyncio.to_thread(engine.complete, words(350, 300), f"{reservation(9)}.x", **long)
            answers = await asyncio.gather(ours, *jobs)
            if seen.is_set():
                return [answer["usage"]["total_tokens"] for answer in answers]

    async def decoding() -> Any:
        load = (await step(vllm_fleet))[0].load
        return load.foreign_decode_tokens > 1_000 and load.foreign_prefill_tokens == 0 and load

    running = asyncio.create_task(batches())
    try:
        load = cast("LoadRow", await poll(decoding, 60))
    finally:
        seen.set()
        _, *foreign = await running
    assert load.foreign_decode_tokens <= sum(foreign)  # the fleet's own request is not in it

    async def idle() -> Any:
        load = (await step(vllm_fleet))[0].load
        return load.foreign_decode_tokens == load.foreign_prefill_tokens == 0 and load

    assert 500 < cast("LoadRow", await poll(idle, 30)).speed_tps < 1_000_000


def test_without_a_url_the_plugin_is_inactive() -> None:
    """The plugin writes one line, and neither hooks into vLLM nor makes a Redis client."""
    script = (
        "import logging, sys; logging.basicConfig(level=20); from warmfleet_worker.plugin import register; register()"
    )
    script += "; register(); assert not [name for name in sys.modules if name.split('.')[0] == 'vllm']"
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        [VENV / "bin" / "python", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert "warmfleet: inactive: WARMFLEET_REDIS_URL is not set" in done.stderr


@pytest.mark.long(
    minutes=1,
    shows="a real engine says goodbye when it stops, and is a new incarnation after its restart",
)
async def test_it_says_goodbye_and_a_restart_is_a_new_incarnation(reported: Reported, vllm_fleet: Fleet) -> None:
    engine, keys = reported.engine, vllm_fleet.keys
    await asyncio.to_thread(engine.complete, words(300, 1))
    first = await poll(lambda: nonce_of(vllm_fleet, engine))
    assert await vllm_fleet.redis.zrange(keys.alive, 0, -1) == [b"vllm-a.0"]
    await asyncio.to_thread(engine.stop)
    await step(vllm_fleet)
    assert await vllm_fleet.redis.zrange(keys.alive, 0, -1) == []
    assert await vllm_fleet.redis.zrange(keys.alive_servers, 0, -1) == []
    engine.start()
    await asyncio.to_thread(engine.wait)
    await asyncio.to_thread(engine.complete, words(200, 2))
    await poll(lambda: nonce_of(vllm_fleet, engine, not_=first), 20)
    assert len(await same(reported, vllm_fleet)) >= 200 // BLOCK_TOKENS


async def nonce_of(fleet: Fleet, engine: VllmEngine, not_: object = None) -> str | None:
    views = {view.worker_id: view for view in await step(fleet)}
    nonce = views[engine.worker_id].record["nonce"] if engine.worker_id in views else None
    return nonce if nonce != not_ else None
