"""The chat client of ``demo``: streams answers, and records worker, matched and cached tokens, time to first token."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
from tenacity import retry, retry_if_exception, stop_after_delay, wait_fixed

if TYPE_CHECKING:
    import random

#: Time for which a 503 is tried again: on a busy machine a replica may lack a fresh reading of Redis for a moment.
UNAVAILABLE_S = 5.0

#: Words for made-up prompts; each is about one token.
SUBJECTS = """
river stone market letter winter garden engine signal harbor copper theory method cloud bridge paper window
morning forest number station history question answer pattern island summer music kitchen journey village
measure weather silver mountain teacher picture moment story corner motion valley record season water
"""
WORDS = tuple(SUBJECTS.split())
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Answer:
    """An answer, read to its end.

    ``matched_tokens``: prompt tokens cached by the router's prediction. ``cached_tokens``: by the engine's own count.
    """

    worker: str
    matched_tokens: int
    cached_tokens: int
    prompt_tokens: int
    first_token_s: float
    text: str

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


def _unavailable(error: BaseException) -> bool:
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.SERVICE_UNAVAILABLE


_patiently = retry(
    retry=retry_if_exception(_unavailable), wait=wait_fixed(0.1), stop=stop_after_delay(UNAVAILABLE_S), reraise=True
)


class Chat:
    """Streams chat completions of one model. Its methods raise httpx.HTTPError for an error or a lost connection."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._http = httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=200))

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, url: str, messages: Messages, max_tokens: int = 16) -> Answer:
        """Send one request to a replica or to an engine, and read its answer to the end."""
        body = {"model": self._model, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        started, first = time.perf_counter(), 0.0
        pieces: list[str] = []
        usage: dict[str, Any] = {}
        async with self._http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            if answer.is_error:
                await answer.aread()
                answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event: dict[str, Any] = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        first = first or time.perf_counter() - started
                        pieces.append(piece)
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            worker=answer.headers.get("x-warmfleet-worker", ""),
            matched_tokens=int(answer.headers.get("x-warmfleet-matched-tokens", 0)),
            cached_tokens=int(details.get("cached_tokens", 0)),
            prompt_tokens=int(usage.get("prompt_tokens", 0)),
            first_token_s=first,
            text="".join(pieces),
        )

    @_patiently
    async def get(self, url: str) -> Any:
        """Return the JSON that a replica answers to a GET."""
        return (await self._http.get(url)).raise_for_status().json()

    @_patiently
    async def explain(self, url: str, messages: Messages) -> dict[str, dict[str, Any]]:
        """Ask ``POST /explain`` about these messages; return each worker's row of the answer by its id."""
        body = {"model": self._model, "messages": messages}
        answer = (await self._http.post(f"{url}/explain", json=body)).raise_for_status().json()
        return {row["worker_id"]: row for row in answer["candidates"]}


def words(rng: random.Random, count: int) -> str:
    """Make random text of about ``count`` tokens, so that no engine has it in its cache."""
    return " ".join(rng.choices(WORDS, k=count))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}
