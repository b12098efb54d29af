"""Hedging: a stream whose worker is late is sent to a second worker, and the first answer is used."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.app.routing.test_pool_choice import Fixture
from tests.support.engines.scripted import STREAM_HEAD, Engine, Seen, answer_well, chunk, engine, no_model, reply, reset
from tests.support.polling import poll
from tests.support.replicas.replica import Replica, replica
from tests.support.requests.client_keys import line

from warmfleet.errors import NameRefused, UpstreamGone
from warmfleet.pools.pool import Pool
from warmfleet.routing.recovery import hedging, retries
from warmfleet.routing.recovery.hedging import Hedging, Race

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from warmfleet.fleet.bookings import Outcome

STREAM = {"prompt": "hello", "stream": True, "max_tokens": 3}
WHOLE = b"".join(b'data: {"choices": [{"index": 0, "text": " %d"}]}\n\n' % number for number in range(3))


@dataclass
class Plan:
    """The engines' answers to requests, in the order of arrival at any engine.

    Words of ``does``: ``waits`` for ``go``, then answers; ``dies`` after ``go``; ``breaks`` off once both are asked;
    ``fails`` with 500 or ``lacks`` the name at that time; ``begins``, and goes on after ``go``; ``hangs``; any
    other word: answers well.
    """

    does: list[str]
    go: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[str] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)

    async def __call__(self, one: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        word = self.does[len(self.asked)] if len(self.asked) < len(self.does) else ""
        self.asked.append(one.url)
        if word in ("waits", "dies"):
            await self.go.wait()
        if word in ("breaks", "fails", "lacks"):
            await self.both_asked()
        if word == "hangs":
            await asyncio.sleep(60)
        if word == "begins":
            writer.write(STREAM_HEAD)
            chunk(writer, b"data: {}\n\n")
            await self.go.wait()
            chunk(writer, b"data: [DONE]\n\n")
            chunk(writer, b"")
        elif word in ("dies", "breaks"):
            reset(writer)
        elif word == "fails":
            reply(writer, b"{}", "500 Internal Server Error")
        elif word == "lacks":
            reply(writer, no_model(str(seen.json["model"])), "404 Not Found")
        else:
            await answer_well(one, seen, writer)

    async def both_asked(self) -> None:
        await poll(lambda: len(self.asked) == 2, 20, "a second worker is asked")

    @property
    def hung_up(self) -> int:
        """The number of requests that the router has given up."""
        return sum(reader.at_eof() for upstream in self.engines for reader in upstream.readers)


@asynccontextmanager
async def pair(url: str, model: str, *does: str, **settings: Any) -> AsyncIterator[tuple[Replica, Plan]]:
    """A replica with two engines, and a plan for their requests."""
    plan = Plan([*does])
    async with AsyncExitStack() as stack:
        plan.engines = [await stack.enter_async_context(engine(model, plan)) for _ in range(2)]
        urls = [upstream.url for upstream in plan.engines]
        chosen = {"hedge_after_s": 0.1} | settings
        yield await stack.enter_async_context(replica(url, model, *urls, **chosen)), plan


async def results(router: Replica) -> dict[str, float]:
    found = {name: await router.metric(f'warmfleet_hedged_streams_total{{result="{name}"}}') for name in RESULTS}
    return {name: count for name, count in found.items() if count}


RESULTS = ("won", "lost", "none", "budget")


async def test_the_second_worker_answers_and_the_first_is_given_up_at_once(valkey_url: str, model: str) -> None:
    async with pair(valkey_url, model, "waits", "begins") as (router, plan):
        asked = asyncio.create_task(router.post(STREAM))
        await poll(lambda: plan.hung_up == 1, 20, "the first engine is left while the second one answers")

        async def one_is_left() -> bool:
            return sum(worker.load.in_flight for worker in await router.fleet.workers.read()) == 1

        await poll(one_is_left, 20, "the load of the request that was given up is given back")
        assert await router.metric('warmfleet_settled_reservations_total{outcome="cancelled"}') == 1
        plan.go.set()
        status, headers, said = await asked
        assert (status, said) == (200, b"data: {}\n\ndata: [DONE]\n\n")
        served = {worker.url: worker.worker_id for worker in await router.fleet.workers.read()}
        assert headers["x-warmfleet-worker"] == served[plan.asked[1]]
        assert await results(router) == {"won": 1}
        await router.unloaded()


async def test_the_first_worker_may_still_win(valkey_url: str, model: str) -> None:
    async with pair(valkey_url, model, "waits", "hangs") as (router, plan):
        asked = asyncio.create_task(router.post(STREAM))
        await plan.both_asked()
        plan.go.set()
        assert (await asked)[2] == WHOLE + b"data: [DONE]\n\n"
        assert await results(router) == {"lost": 1}
        await router.unloaded()
        await poll(lambda: plan.hung_up == 1, 20, "the second engine is left")


async def test_nothing_is_left_of_a_second_worker_that_two_pools_name_in_the_turn_of_the_first_byte() -> None:
    """Each pool is asked in a separate task, which may book a worker until the task learns that the race is over."""
    fixture, answer = Fixture(), cast("Any", None)
    relay = cast("Any", None)
    job, first = fixture.attempt()
    _, second = fixture.attempt(job)
    asks = Hedging(0.1, relay, fixture.settlements, fixture.choice, retries.RetryBudget(), fixture.metrics)
    race = Race(job, answer)

    async def answers() -> Outcome:
        while sum(fixture.asked()) < 2:  # noqa: ASYNC110  a stand-in counts its questions, it tells nobody
            await asyncio.sleep(0)
        assert first.on_first_byte is not None
        first.on_first_byte(first)
        return "finished"

    race.run(first, answers())
    race.run(second, asks._second(job, second, answer))
    await asyncio.gather(*race._tasks.values(), return_exceptions=True)
    first.release("finished")
    await fixture.nothing_left()


async def test_a_request_of_a_key_with_limits_is_not_hedged(valkey_url: str, model: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(line("team-a", "wf-good", concurrency=9))
    settings = {"client_keys_file": str(tmp_path / "keys"), "admin_port": 1, "hedge_after_s": 0.01}
    async with pair(valkey_url, model, "waits", **settings) as (router, plan):
        asked = asyncio.create_task(router.post(STREAM, authorization="Bearer wf-good"))
        await poll(lambda: len(plan.asked) == 1, 20, "a worker is asked")
        await asyncio.sleep(0.1)
        assert len(plan.asked) == 1
        plan.go.set()
        status, headers, _ = await asked
        assert (status, headers["x-ratelimit-remaining-requests"]) == (200, "8")


async def test_a_second_worker_that_fails_is_no_failure(valkey_url: str, model: str) -> None:
    for word in "fails", "dies":
        async with pair(valkey_url, model + word, "waits", word) as (router, plan):
            asked = asyncio.create_task(router.post(STREAM))
            await plan.both_asked()
            plan.go.set()
            status, _, said = await asked
            assert (status, said) == (200, WHOLE + b"data: [DONE]\n\n")
            await router.unloaded()


@pytest.mark.parametrize(
    ("does", "avoided"),
    [
        (("breaks", "waits"), [0]),
        (("waits", "breaks"), [1]),
        (("waits", "fails"), []),
        (("lacks", "waits"), []),
        (("waits", "lacks"), []),
    ],
)
async def test_other_requests_avoid_a_worker_that_died(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch, does: tuple[str, str], avoided: list[int]
) -> None:
    """Either worker may die; a 500 may be the request's own fault, and a missing name concerns no other request."""
    found: list[str] = []
    monkeypatch.setattr(Pool, "avoid", lambda _pool, worker: found.append(worker))
    async with pair(valkey_url, model, *does) as (router, plan):
        asked = asyncio.create_task(router.post(STREAM | {"model": model}))
        await plan.both_asked()
        ids = {view.url: view.worker_id for view in await router.fleet.workers.read()}
        await poll(lambda: len(found) == len(avoided), 20, "it is avoided")
        plan.go.set()
        assert (await asked)[0] == 200
        assert found == [ids[plan.asked[number]] for number in avoided]
        await router.unloaded()


