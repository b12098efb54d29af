"""Before a joining worker takes requests, one replica sends it popular prefixes, once and within bounds."""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.engines.simulated import Simulated, simulated
from tests.support.polling import poll
from tests.support.replicas.replica import Replica, replica

from warmfleet.background import prewarm as warming
from warmfleet.fleet import Proof

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from warmfleet.fleet import WorkerView

WORDS = ("water", "river", "stone", "paper", "light", "table", "green", "sound", "house", "north")
HOT = " ".join(random.Random(5).choices(WORDS, k=700))  # 4,000 characters

LONG = pytest.mark.long(
    minutes=1,
    shows=(
        "a joining worker is given the prefixes in use, or starts cold in time: with the feature off, with "
        "two replicas, an engine that never answers, a replica that dies, and a worker that is needed"
    ),
)


async def view(router: Replica, server: str) -> WorkerView | None:
    return next((worker for worker in await router.fleet.workers.read() if worker.record["server_id"] == server), None)


async def proven(router: Replica, server: str, seconds: float = 20.0) -> None:
    async def so() -> bool:
        one = await view(router, server)
        return one is not None and one.proof == "proven" and one.routable

    await poll(so, seconds, f"{server} is proven")
    await poll(lambda: known(router, server), 5, f"the replica has seen {server}")


async def known(router: Replica, server: str) -> bool:
    _, body = await router.get("/workers")
    workers = json.loads(body)["models"][0]["workers"]
    proven = [entry for entry in workers if entry["proof"] == "proven" and entry["routable"]]
    states = await router.metric('warmfleet_workers{state="proven"}')
    return any(entry["worker_id"] == f"{server}.0" for entry in proven) and states == len(proven)


async def ask(router: Replica, model: str, prompt: str = HOT, **headers: str) -> dict[str, Any]:
    """The worker of a new request, its foreseen matched tokens, and the tokens that the engine had cached."""
    status, told, body = await router.post({"model": model, "prompt": prompt, "max_tokens": 1}, **headers)
    assert status == 200, body
    usage = json.loads(body)["usage"]
    return {
        "worker": told["x-warmfleet-worker"],
        "matched": int(told["x-warmfleet-matched-tokens"]),
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
    }


async def make_hot(router: Replica, model: str, prefix: str = HOT, **headers: str) -> None:
    for number in range(4):
        await ask(router, model, f"{prefix} Question {number}: " + "".join(random.choices("abcdef", k=40)), **headers)


@dataclass
class Busy:
    """Replicas that know a hot prefix, and the engine ``old`` that holds this prefix."""

    routers: list[Replica]
    old: AsyncExitStack

    async def alone(self, server: str) -> None:
        """End ``old``, and return when the fleet knows the blocks of ``server``, which reports them every 0.1 s."""
        await self.old.aclose()
        await poll(self._left, 10, "old has left")
        await asyncio.sleep(0.3)  # time for three reports
        assert await view(self.routers[0], server)

    async def _left(self) -> bool:
        one = await view(self.routers[0], "old")
        return one is None or not one.routable


@asynccontextmanager
async def busy(valkey_url: str, model: str, replicas: int = 1, **settings: Any) -> AsyncIterator[Busy]:
    headers = {"authorization": "Bearer one"}
    async with AsyncExitStack() as stack, AsyncExitStack() as old:
        await old.enter_async_context(simulated(valkey_url, model, "old"))
        made = [
            await stack.enter_async_context(replica(valkey_url, model, **({"warm_prefixes": 3} | settings)))
            for _ in range(replicas)
        ]
        for router in made:
            await proven(router, "old")
            await router.exact()
            await make_hot(router, model, **headers)
        yield Busy(made, old)


class Ears:
    """The requests that an engine got. Requests that warm the engine wait until ``held`` is set."""

    def __init__(self, engine: Simulated, held: asyncio.Event | None = None) -> None:
        self.warmed: list[Any] = []
        self.routed: list[Any] = []
        self.held = held or asyncio.Event()
        core, submit = engine.engine.core, engine.engine.core.submit

        async def heard(request: Any, sink: Any) -> None:
            if "unbooked.warming" in request.request_id:
                self.warmed.append(request)
                if held is not None:
                    await held.wait()
            elif "probe" not in request.request_id:
                self.routed.append(request)
            await submit(request, sink)

        core.submit = heard  # type: ignore[method-assign]


async def starts(fleet: Busy, model: str, valkey_url: str, *, warm: bool) -> None:
    (router,) = fleet.routers
    async with simulated(valkey_url, model, "new") as engine:
        ears = Ears(engine)
        await proven(router, "new")
        assert not ears.routed
        assert len(ears.warmed) == int(warm)
        await fleet.alone("new")
        told = await ask(router, model, HOT + " And now?", authorization="Bearer one")
        assert told["worker"] == "new.0"
        assert (told["cached"] > 500, told["matched"] > 500) == (warm, warm), told
        assert told["matched"] == told["cached"] or not warm
        if warm and await router.metric("warmfleet_warmed_tokens_total"):
            told = await ask(router, model, HOT + " And now, to another?", authorization="Bearer two")
            apart = bool(ears.warmed[0].salt)
            assert (told["worker"], told["cached"] > 500) == ("new.0", not apart), "a tenant finds its own only"
    assert await router.metric('warmfleet_warmings_total{result="done"}') == int(warm)


