"""A request goes only to an engine that serves its name, however engines tell their names, and while these change."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.engines.plugin_worker import worker
from tests.support.engines.scripted import Engine, Seen, answer_by_name, answer_well, engine, no_model, reply
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.support.replicas.doctor import doctor
from tests.support.replicas.replica import Replica, replica
from tests.support.requests.client_keys import line

from warmfleet.cli.doctor.finding import State
from warmfleet.fleet import WorkerState
from warmfleet.pools import pool
from warmfleet.pools.pool import Pool
from warmfleet_worker import server_publisher
from warmfleet_worker.protocol import wire
from warmfleet_worker.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.support.engines.scripted import Answer

LISTED = ("127.0.0.0/8",)  # the engines must be listed, because these report no probe in their streams
CLIENTS = 20
AFTER_S = 0.7  # time for a change: engines are checked, and announce their names, every 0.2 s


async def held_by_name(one: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Answer slowly, so that simultaneous requests are spread over the engines."""
    if seen.json.get("model", "") in one.names:
        await asyncio.sleep(0.05)
    await answer_by_name(one, seen, writer)


@dataclass
class Named:
    """An engine whose names may change. known_as: its worker_id. adapters: its adapters if it has the plugin."""

    engine: Engine
    known_as: str
    adapters: dict[str, str] = field(default_factory=dict)

    def serve(self, *names: str) -> None:
        """Serve these names from now on. An engine with the plugin announces all names after the first as adapters."""
        self.engine.names = [*names]
        self.adapters.clear()
        self.adapters |= {name: f"/adapters/{name}" for name in names[1:]}

    @property
    def refused(self) -> int:
        return sum(seen.json.get("model") not in ("", *self.engine.names) for seen in self.engine.seen)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announce names and check engines every fraction of a second."""
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(server_publisher, "LOOK_SECONDS", 0.05)


@pytest.fixture(params=["url", "plugin"])
def way(request: pytest.FixtureRequest) -> str:
    """The source of engines' names: routers read them by URL, or a plugin (or a bridge) announces them."""
    return str(request.param)


@asynccontextmanager
async def fleet_of(
    url: str, model: str, way: str, *names: list[str], answer: Answer = held_by_name, routable: int, **settings: Any
) -> AsyncIterator[tuple[Replica, list[Named]]]:
    """A replica and an engine for each list of names. routable: the number of engines that take requests."""
    async with AsyncExitStack() as stack:
        made, urls = list[Named](), list[str]()
        for number, served in enumerate(names):
            one = Named(await stack.enter_async_context(engine(model, answer)), f"e{number}.0")
            made.append(one)
            one.serve(*served)
            if way == "url":
                one.known_as = one.engine.url.removeprefix("http://").replace(":", "-")
                urls.append(one.engine.url)
            else:
                told: dict[str, Any] = {"name": f"e{number}", "adapters": one.adapters, "models": tuple(served[:1])}
                await stack.enter_async_context(worker(url, model, one.engine.url, Tracker(), **told))
        chosen: dict[str, Any] = {
            "policy": "round_robin",
            "worker_addresses": LISTED,
            "blocks_timeout_s": 0.1,
            "static_workers": tuple(urls),
        } | settings
        router = await stack.enter_async_context(replica(url, model, **chosen))
        await poll(partial(known, router, len(names)), 30, "all engines are known")
        await router.routable(routable)
        yield router, made


async def known(router: Replica, count: int) -> bool:
    states = [view.state for view in await router.fleet.workers.read()]
    return len(states) == count and not {WorkerState.PENDING, WorkerState.JOINING, WorkerState.WARMING} & {*states}


async def asked(router: Replica, name: str, count: int = 24, **body: object) -> tuple[Counter[int], set[str]]:
    """The statuses and workers of ``count`` simultaneous requests with new prompts."""

    async def one(number: int) -> tuple[int, str]:
        prompt = f"{random.random()} {number} fox"
        status, headers, _ = await router.post({"model": name, "prompt": prompt, "max_tokens": 2, **body})
        return status, headers.get("x-warmfleet-worker", "")

    found = await asyncio.gather(*map(one, range(count)))
    return Counter(status for status, _ in found), {worker for _, worker in found if worker}


async def listed(router: Replica) -> set[str]:
    return {entry["id"] for entry in json.loads((await router.get("/v1/models"))[1])["data"]}


async def row(router: Replica, known_as: str) -> dict[str, Any]:
    (model,) = json.loads((await router.get("/workers"))[1])["models"]
    return next(worker for worker in model["workers"] if worker["worker_id"] == known_as)


# ---------------------------------------------------------------- the engine that gets a name


