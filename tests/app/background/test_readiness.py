"""Checks of engines known by URL: sleeping, paused and saturated engines get no requests, slow answers are allowed."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.engines.scripted import STREAM_HEAD, Engine, answer_by_name, chunk, engine, event
from tests.support.polling import poll
from tests.support.replicas.replica import Replica
from tests.support.replicas.replica import replica as whole_replica
from tests.support.replicas.stock_checks import Checks, asked, sent

from warmfleet.background.stock import checks as stock_engines
from warmfleet.background.stock.checks import worker_id
from warmfleet.background.stock.readiness import figures_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.fleet import WorkerView

AWAKE = 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} %d\n'


@dataclass
class Pages:
    """An engine's answers by path; other paths get 404."""

    at: dict[str, Any] = field(default_factory=dict)

    def put(self, engine: Engine) -> None:
        before = engine._page

        def page(path: str) -> bytes:
            known = path in self.at or path == "/v1/models"
            engine.statuses[path] = "200 OK" if known else "404 Not Found"
            found = self.at.get(path, before(path) if path == "/v1/models" else b"{}")
            if isinstance(found, Exception):
                raise found
            return found if isinstance(found, bytes) else str(found).encode()

        cast("Any", engine)._page = page


def sleeping(path: str, *, yes: bool) -> dict[str, Any]:
    return {path: json.dumps({path[1:]: yes})}


async def worker(checks: Checks) -> WorkerView:
    (found,) = await checks.fleet.workers.read()
    return found


# ---------------------------------------------------------------- asleep and paused

#: The engine's pages while it is asleep or paused, and its pages while it runs.
HELD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "asleep, by its metrics only": ({"/metrics": AWAKE % 0}, {"/metrics": AWAKE % 1}),
    "asleep, by /is_sleeping only": (sleeping("/is_sleeping", yes=True), sleeping("/is_sleeping", yes=False)),
    "paused, by /is_paused only": (sleeping("/is_paused", yes=True), sleeping("/is_paused", yes=False)),
    "paused, as vLLM tells it": (
        sleeping("/is_sleeping", yes=True) | sleeping("/is_paused", yes=True) | {"/metrics": AWAKE % 1},
        sleeping("/is_sleeping", yes=False) | sleeping("/is_paused", yes=False) | {"/metrics": AWAKE % 1},
    ),
    "asleep, where only its metrics know": (
        sleeping("/is_paused", yes=False) | {"/metrics": AWAKE % 0},
        sleeping("/is_paused", yes=False) | {"/metrics": AWAKE % 1},
    ),
    "one rank of two asleep": (
        {"/metrics": AWAKE % 1 + (AWAKE % 0).replace('"0"', '"1"')},
        {"/metrics": AWAKE % 1 + (AWAKE % 1).replace('"0"', '"1"')},
    ),
}


@pytest.mark.parametrize(("held", "free"), HELD.values(), ids=HELD)
async def test_an_engine_that_is_held_gets_no_request_after_the_next_check(
    held: dict[str, Any],
    free: dict[str, Any],
    replica: Callable[..., Checks],
    model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stock_engines, "TOLD_LATELY", 0.0)
    async with engine(model) as one, engine(model) as two:
        pages = Pages(dict(free))
        pages.put(one)
        Pages().put(two)
        checks = replica(one.url, two.url)
        await checks.round()
        await checks.fleet.upkeep.step()
        slots = {url: found.load.slot for url, found in (await checks.workers()).items()}
        for _ in range(2):
            pages.at = dict(held)
            await checks.round()
            assert {url: str(found.state) for url, found in (await checks.workers()).items()} == {
                one.url: "paused",
                two.url: "approximate",
            }
            for n in range(4):
                assert (await checks.fleet.bookings.decide(asked(b"%d " % n * 400))).url == two.url
            pages.at = dict(free)
            await checks.round()
            assert {str(found.state) for found in (await checks.workers()).values()} == {"approximate"}
        assert {url: found.load.slot for url, found in (await checks.workers()).items()} == slots, "its mirror stays"


UNKNOWN: dict[str, dict[str, Any]] = {
    "it gives no answer": {"/is_sleeping": ConnectionError(), "/is_paused": ConnectionError()},
    "its answer cannot be read, and its metrics neither": {
        "/is_sleeping": ConnectionError(),
        "/metrics": ConnectionError(),
    },
}


