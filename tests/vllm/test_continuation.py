"""Real vLLM dies in the middle of its streams, and the clients still get the same text."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.polling import poll
from tests.support.replicas.replica import Replica, replica
from tests.vllm.conftest import TAG
from tests.vllm.engine import SERVED_NAME, EngineOptions, running

from warmfleet.pools import outliers

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm.engine import VllmEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.long(
        minutes=3,
        shows=(
            "one of two real engines is killed in the middle of 20 greedy streams, and later a core alone: every "
            "client gets the text of a run without a fault"
        ),
    ),
]

STREAMS, TOKENS = 20, 400
CONTINUED = 'warmfleet_continued_streams_total{result="continued"}'
WORDS = ("water", "river", "Straße", "paper", "光", "table", "green", "🙂", "house", "naïve")


def asked(number: int) -> tuple[str, dict[str, Any]]:
    """A path and a body. The random model answers with bytes of every kind, also with parts of characters."""
    text = " ".join(random.Random(number).choices(WORDS, k=120))
    body = {"model": SERVED_NAME, "temperature": 0, "stream": True, "max_tokens": TOKENS, "ignore_eos": True}
    body |= {"stream_options": {"include_usage": True}, "repetition_penalty": 1_000.0}  # or one word repeats
    if number % 2:
        return "/v1/completions", body | {"prompt": text}
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}


@dataclass
class Stream:
    """The pieces that a client has got so far. gap_s: the longest wait between two pieces."""

    worker: str = ""
    text: str = ""
    events: int = 0
    ends: list[str] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    error: str = ""
    gap_s: float = 0.0

    def take(self, event: dict[str, Any]) -> None:
        self.events += 1
        self.error = self.error or str(event.get("error") or "")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            self.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            self.ends += [choice["finish_reason"]] if choice.get("finish_reason") else []

    @property
    def whole(self) -> tuple[str, list[str], list[int], str]:
        counts = [self.usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
        return self.text, self.ends, counts, self.error


async def hear(router: Replica, number: int, stream: Stream) -> None:
    path, body = asked(number)
    async with router.client.post(router.url + path, json=body) as answer:
        assert answer.status == 200
        stream.worker, last = answer.headers["x-warmfleet-worker"], time.monotonic()
        async for line in answer.content:
            stream.gap_s, last = max(stream.gap_s, time.monotonic() - last), time.monotonic()
            if line.startswith(b"data: {"):
                stream.take(json.loads(line[6:]))


async def run(router: Replica, *, kill: Callable[[list[Stream]], None] | None = None) -> list[Stream]:
    """Run all streams at once, and call ``kill`` with them when each has got some of its text."""
    streams = [Stream() for _ in range(STREAMS)]
    tasks = [asyncio.create_task(hear(router, number, stream)) for number, stream in enumerate(streams)]
    if kill is not None:
        await poll(
            lambda: sum(stream.events for stream in streams) > 40 * STREAMS, 60, "the streams are in their middle"
        )
        kill(streams)
    await asyncio.gather(*tasks)
    return streams


async def test_streams_go_on_with_the_same_text_when_an_engine_is_killed(
    vllm_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First a whole engine dies; it comes back, and then the other one's core dies under a living API server."""
    monkeypatch.setattr(outliers, "FAILURES", 1_000)  # the engine that was killed gets streams again at once
    options = [EngineOptions(redis_url=vllm_store, worker_id=f"on-{name}", model_tag=TAG, blocks=640) for name in "ab"]
    with running(*options) as engines:
        async with replica(vllm_store, TAG, decide_timeout_s=5.0, continue_greedy=True) as router:
            await router.exact()
            await poll(lambda: _proven(router, 2), 60, "two proven workers")
            wanted = await run(router)
            assert [stream.error for stream in wanted] == [""] * STREAMS
            assert min(len(set(stream.text)) for stream in wanted) > 50, "the texts are too simple to show anything"
            again = await run(router)
            assert [stream.whole for stream in again] == [stream.whole for stream in wanted], (
                "greedy answers do not repeat"
            )
            victim = await check(router, engines, wanted, lambda engine: engine.kill())
            victim.start()
            await asyncio.to_thread(victim.wait)
            await poll(lambda: _proven(router, 2), 120, "the engine is back")
            await check(router, engines, wanted, kill_core)


async def check(
    router: Replica, engines: list[VllmEngine], wanted: list[Stream], kill: Callable[[VllmEngine], None]
) -> VllmEngine:
    """Kill the engine that has more of the streams; each must end as ``wanted``. Returns the engine."""
    for engine in engines:
        async with router.client.post(f"{engine.url}/reset_prefix_cache") as reset:
            assert reset.status == 200
    broken, before = Counter[str](), await router.metric(CONTINUED)

    def strike(streams: list[Stream]) -> None:
        broken.update(stream.worker for stream in streams if stream.worker and not stream.ends)
        kill(_engine(engines, broken.most_common(1)[0][0]))

    heard = await run(router, kill=strike)
    [(name, count)] = broken.most_common(1)
    differing = [number for number in range(STREAMS) if heard[number].whole != wanted[number].whole]
    continued = await router.metric(CONTINUED) - before
    ours, others = ([stream.gap_s for stream in heard if (stream.worker == name) == at] for at in (True, False))
    print(f"\n{count} of {STREAMS} streams were at {name}; {continued:.0f} went on, {len(differing)} differ;", end=" ")
    print(f"longest gap of those {max(ours):.2f} s, of the others {max(others, default=0.0):.2f} s")
    assert differing == []
    assert 0 < continued <= count  # the last of them may have ended when the signal came
    await router.unloaded()
    return _engine(engines, name)


def kill_core(engine: VllmEngine) -> None:
    """SIGKILL to the engine core alone: the API server ends its streams with an error event."""
    assert engine.process is not None
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (
                b"EngineCore" in (folder / "cmdline").read_bytes()
                and os.getpgid(int(folder.name)) == engine.process.pid
            ):
                os.kill(int(folder.name), signal.SIGKILL)


def _engine(engines: list[VllmEngine], worker_id: str) -> VllmEngine:
    [found] = [engine for engine in engines if engine.worker_id == worker_id]
    return found


async def _proven(router: Replica, count: int) -> bool:
    return await router.metric('warmfleet_workers{state="proven"}') == count
