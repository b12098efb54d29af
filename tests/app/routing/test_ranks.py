"""Servers with several engine cores: each request names the core that was chosen, whatever its client asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.engines.plugin_worker import SCHEME, proof, worker
from tests.support.engines.scripted import Engine, Seen, answer_well, engine
from tests.support.replicas.replica import replica

from warmfleet.fleet import LoadRow, WorkerState, WorkerView
from warmfleet.pools.fleet_view import view_of
from warmfleet_worker.protocol.wire import NO_CACHE, Scheme
from warmfleet_worker.tracker import Tracker
from warmfleet_worker.worker_publisher import WorkerPublisher

if TYPE_CHECKING:
    import asyncio

    from tests.support.engines.scripted import Answer

    from warmfleet_worker.worker_publisher import WorkerPublisher


def core(server_id: str, rank: int, ranks: int | None) -> WorkerView:
    """An engine core. ranks: the number that its server announces; None: the server's version announces none."""
    record = {"server_id": server_id, "rank": rank}
    server = {"facts": {} if ranks is None else {"ranks": ranks}}
    name = f"{server_id}.{rank}"
    return WorkerView(name, record, server, LoadRow(), 0.0, WorkerState.PROVEN, "proven", f"http://{name}", ["m"])


def test_only_cores_of_a_server_with_several_are_named() -> None:
    found = [core("one", 0, 1), core("old", 0, None), core("two", 0, 2), core("late", 1, 2)]
    found += [core("older", 0, None), core("older", 1, None)]
    ranks = view_of(found, None, (), text=False).ranks
    assert ranks == {"two.0": "0", "late.1": "1", "older.0": "0", "older.1": "1"}


def reporting(cores: list[WorkerPublisher]) -> Answer:
    """An engine that keeps no blocks, and reports its prefills."""

    async def answer(one: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        reservation, prompt = seen.headers["x-request-id"].partition(".")[0], seen.json.get("prompt") or ""
        cores[0].progress(reservation, 0, len(prompt))
        await answer_well(one, seen, writer)

    return answer


async def test_a_request_names_the_chosen_rank_and_not_the_one_its_client_wants(valkey_url: str, model: str) -> None:
    """The engine keeps no blocks, so the request is placed by load, and the proof's reason says so."""
    cores: list[WorkerPublisher] = []
    nothing = Scheme(NO_CACHE, SCHEME.none_hash, 16)
    async with (
        engine(model, reporting(cores)) as upstream,
        replica(valkey_url, model) as router,
        worker(valkey_url, model, upstream.url, Tracker(), nothing, ranks=2) as publisher,
    ):
        cores.append(publisher)
        assert await proof(router, "identity") == "its prefix caching is off: it is chosen by load"
        await router.routable(1)
        assert {seen.headers.get("x-data-parallel-rank") for seen in upstream.seen if seen.path != "/health"} == {"0"}
        body = {"model": model, "prompt": list(range(100))}
        for wish in ("1", "0", "7", "x"):
            status, headers, _ = await router.post(body, **{"X-data-parallel-rank": wish})
            assert (status, headers["x-warmfleet-matched-tokens"]) == (200, "0")
            assert upstream.seen[-1].headers["x-data-parallel-rank"] == "0"
