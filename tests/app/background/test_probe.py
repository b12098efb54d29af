"""The probe at a join finds a worker that hashes otherwise than announced. Announced differences are no fault."""

from __future__ import annotations

import json
import threading
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.engines.simulated import TEMPLATE, Kind, simulated
from tests.support.engines.simulated import identity as simulated_identity
from tests.support.polling import poll
from tests.support.replicas.replica import Replica, replica
from tests.support.requests.image_rules import fact as image_fact

from warmfleet.background import prober as probe
from warmfleet.background.probe import WRONG, Probe, Result, random_image
from warmfleet.fleet import Flag
from warmfleet.prompt import tokenizer as encoder

if TYPE_CHECKING:
    from pathlib import Path

    from warmfleet.fleet import WorkerView
    from warmfleet.pools.pool import Pool

LIARS: dict[Kind, tuple[str, ...]] = {
    "template": ("chat",),
    "tokenizer": (
        "text",
        "chat",
    ),  # the chat alone, if both tokenizers make equally many tokens of the text
    "seed": ("tokens",),
    "algorithm": ("tokens",),
    "block size": ("tokens",),
}


async def proofs(router: Replica, **wanted: str) -> dict[str, WorkerView]:
    """Every worker by its server's name, once the proofs are as wanted."""

    async def so() -> dict[str, WorkerView] | None:
        found = {str(view.record["server_id"]): view for view in await router.fleet.workers.read()}
        return found if all(name in found and found[name].proof == proof for name, proof in wanted.items()) else None

    found = await poll(so, 30, str(wanted))
    assert isinstance(found, dict)
    return found


async def test_workers_that_announce_something_false_are_routed_by_load_only(valkey_url: str, model: str) -> None:
    async with AsyncExitStack() as stack:
        right = await stack.enter_async_context(simulated(valkey_url, model, "right"))
        await stack.enter_async_context(simulated(valkey_url, model, "elsewhere", url=right.url))
        for kind in LIARS:
            await stack.enter_async_context(simulated(valkey_url, model, kind.split()[0], kind, lies=True))
        router = await stack.enter_async_context(
            replica(valkey_url, model, blocks_timeout_s=1.0, approved_templates=())
        )
        # A busy machine may let a probe end without an answer, and the next one finds what is wrong.
        workers = await proofs(router, right="proven", **{kind.split()[0]: "identity" for kind in LIARS})
        del workers["right"]
        elsewhere = workers.pop("elsewhere")
        assert not elsewhere.routable, "another engine answers at its URL: nothing shows that it is this worker"
        for kind, causes in LIARS.items():
            view = workers[kind.split()[0]]
            assert (view.proof, view.routable) == ("identity", True), kind
            assert view.record["cause"] in causes
            assert view.record["reason"].startswith(WRONG[view.record["cause"]])
        await router.routable(6)
        assert await router.metric('warmfleet_workers{state="identity"}') == 5
        assert "does not render a chat" in (await router.get("/workers"))[1].decode()
        await router.unloaded()


@pytest.mark.parametrize("counted", [30, 31])
async def test_a_worker_that_hashes_or_counts_images_otherwise_keeps_its_texts(
    counted: int, valkey_url: str, model: str
) -> None:
    """The engine has the announced token, but no image in its hashes."""
    token_id = simulated_identity().tokenizer.token_to_id("\u0100")  # byte-level BPE writes a zero byte so
    rule = image_fact("m", token="\0", token_id=token_id, parameters={"tokens": 30})
    facts = {"multimodal": True, "placeholders": {"image": "\0"}, "images": rule}
    async with simulated(valkey_url, model, facts=facts) as engine:
        engine.see(token_id, counted)
        async with replica(valkey_url, model, blocks_timeout_s=1.0) as router:
            view = (await proofs(router, eng="proven"))["eng"]
            assert view.record["cause"] == "image"
            assert view.record["reason"].startswith(WRONG["image"])
            await router.routable(1)
            looks = [{"type": "text", "text": "And why?"}, random_image()]
            head = {"role": "system", "content": "The quick brown fox jumps over the lazy dog. " * 20}
            body = {"model": model, "messages": [head, {"role": "user", "content": looks}], "max_tokens": 1}

            async def known() -> bool:
                explained = json.loads((await router.post(body, "/explain"))[2])
                return (explained["identity"], explained["reason"]) == ("prefix", "image_wrong")

            await poll(known, 10, "images are not trusted")


async def test_a_worker_with_other_files_than_most_is_not_probed_until_most_have_them(
    valkey_url: str, model: str
) -> None:
    async with AsyncExitStack() as stack:
        for name in ("a1", "a2"):
            await stack.enter_async_context(simulated(valkey_url, model, name))
        await stack.enter_async_context(simulated(valkey_url, model, "b1", "template"))
        await stack.enter_async_context(simulated(valkey_url, model, "c1", "tokenizer"))
        router = await stack.enter_async_context(replica(valkey_url, model))
        workers = await proofs(router, a1="proven", a2="proven", b1="identity", c1="identity")
        assert workers["b1"].record["reason"] == "its chat_template.jinja differs from the fleet's"
        assert workers["c1"].record["reason"] == "its tokenizer.json differs from the fleet's"
        for name in ("b2", "b3"):
            await stack.enter_async_context(simulated(valkey_url, model, name, "template"))
        workers = await proofs(router, b1="proven", b2="proven", b3="proven", a1="identity", a2="identity")
        assert workers["a1"].record["cause"] == "differs"
        assert await router.metric('warmfleet_downgrades_total{cause="differs"}') == 2