@pytest.mark.parametrize(
    ("error", "warns"),
    [
        (UpstreamGone("died"), True),
        (UpstreamGone("refused", refused=True), True),
        (UpstreamGone("503", refused=True, answered=True), True),
        (UpstreamGone("500", answered=True), False),
        (NameRefused("x", counts=True), False),
    ],
)
def test_other_requests_are_warned_of_what_no_request_causes(error: UpstreamGone, warns: bool) -> None:
    assert error.warns_others is warns


async def test_a_first_worker_that_fails_meanwhile_is_replaced_by_the_second(valkey_url: str, model: str) -> None:
    async with pair(valkey_url, model, "dies", "waits") as (router, plan):
        asked = asyncio.create_task(router.post(STREAM))
        await plan.both_asked()
        for writer in plan.engines[[upstream.url for upstream in plan.engines].index(plan.asked[0])].writers:
            reset(writer)
        await asyncio.sleep(0.05)
        plan.go.set()
        status, _, said = await asked
        assert (status, said) == (200, WHOLE + b"data: [DONE]\n\n")
        assert await results(router) == {"won": 1}
        assert await router.metric('warmfleet_settled_reservations_total{outcome="failed"}') == 1
        await router.unloaded()


async def test_it_is_off_unless_the_operator_sets_a_delay(valkey_url: str, model: str) -> None:
    async with pair(valkey_url, model, "waits", hedge_after_s=0.0) as (router, plan):
        asked = asyncio.create_task(router.post(STREAM))
        await poll(lambda: plan.asked, 20, "an engine is asked")
        await asyncio.sleep(0.3)
        plan.go.set()
        assert (await asked)[0] == 200
        assert len(plan.asked) == 1