@pytest.mark.parametrize("pages_at", UNKNOWN.values(), ids=UNKNOWN)
async def test_an_engine_that_does_not_tell_now_stays_as_it_was(
    pages_at: dict[str, Any], replica: Callable[..., Checks], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock_engines, "TOLD_LATELY", 0.0)
    async with engine(model) as one:
        pages = Pages(sleeping("/is_sleeping", yes=True) | sleeping("/is_paused", yes=True))
        pages.put(one)
        checks = replica(one.url)
        await checks.round()
        pages.at = pages_at
        await checks.round()
        assert (await worker(checks)).state == "paused"


async def test_paths_that_an_engine_lacks_are_asked_for_once(replica: Callable[..., Checks], model: str) -> None:
    async with engine(model) as one:
        asked_for: list[str] = []
        before = one._page

        def page(path: str) -> bytes:
            asked_for.append(path)
            return before(path)

        cast("Any", one)._page = page
        checks = replica(one.url)
        for _ in range(4):
            await checks.round()
        assert (asked_for.count("/is_sleeping"), asked_for.count("/is_paused")) == (1, 1)


async def test_one_replica_reads_for_all_and_all_agree(replica: Callable[..., Checks], model: str) -> None:
    async with engine(model) as one:
        pages = Pages({"/metrics": AWAKE % 0})
        pages.put(one)
        a, b = replica(one.url), replica(one.url)
        await a.round()
        await b.round()
        read: list[str] = []
        before = one._page

        def page(path: str) -> bytes:
            read.append(path)
            return before(path)

        cast("Any", one)._page = page
        for _ in range(3):
            await a.round()
            await b.round()
            assert (await worker(a)).state == "paused"
        assert read.count("/metrics") == 0, "it was read less than four seconds ago"


async def test_one_that_was_asleep_and_starts_anew_is_awake(replica: Callable[..., Checks], model: str) -> None:
    async with engine(model) as one:
        pages = Pages(sleeping("/is_sleeping", yes=True))
        pages.put(one)
        checks = replica(one.url)
        await checks.round()
        assert (await worker(checks)).state == "paused"
        pages.at = {"/v1/models": ConnectionError()}
        await checks.round()
        assert (await worker(checks)).state == "silent"
        pages.at = {}
        await checks.round()
        assert (await worker(checks)).state == "approximate"


# ---------------------------------------------------------------- saturated

RUNS = 'vllm:num_requests_running{{engine="0"}} {0}\nvllm:num_requests_waiting{{engine="0"}} {1}\n'
RUNS += 'vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} {1}\n'
RUNS += 'vllm:request_success_total{{finished_reason="stop"}} {2}\n'
RUNS += 'vllm:request_success_total{{finished_reason="abort"}} 0\n'
SGLANG = "sglang:num_running_reqs {0}\nsglang:num_queue_reqs {1}\nsglang:num_requests_total {2}\n"
TGI = "tgi_batch_current_size {0}\ntgi_queue_size {1}\ntgi_request_success {2}\n"
LLAMA = "llamacpp:requests_processing {0}\nllamacpp:requests_deferred {1}\n"

#: Two readings, half a second apart, of running, waiting and ended requests; and whether the engine is saturated.
LOADS: dict[str, tuple[str, tuple[int, int, int], tuple[int, int, int], bool]] = {
    "vLLM takes in nothing": (RUNS, (8, 50, 100), (8, 50, 100), True),
    "vLLM takes in less than waits": (RUNS, (8, 50, 100), (8, 49, 101), True),
    "vLLM's queue will be empty in a second": (RUNS, (8, 10, 100), (8, 10, 105), False),
    "vLLM's queue was there for a moment": (RUNS, (0, 64, 100), (64, 0, 100), False),
    "vLLM runs much, and nothing waits": (RUNS, (256, 0, 100), (256, 0, 100), False),
    "SGLang takes in nothing": (SGLANG, (8, 50, 100), (8, 50, 100), True),
    "SGLang's queue will be empty in a second": (SGLANG, (8, 10, 100), (8, 10, 105), False),
    "TGI takes in nothing": (TGI, (8, 50, 100), (8, 50, 100), True),
    "llama.cpp takes in nothing": (LLAMA, (4, 9, 0), (4, 9, 0), True),
    "it tells nothing of its requests": ("other 1\n", (0, 0, 0), (0, 0, 0), False),
}


