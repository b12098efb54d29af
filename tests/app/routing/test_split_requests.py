"""Requests that two engines serve: the prefill engine computes the prompt, the decode engine takes its blocks over."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from tests.support.engines.transferring import CONSUMER, PRODUCER, Transferring
from tests.support.fleet.split_requests import SplitFleet, alone, split_fleet
from tests.support.polling import poll
from tests.support.replicas.doctor import doctor

from warmfleet.cli.doctor.finding import State
from warmfleet.engines import first_event
from warmfleet.engines.upstream import Upstream
from warmfleet.fleet.bookings import Bookings
from warmfleet.pools.outliers import Judged, Outliers
from warmfleet.pools.pairing import BY_POLICY, HANDOFF_OFF
from warmfleet.routing import prefill_answer, prefill_booking, prefills, unread_blocks
from warmfleet.routing.prefill_answer import PrefillAnswer
from warmfleet.routing.prefill_booking import PrefillBooking
from warmfleet.routing.transfer_params import PrefillFailed
from warmfleet_loadtest.simulator.answers import DONE
from warmfleet_loadtest.simulator.api import EVENTS, Api
from warmfleet_loadtest.simulator.openai_request import RefusedError
from warmfleet_loadtest.simulator.scheduler import Leg
from warmfleet_loadtest.simulator.transfers.engine_side import Transfers
from warmfleet_loadtest.simulator.transfers.faults import Faults
from warmfleet_loadtest.simulator.transfers.prefill_side import PrefillSide

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from warmfleet.engines.engine_connection import EngineResponse
    from warmfleet_loadtest.simulator.answers import Writer
    from warmfleet_loadtest.simulator.scheduler import Output, Request

TEXT = " ".join(f"word{number}" for number in range(250))
#: The event with which vLLM begins the stream of a chat.
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
LENGTH: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
COMPLETION: dict[str, Any] = LENGTH | {"prompt": TEXT}
#: The body for a text.
PATHS: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/completions": lambda text: LENGTH | {"prompt": text},
    "/v1/chat/completions": lambda text: LENGTH | {"messages": [{"role": "user", "content": text}]},
}


def events(said: bytes) -> list[Any]:
    lines = [line[6:] for line in said.decode().splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def streamed_text(said: bytes) -> str:
    choices = [choice for event in events(said) for choice in event["choices"]]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


@pytest.fixture
async def fleet(valkey_url: str, model: str, request: pytest.FixtureRequest) -> AsyncIterator[SplitFleet]:
    connector = getattr(request, "param", "NixlConnector")
    kinds = replace(PRODUCER, connector=connector), replace(CONSUMER, connector=connector)
    async with split_fleet(valkey_url, model, producer=kinds[0], consumer=kinds[1]) as made:
        await made.busy()
        yield made


over_both = pytest.mark.parametrize("fleet", ["NixlConnector", "MooncakeConnector"], indirect=True)


@over_both
async def test_two_engines_make_the_answer_of_one(fleet: SplitFleet) -> None:
    for count, (path, stream) in enumerate(product(PATHS, (False, True)), 1):
        asked = PATHS[path](f"{count} {TEXT}")
        body = asked | {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
        status, headers, said = await fleet.router.post(body, path)
        assert status == 200, said
        assert (await fleet.results(), fleet.prefilled(), fleet.taken()) == ({"split": count}, count, count)
        assert (headers["x-warmfleet-prefill-worker"], headers["x-warmfleet-worker"]) == ("p0.0", "d0.0")
        answer = streamed_text(said) if stream else text_of(json.loads(said))
        assert answer == text_of(await alone(asked, path))
        await fleet.given_back()


@over_both
async def test_usage_tells_what_the_prefill_engine_had_cached(fleet: SplitFleet) -> None:
    """Its prediction is compared with that, and nothing with what the decode engine reports: it has got all."""
    await fleet.prefill[0].order(bytes_per_s=3e8)  # it reports its part before the other engine has the blocks
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    await fleet.router.post(COMPLETION | stream)
    await fleet.given_back()
    (await fleet.decode[0].http.post("/sim/reset")).raise_for_status()
    _, headers, said = await fleet.router.post(COMPLETION | stream | {"prompt": f"{TEXT} and so on {TEXT}"})
    cached = events(said)[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == int(headers["x-warmfleet-matched-tokens"]) > 0
    assert await fleet.results() == {"split": 2}
    await poll(lambda: _counted(fleet, "exact", 2), 10, "both predictions are compared")
    assert await _counted(fleet, "over", 0)
    assert await _counted(fleet, "short", 0)


async def _counted(fleet: SplitFleet, name: str, count: int) -> bool:
    index = json.loads((await fleet.router.get("/workers"))[1])["models"][0]["index"]
    return int(index["counts"].get(name, 0)) == count


async def test_ids_of_a_client_go_to_both_engines(fleet: SplitFleet) -> None:
    body = {"prompt": list(range(300, 900)), "max_tokens": 4, "ignore_eos": True}
    status, _, said = await fleet.router.post(body)
    assert (status, text_of(json.loads(said))) == (200, text_of(await alone(body)))
    assert await fleet.results() == {"split": 1}


async def test_a_chat_that_calls_a_tool_is_split(fleet: SplitFleet) -> None:
    """The prefill engine need not read the call, which its one token does not hold."""
    path, tools = "/v1/chat/completions", [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    status, _, said = await fleet.router.post(PATHS[path](TEXT) | {"tools": tools, "tool_choice": "auto"}, path)
    assert (status, await fleet.results()) == (200, {"split": 1})
    assert json.loads(said)["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"


async def test_no_token_ends_the_first_step(fleet: SplitFleet) -> None:
    """Else vLLM would keep no blocks: simulated engines count such steps as violations."""
    status, _, _ = await fleet.router.post({"prompt": TEXT, "max_tokens": 4, "stop": ["e", "a"]})
    assert (status, await fleet.results()) == (200, {"split": 1})
    fleet.check()


UNFIT: dict[str, dict[str, Any]] = {
    "n": {"n": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "echo": {"echo": True},
    "prompts": {"prompt": [TEXT, TEXT]},
    "decode engines cannot read it": {"max_tokens": "8"},
    "options of no stream": {"stream_options": {"include_usage": True}},
}


async def test_one_engine_serves_a_request_that_two_cannot(fleet: SplitFleet) -> None:
    for why, changes in UNFIT.items():
        status, headers, said = await fleet.router.post(COMPLETION | {"prompt": f"{why} {TEXT}"} | changes)
        assert (status, headers["x-warmfleet-worker"]) == (200, "d0.0"), (why, said)
    assert set(await fleet.results()) == {"unfit"}
    assert fleet.prefilled() == 0
    await fleet.given_back()


@pytest.mark.parametrize("limits", [{"max_tokens": 40_000}, {"min_tokens": 20}])
async def test_no_prompt_is_computed_for_limits_that_engines_refuse(fleet: SplitFleet, limits: dict[str, int]) -> None:
    assert (await fleet.router.post(COMPLETION | limits))[0] == 400
    assert (set(await fleet.results()), fleet.prefilled(), await fleet.leg_load()) == ({"unfit"}, 0, 0)


async def test_other_policies_take_one_engine(valkey_url: str, model: str) -> None:
    async with split_fleet(valkey_url, model, policy="round_robin") as fleet:
        assert (await served(fleet))["x-warmfleet-worker"] == "d0.0"
        assert await fleet.results() == {"unfit": 1}
        report = await doctor(valkey_url, model)
        report.names("pairs", "no request goes to p0.0:", f"warmfleet policy cost --model {model}", State.NOTE)
        [fine] = report.of("pairs", State.OK)
        assert fine.detail == f"p0.0 can prefill for d0.0 (1 pairs); {BY_POLICY}"


async def test_no_request_is_split_without_the_hand_off(valkey_url: str, model: str) -> None:
    async with split_fleet(valkey_url, model, prefill=2, token_handoff=False):
        report = await doctor(valkey_url, model, token_handoff=False)
        [fine] = report.of("pairs", State.OK)
        assert fine.detail == f"p0.0, p1.0 can prefill for d0.0 (2 pairs); {HANDOFF_OFF}"
        assert not report.of("pairs", State.NOTE)


async def test_explain_tells_both_engines(fleet: SplitFleet) -> None:
    for body, prefill in ((COMPLETION, "p0.0"), (COMPLETION | {"n": 2}, "")):
        told = json.loads((await fleet.router.post(body | {"model": fleet.model}, "/explain"))[2])
        assert (told["chosen"], told["prefill"]) == ("d0.0", prefill)
        assert bool(told["ways"]) == bool(prefill)


async def test_a_gateway_gets_one_engine(fleet: SplitFleet) -> None:
    status, _, said = await fleet.router.post(COMPLETION, "/route?endpoint=/v1/completions")
    assert (status, json.loads(said)["worker"]) == (200, "d0.0")
    assert (await fleet.leg_load(), await fleet.results()) == (0, {"unfit": 1})


# ---------------------------------------------------------------- the prefill engine fails


async def served(fleet: SplitFleet, text: str = TEXT, *, stream: bool = True) -> dict[str, str]:
    """Ask once; return the headers of an answer that is right."""
    body = COMPLETION | {"prompt": text}
    status, headers, said = await fleet.router.post(body | {"stream": stream})
    assert status == 200, said
    assert (streamed_text(said) if stream else text_of(json.loads(said))) == text_of(await alone(body))
    return headers


@pytest.mark.parametrize("moment", ["now", "prefill"])
async def test_a_prefill_engine_dies_before_it_answers(fleet: SplitFleet, moment: str) -> None:
    if moment == "now":
        fleet.prefill[0].engine.die()
    else:
        await fleet.prefill[0].order(die=moment)
    headers = await served(fleet)
    assert headers["x-warmfleet-worker"] == "d0.0"
    assert "x-warmfleet-prefill-worker" not in headers
    results = await fleet.results()
    assert ("failed" in results or moment == "now", "split" in results) == (True, False)
    assert fleet.taken() == 0


@over_both
async def test_a_prefill_engine_dies_before_its_blocks_are_read(fleet: SplitFleet) -> None:
    await fleet.prefill[0].order(die="answered")
    await served(fleet)
    assert await fleet.results() == {"split": 1}
    side = fleet.decode[0].engine.transfers
    assert side is not None
    assert side.counts.recomputed == 1


async def test_a_prefill_engine_that_hangs_is_not_waited_for(
    fleet: SplitFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefills, "LEAST_S", 0.2)
    await fleet.prefill[0].order(hang="prefill")
    await served(fleet)
    assert await fleet.results() == {"late": 1, "unfit": 1}
    await served(fleet, f"another {TEXT}")
    assert await fleet.results() == {"late": 1, "unfit": 1, "cheaper": 1}, "it is avoided for a moment"
    await fleet.prefill[0].order(resume=True)
    await fleet.given_back()


async def test_hedging_blames_no_decode_engine_for_the_prefill_engine(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blamed: list[str] = []
    monkeypatch.setattr(Outliers, "failed", lambda _, judged: blamed.append(judged.worker_id))

    async def fails(*_: object) -> bytes:
        await asyncio.sleep(0.3)
        raise PrefillFailed("failed", "it has died", Judged("p0.0", trial=False))

    monkeypatch.setattr(prefills.Prefills, "body", fails)
    async with split_fleet(valkey_url, model, decode=2, speed="4", hedge_after_s=0.05) as fleet:  # half a second
        await fleet.busy()
        await served(fleet)
        assert await fleet.router.metric('warmfleet_hedged_streams_total{result="won"}') == 1
    assert blamed == ["p0.0"]


async def test_a_request_that_kills_its_engines_is_stopped(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The death of the prefill engine counts."""
    killed: list[Transferring] = []

    def dies_of(one: Transferring) -> Callable[..., Any]:
        async def submit(*_: object) -> None:
            killed.append(one)
            one.engine.die()
            await asyncio.Event().wait()

        return submit

    async with split_fleet(valkey_url, model, decode=2) as fleet:
        await fleet.busy()
        for one in (*fleet.prefill, *fleet.decode):
            monkeypatch.setattr(one.engine.core, "submit", dies_of(one))
        status, _, _ = await fleet.router.post(COMPLETION)
        assert (status, len(killed), killed[0]) == (502, 2, fleet.prefill[0])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_engine_that_hangs_before_its_blocks_are_read(
    fleet: SplitFleet, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """vLLM waits for the blocks for ever."""
    monkeypatch.setattr(prefill_booking, "MOVED_S", 0.3)
    await fleet.prefill[0].order(hang="read")
    headers = await served(fleet, stream=stream)
    assert headers["x-warmfleet-worker"] == "d0.0"
    assert await fleet.results() == {"split": 1, "late": 1, "unfit": 1}
    (why,) = json.loads((await fleet.router.get(f"/why?id={headers['x-request-id']}"))[1])["requests"]
    assert "d0.0, whose prefill engine p0.0 failed: The blocks of the prompt did not come in time" in why["because"]
    await fleet.prefill[0].order(resume=True)


def looks_soon(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Let the replica look soon whether the blocks came; each look waits for the report. Set after the first look."""
    monkeypatch.setattr(prefill_booking, "SLOWER", 0.0)
    monkeypatch.setattr(prefill_booking, "MOVED_S", 0.2)
    prefilled, looked = Bookings.prefilled, asyncio.Event()

    async def look(bookings: Bookings, reservation: str) -> bool:
        await poll(lambda: prefilled(bookings, reservation), 30, "the prompt is reported")
        asyncio.get_running_loop().call_soon(looked.set)  # after the caller has taken the answer
        return True

    monkeypatch.setattr(Bookings, "prefilled", look)
    return looked


async def test_a_long_answer_is_no_missing_block(fleet: SplitFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine has reported the prompt, though no byte of the answer came."""
    looked, whole, first = looks_soon(monkeypatch), Api._whole, iter([True])

    async def ends_later(api: Api, http: Any, writer: Any, request: Any) -> Any:
        if request.leg is not Leg.PREFILL and next(first, False):
            await looked.wait()
        return await whole(api, http, writer, request)

    monkeypatch.setattr(Api, "_whole", ends_later)
    assert (await served(fleet, stream=False))["x-warmfleet-prefill-worker"] == "p0.0"
    assert await fleet.results() == {"split": 1}


async def test_a_text_that_is_held_back_is_no_missing_block(fleet: SplitFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the role vLLM sends nothing while its parser of tools holds the text back."""
    looked, write = looks_soon(monkeypatch), Api._write

    async def holds_back(
        api: Api, http: web.Request, writer: Writer, sink: asyncio.Queue[Output], requests: list[Request]
    ) -> web.StreamResponse:
        if not (writer.ask.transfer or {}).get("do_remote_prefill"):
            return await write(api, http, writer, sink, requests)
        outputs = [await sink.get()]
        stream = web.StreamResponse(headers=EVENTS)
        await stream.prepare(http)
        await stream.write(ROLE)
        await looked.wait()
        await fleet.given_back()  # nothing is booked for blocks that are there
        while not outputs[-1].finished:
            outputs.append(await sink.get())
        await stream.write(b"".join(map(writer.chunk, outputs)) + DONE)
        return stream

    monkeypatch.setattr(Api, "_write", holds_back)
    path = "/v1/chat/completions"
    body = PATHS[path](TEXT)
    status, headers, said = await fleet.router.post(body | {"stream": True}, path)
    assert (status, headers.get("x-warmfleet-prefill-worker")) == (200, "p0.0")
    assert await fleet.results() == {"split": 1}
    monkeypatch.setattr(Api, "_write", write)
    assert streamed_text(said) == text_of(await alone(body, path))


async def test_a_prefill_engine_refuses(fleet: SplitFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """After three refusals of what another engine served, the fleet sends it nothing for a while."""

    async def refuse(*_: object) -> None:
        raise RefusedError("no room", 503)

    monkeypatch.setattr(fleet.prefill[0].engine.core, "submit", refuse)
    for number in range(3):
        await served(fleet, f"{number} {TEXT}")
    assert await fleet.results() == {"refused": 3, "unfit": 3}

    async def ejected() -> bool:
        views = await fleet.router.fleet.workers.read()
        return any(view.worker_id == "p0.0" and not view.routable for view in views)

    await poll(ejected, 15, "it is ejected")
    await fleet.given_back()


async def test_blocks_of_which_one_is_gone_are_not_read(fleet: SplitFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """So vLLM answers where a sliding window begins with a block."""
    take_params = PrefillSide.take_params

    def with_null_block(side: PrefillSide, request: Any) -> Any:
        params = take_params(side, request)
        if params is not None:
            params["remote_block_ids"].append([0, 7, 8])
        return params

    monkeypatch.setattr(PrefillSide, "take_params", with_null_block)
    await served(fleet)
    assert await fleet.results() == {"unfit": 2}, "once for two engines, and then for one"
    assert (fleet.prefilled(), fleet.taken()) == (1, 0)
    await fleet.given_back()


@pytest.mark.parametrize("when", ["slow", "stopped"])
async def test_blocks_whose_lease_may_have_ended_are_not_read(
    fleet: SplitFleet, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """slow: this process stands still before the answer comes. stopped: afterwards, so it comes with the next look."""
    monkeypatch.setattr(prefills, "MARGIN_S", 29.8)  # the engine keeps blocks for 30 s
    monkeypatch.setattr(prefill_answer, "LOOK_S", 0.3 if when == "stopped" else 2.0)
    take_params, reach = PrefillSide.take_params, Faults.reach

    def stands_still(side: PrefillSide, request: Any) -> Any:
        params = take_params(side, request)
        if params is not None and when == "slow":
            time.sleep(0.5)
        return params

    async def reaches(faults: Faults, moment: str) -> None:
        if moment == "answered" and when == "stopped":
            time.sleep(0.5)  # noqa: ASYNC251  the whole process stands still
        await reach(faults, moment)

    monkeypatch.setattr(PrefillSide, "take_params", stands_still)
    monkeypatch.setattr(Faults, "reach", reaches)
    await served(fleet)
    assert await fleet.results() == {"late": 1, "unfit": 1}
    assert (fleet.prefilled(), fleet.taken()) == (1, 0)


async def test_blocks_of_an_engine_that_has_left_are_not_read(
    fleet: SplitFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = PrefillBooking.answered

    def leaves(held: PrefillBooking) -> None:
        answered(held)
        view = held._pool.view
        held._pool.view = replace(view, workers=tuple(one for one in view.workers if one.worker_id != "p0.0"))

    monkeypatch.setattr(PrefillBooking, "answered", leaves)
    await served(fleet)
    assert await fleet.results() == {"late": 1, "unfit": 1}
    assert (fleet.prefilled(), fleet.taken()) == (1, 0)


async def test_without_prefill_engines_one_engine_serves(fleet: SplitFleet, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "warmfleet.pools.pool"):
        fleet.prefill[0].engine.die()
        await poll(lambda: "cannot be split" in caplog.text, 20, "the replica says so")
        await served(fleet)
    assert await fleet.results() == {"no_pair": 1}
    shown = json.loads((await fleet.router.get("/workers"))[1])["models"][0]
    assert shown["pairs"]["pairs"] == 0
    told = {worker["worker_id"]: worker.get("pairs") for worker in shown["workers"]}
    assert "no prefill engine of its pool" in told["d0.0"]["apart"][0]["why"]


async def test_engines_of_two_versions_serve_alone(valkey_url: str, model: str) -> None:
    """Neither is idle: without a pair roles do not count."""
    other = replace(CONSUMER, version="sim 2")
    async with split_fleet(valkey_url, model, consumer=other, pairs=0) as fleet:
        first = (await served(fleet))["x-warmfleet-worker"]
        await fleet.busy(first)
        second = (await served(fleet, f"another {TEXT}"))["x-warmfleet-worker"]
        assert ({first, second}, await fleet.results()) == ({"p0.0", "d0.0"}, {"no_pair": 2})


async def test_in_an_upgrade_only_equals_share_requests(valkey_url: str, model: str) -> None:
    old = replace(CONSUMER, version="sim 0")
    async with split_fleet(valkey_url, model, decode=2, consumer=[CONSUMER, old], pairs=1) as fleet:
        await fleet.busy()
        for number in range(3):
            await served(fleet, f"{number} {TEXT}", stream=bool(number % 2))
        assert fleet.taken(1) == 0
        assert set(await fleet.results()) <= {"split", "cheaper"}


# ---------------------------------------------------------------- the decode engine fails


async def test_a_decode_engine_dies_before_its_first_token(valkey_url: str, model: str) -> None:
    """Another engine gets the request, and other parameters or none."""
    async with split_fleet(valkey_url, model, decode=2) as fleet:
        await fleet.busy()
        await fleet.prefill[0].order(hang="read")
        asked = asyncio.create_task(served(fleet))
        await poll(lambda: any(_reads(fleet, number) for number in (0, 1)), 10, "a decode engine waits for blocks")
        first = 0 if _reads(fleet, 0) else 1
        fleet.decode[first].engine.die()
        await fleet.prefill[0].order(resume=True)
        headers = await asked
        assert headers["x-warmfleet-worker"] in ("p0.0", f"d{1 - first}.0")
        assert await fleet.router.metric('warmfleet_retries_total{where="another"}') == 1


def _reads(fleet: SplitFleet, number: int) -> bool:
    """Whether a request at this decode engine waits for blocks."""
    return any(request.leg == Leg.LOADING for request in fleet.decode[number].engine.core.scheduler.waiting)


async def test_a_decode_engine_dies_after_its_first_token(fleet: SplitFleet) -> None:
    body = COMPLETION | {"stream": True, "max_tokens": 200}
    async with fleet.router.client.post(f"{fleet.router.url}/v1/completions", json=body) as answer:
        await answer.content.readany()
        await fleet.given_back()
        fleet.decode[0].engine.die()
        rest = (await answer.content.read()).decode()
    assert '"error"' in rest
    assert await fleet.results() == {"split": 1}


# ---------------------------------------------------------------- the client hangs up


@pytest.mark.parametrize("when", ["early", "late"])
async def test_a_client_hangs_up_while_its_prompt_is_computed(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Late in the step the prefill engine may answer just then, so that its answer is awaited."""
    monkeypatch.setattr(unread_blocks, "REST_S", 60 if when == "late" else -60)
    async with split_fleet(valkey_url, model, speed="4") as fleet:  # half a second for the prompt
        await fleet.busy()
        core = fleet.prefill[0].engine.core.scheduler
        asked = asyncio.create_task(fleet.router.post(COMPLETION))
        await poll(lambda: core.running, 10, "the prefill engine computes")
        asked.cancel()
        await poll(lambda: not core.running, 5, "the prefill engine has stopped")
        await fleet.given_back()
        assert (fleet.prefilled(), fleet.taken()) == (int(when == "late"), 0)


def _never_read(monkeypatch: pytest.MonkeyPatch) -> list[PrefillAnswer]:
    """Let requests wait for a step's answer for ever. Return the answers, which come all the same."""
    waited: list[PrefillAnswer] = []
    whole = PrefillAnswer.whole

    async def waits(answer: PrefillAnswer, limit_s: float) -> bytes:
        if answer in waited:
            return await whole(answer, limit_s)
        waited.append(answer)
        return await asyncio.Future()

    monkeypatch.setattr(PrefillAnswer, "whole", waits)
    return waited


@over_both
@pytest.mark.parametrize("path", PATHS)
async def test_a_client_hangs_up_as_the_prefill_engine_answers(
    fleet: SplitFleet, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The blocks are free long before the lease of 30 s ends."""
    waited = _never_read(monkeypatch)
    asked = asyncio.create_task(fleet.router.post(PATHS[path](TEXT) | {"stream": True}, path))
    await poll(lambda: waited and waited[0].response.complete, 10, "the prefill engine has answered")
    asked.cancel()
    await fleet.given_back()
    assert (fleet.prefilled(), fleet.taken()) == (1, 0)


@pytest.mark.parametrize("silent", ["p0", "d0"])
async def test_a_client_hangs_up_before_an_engine_falls_silent(
    fleet: SplitFleet, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    """Neither the answer to the first step nor a refusal is awaited for ever."""
    monkeypatch.setattr(unread_blocks, "REFUSAL_S", 0.2)
    monkeypatch.setattr(prefills, "LEAST_S", 0.2)
    monkeypatch.setattr(unread_blocks, "REST_S", 60)
    asked_for: list[EngineResponse] = []
    start = Upstream.start

    def note(upstream: Upstream, *more: Any) -> EngineResponse:
        asked_for.append(start(upstream, *more))
        return asked_for[-1]

    monkeypatch.setattr(Upstream, "start", note)
    waited = _never_read(monkeypatch)
    if silent == "p0":
        await fleet.prefill[0].order(hang="prefill")
    asked = asyncio.create_task(fleet.router.post(COMPLETION))
    await poll(lambda: waited and (silent == "p0" or waited[0].response.complete), 10, "the step is under way")
    if silent == "d0":
        await fleet.decode[0].order(hang="now")
    asked.cancel()
    count = 1 if silent == "p0" else 2
    await poll(
        lambda: len(asked_for) == count and not any(one._connection or one.connecting for one in asked_for),
        *(10, "nothing is awaited"),
    )
    assert bool(fleet.pinned) is (silent == "d0"), "until the lease ends"
    assert all(b"X-Request-Id: unbooked." in one.request[0] for one in asked_for[1:])
    await fleet.prefill[0].order(resume=True)
    await fleet.decode[0].order(resume=True)


async def test_no_more_blocks_than_a_bound_are_freed_at_a_time(
    fleet: SplitFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread_blocks, "MOST", 0)
    waited = _never_read(monkeypatch)
    asked = asyncio.create_task(fleet.router.post(COMPLETION))
    await poll(lambda: waited and waited[0].response.complete, 10, "the prefill engine has answered")
    asked.cancel()

    async def free() -> bool:
        return not await fleet.leg_load()

    await poll(free, 10, "nothing is booked")
    assert fleet.pinned


async def test_a_client_hangs_up_before_the_decode_engine_has_read_its_request(
    fleet: SplitFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API server that sees no client any more once it comes to the request tells nobody."""
    begin, arrived = Transfers.begin, asyncio.Event()

    async def late(side: Transfers, params: Any, *more: Any, **named: Any) -> None:
        if params["do_remote_prefill"]:
            arrived.set()
            await asyncio.sleep(0.3)
        await begin(side, params, *more, **named)

    monkeypatch.setattr(Transfers, "begin", late)
    asked = asyncio.create_task(fleet.router.post(COMPLETION | {"stream": True}))
    await arrived.wait()
    asked.cancel()
    await fleet.given_back()


async def test_a_client_hangs_up_while_its_blocks_travel(fleet: SplitFleet) -> None:
    """The blocks are free long before the lease of 30 s ends."""
    await fleet.prefill[0].order(handshake_s=0.4)
    asked = asyncio.create_task(fleet.router.post(COMPLETION | {"stream": True}))
    await poll(lambda: _reads(fleet, 0) and fleet.pinned, 10, "the decode engine waits for blocks")
    asked.cancel()
    await fleet.given_back()


async def test_a_client_hangs_up_amid_its_answer(fleet: SplitFleet) -> None:
    body = COMPLETION | {"stream": True, "max_tokens": 200}
    async with fleet.router.client.post(f"{fleet.router.url}/v1/completions", json=body) as answer:
        await answer.content.readany()
    core = fleet.decode[0].engine.core.scheduler
    await poll(lambda: not core.running, 5, "the decode engine has stopped")
    await fleet.given_back()


# ---------------------------------------------------------------- an answer that breaks off


class Breaking:
    """Lets decode engines break off the first answer for which they got parameters, after ``begun``. ``asked``: the
    number of such requests.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, begun: bytes = b"") -> None:
        self.asked = 0
        self._write = Api._write
        self._begun = begun
        breaking = self

        async def write(api: Api, http: web.Request, writer: Any, *more: Any) -> web.StreamResponse:
            if not (writer.ask.transfer or {}).get("do_remote_prefill"):
                return await breaking._write(api, http, writer, *more)
            breaking.asked += 1
            if breaking.asked > 1:
                return await breaking._write(api, http, writer, *more)
            if breaking._begun:
                stream = web.StreamResponse(headers=EVENTS)
                await stream.prepare(http)
                await stream.write(breaking._begun)
            assert http.transport is not None
            http.transport.close()
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(Api, "_write", write)


async def test_a_connection_that_was_open_before_does_not_send_the_parameters_again(
    fleet: SplitFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other requests nobody can tell whether the engine has closed the connection before it had read them."""
    await served(fleet, f"before {TEXT}")
    breaking = Breaking(monkeypatch)
    headers = await served(fleet)
    assert (breaking.asked, headers["x-warmfleet-worker"]) == (1, "p0.0")
    assert await fleet.router.metric('warmfleet_retries_total{where="same"}') == 0


@pytest.mark.parametrize("ending", ["closed", "error"])
async def test_the_role_of_a_chat_is_no_token(fleet: SplitFleet, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """A decode engine that gets no blocks names the role first."""
    error = b'data: {"error":{"message":"Internal server error","code":500}}\n\n'
    breaking = Breaking(monkeypatch, ROLE + (error if ending == "error" else b""))
    path = "/v1/chat/completions"
    body = PATHS[path](TEXT)
    status, headers, said = await fleet.router.post(body | {"stream": True}, path)
    assert (status, breaking.asked, headers["x-warmfleet-worker"]) == (200, 1, "p0.0")
    assert streamed_text(said) == text_of(await alone(body, path))


async def test_the_role_with_the_ids_of_a_long_prompt_is_no_token(
    fleet: SplitFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So vLLM begins if the request asks for token ids."""
    path = "/v1/chat/completions"
    body = PATHS[path](TEXT * 5)
    answer = await alone(body, path)
    ids = list(range(100_000, 100_000 + answer["usage"]["prompt_tokens"]))
    role = ROLE.replace(b"data: {", b'data: {"prompt_token_ids":%b,' % json.dumps(ids).encode())
    assert len(role) > first_event.MAX_BYTES
    breaking = Breaking(monkeypatch, role)
    status, headers, said = await fleet.router.post(body | {"stream": True}, path)
    assert (status, breaking.asked, headers["x-warmfleet-worker"]) == (200, 1, "p0.0")
    assert streamed_text(said) == text_of(answer)


# ---------------------------------------------------------------- parts


PLAIN: list[dict[str, Any]] = [
    {},
    {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 5, "min_tokens": 5},
    {"max_completion_tokens": 1, "max_tokens": None, "return_token_ids": True},
    {"stop": "end", "tool_choice": "required"},
    {"stop": ["one", "two"]},
]
NOT_PLAIN: list[dict[str, Any]] = [
    {"max_tokens": "5"},
    {"max_tokens": 0},
    {"max_tokens": True},
    {"max_completion_tokens": 2.5},
    {"stream": "yes"},
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": "x"}},
    {"stream": True, "stream_options": 5},
    {"min_tokens": 6, "max_tokens": 5},
    {"min_tokens": "x"},
    {"return_token_ids": "maybe"},
    {"ignore_eos": "maybe"},
    {"stop_token_ids": [1, "2"]},
    {"stop_token_ids": 1},
    {"stop": 1},
    {"stop": ["one", 2]},
    {"stop": ["1", "2", "3", "4", "5"]},
    {"use_beam_search": True},
    {"tool_choice": {"type": "function", "function": {"name": "look"}}},
    {"tool_choice": "any"},
]


def test_the_prefill_engine_judges_what_the_decode_engine_gets() -> None:
    """Else blocks would be kept until the lease ends for a request that the decode engine cannot read."""
    assert all(map(prefills.plain, PLAIN))
    assert not any(map(prefills.plain, NOT_PLAIN))
