"""Gateways that forward requests themselves get a worker and a booking from a replica, and report outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from tests.support.engines.scripted import Engine, engine
from tests.support.polling import poll
from tests.support.redis.gate import gate
from tests.support.replicas.replica import Replica, replica

from warmfleet import main
from warmfleet.cli.local.ports import free_port
from warmfleet.fleet import Constants, Flag, Spans
from warmfleet.pools.outliers import FAILURES, Outliers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
ROUTE = "/route?endpoint=/v1/completions"
GUIDE = Path(__file__).parents[3] / "app" / "docs" / "route.md"


async def told(router: Replica, path: str, body: Any, **headers: str) -> Any:
    status, _, answer = await router.post(body, path, **headers)
    assert status == 200, answer
    return json.loads(answer)


async def error(router: Replica, path: str, body: Any, **headers: str) -> tuple[int, str, str | None]:
    status, _, answer = await router.post(body, path, **headers)
    found = json.loads(answer)["error"]
    return status, found["code"], found["param"]


async def test_a_placement_is_booked_and_settled(replica_and_engine: tuple[Replica, Engine], model: str) -> None:
    router, upstream = replica_and_engine
    placed = await told(router, ROUTE, {"model": model, "prompt": PROMPT}, **{"X-Request-Id": "mine"})
    reservation = placed["reservation"]
    assert placed["url"] == upstream.url
    assert placed["worker"] == upstream.url.removeprefix("http://").replace(":", "-")
    assert placed["headers"] == {"X-Request-Id": f"{reservation}.mine"}
    assert (placed["expires_in_s"], placed["cache_salt"]) == (30, None)
    assert placed["prompt_tokens"] > 200
    assert not upstream.seen, "the gateway sends it, not the router"
    (load,) = [worker.load for worker in await router.fleet.workers.read()]
    assert load.prefill_tokens > 200
    ended = {"model": model, "reservation": reservation}
    assert await told(router, "/settle", ended | {"outcome": "started"}) == {"result": "started"}
    (load,) = [worker.load for worker in await router.fleet.workers.read()]
    assert (load.prefill_tokens, load.in_flight) == (0, 1)
    assert await told(router, "/settle", ended | {"outcome": "finished"}) == {"result": "settled"}
    await router.unloaded()
    assert (await told(router, "/settle", ended | {"outcome": "finished"}))["result"] in ("same", "unknown")
    assert await error(router, "/renew", ended) == (409, "cancelled", "reservation")
    assert await router.load() == 0, "what was settled is not booked anew"


async def test_what_served_requests_left_is_matched(replica_and_engine: tuple[Replica, Engine], model: str) -> None:
    router, _ = replica_and_engine
    await router.post({"model": model, "prompt": PROMPT})
    placed = await told(router, ROUTE, {"model": model, "prompt": PROMPT + "And then? "})
    assert placed["matched_tokens"] >= 192


async def test_what_is_never_settled_expires(valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "Constants", partial(Constants, spans=Spans(lease_ms=1_000)))
    async with (
        engine(model) as upstream,
        replica(valkey_url, model, upstream.url, renew_interval_s=0.2) as router,
    ):
        body = {"model": model, "prompt": PROMPT}
        kept, left = await told(router, ROUTE, body), await told(router, ROUTE, body)
        assert kept["expires_in_s"] == 1
        both = await router.load()

        async def one_expired() -> bool:
            await told(router, "/renew", {"model": model, "reservation": kept["reservation"]})
            return await router.load() < both

        await poll(one_expired, 30, "the reservation that nobody renews expires")
        gone = {"reservation": left["reservation"]}
        assert await error(router, "/renew", gone) == (409, "cancelled", "reservation")
        await router.unloaded()


async def test_the_same_key_books_once(replica_and_engine: tuple[Replica, Engine], model: str) -> None:
    router, _ = replica_and_engine
    body, key = {"model": model, "prompt": PROMPT}, {"Idempotency-Key": "a"}
    first = await told(router, ROUTE, body, **key)
    load = await router.load()
    again = await told(router, ROUTE, body, **key)
    assert (again["reservation"], again["worker"]) == (first["reservation"], first["worker"])
    assert await router.load() == load
    other = await told(router, ROUTE, body, **{"Idempotency-Key": "b"})
    assert other["reservation"] != first["reservation"]
    early = {"model": model, "reservation": other["reservation"], "outcome": "cancelled"}
    assert await told(router, "/settle", early) == {"result": "settled"}
    assert await told(router, "/settle", early) == {"result": "unknown"}  # as if the outcome came before the booking
    assert await error(router, ROUTE, body, **{"Idempotency-Key": "b"}) == (409, "cancelled", None)
    assert await router.metric("warmfleet_fallback_requests_total") == 0, "a cancelled key says nothing against Redis"
    assert await router.load() == load


async def test_a_worker_that_failed_is_excluded(valkey_url: str, model: str) -> None:
    async with engine(model) as one, engine(model) as two, replica(valkey_url, model, one.url, two.url) as router:
        body = {"model": model, "prompt": PROMPT}
        first = await told(router, ROUTE, body)
        second = await told(router, f"{ROUTE}&exclude={first['worker']}", body)
        assert {first["worker"], second["worker"]} == {w.worker_id for w in await router.fleet.workers.read()}
        both = f"{first['worker']},{second['worker']}"
        assert (await error(router, f"{ROUTE}&exclude={both}", body))[:2] == (503, "no_worker")


async def test_a_gateway_learns_the_salt_of_its_tenant(valkey_url: str, model: str) -> None:
    kept = {"tenant_key": "k" * 32, "admin_key": "boss"}
    async with (
        engine(model) as upstream,
        replica(valkey_url, model, upstream.url),
        replica(valkey_url, model, **kept) as router,
    ):
        bearer, body = {"Authorization": "Bearer boss"}, {"model": model, "prompt": PROMPT}

        async def placed() -> bool:
            return (await router.post(body, ROUTE, **bearer))[0] == 200

        await poll(placed, 60, "the replica knows the worker")
        salts = [
            (await told(router, ROUTE, body, **bearer, **{"X-Warmfleet-Tenant": tenant}))["cache_salt"]
            for tenant in ("one", "two", "two")
        ]
        assert None not in salts
        assert salts[0] != salts[1] == salts[2]


@pytest.mark.parametrize(
    "hidden", [{"tenant_key": "k" * 32}, {"answer_headers": "request_id"}, {"client_keys_file": ""}]
)
async def test_a_fleet_with_tenants_or_keys_has_no_open_gateway(
    valkey_url: str, model: str, tmp_path: Path, hidden: dict[str, str]
) -> None:
    if "client_keys_file" in hidden:
        (tmp_path / "keys").touch()
        hidden = {"client_keys_file": str(tmp_path / "keys")}
    async with replica(valkey_url, model, **hidden) as router:
        for path in ("/route", "/settle", "/renew"):
            assert (await error(router, path, b"no JSON"))[:2] == (403, "forbidden")


async def test_bad_requests_name_the_field(replica_and_engine: tuple[Replica, Engine], model: str) -> None:
    router, _ = replica_and_engine
    body, known = {"model": model, "prompt": PROMPT}, "wf-0" + "a" * 21
    assert await error(router, "/route?endpoint=/sleep", body) == (400, "bad_request", "endpoint")
    assert (await error(router, "/route", body))[2] == "messages"
    assert await error(router, ROUTE, body | {"model": "no"}) == (404, "model_not_found", "model")
    assert (await error(router, ROUTE, body, **{"Idempotency-Key": "x" * 257}))[2] == "Idempotency-Key"
    assert (await error(router, ROUTE + "&exclude=" + "x," * 65, body))[2] == "exclude"
    for bad in (None, 5, "", "nothing", known + "a", "wf-" + "\u00e9" * 22):
        assert await error(router, "/settle", {"reservation": bad}) == (400, "bad_request", "reservation")
    outcomes: list[Any] = [None, 5, "done", ["finished"], {}]
    for outcome in outcomes:
        assert await error(router, "/settle", {"reservation": known, "outcome": outcome}) == (
            400, "bad_request", "outcome",
        )  # fmt: skip
    assert await error(router, "/renew", {"reservation": known, "model": 5}) == (400, "bad_request", "model")
    assert await router.load() == 0


@pytest.mark.parametrize("path", ["/route", "/settle", "/renew"])
async def test_gateways_need_the_operators_key(valkey_url: str, model: str, path: str) -> None:
    async with replica(valkey_url, model, admin_key="boss") as router:
        assert (await error(router, path, b"no JSON"))[:2] == (401, "unauthorized")
        assert (await error(router, path, b"no JSON", Authorization="Bearer boss"))[:2] == (400, "bad_request")


# ---------------------------------------------------------------- outcomes that gateways report


class Gateway:
    """A gateway that places requests at two workers and reports their outcomes. At one worker every request fails."""

    def __init__(self, router: Replica, model: str, bad: Engine) -> None:
        self.router = router
        self.body = {"model": model, "prompt": PROMPT}
        self.bad = bad.url.removeprefix("http://").replace(":", "-")

    async def place(self, *, at_bad: bool) -> dict[str, Any]:
        """A placement at the bad worker, or at the good one."""
        for _ in range(20):
            placed: dict[str, Any] = await told(self.router, ROUTE, self.body)
            if (placed["worker"] == self.bad) == at_bad:
                return placed
            await self.settle(placed, "cancelled")
        raise AssertionError("round robin goes to every worker")

    async def settle(self, placed: dict[str, Any], outcome: str, **more: Any) -> str:
        ended = {"model": self.body["model"], "reservation": placed["reservation"], "outcome": outcome, **more}
        return str((await told(self.router, "/settle", ended))["result"])

    async def ejected(self) -> bool:
        workers = await self.router.fleet.workers.read()
        return any(worker.worker_id == self.bad and worker.load.flags & Flag.EJECTED for worker in workers)


@contextlib.asynccontextmanager
async def gateway(valkey_url: str, model: str) -> AsyncIterator[Gateway]:
    async with (
        engine(model) as one,
        engine(model) as two,
        replica(valkey_url, model, one.url, two.url, policy="round_robin") as router,
    ):
        yield Gateway(router, model, one)
        await router.unloaded()


async def test_a_worker_whose_answers_break_off_at_a_gateway_is_ejected(valkey_url: str, model: str) -> None:
    async with gateway(valkey_url, model) as asks:
        for _ in range(FAILURES):
            assert not await asks.ejected()
            placed = await asks.place(at_bad=True)
            assert await asks.settle(placed, "started") == "started"
            assert await asks.settle(placed, "failed", status=200) == "settled"
        await poll(asks.ejected, 20, "the fleet passes it over")


async def test_a_worker_that_failed_what_another_served_at_a_gateway_is_ejected(valkey_url: str, model: str) -> None:
    async with gateway(valkey_url, model) as asks:
        for status in [503, None, 500]:
            assert await asks.settle(await asks.place(at_bad=True), "failed", status=status) == "settled"
            served = await asks.place(at_bad=False)
            more = {"status": 200, "failed_workers": [asks.bad, served["worker"], "a-stranger"]}
            assert await asks.settle(served, "finished", **more) == "settled"
        await poll(asks.ejected, 20, "the fleet passes it over")


@pytest.fixture
def blamed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The workers that a failure was counted against, one entry for each failure."""
    found: list[str] = []
    monkeypatch.setattr(Outliers, "failed", lambda _self, worker: found.append(worker.worker_id))
    return found