@pytest.mark.parametrize("more", [{"stream": False}, {"n": 2}, {"prompt": ["a", "b"]}, {"prompt": "long " * 100}])
async def test_what_may_not_be_doubled(
    valkey_url: str, model: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain answer has no early first byte; several answers, several prompts or a long prompt cost too much."""
    monkeypatch.setattr(hedging, "MAX_PROMPT_TOKENS", 20)
    async with pair(valkey_url, model, "waits") as (router, plan):
        asked = asyncio.create_task(router.post(STREAM | more))
        await poll(lambda: plan.asked, 20, "an engine is asked")
        await asyncio.sleep(0.3)
        plan.go.set()
        assert (await asked)[0] == 200
        assert len(plan.asked) == 1
        assert await results(router) == {}


async def test_a_budget_bounds_second_askings(valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "BUDGET_MOST", 1.0)
    async with pair(valkey_url, model, "waits", "", "waits") as (router, plan):
        assert (await router.post(STREAM))[0] == 200
        asked = asyncio.create_task(router.post(STREAM))
        await poll(lambda: len(plan.asked) == 3, 20, "an engine is asked")
        budget = 'warmfleet_hedged_streams_total{result="budget"}'
        await poll(lambda: router.metric(budget), 20, "no second worker may be asked")
        plan.go.set()
        assert (await asked)[0] == 200
        assert len(plan.asked) == 3


async def test_a_client_that_hangs_up_ends_both(valkey_url: str, model: str) -> None:
    async with pair(valkey_url, model, "hangs", "hangs") as (router, plan):
        asked = asyncio.create_task(router.post(STREAM))
        await plan.both_asked()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await poll(lambda: plan.hung_up == 2, 20, "both engines are left")
        await router.unloaded()


async def test_without_a_second_worker_the_first_is_waited_for(valkey_url: str, model: str) -> None:
    async with pair(valkey_url, model, "waits") as (router, plan):
        other = next(upstream for upstream in plan.engines)
        await other.die()
        await router.routable(1)
        asked = asyncio.create_task(router.post(STREAM))
        none = 'warmfleet_hedged_streams_total{result="none"}'
        await poll(lambda: plan.asked, 20, "the engine is asked")
        await asyncio.sleep(0.3)
        plan.go.set()
        assert (await asked)[0] == 200
        assert await router.metric(none) == 1
