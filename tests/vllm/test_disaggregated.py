"""Real vLLM with NIXL, a prefill and two decode engines behind a router: conversations are split over two engines, and
answered as by one. Engines are killed and stopped meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.support.requests.pictures import conversations
from tests.vllm.engine import ROOT, SERVED_NAME, VENV, VllmEngine, running
from tests.vllm.replicas import replicas
from tests.vllm.seeing import environment, vision_model
from tests.vllm.test_fleet import Real, settled
from tests.vllm.test_handoff import ADAPTER, TEMPLATE
from tests.vllm.test_images import SEES
from tests.vllm.test_roles import AFTER_EXPIRY, LEASE_S, counted, options, taken_from_others

from warmfleet.cli.local.ports import free_port
from warmfleet.fleet import Fleet as Index
from warmfleet.fleet import Timeouts, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

CONVERSATIONS, TURNS, AT_ONCE = 170, 3, 12
FEW = 30  # conversations that nothing disturbs
BLOCKS, ROOMY = 400, 4_000  # of an engine's cache; ROOMY: for several times FEW conversations
CLOSE = 1e-4  # largest difference of a log probability
WAITS_S, STOPPED_S = 240.0, 6.0
LONG_LEASE_S = 900  # on a busy machine a first handshake may take longer than LEASE_S
CALM, BESIDE = 40, 12  # split requests that are sent one by one, and requests beside them
MOST_CALM = 80  # conversations that are tried for that
PATIENT = {"WARMFLEET_QUEUE_TIMEOUT_S": str(WAITS_S), "WARMFLEET_DECIDE_TIMEOUT_S": "10"}  # on a busy machine
EMPTY = '{"candidates":[]}'

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3_000)]
LONG = pytest.mark.long(
    minutes=25,
    shows=(
        "510 conversations on real vLLM with NIXL, a prefill and two decode engines: of text with LoRA and tools, "
        "with images, with sliding windows; every answer is that of one engine, as much is cached as predicted, "
        "and no engine's cache is spoiled, though each role is killed and stopped"
    ),
)
WORDS = ("import", "return", "while", "class", "value", "index", "error", "string", "buffer", "module")
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]


def texts(rng: random.Random) -> list[dict[str, Any]]:
    """A conversation's turns as bodies of requests; all use an adapter, some have tools.

    On the CPU, vLLM 0.32 gives other answers when requests with an adapter and without run at the same time.
    """
    more: dict[str, Any] = {"tools": TOOLS, "tool_choice": "auto"} if rng.random() < 0.3 else {}
    return _turns(rng, {"model": "adapter"} | more)


def plain_texts(rng: random.Random) -> list[dict[str, Any]]:
    return _turns(rng, {})


def _turns(rng: random.Random, more: dict[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    turns = []
    for _ in range(TURNS):
        messages = [*messages, {"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randrange(20, 400)))}]
        turns.append({"messages": messages, "max_tokens": rng.choice((6, 6, 30))} | more)
        messages = [*messages, {"role": "assistant", "content": " ".join(rng.choices(WORDS, k=20))}]
    return turns


def pictures(rng: random.Random) -> list[dict[str, Any]]:
    made = conversations(rng.randrange(10**6), 2 * TURNS)
    return [ask.body for ask in made if ask.endpoint == "chat" and ask.lora is None][:TURNS]


@dataclass(frozen=True)
class Kind:
    """A kind of conversations, and how engines for them start."""

    turns: Callable[[random.Random], list[dict[str, Any]]]
    model: Path
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    splits: bool = True
    blocks: int = BLOCKS
    lease_s: int = LEASE_S


def kind_of(name: str, folder: Path) -> Kind:
    if name == "plain":
        return Kind(plain_texts, ROOT / "models" / "tiny", blocks=ROOMY, lease_s=LONG_LEASE_S)
    if name == "images":
        return Kind(pictures, vision_model("qwen2_vl"), SEES, environment(), splits=False)
    if name == "windows":
        return Kind(plain_texts, ROOT / "models" / "tiny-windows")
    template, adapter = folder / "template.jinja", folder / "adapter"
    template.write_text(TEMPLATE)
    subprocess.check_call([VENV / "bin" / "python", "-c", ADAPTER, adapter])
    parsers = ("--chat-template", str(template), "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    lora = ("--enable-lora", "--lora-modules", f"adapter={adapter}")
    return Kind(texts, ROOT / "models" / "tiny", (*parsers, *lora))


@dataclass
class Fleet:
    prefill: VllmEngine
    decode: list[VllmEngine]
    url: str
    redis_url: str


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Kind, Fleet]]:
    kind = kind_of(request.param, tmp_path)
    with ExitStack() as stack:
        redis_url = stack.enter_context(server(valkey_binary()))
        made = []
        for name, role in (("p", "kv_producer"), ("d1", "kv_consumer"), ("d2", "kv_consumer")):
            one = options(redis_url, name, role, free_port(), lease_s=kind.lease_s)
            arguments, environ = (*one.arguments, *kind.arguments), {**one.environment, **kind.environment}
            made.append(replace(one, blocks=kind.blocks, model=kind.model, arguments=arguments, environment=environ))
        # Engines start one after another: each start takes a core for a while, and other tests run beside.
        prefill, *decode = [stack.enter_context(running(one))[0] for one in made]
        [url] = stack.enter_context(replicas(redis_url, 1, engines=3, **PATIENT))
        yield kind, Fleet(prefill, decode, url, redis_url)


@dataclass(frozen=True)
class Answer:
    """Tokens and log probabilities, cached tokens as predicted and as counted, and the engines that made the answer.

    decided: by the fleet's state, not by a fallback, as where a busy machine kept Redis or heartbeats waiting.
    """

    tokens: list[str]
    logprobs: list[float]
    predicted: int
    cached: int
    prefill: str
    decode: str
    prompt: int
    decided: bool
    held: dict[str, int]  # tokens that each engine was believed to hold, if the request asked for the explanation


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any], **headers: str) -> Answer:
    asked = {"model": SERVED_NAME, "max_tokens": 6, "temperature": 0, "logprobs": True} | body
    answer = await client.post(f"{url}/v1/chat/completions", json=asked, headers=headers)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    content = told["choices"][0]["logprobs"]["content"]
    return Answer(
        [one["token"] for one in content],
        [one["logprob"] for one in content],
        int(answer.headers.get("x-warmfleet-matched-tokens", 0)),
        (told["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
        answer.headers.get("x-warmfleet-prefill-worker", ""),
        answer.headers.get("x-warmfleet-worker", ""),
        told["usage"]["prompt_tokens"],
        answer.headers.get("x-warmfleet-reservation") == "booked",
        {
            one["worker"]: one["matched"]
            for one in json.loads(answer.headers.get("x-warmfleet-explain", EMPTY))["candidates"]
        },
    )


@dataclass
class Talks:
    """The fleet's answers, by conversation and turn. going: cleared while a killed engine starts again."""

    fleet: Fleet
    bodies: list[list[dict[str, Any]]]
    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)
    going: asyncio.Event = field(default_factory=asyncio.Event)
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    done: int = 0

    async def run(self, client: httpx.AsyncClient) -> None:
        self.going.set()
        async with asyncio.TaskGroup() as tasks:
            for number in range(len(self.bodies)):
                tasks.create_task(self._talk(client, number))
            tasks.create_task(self._strike())

    async def _talk(self, client: httpx.AsyncClient, number: int) -> None:
        async with self.places:
            await self.going.wait()
            for turn, body in enumerate(self.bodies[number]):
                self.answers[number, turn] = await ask(client, self.fleet.url, body)
        self.done += 1

    async def _strike(self) -> None:
        """Stop both roles, then kill both; in between conversations go on."""
        prefill, decode = self.fleet.prefill, self.fleet.decode
        part = len(self.bodies) // 6
        for number, (engine, kills) in enumerate(
            ((prefill, False), (decode[0], False), (prefill, True), (decode[1], True)), 1
        ):
            await self._reaches(number * part)
            if kills:
                await asyncio.to_thread(engine.kill)
                await self._reaches(number * part + AT_ONCE)
                self.going.clear()
                engine.start()
                await asyncio.to_thread(engine.wait)
            else:
                signal_group(engine, signal.SIGSTOP)
                await asyncio.sleep(STOPPED_S)
                signal_group(engine, signal.SIGCONT)
            await poll(lambda: asyncio.to_thread(self._all_are_back), 60, "the router knows the engine again")
            self.going.set()

    async def _reaches(self, done: int) -> None:
        await poll(lambda: self.done >= done, 1_200, f"{done} conversations have ended")

    def _all_are_back(self) -> bool:
        workers = httpx.get(f"{self.fleet.url}/workers", timeout=5).json()["models"][0]["workers"]
        return len([one for one in workers if one["routable"] and one["proof"] == "proven"]) == 3