#: The names of two engines in the pool POOL, the name that is asked for, and the engines that may get it.
@pytest.mark.parametrize(
    ("first", "second", "name", "serve"),
    [
        pytest.param(["POOL"], ["/models/other"], "POOL", {0}, id="another name than the pool's"),
        pytest.param(["POOL"], ["POOL-2"], "POOL", {0}, id="a name that begins with the pool's"),
        pytest.param(["POOL"], ["POOL", "alias"], "alias", {1}, id="an alias of one"),
        pytest.param(["POOL", "alias"], ["POOL", "alias"], "alias", {0, 1}, id="an alias of both"),
        pytest.param(["POOL", "x", "y"], ["POOL", "x"], "y", {0}, id="a second alias of one"),
        pytest.param(["POOL", "x"], ["POOL"], "POOL", {0, 1}, id="the pool's name, though the engines differ"),
        pytest.param(["POOL", "x"], ["x", "other"], "x", {0}, id="an alias of one that lacks the pool's name"),
        pytest.param(["alias", "POOL"], ["POOL"], "alias", {0}, id="the pool's name is not the first"),
        pytest.param(["/POOL/"], ["other"], "/POOL/", {0}, id="slashes around the pool's name"),
    ],
)
async def test_a_name_goes_to_the_engines_that_serve_it(
    valkey_url: str, model: str, way: str, first: list[str], second: list[str], name: str, serve: set[int]
) -> None:
    names = [[served_name.replace("POOL", model) for served_name in served] for served in (first, second)]
    fitting = [any(served_name.strip("/") == model for served_name in served) for served in names]
    async with fleet_of(valkey_url, model, way, *names, routable=sum(fitting)) as (router, engines):
        asked_for = name.replace("POOL", model)
        for _ in range(2):
            statuses, workers = await asked(router, asked_for)
            assert (statuses, workers) == ({200: 24}, {engines[number].known_as for number in serve})
        assert [upstream.refused for upstream in engines] == [0, 0]
        here = [served for served, fits in zip(names, fitting, strict=True) if fits]
        assert await listed(router) == {served_name for served in here for served_name in served}
        assert (await asked(router, "nobody's", 3))[0] == {404: 3}