async def test_what_is_not_the_workers_fault_counts_for_nothing(valkey_url: str, model: str, blamed: list[str]) -> None:
    """A client's mistake, a request without a worker, an outcome reported twice, and an outcome of an unknown id."""
    async with gateway(valkey_url, model) as asks:
        for status in (400, 404, 500, 503, None):
            await asks.settle(await asks.place(at_bad=True), "failed", status=status)
        assert blamed == []
        refused = await asks.place(at_bad=False)
        await asks.settle(refused, "finished", status=404, failed_workers=[asks.bad])
        assert blamed == []
        once = await asks.place(at_bad=True)
        results = [await asks.settle(once, "failed", status=200) for _ in range(3)]
        results += [await asks.settle({"reservation": "wf-0" + "a" * 21}, "failed", status=200) for _ in range(3)]
        assert results[0] == "settled"
        assert {*results[1:]} <= {"same", "unknown"}
        assert blamed == [asks.bad]
        assert await asks.router.metric('warmfleet_settled_reservations_total{outcome="failed"}') == 6


async def test_an_outcome_after_the_leases_end_counts_for_nothing(
    valkey_url: str, model: str, blamed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "Constants", partial(Constants, spans=Spans(lease_ms=300)))
    async with gateway(valkey_url, model) as asks:
        late = await asks.place(at_bad=True)

        async def expired() -> bool:
            return await asks.router.fleet.bookings.lease(late["reservation"]) is None

        await poll(expired, 30, "the lease is at its end")
        assert await asks.settle(late, "failed", status=200) == "unknown"
        assert blamed == []