@pytest.mark.parametrize(("form", "first", "second", "full"), LOADS.values(), ids=LOADS)
async def test_an_engine_whose_queue_outlasts_the_next_check_gets_no_new_request(
    form: str,
    first: tuple[int, int, int],
    second: tuple[int, int, int],
    full: bool,
    replica: Callable[..., Checks],
    model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stock_engines, "TOLD_LATELY", 0.0)
    async with engine(model) as one, engine(model) as two:
        pages = Pages()
        pages.put(one)
        Pages().put(two)
        checks = replica(one.url, two.url)
        await checks.round()
        await checks.fleet.upkeep.step()
        other = worker_id(two.url)
        await checks.fleet.workers.drain(other, draining=True)
        await sent(checks, one.url)  # the engine that will be saturated has this prompt in its cache
        await checks.fleet.workers.drain(other, draining=False)
        readings = iter([first, second])
        before = one._page
        last: list[Any] = [second]

        def page(path: str) -> bytes:
            if path != "/metrics":
                return before(path)
            last[0] = next(readings, last[0])
            return form.format(*last[0]).encode()

        cast("Any", one)._page = page
        one.statuses["/metrics"] = "200 OK"
        await checks.round()
        known = await checks.workers()
        assert (known[one.url].load.foreign_prefill_tokens > 0) is full
        assert known[one.url].state == "approximate"
        prompts = [b"word " * 400, *(b"%d " % n * 400 for n in range(5))]
        chosen = {(await checks.fleet.bookings.decide(asked(text))).url for text in prompts}
        assert (one.url not in chosen) is full


async def test_an_engine_is_full_until_a_check_says_otherwise(
    replica: Callable[..., Checks], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock_engines, "TOLD_LATELY", 0.0)
    async with engine(model) as one:
        pages = Pages({"/metrics": RUNS.format(8, 50, 100)})
        pages.put(one)
        checks = replica(one.url)
        await checks.round()
        assert (await worker(checks)).load.foreign_prefill_tokens > 10_000
        pages.at["/metrics"] = ConnectionError()
        await checks.round()
        assert (await worker(checks)).load.foreign_prefill_tokens > 10_000, "it did not say"
        pages.at["/metrics"] = RUNS.format(8, 0, 150)
        await checks.round()
        assert (await worker(checks)).load.foreign_prefill_tokens == 0


async def test_where_all_are_full_requests_wait_until_one_is_not(valkey_url: str, model: str) -> None:
    async with engine(model) as one:
        pages = Pages({"/metrics": RUNS.format(8, 50, 100)})
        pages.put(one)
        async with whole_replica(valkey_url, model, one.url, health_interval_s=1.0) as router:
            await router.routable(1)
            request = asyncio.create_task(router.post({"model": model, "prompt": "word " * 40}))

            async def waits() -> bool:
                return await router.metric("warmfleet_queued_requests") == 1

            await poll(waits, 20, "it waits")
            assert not one.seen
            pages.at["/metrics"] = RUNS.format(8, 0, 150)
            assert (await request)[0] == 200


@pytest.mark.parametrize("goes", [False, True])
async def test_a_request_that_waits_goes_to_the_engine_that_serves_its_name_then(
    goes: bool, valkey_url: str, model: str
) -> None:
    """The name moves to the other engine while both are full. goes: the engine that had the name also ends."""
    async with engine(model, answer_by_name) as has, engine(model, answer_by_name) as gets:
        pages = [Pages({"/metrics": RUNS.format(8, 50, 100)}) for _ in range(2)]
        has.names, gets.names = [model, "alias"], [model]
        for page, one in zip(pages, (has, gets), strict=True):
            page.put(one)
        async with whole_replica(valkey_url, model, has.url, gets.url, health_interval_s=0.3) as router:
            await router.routable(2)
            request = asyncio.create_task(router.post({"model": "alias", "prompt": "word " * 40}))
            await poll(lambda: _waits(router), 20, "it waits")
            gets.names = [model, "alias"]
            await poll(lambda: _serve_alias(router, 2), 20, "it has the name, too")
            if goes:
                await has.die()
                await router.routable(1)
            else:
                has.names = [model]
                await poll(lambda: _serve_alias(router, 1), 20, "the other one has it no longer")
            for page in pages:
                page.at["/metrics"] = RUNS.format(8, 0, 150)
            assert (await request)[0] == 200
            assert [len(upstream.seen) for upstream in (has, gets)][goes:] == [1, 1][goes:]


