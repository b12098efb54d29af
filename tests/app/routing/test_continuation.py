"""A stream whose engine dies goes on at another worker, and the client does not notice."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import zlib
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.app.api.test_key_limits import KEY, limited
from tests.app.routing.test_token_handoff import FACTS, view
from tests.support.engines.plugin_worker import SMALL, caching, worker
from tests.support.engines.scripted import STREAM_HEAD, Engine, Seen, chunk, engine, reset
from tests.support.polling import poll
from tests.support.replicas.replica import Replica, replica
from tokenizers import Tokenizer

from warmfleet.engines import followed_stream
from warmfleet.engines.followed_stream import FollowedStream, KeptIds
from warmfleet.errors import UpstreamGone
from warmfleet.pools import outliers
from warmfleet.pools.identified_prompt import IdentifiedPrompt
from warmfleet.prompt.request import parse
from warmfleet.routing.call import Job
from warmfleet.routing.recovery import continuation, retries
from warmfleet.routing.recovery.continuation import continuable, takes
from warmfleet_worker.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOKENS = 20
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "the cat sat on the mat " * 4, "max_tokens": TOKENS},
    CHAT: {"messages": [{"role": "user", "content": "hello " * 20}], "max_completion_tokens": TOKENS},
}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
ASKS = {"X-Warmfleet-Continue": "1"}


@dataclass
class Plan:
    """A plan for the streams of both engines.

    dies_after: for each stream from now on, the tokens after which the engine dies. says: an event that is sent before
    the end. freezes: the engine falls silent instead. other: a continued stream has other tokens. asked: the bodies.
    booked: the number of booked requests in the fleet at the time of each body.
    """

    dies_after: list[int] = field(default_factory=list)
    says: bytes = b""
    freezes: bool = False
    other: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    booked: list[int] = field(default_factory=list)
    router: Replica | None = None

    def dies(self, *after: int) -> None:
        self.asked.clear()
        self.booked.clear()
        self.dies_after = [*after]


@dataclass
class Talker:
    """An engine whose next token follows from all ids before it, as that of a greedy model does.

    Some tokens end in the middle of a character, so their text comes with the next token; some events have two tokens.
    """

    name: str
    plan: Plan
    tracker: Tracker = field(default_factory=Tracker)

    def next(self, ids: list[int]) -> int:
        return zlib.crc32(str(ids).encode(), self.plan.other * (len(self.plan.asked) - 1)) % 200

    async def __call__(self, one: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        body = seen.json
        if not body.get("stream"):
            await caching(self.tracker, [])(one, seen, writer)
            return
        self.plan.asked.append(body)
        if self.plan.router is not None:
            self.plan.booked.append(sum(row.load.in_flight for row in await self.plan.router.fleet.workers.read()))
        given = sent_ids(body)
        text = "".join(f"<{message['role']}>{message['content']}" for message in body.get("messages", ()))
        ids = given or Tokenizer.from_str(SMALL.decode()).encode(body.get("prompt") or text).ids
        await self._say(Events(self.name, seen.path == CHAT, body, ids), writer)

    async def _say(self, events: Events, writer: asyncio.StreamWriter) -> None:
        ids, held, group = [*events.prompt], "", list[tuple[int, str]]()
        plan = self.plan
        dies_after = plan.dies_after.pop(0) if plan.dies_after else 10**9
        writer.write(STREAM_HEAD)
        for piece in events.begin():
            chunk(writer, piece)
        for number in range(events.count):
            token = self.next(ids)
            ids.append(token)
            held += f"{token} "
            said, held = ("", held) if token % 3 == 0 and number + 1 < events.count else (held, "")
            group.append((token, said))
            if token % 4 == 1 and number + 1 < min(events.count, dies_after):
                continue  # two tokens in one event
            chunk(writer, events.tokens(group, last=number + 1 == events.count))
            group = []
            await writer.drain()
            if number + 1 >= dies_after:
                await asyncio.sleep(0.05)
                if plan.says:
                    chunk(writer, plan.says)
                    await writer.drain()
                    await asyncio.sleep(0.05)
                if plan.freezes:
                    await asyncio.sleep(60)
                reset(writer)
                return
            await asyncio.sleep(0.001)
        for piece in events.end():
            chunk(writer, piece)
        chunk(writer, b"")


def sent_ids(body: dict[str, Any]) -> list[int]:
    """The token ids of the prompt, if the router sent them."""
    given = body.get("kv_transfer_params", {}).get("prompt_token_ids") or body.get("prompt")
    return given if isinstance(given, list) else []


class Events:
    """The events of one stream, as vLLM writes them."""

    def __init__(self, name: str, chat: bool, body: dict[str, Any], prompt: list[int]) -> None:
        self.chat, self.prompt, self.said = chat, prompt, 0
        self.ids, self.usage = bool(body.get("return_token_ids")), "stream_options" in body
        self.count = int(float(body.get("max_completion_tokens" if chat else "max_tokens") or 3))
        self.head = {"id": f"one-of-{name}", "created": hash(name) % 1_000_000, "model": name}

    def event(self, *choices: dict[str, Any], **more: Any) -> bytes:
        data = json.dumps(self.head | {"choices": choices} | more, separators=(",", ":"))
        return b"data: " + data.encode() + b"\n\n"

    def begin(self) -> list[bytes]:
        if not self.chat:
            return []
        given = {"prompt_token_ids": self.prompt if self.ids else None}
        return [self.event({"index": 0, "delta": {"role": "assistant", "content": ""}}, **given)]

    def tokens(self, group: list[tuple[int, str]], *, last: bool) -> bytes:
        text = "".join(said for _, said in group)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
        choice |= {"delta": {"content": text}} if self.chat else {"text": text}
        choice["token_ids"] = [token for token, _ in group] if self.ids else None
        if not self.chat:
            choice["prompt_token_ids"] = self.prompt if self.ids and not self.said else None
        self.said += len(group)
        return self.event(choice)

    def end(self) -> list[bytes]:
        usage = {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": self.said,
            "total_tokens": len(self.prompt) + self.said,
            "prompt_tokens_details": {"cached_tokens": len(self.prompt) - 1},
        }
        return [*([self.event(usage=usage)] if self.usage else []), b"data: [DONE]\n\n"]


@pytest.fixture(autouse=True)
def nobody_is_ejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eject no worker: the engines of these tests break many streams, and an ejected engine could not continue any."""
    monkeypatch.setattr(outliers, "FAILURES", 1_000)


