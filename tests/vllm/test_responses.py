"""Two real engines that keep answers of /v1/responses: what follows an answer goes to its engine, also after a kill."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.engine import SERVED_NAME, SLEEPS, EngineOptions, running
from tests.vllm.replicas import replicas

from warmfleet.fleet import Fleet
from warmfleet.fleet.client import connect
from warmfleet.prompt.response_ids import keeper_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=3,
        shows=(
            "two real engines that keep answers of /v1/responses: later requests about an answer go to its engine, the "
            "plugin knows their load, and after a kill vLLM's own 404 is passed on"
        ),
    ),
    pytest.mark.timeout(1_500),
]

TALKS, TURNS = 12, 3
PATH = "/v1/responses"


async def test_what_follows_an_answer_goes_to_its_engine() -> None:
    with server(valkey_binary()) as redis_url:
        keeps = {"VLLM_ENABLE_RESPONSES_API_STORE": "1", **SLEEPS}
        options = [EngineOptions(redis_url=redis_url, worker_id=name, environment=keeps) for name in ("a", "b")]
        with running(*options) as engines, replicas(redis_url) as urls:
            fleet, workers = Fleet(connect(redis_url, timeout_s=5), SERVED_NAME), ("a.0", "b.0")

            async def quiet() -> bool:
                """Whether nothing is booked, and no engine has told of a request that no router sent."""
                loads = [view.load for view in await fleet.workers.read()]
                return not any(load.in_flight or load.foreign_prefill_tokens for load in loads)

            async with httpx.AsyncClient(timeout=120) as client:

                async def ask(url: str, **more: Any) -> httpx.Response:
                    body = {"model": SERVED_NAME, "max_output_tokens": 8, "temperature": 0} | more
                    return await client.post(url + PATH, json=body)

                kept: dict[str, list[str]] = {worker: [] for worker in workers}
                for number in range(TALKS):
                    answer = await ask(urls[number % 2], input=f"{number} " * 200)
                    assert answer.status_code == 200, answer.text
                    home, told = answer.headers["x-warmfleet-worker"], answer.json()
                    assert keeper_of(told["id"], workers) == home
                    for turn in range(TURNS):
                        answer = await ask(urls[turn % 2], input="go on", previous_response_id=told["id"])
                        assert (answer.status_code, answer.headers["x-warmfleet-worker"]) == (200, home), answer.text
                        told = answer.json()
                    found = await client.get(f"{urls[0]}{PATH}/{told['id']}")
                    assert (found.status_code, found.json()["id"]) == (200, told["id"])
                    kept[home].append(told["id"])
                    await poll(quiet, 30, "nothing is booked")
                assert all(kept.values()), "both engines keep answers"
                counts = await fleet.index.counts()
                assert counts.get("exact", 0) > 0, "the plugin knows these requests by their ids"

                later = await ask(urls[0], input="write", background=True, max_output_tokens=2_000, ignore_eos=True)
                assert later.status_code == 200, later.text
                stopped = await client.post(f"{urls[1]}{PATH}/{later.json()['id']}/cancel")
                assert (stopped.status_code, stopped.json()["status"]) == (200, "cancelled"), stopped.text

                engines[0].kill()

                async def gone() -> bool:
                    return [view.worker_id for view in await fleet.workers.read() if view.routable] == ["b.0"]

                await poll(gone, 60, "the killed engine gets no request")
                for name in kept["a.0"]:

                    async def refused(name: str = name) -> bool:
                        """A replica may read the fleet a moment later than this test."""
                        answer = await ask(urls[0], input="go on", previous_response_id=name)
                        return answer.status_code == 404 and "not found" in answer.text

                    await poll(refused, 10, "vLLM's own 404")
                    assert (await client.get(f"{urls[1]}{PATH}/{name}")).status_code == 404
                for name in kept["b.0"]:
                    answer = await ask(urls[1], input="go on", previous_response_id=name)
                    assert (answer.status_code, answer.headers["x-warmfleet-worker"]) == (200, "b.0")
            await fleet.close()
