"""Answers of /v1/responses that one engine keeps: later requests about them go to that engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.support.engines.scripted import engine, reply
from tests.support.replicas.replica import replica

from warmfleet.fleet import new_reservation
from warmfleet.prompt.response_ids import is_ours, keeper_of, response_id
from warmfleet_worker.protocol.wire import conversation_ended, reservation_of

if TYPE_CHECKING:
    import asyncio

    from tests.support.engines.scripted import Engine, Seen
    from tests.support.replicas.replica import Replica

WORKERS = tuple(f"vllm-{number}.0" for number in range(50))


@pytest.mark.parametrize("booked", [True, False])
@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("client", ["", "c" * 11])
def test_an_id_names_reservation_and_worker(client: str, *, booked: bool, ended: bool) -> None:
    reservation = new_reservation(1, client=client)
    made = [response_id(reservation, worker, booked=booked, ended=ended) for worker in WORKERS]
    assert all(map(is_ours, made))
    assert [keeper_of(name, WORKERS) for name in made] == list(WORKERS)
    assert keeper_of(made[0], WORKERS[1:]) == ""
    at_engine = f"{made[0]}_0-1a2b3c4d"  # of the first call of the model in an answer with tools
    assert reservation_of(at_engine) == ((reservation, 0) if booked else None)
    assert conversation_ended(at_engine) == (booked and ended)


def test_other_ids_name_no_worker() -> None:
    good = response_id(new_reservation(1), "a.0", booked=True, ended=False)
    for other in ("", "resp_1", good[:-1], good + "0", good + "/x", good.replace("resp_", ""), good.upper()):
        assert not is_ours(other)
        assert keeper_of(other, ["a.0"]) == ""


@pytest.mark.parametrize("kind", ["chatcmpl-", "cmpl-", "generate-tokens-", "generative-scoring-", "resp_", ""])
def test_the_plugin_knows_a_request_by_its_engines_id(kind: str) -> None:
    reservation = new_reservation(1)
    assert reservation_of(f"{kind}{reservation}.x-0-8f") == (reservation, 0)
    assert reservation_of(f"{kind}unbooked.{reservation}.x") is None


async def keeping(one: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Answer as vLLM does: with the body's id, and 404 about an answer that this engine does not keep."""
    told = seen.json if seen.body else {}
    asked = told.get("previous_response_id") or seen.path.removeprefix("/v1/responses").strip("/").partition("/")[0]
    kept = {before.json["request_id"] for before in one.seen if before is not seen and before.body}
    if asked and asked not in kept:
        reply(
            writer,
            json.dumps({"error": {"message": f"Response with id {asked!r} not found."}}).encode(),
            "404 Not Found",
        )
    else:
        reply(writer, json.dumps({"id": told.get("request_id") or asked, "object": "response"}).encode())


async def got(router: Replica, path: str) -> tuple[int, str]:
    """Status, and the worker that answered."""
    async with router.client.get(router.url + path) as answer:
        return answer.status, answer.headers.get("x-warmfleet-worker", "")


async def test_what_follows_an_answer_goes_to_its_engine(valkey_url: str, model: str) -> None:
    async with (
        engine(model, keeping) as first,
        engine(model, keeping) as second,
        replica(valkey_url, model, first.url, second.url) as router,
    ):
        await router.routable(2)
        homes = set[str]()
        for number in range(40):  # of each text chance decides which engine gets it
            if number >= 8 and len(homes) == 2:
                break
            status, headers, text = await router.post({"model": model, "input": f"hi {number}"}, "/v1/responses")
            told, home = json.loads(text), headers["x-warmfleet-worker"]
            assert status == 200
            homes.add(home)
            for _ in range(3):
                body = {"model": model, "input": "go on", "previous_response_id": told["id"]}
                status, headers, text = await router.post(body, "/v1/responses")
                assert (status, headers["x-warmfleet-worker"]) == (200, home)
                told = json.loads(text)
            assert await got(router, f"/v1/responses/{told['id']}") == (200, home)
            status, headers, _ = await router.post(b"", f"/v1/responses/{told['id']}/cancel")
            assert (status, headers["x-warmfleet-worker"]) == (200, home)
        assert len(homes) == 2
        unknown = response_id(new_reservation(1), "gone.0", booked=True, ended=False)
        status, _, text = await router.post(body | {"previous_response_id": unknown}, "/v1/responses")
        assert (status, "not found" in text.decode()) == (404, True), "an engine's own words"
        sent = len(first.seen) + len(second.seen)
        assert await got(router, "/v1/responses/resp_1") == (404, "")
        assert (await router.post(b"", f"/v1/responses/{unknown}/delete"))[0] == 404
        assert len(first.seen) + len(second.seen) == sent, "no engine is asked"
        own = {"model": model, "input": "hi", "request_id": "resp_mine"}
        assert json.loads((await router.post(own, "/v1/responses"))[2])["id"] == "resp_mine"
        await router.unloaded()