async def test_workers_take_requests_while_a_tokenizer_loads_slowly(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, gate = encoder.Encoder.load, threading.Event()

    def slow(tokenizer_json: bytes) -> encoder.Encoder:
        gate.wait(20)
        return load(tokenizer_json)

    monkeypatch.setattr(encoder.Encoder, "load", slow)
    async with simulated(valkey_url, model), replica(valkey_url, model, identity_wait_s=0.2) as router:
        (view,) = (await proofs(router, eng="identity")).values()
        assert (view.routable, view.record["cause"]) == (True, "untested")
        prompt = {"model": model, "prompt": list(range(100)), "max_tokens": 2}
        for _ in range(2):
            status, headers, _ = await router.post(prompt)
            assert (status, headers["x-warmfleet-matched-tokens"]) == (200, "0"), "not before it is proven"
        gate.set()
        await proofs(router, eng="proven")


async def test_a_wrong_tokenizer_in_the_settings_is_found_out(
    valkey_url: str, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = simulated_identity("tokenizer")
    (tmp_path / "tokenizer.json").write_text(other.tokenizer.to_str())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE})
    )
    async with simulated(valkey_url, model), replica(valkey_url, model) as right:
        await proofs(right, eng="proven")
        async with replica(valkey_url, model, tokenizer=str(tmp_path)):
            (view,) = (await proofs(right, eng="identity")).values()
            # About one text in a hundred has equally many tokens with both tokenizers; then only the chat differs.
            assert view.record["cause"] in ("text", "chat")
            assert "in use here does" in view.record["reason"]
            assert [
                record
                for record in caplog.records
                if record.levelname == "WARNING" and "in use here" in record.getMessage()
            ]


async def test_all_workers_are_probed_again_once_in_a_while(valkey_url: str, model: str) -> None:
    times: dict[str, Any] = {"probe_interval_s": 0.3, "backoff_s": (0.1, 0.2)}
    async with simulated(valkey_url, model) as worker, replica(valkey_url, model, **times) as router:
        await proofs(router, eng="proven")
        worker.evict_at_once()

        async def probed() -> bool:
            return await router.metric('warmfleet_probes_total{result="proven"}') >= 4

        await poll(probed, 10, "what was told counts, not what is still held")
        assert await router.metric('warmfleet_probes_total{result="identity"}') == 0
        worker.become("template")  # the test's requests have no chat, so they do not show the change
        await proofs(router, eng="identity")
        worker.become("right")
        await proofs(router, eng="proven")


@pytest.mark.parametrize("trouble", ["no answer", "a stream that is behind", "an index that lacks blocks"])
async def test_a_probe_that_learns_nothing_changes_nothing(
    valkey_url: str, model: str, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"probe_interval_s": 0.2, "blocks_timeout_s": 0.3, "backoff_s": (0.1, 0.2)}
    async with simulated(valkey_url, model) as worker, replica(valkey_url, model, **settings) as router:
        await proofs(router, eng="proven")
        if trouble == "no answer":
            assert worker.engine._runner
            await worker.engine._runner.cleanup()
        elif trouble == "a stream that is behind":
            assert worker.engine.halves
            monkeypatch.setattr(worker.engine.halves.worker, "step", lambda _now: None)
        else:
            worker.become("seed")

        async def nothing_learned() -> bool:
            if trouble == "an index that lacks blocks":  # set each time: the worker's heartbeats mend the index
                (view,) = await router.fleet.workers.read()
                await flag(router, view, view.load.flags | Flag.PARTIAL)
            return await router.metric('warmfleet_probes_total{result="none"}') >= 3

        await poll(nothing_learned, 20, "three probes")
        (view,) = await router.fleet.workers.read()
        assert view.proof == "proven"


async def test_few_probes_run_at_a_time(valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "AT_ONCE", 2)
    run, under_way, most = Probe.run, 0, 0

    async def counted(self: Probe, pool: Pool, worker: WorkerView, *, texts: bool) -> Result:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            return await run(self, pool, worker, texts=texts)
        finally:
            under_way -= 1

    monkeypatch.setattr(Probe, "run", counted)
    async with AsyncExitStack() as stack:
        for number in range(5):
            await stack.enter_async_context(simulated(valkey_url, model, f"e{number}"))
        router = await stack.enter_async_context(replica(valkey_url, model))
        await proofs(router, **{f"e{number}": "proven" for number in range(5)})
        assert most == 2


async def flag(router: Replica, view: WorkerView, flags: int) -> None:
    packed = bytearray(view.load.pack(view.worker_id))
    packed[20:22] = int(flags).to_bytes(2, "big")
    await cast("Any", router.fleet.redis.hset(router.fleet.keys.load, view.worker_id, bytes(packed)))