def signal_group(engine: VllmEngine, number: signal.Signals) -> None:
    assert engine.process is not None
    subprocess.run(["kill", f"-{number.value}", "--", f"-{engine.process.pid}"], check=True)


@pytest.mark.parametrize("fleet", ["plain"], indirect=True)
async def test_conversations_are_answered_as_by_one_engine(fleet: tuple[Kind, Fleet]) -> None:
    """Conversations take a turn at once, so that splitting pays; each turn begins when the index is settled.

    On a busy machine, where prefill engines are late, more conversations follow until enough requests are split.
    """
    kind, engines = fleet
    rng, talks = random.Random(3), Talks(engines, [])
    real = Real([engines.url], {one.worker_id: one for one in (engines.prefill, *engines.decode)}, engines.redis_url)
    index = Index(connect(engines.redis_url, timeout_s=WAITS_S), SERVED_NAME, Timeouts(WAITS_S, WAITS_S))
    async with httpx.AsyncClient(timeout=WAITS_S) as client:
        while sum(bool(one.prefill) for one in talks.answers.values()) < FEW * TURNS // 10:
            first = len(talks.bodies)
            talks.bodies += [[body | {"max_tokens": 30} for body in kind.turns(rng)] for _ in range(FEW)]
            for turn in range(TURNS):
                asked = [ask(client, engines.url, bodies[turn]) for bodies in talks.bodies[first:]]
                talks.answers |= {(at, turn): one for at, one in enumerate(await asyncio.gather(*asked), first)}
                await settled(real, index)
        differing = [await different(client, engines.prefill, talks)]
        # A decode engine that had taken stale blocks would answer otherwise now, from its cache.
        differing += [await different(client, engine, talks, (TURNS - 1,)) for engine in engines.decode]
        late = await late_transfers(client, engines.url)
    await index.close()
    answers = talks.answers.values()
    split = Counter((bool(one.prefill), one.decode) for one in answers)
    print(f"\nsplit, by the engine that answered: {split}; decided: {sum(one.decided for one in answers)}")
    assert not any(differing), "an engine alone answers otherwise"
    assert sum(one.decided and one.predicted != one.cached for one in answers) <= late
    assert sum(one.cached > 0 for one in answers) > len(answers) // 3, "most second and third turns"
    assert sum(map(taken_from_others, engines.decode)) > 0
    assert counted(engines.prefill, AFTER_EXPIRY) <= late