async def test_the_first_request_of_a_joining_worker_finds_the_prefix_of_its_tenant(
    valkey_url: str, model: str
) -> None:
    async with busy(valkey_url, model, tenant_key="a secret of the operator") as fleet:
        await starts(fleet, model, valkey_url, warm=True)


@LONG
@pytest.mark.parametrize("prefixes", [3, 0], ids=["on", "off"])
async def test_the_first_request_finds_the_prefix_if_warming_is_on(valkey_url: str, model: str, prefixes: int) -> None:
    async with busy(valkey_url, model, warm_prefixes=prefixes) as fleet:
        await starts(fleet, model, valkey_url, warm=prefixes > 0)


@LONG
async def test_of_two_replicas_one_warms_and_none_routes_there_meanwhile(valkey_url: str, model: str) -> None:
    async with busy(valkey_url, model, replicas=2) as fleet:
        routers = fleet.routers
        async with simulated(valkey_url, model, "new") as engine:
            ears = Ears(engine, held=asyncio.Event())

            async def warming_is_shown() -> bool:
                shown = [await router.metric('warmfleet_workers{state="warming"}') for router in routers]
                return shown == [1, 1]

            await poll(warming_is_shown, 10, "both replicas show it")
            _, body = await routers[0].get("/workers")
            shown = json.loads(body)["models"][0]["workers"]
            states = {row["worker_id"]: (row["proof"], row["routable"]) for row in shown}
            assert states == {"old.0": ("proven", True), "new.0": ("warming", False)}
            told = [await ask(one, model, f"{number} {HOT}") for number, one in enumerate(routers * 4)]
            assert {answer["worker"] for answer in told} == {"old.0"}
            ears.held.set()
            for router in routers:
                await proven(router, "new")
            assert len(ears.warmed) == 1
        done = [await router.metric('warmfleet_warmings_total{result="done"}') for router in routers]
        assert sorted(done) == [0, 1]


@LONG
async def test_a_worker_that_never_answers_starts_cold_and_leaves_nothing(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "PROMPT_S", 0.5)
    async with busy(valkey_url, model) as fleet, simulated(valkey_url, model, "new") as engine:
        (router,) = fleet.routers
        ears = Ears(engine, held=asyncio.Event())
        await poll(lambda: ears.warmed, 10, "it is asked")
        await proven(router, "new", 5)
        assert await router.metric('warmfleet_warmings_total{result="slow"}') == 1
        assert len(ears.warmed) == 1
        await router.unloaded()
        one = await view(router, "new")
        assert one is not None
        assert (one.load.in_flight, one.load.foreign_prefill_tokens) == (0, 0)


@LONG
async def test_the_only_worker_is_not_kept_waiting(valkey_url: str, model: str) -> None:
    """The worker takes requests at once if it is the first one, and if the others leave while it is warmed."""
    async with busy(valkey_url, model) as fleet:
        (router,) = fleet.routers
        async with simulated(valkey_url, model, "new") as engine:
            await make_hot(router, model, prefix="Something else. " + HOT)
            ears = Ears(engine, held=asyncio.Event())
            await poll(lambda: ears.warmed, 10, "it is asked")
            await fleet.alone("new")
            await poll(lambda: router.metric('warmfleet_workers{state="unroutable"}'), 5, "the replica knows")
            ears.held.set()
            await proven(router, "new", 5)
            assert len(ears.warmed) == 1
            assert await router.metric('warmfleet_warmings_total{result="needed"}') == 1
        async with simulated(valkey_url, model, "next") as engine:
            ears = Ears(engine)
            await proven(router, "next")
            assert not ears.warmed


@LONG
async def test_when_the_replica_that_warms_is_gone_another_proves_it_and_does_not_warm_again(
    valkey_url: str, model: str
) -> None:
    async with busy(valkey_url, model) as busy_fleet:
        (router,) = busy_fleet.routers
        fleet, claimed = router.fleet, asyncio.ensure_future(claim(router))
        async with simulated(valkey_url, model, "new") as engine:
            ears = Ears(engine)
            ends = await claimed
            one = await view(router, "new")
            assert one is not None
            assert (one.proof, one.routable) == ("warming", False)
            nonce = str(one.record["nonce"])
            assert await fleet.probes.prove("new.0", nonce, Proof("proven", "")) == "TAKEN", (
                "nobody else proves it meanwhile"
            )
            assert await fleet.probes.prove("new.0", nonce, Proof("url", "")) == "TAKEN"
            assert await fleet.probes.warming("new.0", nonce, "another", 1_000) == "TAKEN"
            await proven(router, "new", 6)
            assert ends - 0.1 <= time.time()
            assert ears.warmed == []
            assert await fleet.probes.warming("new.0", nonce, "gone", 1_000) == "TAKEN"
            assert await fleet.probes.prove("new.0", nonce, Proof("proven", "", owner="gone")) == "TAKEN", (
                "its time is over"
            )


async def claim(router: Replica) -> float:
    """Act as a replica that begins to warm ``new`` and dies at once. Returns when its lease ends."""

    async def first() -> float:
        one = await view(router, "new")
        if one is None or one.server is None:
            return 0
        told = await router.fleet.probes.warming("new.0", str(one.record["nonce"]), "gone", 1_000)
        return time.time() + 1.0 if told == "OK" else 0

    ends = await poll(first, 10, "it joins")
    assert isinstance(ends, float)
    return ends
