"""The cost of rendering a chat: ``python -m tests.bench.bench_templates`` prints one JSON object as its last line.

CPU µs of one render by the templates of the tiny models. ``plain``: an approved template, in process. ``sandbox``: by
jinja2's sandbox in process, which a replica never does. ``child``: an unapproved template, with the CPU time of the
replica (``_router``), that of the child (``_process``), and the wait (``_wall``). ``start_ms``: the time until a new
process has compiled a template.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from warmfleet.metrics import Metrics
from warmfleet.prompt.chat_template import ChatTemplate
from warmfleet.untrusted.render_process import Sandboxed

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.prompt.messages import Message

KINDS = ("qwen3", "llama3")
MESSAGES = (20, 80)
ROUNDS = 3
FIXED = {"tools": None, "documents": None, "bos_token": "<s>", "eos_token": "</s>"}
ARGUMENTS = {"add_generation_prompt": True}


def chat(count: int) -> list[Message]:
    """Return messages of 600 to 2,000 characters, of which one in five is not ASCII."""
    rng = random.Random(count)
    ascii_words = ["prefix", "cache", "router", "block", "the", "of", "engine", "tokens"]
    roles = ["system"] + ["user", "assistant"] * (count // 2)
    made: list[Message] = []
    for at, role in enumerate(roles[:count]):
        words = ascii_words if at % 5 else [*ascii_words, "naïve", "日本"]
        made.append({"role": role, "content": " ".join(rng.choices(words, k=rng.randrange(100, 330)))})
    return made


def here_us(template: ChatTemplate, messages: list[Message], repeats: int) -> float:
    def mean() -> float:
        begun = time.process_time()
        for _ in range(repeats):
            template.render(messages, ARGUMENTS, FIXED)
        return (time.process_time() - begun) / repeats * 1e6

    return min(mean() for _ in range(ROUNDS))


async def child_us(box: Sandboxed, messages: list[Message], repeats: int) -> dict[str, float]:
    """Return the figures of the round in which both processes together cost least."""
    best = {"router": float("inf"), "process": float("inf"), "wall": 0.0}
    for _ in range(ROUNDS):
        walls, begun, theirs = [], time.process_time(), cpu_s(box)
        for _ in range(repeats):
            at = time.perf_counter()
            await box.render(messages, ARGUMENTS, FIXED)
            walls.append(time.perf_counter() - at)
        ours, theirs = time.process_time() - begun, cpu_s(box) - theirs
        found = {
            "router": ours / repeats * 1e6,
            "process": theirs / repeats * 1e6,
            "wall": statistics.median(walls) * 1e6,
        }
        best = min(best, found, key=lambda one: one["router"] + one["process"])
    return best


def cpu_s(box: Sandboxed) -> float:
    """Return the CPU seconds of a process so far, by the scheduler's clock."""
    assert box._child is not None
    return int(Path(f"/proc/{box._child.process.pid}/schedstat").read_text().split()[0]) / 1e9


async def measure(repeats: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    folder = resources.files("warmfleet_loadtest").joinpath("data")
    for kind in KINDS:
        source = folder.joinpath(f"kind_{kind}.jinja").read_text()
        plain, sandbox = ChatTemplate(source, trusted=True), ChatTemplate(source)
        box = Sandboxed(source, "auto", kind, Metrics())
        begun = time.perf_counter()
        await box.ready()
        out[f"start_ms_{kind}"] = round((time.perf_counter() - begun) * 1e3, 1)
        for count in MESSAGES:
            messages, name = chat(count), f"{kind}_{count}"
            assert await box.render(messages, ARGUMENTS, FIXED) == plain.render(messages, ARGUMENTS, FIXED)
            out[f"plain_{name}"] = round(here_us(plain, messages, repeats), 1)
            out[f"sandbox_{name}"] = round(here_us(sandbox, messages, repeats), 1)
            for side, value in (await child_us(box, messages, repeats)).items():
                out[f"child_{side}_{name}"] = round(value, 1)
            print(name, {key: value for key, value in out.items() if key.endswith(name)}, file=sys.stderr, flush=True)
        await box.end()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=300, help="renders of a round (default %(default)s)")
    run: Callable[..., dict[str, Any]] = asyncio.Runner(loop_factory=uvloop.new_event_loop).run
    print(json.dumps(run(measure(parser.parse_args().repeats))))


if __name__ == "__main__":
    main()