@LONG
@pytest.mark.parametrize("fleet", ["text", "windows", "images"], indirect=True)
async def test_answers_are_those_of_one_engine(fleet: tuple[Kind, Fleet]) -> None:
    kind, engines = fleet
    rng = random.Random(1)
    talks = Talks(engines, [kind.turns(rng) for _ in range(CONVERSATIONS)])
    async with httpx.AsyncClient(timeout=WAITS_S) as client:
        await talks.run(client)
        split = Counter((bool(one.prefill), one.decode) for one in talks.answers.values())
        off = sum(one.predicted != one.cached for one in talks.answers.values())
        print(f"\nsplit, by the engine that answered: {dict(split)}; predicted otherwise than cached: {off}")
        assert off <= len(talks.answers) // 20, "but for engines that are killed"
        # A decode engine that had taken stale blocks would answer otherwise now, from its cache.
        for engine in (engines.prefill, *engines.decode):
            differing = await different(client, engine, talks)
            assert not differing, f"{engine.worker_id} answers otherwise: {differing}"
    assert sum(count for (both, _), count in split.items() if both) > (len(talks.answers) // 10 if kind.splits else -1)
    assert counted(engines.prefill, AFTER_EXPIRY) == 0


@LONG
@pytest.mark.parametrize("fleet", ["text"], indirect=True)
async def test_as_much_is_cached_at_both_engines_as_predicted(fleet: tuple[Kind, Fleet]) -> None:
    """Answers beside them make it worth while to split requests that come one by one."""
    kind, engines = fleet
    rng, split, off = random.Random(2), 0, []

    async def beside() -> None:
        more = {"n": 2, "temperature": 1, "max_tokens": 300, "ignore_eos": True}
        while True:  # several answers to a request, so that it is not split
            await ask(client, engines.url, kind.turns(rng)[0] | more)

    async with httpx.AsyncClient(timeout=WAITS_S) as client, asyncio.TaskGroup() as tasks:
        others = [tasks.create_task(beside()) for _ in range(BESIDE)]
        for _ in range(MOST_CALM):
            for body in kind.turns(rng):
                before = {engine.worker_id: taken_from_others(engine) for engine in engines.decode}
                one = await ask(client, engines.url, body, **{"x-warmfleet-explain": "1"})
                took = {
                    engine.worker_id: taken_from_others(engine) - before[engine.worker_id] for engine in engines.decode
                }
                lacked = {one.decode: one.prompt - one.held[one.decode]} if one.prefill else {}
                if one.predicted != one.cached or took != dict.fromkeys(took, 0) | lacked:
                    off.append((one, took, lacked))
                split += bool(one.prefill)
            if split >= CALM:
                break
        for task in others:
            task.cancel()
    print(f"\nsplit: {split}")
    assert split >= CALM
    assert not off


async def late_transfers(client: httpx.AsyncClient, url: str) -> float:
    """Return how many split requests the router gave up because their blocks did not come: there are none on an idle
    machine. Each may count as a notification after the expiry, as in ``test_roles``, and its next try may find what the
    decode engine computed meanwhile, of which the index has not heard yet."""
    text = (await client.get(f"{url}/metrics")).text
    found = re.findall(r'^warmfleet_split_requests_total\{[^}]*result="late"[^}]*\} (\S+)', text, re.MULTILINE)
    return sum(map(float, found))


async def different(
    client: httpx.AsyncClient, engine: VllmEngine, talks: Talks, turns: Collection[int] = range(TURNS)
) -> dict[tuple[int, int], tuple[Answer, Answer]]:
    """Ask one engine alone; return the answers of these turns that differ from those of the fleet."""
    found = {}
    places = asyncio.Semaphore(AT_ONCE)

    async def compare(number: int, turn: int) -> None:
        async with places:
            alone = await ask(client, engine.url, talks.bodies[number][turn])
        ours = talks.answers[number, turn]
        near = all(abs(one - other) <= CLOSE for one, other in zip(alone.logprobs, ours.logprobs, strict=False))
        if alone.tokens != ours.tokens or not near:
            found[number, turn] = ours, alone

    await asyncio.gather(*[compare(*key) for key in talks.answers if key[1] in turns])
    return found
