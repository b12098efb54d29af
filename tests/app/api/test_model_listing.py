"""/v1/models lists each name as an engine's own listing does, for workers of every kind."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.engines.scripted import Engine, answer_well, engine
from tests.support.engines.simulated import simulated
from tests.support.fleet.constants_alone import ConstantsAlone
from tests.support.replicas.replica import Replica, replica

from warmfleet.api.model_listing import entries
from warmfleet.fleet import LoadRow, WorkerState, WorkerView
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.fleet_view import view_of
from warmfleet.pools.pool import Pool
from warmfleet.pools.served_models import Pools

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.fleet import Fleet

STARTED = 1_760_000_000
FIELDS = {"id", "object", "created", "owned_by", "root", "parent", "max_model_len"}


def telling(entries: list[dict[str, Any]], started: int = STARTED) -> Callable[[str], bytes]:
    """The pages of an engine whose /v1/models has these entries."""

    def page(path: str) -> bytes:
        if path == "/v1/models":
            return json.dumps({"object": "list", "data": entries}).encode()
        return f"process_start_time_seconds {started}.5\n".encode() if path == "/metrics" and started else b"{}"

    return page


async def listed(router: Replica) -> dict[str, dict[str, Any]]:
    """The entries by their ids; /v1/models/{id} must equal the entry of the list."""
    found = json.loads((await router.get("/v1/models"))[1])["data"]
    for entry in found:
        assert json.loads((await router.get(f"/v1/models/{entry['id']}"))[1]) == entry
        assert entry.keys() == FIELDS
    return {entry["id"]: entry for entry in found}


def card(name: str, limit: object = 4_096, parent: str | None = None) -> dict[str, Any]:
    return {"id": name, "object": "model", "parent": parent, "max_model_len": limit}


async def told(valkey_url: str, model: str, *pages: Callable[[str], bytes]) -> dict[str, dict[str, Any]]:
    engines = [Engine(model, answer_well) for _ in pages]
    try:
        for one, page in zip(engines, pages, strict=True):
            one._page = page  # type: ignore[method-assign,assignment]
            one.server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
            one.url = f"http://127.0.0.1:{one.server.sockets[0].getsockname()[1]}"
        async with replica(valkey_url, model, *[upstream.url for upstream in engines]) as router:
            return await listed(router)
    finally:
        for upstream in engines:
            await upstream.close()


async def test_a_static_engine_tells_its_context_and_its_start(valkey_url: str, model: str) -> None:
    found = await told(valkey_url, model, telling([card(model)]))
    assert found[model] == {
        "id": model,
        "object": "model",
        "created": STARTED,
        "owned_by": "warmfleet",
        "root": model,
        "parent": None,
        "max_model_len": 4_096,
    }


async def test_an_adapter_names_its_model(valkey_url: str, model: str) -> None:
    found = await told(valkey_url, model, telling([card(model), card("sql", None, model)]))
    assert {name: (one["parent"], one["max_model_len"]) for name, one in found.items()} == {
        model: (None, 4_096),
        "sql": (model, 4_096),
    }


async def test_of_engines_that_differ_the_longest_context_and_the_first_start(valkey_url: str, model: str) -> None:
    """The longest context counts, because requests that are too long for some engines go to another engine."""
    found = await told(
        valkey_url,
        model,
        telling([card(model)], STARTED + 9),
        telling([card(model, 32_768)]),
        telling([card(model, None)]),
    )
    assert (found[model]["max_model_len"], found[model]["created"]) == (32_768, STARTED)


@pytest.mark.parametrize("limit", [None, "long", -1, 0, 2**40, 1.5, True, [], {}])
async def test_an_engine_that_tells_no_context(valkey_url: str, model: str, limit: object) -> None:
    found = await told(valkey_url, model, telling([card(model, limit)]))
    assert found[model]["max_model_len"] is None


async def test_without_a_start_the_time_is_real_all_the_same(valkey_url: str, model: str) -> None:
    before = int(time.time())
    found = await told(valkey_url, model, telling([card(model)], 0))
    assert before <= found[model]["created"] <= time.time()
    async with replica(valkey_url, "nobody/serves-this") as router:
        entry = (await listed(router))["nobody/serves-this"]
        assert before <= entry["created"] <= time.time()
        assert (entry["parent"], entry["max_model_len"]) == (None, None)


async def test_a_worker_that_joined_is_as_old_as_its_join_in_every_replica(valkey_url: str, model: str) -> None:
    began = int(time.time()) - 1
    async with (
        simulated(valkey_url, model),
        replica(valkey_url, model) as one,
        replica(valkey_url, model) as other,
    ):
        await one.proven()
        await other.proven()
        first, second = await listed(one), await listed(other)
    assert first == second
    assert began <= first[model]["created"] <= time.time()
    assert first[model]["max_model_len"] > 0


def worker(name: str, record: dict[str, Any], loras: dict[str, str]) -> WorkerView:
    server = {"facts": {"loras": loras}}
    return WorkerView(
        name, record, server, LoadRow(), 0.0, WorkerState.PROVEN, "proven", f"http://{name}", ["alias", "m"]
    )


def test_an_adapter_takes_as_much_as_the_workers_that_have_it() -> None:
    """The workers may be in any pool of the model; the adapter's parent is the name that clients use."""
    pools = [Pool(tag, cast("Fleet", ConstantsAlone()), DegradedMode(1.0)) for tag in ("m#a", "m#b")]
    short, long = {"max_model_len": 1_000, "joined": 9_000}, {"max_model_len": 9_000, "joined": 7_000}
    workers = [worker("w1", short, {"sql": "/sql", "law": "/law"}), worker("w2", long, {"law": "/law"})]
    pools[0].show(view_of(workers, None, (), text=False))
    pools[1].show(view_of([worker("w3", {"max_model_len": 20_000}, {})], None, (), text=False))
    found = {entry["id"]: entry for entry in entries(Pools(pools), STARTED)}
    assert {name: (one["parent"], one["max_model_len"], one["created"]) for name, one in found.items()} == {
        "alias": (None, 20_000, 7),
        "m": (None, 20_000, 7),
        "sql": ("m", 1_000, 7),
        "law": ("m", 9_000, 7),
    }


async def test_the_document_describes_the_entries(valkey_url: str, model: str) -> None:
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url) as router:
        document = json.loads((await router.get("/openapi.json"))[1])
    answer = document["paths"]["/v1/models/{model}"]["get"]["responses"]["200"]
    assert {*answer["content"]["application/json"]["schema"]["required"]} == FIELDS