async def _waits(router: Replica) -> bool:
    return await router.metric("warmfleet_queued_requests") == 1


async def _serve_alias(router: Replica, count: int) -> bool:
    (told,) = json.loads((await router.get("/workers"))[1])["models"]
    return sum("alias" in row["models"] for row in told["workers"]) == count


def test_a_page_is_read_as_it_stands() -> None:
    page = (RUNS.format(8, 50, 100) + AWAKE % 1).encode()
    assert figures_of(page, 1.0)[:4] == (8, 50, 100, False)
    assert figures_of(b"# TYPE x\n" + page.replace(b"\n", b" 1763863000\n") + page, 1.0)[:3] == (16, 100, 200)
    assert figures_of(b"vllm:num_requests_waiting{} x\nvllm:num_requests_waiting", 1.0)[:4] == (0, 0, 0, None)


# ---------------------------------------------------------------- slow to answer its check


def streaming(stop: asyncio.Event) -> Any:
    async def answer(_: Engine, _seen: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        while not stop.is_set():
            chunk(writer, event(" word"))
            await writer.drain()
            await asyncio.sleep(0.05)
        chunk(writer, b"data: [DONE]\n\n")
        chunk(writer, b"")

    return answer


def waiting(stop: asyncio.Event) -> Any:
    async def answer(engine_: Engine, _seen: Any, writer: asyncio.StreamWriter) -> None:
        await stop.wait()
        body = json.dumps({"choices": [{"index": 0, "text": " word"}]}).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )

    return answer


async def late(one: Engine) -> None:
    one.late.add("/v1/models")


async def closes_its_checks(one: Engine) -> None:
    before = one._page

    def page(path: str) -> bytes:
        if path == "/v1/models":
            raise ConnectionError
        return before(path)

    cast("Any", one)._page = page


async def refused(one: Engine) -> None:
    await closes_its_checks(one)
    await one._listen_no_more()


async def unwell(one: Engine) -> None:
    one.statuses["/v1/models"] = "503 Service Unavailable"


TROUBLE = {"late": late, "refused": refused, "reset": closes_its_checks, "503": unwell}
WORKING: dict[str, tuple[Any, str, bool]] = {
    "it streams": (streaming, "late", True),
    "a plain answer is in the making": (waiting, "late", True),
    "it refuses connections meanwhile": (streaming, "refused", False),
    "it resets its checks": (streaming, "reset", False),
    "it answers its checks with 503": (streaming, "503", False),
    "nothing runs there": (None, "late", False),
}


@pytest.mark.parametrize(("answer", "check", "stays"), WORKING.values(), ids=WORKING)
async def test_a_slow_check_is_no_death_while_connections_stand(
    answer: Any, check: str, stays: bool, valkey_url: str, model: str
) -> None:
    stop = asyncio.Event()
    async with engine(model) as one:
        if answer is not None:
            one.answer = answer(stop)
        async with whole_replica(valkey_url, model, one.url, check_timeout_s=0.3) as router:
            await router.routable(1)
            body = {"model": model, "prompt": "word " * 40, "stream": answer is streaming}
            request = asyncio.create_task(router.post(body)) if answer else None
            await poll(lambda: bool(one.seen) or answer is None, what="the request is there")
            await TROUBLE[check](one)
            seen: set[str] = set()
            for _ in range(10):
                seen |= {str(found.state) for found in await router.fleet.workers.read()}
                await asyncio.sleep(0.15)
            assert (seen == {"approximate"}) is stays, seen
            stop.set()
            if request is not None:
                assert (await request)[0] == 200


async def test_an_engine_that_sends_nothing_for_long_is_at_work_no_more(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock_engines, "STILL_S", 1.0)
    stop = asyncio.Event()
    async with (
        engine(model, waiting(stop)) as one,
        whole_replica(valkey_url, model, one.url, check_timeout_s=0.3) as router,
    ):
        await router.routable(1)
        request = asyncio.create_task(router.post({"model": model, "prompt": "word " * 40}))
        await poll(lambda: bool(one.seen), what="the request is there")
        await late(one)

        async def out() -> bool:
            return [str(found.state) for found in await router.fleet.workers.read()] == ["silent"]

        await poll(out, 20, "it is out")
        stop.set()
        await request