async def test_what_a_gateway_tells_is_checked(replica_and_engine: tuple[Replica, Engine], model: str) -> None:
    router, _ = replica_and_engine
    told_well = {"model": model, "reservation": "wf-0" + "a" * 21, "outcome": "failed"}
    wrong: dict[str, list[Any]] = {
        "status": ["200", 99, 600, True, 2.5],
        "failed_workers": ["w", "", 0, {"w": 1}, [1], [["w"]], ["w"] * 65],
    }
    for field, values in wrong.items():
        for value in values:
            assert await error(router, "/settle", told_well | {field: value}) == (400, "bad_request", field)


async def test_a_key_is_placed_by_one_request_at_a_time(valkey_url: str, model: str) -> None:
    async with (
        gate(valkey_url) as slow,
        engine(model) as upstream,
        replica(f"redis://127.0.0.1:{slow.port}/0", model, upstream.url, look_url=valkey_url) as router,
    ):
        slow.delay_s = 0.3
        body, key = {"model": model, "prompt": PROMPT}, {"Idempotency-Key": "a"}
        answers = await asyncio.gather(*(router.post(body, ROUTE, **key) for _ in range(2)))
        slow.delay_s = 0.0
        assert sorted(status for status, _, _ in answers) == [200, 409]
        [refused] = [json.loads(said)["error"] for status, _, said in answers if status == 409]
        assert (refused["code"], refused["param"]) == ("key_in_use", "Idempotency-Key")
        assert (await router.post(body, ROUTE, **key))[0] == 200, "the key is free again"


