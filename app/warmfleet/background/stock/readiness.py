"""Whether an engine without the plugin takes new requests now: it may be paused, asleep, or have more than it can do.

vLLM answers on ``/is_sleeping`` and ``/is_paused`` whether requests wait until an operator wakes or resumes the engine.
An engine has these paths if HTTP can put it to sleep. Its ``/metrics`` show sleep, too, and how many requests wait in
its queue; each read of this page costs the engine 5 to 20 ms, so one replica at a time reads it for all replicas.

An engine is *saturated* if the requests in its queue will not all have begun by the next check: new requests would only
wait there. Two readings of the page show how fast requests begin.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import orjson

from warmfleet.errors import WarmfleetError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from warmfleet.engines.engine_client import EngineClient

ASK_TIMEOUT_S = 1.0  # longest wait for an answer; short: a check may take 3 s in all, and a round begins every 5 s
PAUSE_PATHS = {"/is_sleeping": "is_sleeping", "/is_paused": "is_paused"}  # path -> the field of its answer
CONFIRM_S = 0.5  # pause before a queue is read again that was empty at the last check, or was never read
LONGEST_WAIT_S = 30.0  # longest wait for a place in an engine's batch that is reported to Redis
#: Names in the /metrics of vLLM, SGLang, TGI and llama.cpp for requests that run, that wait, and that have ended.
RUNNING = (
    b"vllm:num_requests_running",
    b"sglang:num_running_reqs",
    b"tgi_batch_current_size",
    b"llamacpp:requests_processing",
)
WAITING = (b"vllm:num_requests_waiting", b"sglang:num_queue_reqs", b"tgi_queue_size", b"llamacpp:requests_deferred")
ENDED = (b"vllm:request_success_total", b"sglang:num_requests_total", b"tgi_request_success")
SLEEP_STATE, AWAKE = b"vllm:engine_sleep_state", b'sleep_state="awake"'


class Ready(NamedTuple):
    """The state of an engine, None if unknown. paused: paused or asleep. wait_s: seconds until a new request begins."""

    paused: bool | None = None
    wait_s: float | None = None


class Figures(NamedTuple):
    """Numbers of requests on one page of an engine's /metrics. asleep: None if the page does not show sleep."""

    running: float
    waiting: float
    ended: float
    asleep: bool | None
    read_at: float


@dataclass(frozen=True, slots=True)
class _Known:
    """The paths of PAUSE_PATHS that an engine has, and its last figures."""

    paths: Collection[str]
    figures: Figures | None = None


class Readiness:
    """Asks engines whether they take requests, and remembers the paths and the last figures of each."""

    def __init__(self, client: EngineClient, headers: Mapping[str, str], interval_s: float) -> None:
        """interval_s: time between two calls of ``ask`` for one engine."""
        self._client = client
        self._headers = headers
        self._interval_s = interval_s
        self._known: dict[str, _Known] = {}  # by URL

    def keep(self, urls: Collection[str]) -> None:
        """Forget all engines but those of these URLs."""
        self._known = {url: known for url, known in self._known.items() if url in urls}

    async def ask(self, url: str, *, anew: bool, read: bool) -> Ready:
        """Ask if an engine takes requests; raises no WarmfleetError. anew: try all PAUSE_PATHS. read: /metrics, too."""
        known = None if anew else self._known.get(url)
        paths = PAUSE_PATHS if known is None else known.paths
        before = None if known is None else known.figures
        read = read or known is None
        answers, figures = await asyncio.gather(
            asyncio.gather(*(self._pause(url, path) for path in paths)), self._figures(url) if read else _nothing()
        )
        has = [path for path, answer in zip(paths, answers, strict=True) if answer != "absent"]
        told = [answer for answer in answers if answer != "absent"]
        wait_s = None if figures is None else await self._wait_s(url, figures, before)
        kept = _Known(has, before) if known is None else replace(known, paths=has)
        self._known[url] = replace(kept, figures=figures or before)
        return Ready(_paused(told, figures), wait_s)

    async def _wait_s(self, url: str, figures: Figures, before: Figures | None) -> float:
        """Estimate a new request's wait: the time to empty the queue, or 0 if shorter than the check interval."""
        if figures.waiting < 1:
            return 0.0
        if before is None or before.waiting < 1:  # the waiting requests may have just arrived
            await asyncio.sleep(CONFIRM_S)
            later = await self._figures(url)
            if later is None or later.waiting < 1:
                return 0.0
            figures, before = later, figures
        begun = max(0.0, figures.ended + figures.running - before.ended - before.running)
        passed_s = max(figures.read_at - before.read_at, CONFIRM_S)
        wait_s = figures.waiting * passed_s / begun if begun else LONGEST_WAIT_S
        return min(wait_s, LONGEST_WAIT_S) if wait_s >= self._interval_s else 0.0

    async def _pause(self, url: str, path: str) -> bool | str:
        """Ask whether the engine is paused; ``absent``: the engine has no such path; ``silent``: it does not answer."""
        try:
            status, body = await self._client.get(url, path, self._headers, ASK_TIMEOUT_S)
        except WarmfleetError:
            return "silent"
        if status >= 500:
            return "silent"
        try:
            said = orjson.loads(body)[PAUSE_PATHS[path]] if status == 200 else None
        except (ValueError, KeyError, TypeError):
            return "absent"
        return said if isinstance(said, bool) else "absent"

    async def _figures(self, url: str) -> Figures | None:
        try:
            status, page = await self._client.get(url, "/metrics", self._headers, ASK_TIMEOUT_S)
        except WarmfleetError:
            return None
        return figures_of(page, time.monotonic()) if status == 200 else None


async def _nothing() -> None:
    return None


def _paused(told: Collection[bool | str], figures: Figures | None) -> bool | None:
    asleep = None if figures is None else figures.asleep
    if asleep or True in told:
        return True
    if "silent" in told:
        return None
    return False if told or asleep is not None else None


def figures_of(page: bytes, now: float) -> Figures:
    """Add up the requests on a /metrics page over all ranks and finish reasons. now: monotonic time of the reading."""
    awake = [value for labels, value in _samples(page, SLEEP_STATE) if AWAKE in labels]
    running, waiting, ended = (
        sum(value for name in names for _, value in _samples(page, name)) for names in (RUNNING, WAITING, ENDED)
    )
    return Figures(running, waiting, ended, 0.0 in awake if awake else None, now)


def _samples(page: bytes, name: bytes) -> list[tuple[bytes, float]]:
    """Return labels and value of each sample of this name. ``find`` takes a tenth of a regular expression's time."""
    found, at = [], page.find(name)
    while at >= 0:
        end = page.find(b"\n", at)
        line = page[at : end if end >= 0 else len(page)]
        labels, brace, value = line[len(name) :].rpartition(b"}")
        begins = at == 0 or page[at - 1 : at] == b"\n"
        if begins and (labels.startswith(b"{") if brace else value.startswith(b" ")):
            with suppress(ValueError, IndexError):
                found.append((labels, float(value.split()[0])))
        at = page.find(name, at + len(line))
    return found