@asynccontextmanager
async def pair(
    url: str, model: str, *, token_handoff: list[str] = FACTS["token_handoff"], **settings: Any
) -> AsyncIterator[tuple[Replica, Plan]]:
    """A replica with two proven workers of one tokenizer. token_handoff: endpoints for which they take token ids."""
    plan = Plan()
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(replica(url, model, **settings))
        for talker in (Talker("first", plan), Talker("second", plan)):
            up = await stack.enter_async_context(engine(model, talker))
            facts = FACTS | {"token_handoff": token_handoff}
            await stack.enter_async_context(worker(url, model, up.url, talker.tracker, name=talker.name, **facts))

        async def proven() -> bool:
            return [view.proof for view in await router.fleet.workers.read()] == ["proven"] * 2

        await poll(proven, 60, "two proven workers")
        await router.exact()
        await router.routable(2)
        plan.router = router
        yield router, plan


@dataclass
class Heard:
    """A whole stream as the client got it."""

    chunks: list[dict[str, Any]]
    done: int

    @property
    def text(self) -> str:
        return "".join(
            choice.get("text") or choice.get("delta", {}).get("content") or ""
            for part in self.chunks
            for choice in part.get("choices", ())
        )

    @property
    def error(self) -> str:
        return next((str(part["error"]["code"]) for part in self.chunks if "error" in part), "")

    def of(self, name: str) -> list[Any]:
        return [choice[name] for part in self.chunks for choice in part.get("choices", ()) if choice.get(name)]


async def hear(router: Replica, path: str, headers: Mapping[str, str] = ASKS, **more: Any) -> Heard:
    body = {"stream": True, "temperature": 0} | BODIES[path] | more
    status, _, said = await router.post(body, path, **headers)
    assert status == 200
    events = [event.removeprefix(b"data: ") for event in said.split(b"\n\n") if event]
    whole = [json.loads(event) for event in events if event.startswith(b"{")]
    return Heard(whole, events.count(b"[DONE]"))


