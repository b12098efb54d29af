"""Simulated prefill and decode engines, which check each use of blocks, and a replica that splits requests."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.support.engines.simulated import identity
from tests.support.engines.transferring import CONSUMER, PRODUCER, Transferring, transferring
from tests.support.polling import poll
from tests.support.replicas.replica import replica

from warmfleet.fleet import Question, new_reservation
from warmfleet.pools.pairing import BY_POLICY, HANDOFF_OFF, SPLIT
from warmfleet_loadtest.simulator.api import Served
from warmfleet_loadtest.simulator.fleet_membership import Membership
from warmfleet_loadtest.simulator.step_costs import load_costs
from warmfleet_loadtest.simulator.transfers.config import TransferConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.support.replicas.replica import Replica

    from warmfleet.fleet import Fleet

BUSY = 16  # requests that seem to be under way at a decode engine, so that prompts are cheaper elsewhere
RESULTS = ("split", "cheaper", "unfit", "no_pair", "failed", "refused", "late")


@dataclass
class SplitFleet:
    """The engines by role, and the replica. ``worker_ids``: by engine."""

    router: Replica
    prefill: list[Transferring]
    decode: list[Transferring]
    model: str

    async def busy(self, *workers: str) -> None:
        """Let engines seem busy; by default all decode engines, so that decisions split requests."""
        for worker_id in workers or [f"d{number}.0" for number in range(len(self.decode))]:
            await make_busy(self.router.fleet, worker_id)

    async def results(self) -> dict[str, int]:
        """The counts of ``warmfleet_split_requests`` that are not 0."""
        found = {}
        for word in RESULTS:
            found[word] = round(await self.router.metric(f'warmfleet_split_requests_total{{result="{word}"}}'))
        return {word: count for word, count in found.items() if count}

    async def leg_load(self) -> int:
        """Everything that is booked at the prefill engines."""
        rows = [view.load for view in await self.router.fleet.workers.read() if view.worker_id.startswith("p")]
        return sum(row.prefill_tokens + row.decode_tokens + row.in_flight for row in rows)

    async def given_back(self, deadline_s: float = 10.0) -> None:
        """Return when nothing is booked at the prefill engines, and they keep no blocks."""

        async def empty() -> bool:
            return await self.leg_load() == 0 and not self.pinned

        await poll(empty, deadline_s, "the prefill engines are free")

    @property
    def pinned(self) -> int:
        """The blocks that prefill engines keep for others."""
        sides = [engine.engine.transfers for engine in self.prefill]
        return sum(len(pin.blocks) for side in sides if side is not None for pin in side.prefill.pinned)

    def prefilled(self, number: int = 0) -> int:
        side = self.prefill[number].engine.transfers
        assert side is not None
        return side.counts.prefilled

    def taken(self, number: int = 0) -> int:
        """Prompts whose blocks this decode engine has got."""
        side = self.decode[number].engine.transfers
        assert side is not None
        return side.counts.transfers - side.counts.failed_transfers

    def check(self) -> None:
        """Assert that no engine saw parameters that were used wrongly, nor made an answer from wrong blocks."""
        for engine in (*self.prefill, *self.decode):
            side = engine.engine.transfers
            assert side is not None
            assert dict(side.counts.violations) == {}
            assert side.counts.wrong_answers == 0


async def make_busy(fleet: Fleet, worker_id: str) -> None:
    """Let an engine seem busy."""
    for _ in range(BUSY):
        question = Question(new_reservation(1), (), 16, 32, only=(worker_id,))
        await fleet.bookings.decide(question)
        await fleet.bookings.settle(question.reservation, "started")  # else others would wait


@asynccontextmanager
async def split_fleet(
    redis_url: str,
    model: str,
    prefill: int = 1,
    decode: int = 1,
    *,
    speed: str = "demo",
    producer: TransferConfig = PRODUCER,
    consumer: TransferConfig | Sequence[TransferConfig] = CONSUMER,
    pairs: int = -1,
    router_redis_url: str = "",
    **settings: Any,
) -> AsyncIterator[SplitFleet]:
    """Start engines p0, p1, ... and d0, d1, ..., and a replica that pairs them. pairs: expected number; -1: all.

    speed: as the option of simulated engines. router_redis_url: by which the replica reaches the same store.
    """
    async with AsyncExitStack() as stack:

        async def start(name: str, transfer: TransferConfig) -> Transferring:
            return await stack.enter_async_context(
                transferring(
                    transfer,
                    load_costs(speed),
                    1_024,
                    Served((model,)),
                    Membership(redis_url, model, (model,), name, ""),
                    identity(),
                )
            )

        producers = [await start(f"p{number}", producer) for number in range(prefill)]
        kinds = [consumer] * decode if isinstance(consumer, TransferConfig) else consumer
        consumers = [await start(f"d{number}", kind) for number, kind in enumerate(kinds)]
        router = await stack.enter_async_context(
            replica(router_redis_url or redis_url, model, look_url=redis_url, **settings)
        )
        await router.routable(prefill + decode)
        await router.exact()
        wanted = prefill * decode if pairs < 0 else pairs

        async def paired() -> bool:
            told = json.loads((await router.get("/workers"))[1])["models"][0]["pairs"]
            use = SPLIT if settings.get("policy", "cost") == "cost" else BY_POLICY
            use = use if settings.get("token_handoff", True) else HANDOFF_OFF
            return bool(told["pairs"] == wanted and (told["told"] == use or not wanted))

        await poll(paired, 30, f"{wanted} pairs")
        fleet = SplitFleet(router, producers, consumers, model)
        yield fleet
        fleet.check()


async def alone(body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    """What one engine without a fleet answers."""
    async with transferring(None, load_costs("fast"), 1_024, tokenizer=identity()) as engine:
        answer = (await engine.http.post(path, json=body | {"model": "demo", "stream": False})).json()
        assert isinstance(answer, dict)
        return answer