async def test_without_redis_a_gateway_is_placed_and_told_that_nothing_is_booked(valkey_url: str, model: str) -> None:
    async with (
        gate(valkey_url) as door,
        engine(model) as upstream,
        replica(f"redis://127.0.0.1:{door.port}/0", model, upstream.url, look_url=valkey_url) as router,
    ):
        body = {"model": model, "prompt": PROMPT}
        booked = await told(router, ROUTE, body)
        await door.shut()
        placed = await told(router, ROUTE, body, **{"X-Request-Id": "mine"})
        assert (placed["reservation"], placed["url"]) == (None, upstream.url)
        assert placed["headers"] == {"X-Request-Id": "unbooked.mine"}
        assert await router.metric("warmfleet_fallback_requests_total") >= 1
        ended = {"model": model, "reservation": booked["reservation"]}
        for path, more in ("/settle", {"outcome": "finished"}), ("/renew", {}):
            assert (await error(router, path, ended | more))[:2] == (503, "fleet_unavailable")
        await door.open()

        async def settled() -> bool:
            return (await router.post(ended | {"outcome": "finished"}, "/settle"))[0] == 200

        await poll(settled, 20, "Redis is back")
        await router.unloaded()


async def test_the_gateway_of_the_guide_works(
    replica_and_engine: tuple[Replica, Engine], model: str, tmp_path: Path
) -> None:
    router, upstream = replica_and_engine
    (source,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "gateway.py").write_text(source)
    port = free_port()
    gateway = await asyncio.create_subprocess_exec(
        sys.executable, str(tmp_path / "gateway.py"), env=os.environ | {"ROUTER": router.url, "PORT": str(port)}
    )
    url = f"http://127.0.0.1:{port}/v1/completions"

    async def ask(**more: Any) -> tuple[int, bytes]:
        async with router.client.post(url, json={"model": model, "prompt": PROMPT, **more}) as answer:
            return answer.status, await answer.read()

    async def answers() -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            return (await ask())[0] == 200
        return False

    try:
        await poll(answers, 60, "the gateway serves")
        status, body = await ask(stream=True, max_tokens=3)
        assert (status, body[-14:]) == (200, b"data: [DONE]\n\n")
        assert upstream.seen[-1].headers["x-request-id"].startswith("wf-")
        assert (await ask(model="no"))[0] == 404
        await router.unloaded()
        assert await router.metric('warmfleet_settled_reservations_total{outcome="finished"}') >= 2
    finally:
        gateway.terminate()
        await gateway.wait()