async def results(router: Replica) -> dict[str, float]:
    names = ("continued", "unfit", "budget", "failed")
    return {
        name: count
        for name in names
        if (count := await router.metric(f'warmfleet_continued_streams_total{{result="{name}"}}'))
    }


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_the_text_is_that_of_a_stream_that_did_not_break(
    valkey_url: str, model: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream may break anywhere, even inside a character: text, usage and format are those of one answer."""
    async with pair(valkey_url, model) as (router, plan):
        whole = await hear(router, path, **USAGE)
        assert len(whole.of("finish_reason")) == whole.done == 1
        for count in range(1, TOKENS):
            plan.dies(count)
            with caplog.at_level(logging.WARNING, "warmfleet.routing.recovery.continuation"):
                heard = await hear(router, path, **USAGE)
            assert (heard.text, heard.error) == (whole.text, "")
            check_form(heard, path)
            said, wanted = heard.chunks[-1]["usage"], whole.chunks[-1]["usage"]
            assert all(said[name] == wanted[name] for name in wanted if name.endswith("_tokens"))
            assert said["prompt_tokens_details"]["cached_tokens"] <= said["prompt_tokens"]
            [_, body] = plan.asked
            assert plan.booked == [1, 1]  # nothing is left booked at the worker that died
            produced = len(sent_ids(body)) - wanted["prompt_tokens"]
            assert 0 <= produced <= count
            assert body["max_completion_tokens" if path == CHAT else "max_tokens"] == TOKENS - produced
        assert await results(router) == {"continued": TOKENS - 1}
        assert "broke off" in caplog.text
        await router.unloaded()


def check_form(heard: Heard, path: str) -> None:
    """Assert that the events are those of one answer to a client that did not ask for token ids."""
    assert len(heard.of("finish_reason")) == heard.done == 1
    assert len({json.dumps([part[key] for key in ("id", "created", "model")]) for part in heard.chunks}) == 1
    assert heard.of("token_ids") == heard.of("prompt_token_ids") == []
    assert not any(part.get("prompt_token_ids") for part in heard.chunks)
    assert len([delta for delta in heard.of("delta") if "role" in delta]) == (path == CHAT)


async def test_who_does_not_ask_gets_the_bytes_unread(valkey_url: str, model: str) -> None:
    async with pair(valkey_url, model) as (router, plan):
        for headers in ({"X-Other": "1"}, {"X-Warmfleet-Continue": "0"}):
            plan.dies(5)
            assert (await hear(router, CHAT, headers)).error == "upstream_gone"
            [body] = plan.asked
            assert "return_token_ids" not in body
        assert await results(router) == {}
        status, _, said = await router.post(BODIES[CHAT], CHAT, **{"X-Warmfleet-Continue": "perhaps"})
        assert (status, json.loads(said)["error"]["param"]) == (400, "X-Warmfleet-Continue")


async def test_the_operator_lets_greedy_streams_go_on(valkey_url: str, model: str) -> None:
    async with pair(valkey_url, model, continue_greedy=True) as (router, plan):
        plain, not_now = {"X-Other": "1"}, {"X-Warmfleet-Continue": "0"}
        plan.dies(5)
        assert (await hear(router, CHAT, plain)).error == ""
        for headers, more in (plain, {"temperature": 0.5, "seed": 3}), (plain, {"temperature": None}), (not_now, {}):
            plan.dies(5)
            assert (await hear(router, CHAT, headers, **more)).error == "upstream_gone"
            assert len(plan.asked) == 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_limits_in_every_form_that_vllm_takes_go_on_as_numbers(valkey_url: str, model: str, path: str) -> None:
    name = "max_completion_tokens" if path == CHAT else "max_tokens"
    limits = {name: f"{TOKENS}.0", "min_tokens": "2", "temperature": "0", "stream": "true"}
    async with pair(valkey_url, model, continue_greedy=True) as (router, plan):
        plan.dies(5)
        assert (await hear(router, path, {"X-Other": "1"}, **limits)).error == ""
        first, second = plan.asked
        assert first[name] == f"{TOKENS}.0"
        assert TOKENS - 5 <= second[name] <= TOKENS
        assert second["min_tokens"] in (0, 1, 2)


async def test_an_error_of_the_engine_in_its_stream_is_a_break(valkey_url: str, model: str) -> None:
    """vLLM's API server sends an error event in the stream when its engine core has died."""
    async with pair(valkey_url, model) as (router, plan):
        whole = await hear(router, CHAT)
        plan.dies(7)
        plan.says = b'data: {"error":{"message":"EngineCore encountered an issue","code":500}}\n\ndata: [DONE]\n\n'
        heard = await hear(router, CHAT)
        assert (heard.text, heard.error, heard.done) == (whole.text, "", 1)


async def test_the_limits_of_its_client_do_not_end_a_stream_that_goes_on(
    valkey_url: str, model: str, tmp_path: Path
) -> None:
    """The continued request was already admitted: it counts once and is not refused although its prompt has grown."""
    prompt = len(BODIES[COMPLETIONS]["prompt"])  # a token is a byte
    rate = 2 * prompt + TOKENS + 3  # enough for both prompts and the first answer, but not for the second answer
    settings = limited(tmp_path, concurrency=1, tokens_per_minute=rate)
    async with pair(valkey_url, model, **settings) as (router, plan):
        whole = await hear(router, COMPLETIONS, ASKS | KEY)
        await router.unloaded()
        plan.dies(TOKENS - 2)
        heard = await hear(router, COMPLETIONS, ASKS | KEY)
        assert (heard.text, heard.error) == (whole.text, "")
        assert await results(router) == {"continued": 1}
        await router.unloaded()
        status, _, said = await router.post(BODIES[COMPLETIONS], COMPLETIONS, **KEY)
        assert status == 429
        told = json.loads(said)["error"]["message"]
        used = int(re.search(r"used ([\d,]+) of", told)[1].replace(",", ""))  # type: ignore[index]
        assert 2 * (prompt + TOKENS) - 30 < used <= 2 * (prompt + TOKENS), "what the client got, once"


async def test_a_silent_engine_is_left(valkey_url: str, model: str) -> None:
    async with pair(valkey_url, model, stream_idle_s=0.5, limit_interval_s=0.1) as (router, plan):
        whole = await hear(router, CHAT)
        plan.dies(7)
        plan.freezes = True
        heard = await hear(router, CHAT)
        assert (heard.text, heard.error) == (whole.text, "")


async def test_a_request_over_its_time_limit_does_not_go_on(valkey_url: str, model: str) -> None:
    async with pair(valkey_url, model, request_max_s=1.0, limit_interval_s=0.1) as (router, plan):
        plan.dies(7)
        plan.freezes = True
        assert (await hear(router, CHAT)).error == "engine_timeout"
        assert len(plan.asked) == 1
        assert await results(router) == {"unfit": 1}


async def test_a_stream_goes_on_once(valkey_url: str, model: str) -> None:
    async with pair(valkey_url, model) as (router, plan):
        whole = await hear(router, CHAT)
        plan.dies(5, 5)
        heard = await hear(router, CHAT)
        assert heard.error == "upstream_gone"
        assert whole.text.startswith(heard.text)
        assert len(plan.asked) == 2
        assert await results(router) == {"failed": 1}
        await router.unloaded()


async def test_another_text_is_not_passed_on(valkey_url: str, model: str) -> None:
    """After an event of two tokens that ends inside a character, text comes twice and must be the same."""
    async with pair(valkey_url, model) as (router, plan):
        whole = await hear(router, CHAT)
        plan.other, errors = 1, set()
        for count in range(1, TOKENS):
            plan.dies(count)
            heard = await hear(router, CHAT)
            errors.add(heard.error)
            if heard.error:
                assert heard.error == "upstream_error"
                assert whole.text.startswith(heard.text)
        assert "upstream_error" in errors


async def test_a_worker_that_joined_meanwhile_gets_no_ids(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of workers that take no ids lacks workers that joined meanwhile or were chosen without Redis."""
    async with pair(valkey_url, model) as (router, plan):
        answers = iter([True, True, False])  # both workers may be chosen, so the stream goes on at the second one
        monkeypatch.setattr(continuation, "takes", lambda *_: next(answers))
        plan.dies(5)
        assert (await hear(router, CHAT)).error == "upstream_gone"
        assert len(plan.asked) == 1
        await router.unloaded()


async def test_a_worker_that_takes_no_ids_does_not_go_on(valkey_url: str, model: str) -> None:
    async with pair(valkey_url, model, token_handoff=["completions"]) as (router, plan):
        plan.dies(5)
        assert (await hear(router, COMPLETIONS)).error == ""
        plan.dies(5)
        assert (await hear(router, CHAT)).error == "upstream_gone"
        assert len(plan.asked) == 1
        assert await results(router) == {"continued": 1, "failed": 1}


def test_a_worker_with_another_tokenizer_does_not_go_on() -> None:
    """A worker with another tokenizer would read the ids as other tokens."""
    job: Any = SimpleNamespace(request=SimpleNamespace(endpoint="chat"))
    for key, taken in (("key", True), ("another", False), ("", False)):
        assert takes(view(), "a.0", job, FollowedStream(Client(), KeptIds(), key)) == taken
    assert not takes(view("identity"), "a.0", job, FollowedStream(Client(), KeptIds(), "key"))


async def test_a_budget_bounds_continuations(valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "BUDGET_MOST", 1.0)
    async with pair(valkey_url, model) as (router, plan):
        errors = []
        for _ in range(3):
            plan.dies(5)
            errors.append((await hear(router, CHAT)).error)
        assert errors == ["", "upstream_gone", "upstream_gone"]
        assert await results(router) == {"continued": 1, "budget": 2}


# ---------------------------------------------------------------- requests that are continued


@pytest.mark.parametrize(
    "more",
    [
        {"stop": ["x"]},
        {"n": 2},
        {"logprobs": True},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.1},
        {"bad_words": ["a"]},
        {"return_token_ids": True},
        {"skip_special_tokens": False},
        {"a_field_of_tomorrow": 1},
    ],
)
def test_with_such_a_field_the_ids_do_not_decide_how_an_answer_goes_on(more: dict[str, Any]) -> None:
    plain = BODIES[CHAT] | {"stream": True, "temperature": 0, "seed": 3, "stop": None, "n": 1, "tools": []}
    assert continuable(plain)
    assert not continuable(plain | more)


def test_a_prompt_with_images_does_not_go_on() -> None:
    """No engine takes such a prompt as token ids."""
    made = object.__new__(continuation.Continuation)
    made._greedy_ones, made._kept = True, KeptIds()
    body = BODIES[CHAT] | {"stream": True, "temperature": 0}
    call = SimpleNamespace(
        body=json.dumps(body).encode(), hints=SimpleNamespace(continues=None), path=SimpleNamespace(form="chat")
    )
    for images in (0, 5):
        prompt = IdentifiedPrompt((), 20, 1, "exact", image_tokens=images)
        job = Job(call, parse("chat", call.body), call.body, None, prompt, ())  # type: ignore[arg-type]
        assert (made.prepared(job).continuable is None) == bool(images)


# ---------------------------------------------------------------- the reader of a stream


class Client:
    """A client's connection that keeps the sent parts."""

    def __init__(self) -> None:
        self.got = b""

    def pass_on(self, data: bytes) -> bool:
        assert data  # an empty chunk would end the answer
        self.got += data
        return True

    async def body(self, data: bytes, *, more: bool) -> None:
        self.got += data


def stream() -> bytes:
    events = Events("n", True, {"return_token_ids": True, "max_completion_tokens": 4, **USAGE}, [5, 6, 7])
    pieces = [*events.begin(), events.tokens([(8, "ä")], last=False), b": a comment\n\n"]
    pieces += [events.tokens([(9, ""), (10, "b")], last=False), events.tokens([(11, "c")], last=True)]
    return b"".join([*pieces, *events.end()])


async def test_however_a_stream_is_cut_into_pieces_it_is_read_the_same() -> None:
    whole, random_ = stream(), random.Random(3)
    wanted = b""
    for _ in range(200):
        client = Client()
        followed = FollowedStream(client, KeptIds(), "key")
        cuts = sorted(random_.sample(range(1, len(whole)), random_.randrange(6)))
        for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            assert followed.pass_on(whole[begin:end])
        await followed.body(b"", more=False)
        wanted = wanted or client.got
        assert client.got == wanted
        assert (list(followed.prompt), list(followed.produced)) == ([5, 6, 7], [8, 9, 10, 11])
        assert (followed.safe, followed.beyond, followed.finished) == (4, "", True)
    assert wanted.count(b"\n\n") == whole.count(b"\n\n")
    assert b'"token_ids":[' not in wanted


async def test_the_head_goes_before_the_events_of_a_piece_that_also_brings_the_error() -> None:
    """The head waits for the first ``body``: events that are passed on before it would come before the status line."""

    class HeadFirst(Client):
        def pass_on(self, data: bytes) -> bool:
            raise AssertionError("no piece was awaited yet, so the head is not sent")

    client = HeadFirst()
    followed = FollowedStream(client, KeptIds(), "key")
    events = Events("n", True, {"return_token_ids": True, "max_completion_tokens": 4, **USAGE}, [5, 6, 7])
    piece = b"".join(
        [*events.begin(), events.tokens([(8, "a")], last=False), b'data: {"error":{"message":"gone"}}\n\n']
    )
    with pytest.raises(UpstreamGone):
        await followed.body(piece, more=True)
    assert client.got.count(b"data: ") == piece.count(b"data: ") - 1


def test_the_kept_ids_are_bounded_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_stream, "MAX_KEPT_BYTES", 50)
    kept = KeptIds()
    both = [FollowedStream(Client(), kept, "key") for _ in range(2)]
    for reader in both:
        reader.pass_on(stream())
    assert [reader.known for reader in both] == [True, False]  # each has seven ids of four bytes
    assert kept.bytes == 28
    for reader in both:
        reader.close()
    assert kept.bytes == 0