async def test_an_engine_with_another_name_is_told_of_wherever_somebody_looks(
    valkey_url: str, model: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    sentence = f"it serves /models/other, not {model}: --served-model-name {model}"
    async with fleet_of(valkey_url, model, way, [model], ["/models/other"], routable=1) as (router, (_, other)):
        told = await row(router, other.known_as)
        assert (told["state"], told["routable"], told["why"]) == ("misnamed", False, sentence)
        assert model in told["remedy"]
        assert await router.metric('warmfleet_workers{state="misnamed"}') == 1
        found = await doctor(valkey_url, model)
        found.names("worker", f"{other.known_as} is misnamed: {sentence}", "--served-model-name")
        assert caplog.text.count(f"worker {other.known_as} takes no requests: {sentence}") == 1, "logged once"
        _, _, answer = await router.post({"model": "/models/other", "prompt": "x"})
        assert sentence in json.loads(answer)["error"]["message"]


async def test_clients_of_a_fleet_whose_engines_all_have_another_name_are_told_why(
    valkey_url: str, model: str, way: str
) -> None:
    async with fleet_of(valkey_url, model, way, ["x"], ["x"], routable=0) as (router, engines):
        await poll(lambda: _misnamed(router, 2), 30, "the replica knows both")
        status, _, answer = await router.post({"model": model, "prompt": "x"})
        assert status == 503
        assert f"it serves x, not {model}: --served-model-name {model}" in json.loads(answer)["error"]["message"]
        status, _, answer = await router.post({"model": model, "prompt": "x"}, "/explain")
        assert f"--served-model-name {model}" in json.loads(answer)["error"]["message"]
        assert not any(upstream.engine.seen for upstream in engines if way == "url")


async def test_names_that_nobody_serves_any_more_are_listed_no_more(valkey_url: str, model: str) -> None:
    """When all engines have another name, the model is listed by its own name, as a model without workers."""
    async with fleet_of(valkey_url, model, "url", *[[model, "alias"]] * 2, routable=2) as (router, engines):
        assert await listed(router) == {model, "alias"}
        for upstream in engines:
            upstream.serve("other")
        await poll(lambda: _misnamed(router, 2), 30, "the replica knows both")
        assert await listed(router) == {model}


async def test_clients_learn_no_worker_and_no_name_that_is_not_theirs(
    valkey_url: str, model: str, way: str, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.jsonl"
    keys.write_text(line("any", "wf-any") + line("one", "wf-one", models=[model]))
    names = ["/models/theirs"], ["/models/theirs"]
    hidden: dict[str, Any] = {"client_keys_file": str(keys), "answer_headers": "request_id"}
    async with fleet_of(valkey_url, model, way, *names, routable=0, **hidden) as (router, engines):

        async def told(key: str, name: str) -> str:
            _, _, answer = await router.post({"model": name, "prompt": "x"}, Authorization=f"Bearer {key}")
            return str(json.loads(answer)["error"]["message"])

        await poll(lambda: _misnamed(router, 2), 30, "the replica knows both")
        for name in (model, "/models/theirs"):
            said = await told("wf-any", name)
            assert "it serves /models/theirs" in said
            assert not any(upstream.known_as in said for upstream in engines)
        assert "theirs" not in await told("wf-one", model)


async def _misnamed(router: Replica, count: int) -> bool:
    return await router.metric('warmfleet_workers{state="misnamed"}') == count


async def test_a_form_whose_model_nobody_reads_is_served(valkey_url: str, model: str, way: str) -> None:
    form = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--b--\r\n'
    names = [model, "alias"], [model], ["other"]
    async with fleet_of(valkey_url, model, way, *names, answer=_any_body, routable=2) as (router, engines):
        before = len(engines[2].engine.seen)
        for _ in range(6):
            kind = {"Content-Type": "multipart/form-data; boundary=b"}
            assert (await router.post(form, "/v1/audio/transcriptions", **kind))[0] == 200
        assert len(engines[2].engine.seen) == before, "an engine with another name gets nothing at all"


async def _any_body(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
    reply(writer, b'{"text": "x"}')


async def test_a_gateway_is_sent_to_an_engine_that_serves_the_name(valkey_url: str, model: str, way: str) -> None:
    names = [model], [model, "alias"], ["alias"]
    async with fleet_of(valkey_url, model, way, *names, routable=2) as (router, engines):
        for name, wanted in (("alias", {1}), (model, {0, 1})):
            places, explained = set[str](), set[str]()
            for _ in range(12):
                body = {"model": name, "prompt": f"{random.random()} fox"}
                _, _, placed = await router.post(body, "/route?endpoint=/v1/completions")
                places.add(json.loads(placed)["worker"])
                _, _, told = await router.post(body, "/explain")
                explained |= {
                    candidate["worker_id"] for candidate in json.loads(told)["candidates"] if candidate["chosen"]
                }
            able = {engines[number].known_as for number in wanted}
            assert places | explained <= able


async def test_names_count_while_redis_is_away(model: str, way: str) -> None:
    with server(valkey_binary()) as url:
        names = [model], [model, "alias"], ["other"]
        async with fleet_of(url, model, way, *names, routable=2, decide_timeout_s=0.2) as (router, engines):
            process = int((await router.fleet.redis.info("server"))["process_id"])
            os.kill(process, signal.SIGSTOP)
            try:
                statuses, workers = await asked(router, "alias", 12)
                assert (statuses, workers) == ({200: 12}, {engines[1].known_as})
                statuses, workers = await asked(router, model, 12)
                assert (statuses, workers) == ({200: 12}, {engines[0].known_as, engines[1].known_as})
            finally:
                os.kill(process, signal.SIGCONT)


# ---------------------------------------------------------------- while names change


async def test_a_change_counts_after_one_announcement(valkey_url: str, model: str, way: str) -> None:
    async with fleet_of(valkey_url, model, way, [model], [model], routable=2) as (router, (first, second)):
        for has, lacks in ((first, second), (second, first)):
            lacks.serve(model)
            has.serve(model, "new")
            await poll(lambda: _lists(router, {model, "new"}), 10, "it is listed")
            await asyncio.sleep(AFTER_S)
            assert await asked(router, "new") == ({200: 24}, {has.known_as})
            assert (await row(router, has.known_as))["state"] in ("proven", "load-only", "approximate"), (
                "nothing is lost"
            )
        second.serve(model)
        await poll(lambda: _lists(router, {model}), 10, "it is gone")
        assert (await asked(router, "new", 3))[0] == {404: 3}
        if way == "url":
            second.serve("elsewhere")
            await poll(lambda: _state(router, second, "misnamed"), 10, "it serves another model")
            assert await asked(router, model) == ({200: 24}, {first.known_as})
            second.serve(model)
            await poll(lambda: _state(router, second, "approximate"), 10, "it serves the pool's name again")
            await router.routable(2)
            assert await asked(router, model) == ({200: 24}, {first.known_as, second.known_as})


async def _lists(router: Replica, names: set[str]) -> bool:
    return await listed(router) == names


async def _state(router: Replica, one: Named, wanted: str) -> bool:
    return bool((await row(router, one.known_as))["state"] == wanted)


async def test_no_client_gets_404_while_three_engines_change_their_names(valkey_url: str, model: str, way: str) -> None:
    """At any time one engine serves all names, but its role passes to another engine before names are announced."""
    rng, found = random.Random(7), Counter[tuple[str, int]]()
    everything = [model, "alias", "tuned"]

    async def client(router: Replica, number: int) -> None:
        while asyncio.get_running_loop().time() < until:
            name = everything[number % 3]
            body = {"model": name, "prompt": f"{number} {random.random()}", "max_tokens": 3, "stream": number % 2 == 0}
            found[name, (await router.post(body))[0]] += 1

    async def changes(engines: list[Named]) -> None:
        whole = 0
        while asyncio.get_running_loop().time() < until:
            for number, one in enumerate(engines):
                some = [name for name in everything[1:] if rng.random() < 0.5]
                gone = way == "url" and rng.random() < 0.2  # only a restart changes an engine's first name
                one.serve(*everything) if number == whole else one.serve(*(["other"] if gone else [model, *some]))
            await asyncio.sleep(AFTER_S)
            now = rng.randrange(3)
            engines[now].serve(*everything)  # before the other one loses a name
            await asyncio.sleep(AFTER_S)
            whole = now

    served = [everything] * 3
    async with fleet_of(valkey_url, model, way, *served, routable=3) as (router, engines):
        until = asyncio.get_running_loop().time() + 3
        changing = asyncio.create_task(changes(engines))
        await asyncio.gather(*(client(router, number) for number in range(CLIENTS)))
        await changing
        refused = await router.metric('warmfleet_retries_total{where="another"}')
    statuses = Counter[int]()
    for (_, status), count in found.items():
        statuses[status] += count
    assert statuses.keys() == {200}, (found, refused)
    assert len(found) == 3
    assert sum(statuses.values()) > 30


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_finds_the_one_engine_that_still_serves_its_name(
    valkey_url: str, model: str, way: str, stream: bool
) -> None:
    """No announcement has told yet that the other engines lost the name, so the request tries some of them first."""
    async with fleet_of(valkey_url, model, way, *[[model, "alias"]] * 8, routable=8) as (router, engines):
        for upstream in engines[1:]:
            upstream.engine.names = [model]
        # At once, before an announcement can tell, and so spread over the engines.
        answers = await asyncio.gather(*(asked(router, "alias", 1, stream=stream) for _ in range(8)))
        assert [statuses for statuses, *_ in answers] == [{200: 1}] * 8
        assert sum(upstream.refused for upstream in engines) >= 1


# ---------------------------------------------------------------- an answer of 404


def refusing(body: bytes, status: str = "404 Not Found") -> Answer:
    async def answer(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        reply(writer, body, status)

    return answer


NAMELESS = json.dumps({"error": {"message": "Response with id 'resp_1' not found.", "code": 404}}).encode()


@pytest.mark.parametrize(
    ("body", "tried"),
    [
        pytest.param(lambda model: no_model(model), True, id="as vLLM"),
        pytest.param(
            lambda model: json.dumps(
                {"type": "error", "error": {"type": "NotFoundError", "message": f"The model `{model}` does not exist."}}
            ).encode(),
            True,
            id="as vLLM to messages",
        ),
        pytest.param(
            lambda model: json.dumps({"object": "error", "message": f"Model {model} not found", "code": 404}).encode(),
            True,
            id="at the top",
        ),
        pytest.param(lambda model: json.dumps({"error": f"model '{model}' not found"}).encode(), True, id="a string"),
        pytest.param(lambda _: b'{"detail":"Not Found"}', False, id="a path"),
        pytest.param(lambda _: NAMELESS, False, id="an object"),
        pytest.param(lambda _: b"404 page not found", False, id="no JSON"),
        pytest.param(lambda _: b'["model"]', False, id="a list"),
        pytest.param(lambda _: b"", False, id="nothing"),
    ],
)
async def test_a_404_for_a_name_that_others_serve_is_tried_there_and_counts_against_the_worker(
    valkey_url: str, model: str, body: Callable[[str], bytes], tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine lists the name but does not serve it."""
    monkeypatch.setattr(pool, "REFUSED_S", 0.05)  # the worker is passed over so long, and may refuse again later
    avoided: list[object] = []
    monkeypatch.setattr(Pool, "avoid", lambda *told: avoided.append(told))
    async with (
        engine(model, refusing(body(model))) as wrong,
        engine(model, answer_well) as right,
        replica(valkey_url, model, wrong.url, right.url, policy="round_robin") as router,
    ):
        statuses, _ = await asked(router, model, 16)
        assert statuses == ({200: 16} if tried else {200: 8, 404: 8})
        assert not avoided, "for other names it is well"
        if not tried:
            return

        async def ejected() -> bool:
            await asked(router, model, 4)
            return "ejected" in {view.state for view in await router.fleet.workers.read()}

        await poll(ejected, 30, "it is ejected")


async def test_a_404_of_all_that_serve_the_name_reaches_the_client(valkey_url: str, model: str) -> None:
    async with (
        engine(model, refusing(no_model(model))) as one,
        engine(model, refusing(no_model(model))) as two,
        replica(valkey_url, model, one.url, two.url) as router,
    ):
        status, headers, answer = await router.post({"model": model, "prompt": "x"})
        told = json.loads(answer)["error"]
        assert (status, told["code"], "retry-after" in headers) == (404, "model_not_found", False) or (
            status == 404 and model in told["message"]
        )
        assert len(one.seen) + len(two.seen) <= 2


# ---------------------------------------------------------------- several models, several pools, and up


async def test_an_engine_whose_model_no_pool_has_stays_where_it_was(valkey_url: str, model: str) -> None:
    """With two models the engine moves to the pool of a name that it serves; with an unknown name it is misnamed."""
    other = f"{model}-b"
    async with (
        engine(model, answer_by_name) as first,
        engine(model, answer_by_name) as second,
    ):
        first.names, second.names = [model], [model]
        async with replica(valkey_url, model, first.url, second.url, models=(model, other)) as router:
            second.names = ["none of them"]

            async def misnamed() -> bool:
                return [view.state.value for view in await router.fleet.workers.read()].count("misnamed") == 1

            await poll(misnamed, 15, "it serves none of the models")
            assert (await asked(router, model))[0] == {200: 24}
            second.names = [other]

            async def moved() -> bool:
                return (await asked(router, other, 2))[0] == {200: 2}

            await poll(moved, 15, "it serves the other model")
            assert (await asked(router, model))[0] == {200: 24}

            async def told() -> bool:
                """Whether /workers says that the engine moved, without a remedy."""
                pools = json.loads((await router.get("/workers"))[1])["models"]
                rows = {row["state"]: row for pool in pools if pool["model"] == model for row in pool["workers"]}
                return (rows["silent"]["why"], rows["silent"]["remedy"]) == (f"moved to {other}", "")

            await poll(told, 15, "it is told that it has moved")
            found = await doctor(valkey_url, model, models=(model, other))
            assert f" moved to {other}" in found.of("moved", State.OK)[0].detail
            assert not [*found.of("worker", State.FAULT), *found.of("workers", State.FAULT)], found.printed
            first.names = [other]

            async def empty() -> bool:
                return not any(worker.heard for worker in await router.fleet.workers.read())

            await poll(empty, 15, "the first one moved, too")
            found = await doctor(valkey_url, model, models=(model, other))
            found.names("workers", f"no engine of {model} is left", "start one")


async def test_a_name_of_one_pool_goes_to_that_pool(valkey_url: str, model: str) -> None:
    tags = f"{model}#1", f"{model}#2"
    async with AsyncExitStack() as stack:
        made = []
        for number, names in enumerate(([model], [model, "alias"], ["alias"])):
            one = await stack.enter_async_context(engine(model, answer_by_name))
            one.names = names
            made.append(one)
            told: dict[str, Any] = {"name": f"e{number}", "models": tuple(names), "adapters": {}}
            await stack.enter_async_context(worker(valkey_url, tags[number % 2], one.url, Tracker(), **told))
        router = await stack.enter_async_context(
            replica(valkey_url, model, models=tags, worker_addresses=LISTED, blocks_timeout_s=0.3)
        )
        await router.routable(2)
        assert await asked(router, "alias") == ({200: 24}, {"e1.0"})
        statuses, workers = await asked(router, model)
        assert statuses == {200: 24}
        assert workers <= {"e0.0", "e1.0"}


@pytest.mark.parametrize("behind", [": a b", "-模型-7b", "😀", "/é/"])
async def test_a_name_that_is_no_tag_is_that_of_its_pool(valkey_url: str, model: str, behind: str) -> None:
    """``warmfleet up`` makes a pool's tag of the name, with a hyphen for each character that a tag cannot have."""
    odd = model + behind
    async with engine(model, answer_by_name) as one:
        one.names = [odd]
        async with replica(valkey_url, wire.tag_of(odd), one.url) as router:
            assert (await asked(router, odd))[0] == {200: 24}
