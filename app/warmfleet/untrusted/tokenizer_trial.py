"""Loads tokenizers. A tokenizer that a worker brought is tried in a process of its own first.

A tokenizer that fails its trial or meets a limit in it is not tried again for AGAIN_S. Until then requests for its
model are routed by load.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import marshal
import time
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import tokenizers

import warmfleet
from warmfleet.prompt.cut_points import Cuts
from warmfleet.prompt.tokenizer import Encoder, digest
from warmfleet.untrusted import trial_child
from warmfleet.untrusted.render_child import DONE
from warmfleet.untrusted.render_process import Child, LimitMet, folders_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from warmfleet.prompt.tokenizer import Affixes

logger = logging.getLogger("warmfleet.untrusted.tokenizer_trial")

MAX_TOKENIZERS = 4  # most tokenizers kept in memory, of 30 to 340 MB each
MAX_VERDICTS = 64  # most results of trials that are remembered
AT_ONCE = 2  # most trials that run at the same time
AGAIN_S = 600.0  # time after a failed trial until the tokenizer is tried again
#: Longest wall time of a trial, in seconds, plus seconds per MB of the file. It exceeds the limit of CPU time in
#: ``trial_child``, and ends a stopped process, which uses no CPU time.
WALL_S, WALL_PER_MB = 30.0, 3.0


class Refused(ValueError):  # noqa: N818  not an error of the router: a worker brought a bad file
    """A tokenizer that no replica should load. again_s: seconds until its file may be tried again."""

    def __init__(self, name: str, reason: str, again_s: float = AGAIN_S) -> None:
        super().__init__(f"tokenizer {name[:12]} is refused: {reason}")
        self.reason = reason
        self.again_s = again_s


@dataclass(frozen=True, slots=True)
class Verdict:
    """The results of a trial. With them a replica loads the tokenizer without testing it on texts again."""

    fast: bool
    affixes: Affixes | None
    cuts: Cuts


class Encoders:
    """The tokenizers of this replica by the digest of their file. The MAX_TOKENIZERS last used are kept."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._known: OrderedDict[tuple[str, bool], Encoder] = OrderedDict()
        self._verdicts: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._refused: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def take(self, tokenizer_json: bytes, template: str, *, trusted: bool) -> tuple[Encoder, Cuts]:
        """Load a file; return its encoder, and where texts rendered by ``template`` may be cut into pieces to encode.

        trusted: the operator chose the file, so it needs no trial. Raises ValueError, which is Refused for a file that
        is not trusted.
        """
        name = await asyncio.to_thread(digest, tokenizer_json)
        if trusted:
            encoder = await self._encoder((name, True), partial(Encoder.load, tokenizer_json))
            return encoder, await self._in_executor(partial(encoder.cuts, template))
        verdict = await self._judged(name, tokenizer_json, template)
        make = partial(Encoder.load_tried, tokenizer_json, fast=verdict.fast, affixes=verdict.affixes)
        return await self._encoder((name, False), make), verdict.cuts

    async def _encoder(self, key: tuple[str, bool], make: Callable[[], Encoder]) -> Encoder:
        encoder = self._known.get(key)
        if encoder is None:
            encoder = await self._in_executor(make)
        _remember(self._known, key, encoder, MAX_TOKENIZERS)
        return encoder

    async def _judged(self, name: str, tokenizer_json: bytes, template: str) -> Verdict:
        key = name, digest(template.encode())
        async with self._turns:
            until, reason = self._refused.get(name, (0.0, ""))
            if (again_s := until - time.monotonic()) > 0:
                raise Refused(name, reason, again_s)
            verdict = self._verdicts.get(key)
            if verdict is None:
                try:
                    verdict = await _tried(name, tokenizer_json, template)
                except Refused as refused:
                    _remember(self._refused, name, (time.monotonic() + AGAIN_S, refused.reason), MAX_VERDICTS)
                    raise
        _remember(self._verdicts, key, verdict, MAX_VERDICTS)
        return verdict

    async def _in_executor(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


async def _tried(name: str, tokenizer_json: bytes, template: str) -> Verdict:
    """Try a tokenizer. Raises Refused; ValueError if no process can be started."""
    request = await asyncio.to_thread(marshal.dumps, (tokenizer_json, template))
    try:
        child = await Child.start(trial_child.__file__, _folders())
    except LimitMet as limit:
        raise ValueError(f"tokenizer {name[:12]} cannot be tried now") from limit
    try:
        status, body = await child.ask(request, WALL_S + WALL_PER_MB * len(request) / 1e6)
        if status != DONE:
            raise Refused(name, body.decode(errors="replace")[:400])
        verdict = _verdict(body)
    except LimitMet as limit:
        raise Refused(name, f"it met a limit of its trial: {limit.kind}") from limit
    finally:
        await child.end()
    logger.info("tokenizer %s is read by %s", name[:12], "fastokens" if verdict.fast else "tokenizers: slower")
    return verdict


def _verdict(body: bytes) -> Verdict:
    """Read the results in the answer of the process. Raises LimitMet if the answer has another form."""
    try:
        answer = orjson.loads(body)
        affixes = answer["affixes"]
        if affixes is not None:
            before, behind = affixes
            affixes = array("I", before), array("I", behind)
        cuts = Cuts([str(token) for token in answer["separators"]], spaces=answer["spaces"])
        return Verdict(bool(answer["fast"]), affixes, cuts)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise LimitMet("crash") from error


def _folders() -> list[str]:
    """Return the folders that the process may import from."""
    found = {*folders_of(warmfleet, tokenizers)}
    if (fast := importlib.util.find_spec("fastokens")) is not None and fast.origin:
        found.add(str(Path(fast.origin).parents[1]))
    return sorted(found)


def _remember(cache: OrderedDict[Any, Any], key: Any, value: Any, limit: int) -> None:
    """Put ``value`` into the cache as its last used entry, and drop those used longest ago beyond ``limit``."""
    cache[key] = value
    cache.move_to_end(key)
    while len(cache) > limit:
        cache.popitem(last=False)
