"""The measuring client: it streams answers, notes when the first byte came, and watches itself.

A client that cannot keep up measures its own delay, not the fleet's. So it reports its CPU share and how late its event
loop was.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import orjson

DATA = b"data: "  # before an event
Begun = Callable[[], object]
LAG_PERIOD = 0.05  # seconds that each measurement of the event loop's lag sleeps


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer.

    ttft_s, total_s: from sending the request to the first and the last byte; ttft_s of an answer that failed before its
    first byte is 0. late_s: from when the request was due to
    its sending. worker, reservation: from the router's headers; empty without a Warmfleet router. error: None after a
    complete answer. text: of a chat's answer.
    """

    ttft_s: float
    total_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    worker: str = ""
    late_s: float = 0.0
    error: str | None = None
    reservation: str = ""
    text: str = ""


@dataclass(slots=True)
class SelfWatch:
    """The client's own health in its ``with`` block: its share of one core, and how late its event loop is."""

    lags_s: list[float] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None
    _began: tuple[float, float] = (0.0, 0.0)

    async def __aenter__(self) -> Self:
        self._began = (time.monotonic(), _cpu())
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(LAG_PERIOD)
            self.lags_s.append(time.monotonic() - before - LAG_PERIOD)

    def report(self) -> dict[str, float]:
        began, cpu = self._began
        lags = sorted(self.lags_s) or [0.0]
        return {
            "cpu_share": round((_cpu() - cpu) / max(1e-9, time.monotonic() - began), 3),
            "lag_p99_ms": round(1e3 * lags[int(0.99 * (len(lags) - 1))], 2),
            "lag_max_ms": round(1e3 * lags[-1], 2),
        }


class Client:
    """Sends completions, with token ids or texts as prompts, and chats to OpenAI servers."""

    def __init__(self, model: str, timeout_s: float = 600.0, api_key: str | None = None) -> None:
        self.model = model
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # Idle connections are dropped before vLLM closes them (5 s).
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            headers={"Content-Type": "application/json", **headers},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def complete(
        self, url: str, prompt: list[int] | str, output_tokens: int, late_s: float = 0.0, session: str = ""
    ) -> Reply:
        """Stream exactly ``output_tokens`` tokens. Errors of server and network are in the reply's ``error``.

        late_s: copied into the reply. session: the session key to send, if any.
        """
        headers = {"X-Session-ID": session} if session else {}
        return await self._stream(f"{url}/v1/completions", {"prompt": prompt}, output_tokens, headers, late_s)

    async def chat(
        self, url: str, chat: dict[str, Any], output_tokens: int, headers: dict[str, str], begun: Begun = lambda: None
    ) -> Reply:
        """Do the same with a chat. chat: its messages and tools. begun: called when the answer begins."""
        return await self._stream(f"{url}/v1/chat/completions", chat, output_tokens, headers, begun=begun)

    async def _stream(
        self,
        url: str,
        prompt: dict[str, Any],
        output_tokens: int,
        headers: dict[str, str],
        late_s: float = 0.0,
        begun: Begun = lambda: None,
    ) -> Reply:
        body = {
            "model": self.model,
            **prompt,
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.monotonic()
        pieces: list[bytes] = []
        first_s = total_s = 0.0
        try:
            async with self._session.post(url, data=orjson.dumps(body), headers=headers) as response:
                worker = response.headers.get("x-warmfleet-worker", "")
                reservation = response.headers.get("x-warmfleet-reservation", "")
                async for piece in response.content.iter_any():
                    total_s = time.monotonic() - began
                    if not first_s and DATA in piece:  # comments that keep a waiting connection open do not count
                        first_s = total_s
                        begun()
                    pieces.append(piece)
        except (aiohttp.ClientError, TimeoutError) as error:
            return Reply(
                first_s, time.monotonic() - began, late_s=late_s, error=f"{type(error).__name__}: {error}"[:200]
            )
        raw = b"".join(pieces)
        if response.status != 200 or not raw.rstrip().endswith(b"[DONE]"):
            text = f"{response.status} {raw[:160].decode(errors='replace')}"
            return Reply(first_s, time.monotonic() - began, worker=worker, late_s=late_s, error=text)
        usage = _usage(raw)
        details = usage.get("prompt_tokens_details") or {}
        return Reply(
            first_s,
            total_s,
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            cached_tokens=int(details.get("cached_tokens") or 0),
            output_tokens=int(usage.get("completion_tokens") or 0),
            worker=worker,
            late_s=late_s,
            reservation=reservation,
            text=_text(raw) if "messages" in prompt else "",
        )


def _text(raw: bytes) -> str:
    """Return the text of a chat's answer, of a stream of events."""
    events = [orjson.loads(line[len(DATA) :]) for line in raw.split(b"\n") if line.startswith(DATA + b"{")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def _usage(raw: bytes) -> dict[str, Any]:
    """Return the last ``usage`` object in a stream of events; empty if there is none or it cannot be read."""
    at = raw.rfind(b'"usage":{')
    if at < 0:
        return {}
    begin = raw.rfind(DATA, 0, at) + len(DATA)
    try:
        return dict(orjson.loads(raw[begin : raw.index(b"\n", at)]).get("usage") or {})
    except ValueError:  # no JSON, or an event without an end
        return {}


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
