"""Token hand-off: an engine is given the token ids that the router has made, so that it does not tokenise again.

Completions take them as their ``prompt``, chats as ``kv_transfer_params.prompt_token_ids`` (vLLM 0.32 and newer); all
else in a request stays, byte for byte, so the answer is the one that the text would have got. Only what is certain is
handed off: exact ids, made with the identity that this very worker announced, to a worker that is proven. Whatever
speaks against it, the engine gets the request as it came.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.fleet import WorkerView
    from warmfleet.metrics import Metrics
    from warmfleet.pool import Shape
    from warmfleet.prompt import Endpoint, Request
    from warmfleet.trie import Prompt
    from warmfleet.view import View

logger = logging.getLogger("warmfleet.handoff")

#: Statuses by which an engine may mean the ids: then it gets the text, and what it says to that is the answer.
REFUSALS = (400, 413, 422)
PAUSE_S = 300.0  # a worker that refused ids and took the text gets none for this long
CHECK_EVERY = 12  # one request of so many goes as text: what the engine counts in it shows a tokenizer that changed
MAX_VIEW_AGE_S = 5.0  # of an older reading nobody knows whether the worker is still the one that announced it
MAX_WORKERS = 4_096
MAX_MARKS = 4_096  # brackets and strings that are looked at to find the prompt in a body
MAX_LOOKS = 256  # at escaped quotes, one by one: 0.2 us each
MAX_SLASHES = 64  # before a quote

_NESTED = re.compile(rb'["{}\[\]]')
_VALUE_ENDS = re.compile(rb"[,}\s]")
_NOT_SPACE = re.compile(rb"\S")
_QUOTE, _BACKSLASH, _OPENING = ord('"'), ord("\\"), b"{["


@dataclass(frozen=True, slots=True)
class Ability:
    """What a worker takes: ids of this identity, on these endpoints, of prompts shorter than ``limit_tokens``."""

    identity_key: str
    endpoints: frozenset[str]
    limit_tokens: int


def ability(worker: WorkerView, identity_key: str) -> Ability | None:
    """By the facts that the worker's server announced; None if nothing may be handed to it."""
    facts: dict[str, Any] = (worker.server or {}).get("facts") or {}
    endpoints, limit = facts.get("token_handoff"), facts.get("max_model_len")
    if worker.proof != "proven" or not worker.routable or facts.get("kv_connector") is not False:
        return None
    return Ability(identity_key, frozenset(endpoints), limit) if endpoints and limit else None


@dataclass(frozen=True, slots=True)
class Offer:
    """One request's prompts as ids, and what made them. ``reason``: why none are to be handed off, else empty.

    characters: of a single text, as a completion has it.
    """

    prompts: tuple[Prompt, ...] = ()
    identity_key: str = ""
    reason: str = ""
    characters: int = 0


NOTHING = Offer(reason="unknown")


def offer(request: Request, shape: Shape) -> Offer:
    """What could be handed off of this request, to a worker that takes it."""
    if request.text_only:
        return Offer(reason="text")
    if any(isinstance(prompt, list) for prompt in request.prompts):
        return Offer(reason="ids")  # an engine may refuse texts and ids in one request
    if not shape.ids or not shape.identity_key or not all(one.tokens for one in shape.ids):
        return NOTHING
    text = request.prompts[0] if len(request.prompts) == 1 else ""
    return Offer(shape.ids, shape.identity_key, characters=len(text))


class Handoff:
    """Decides for one replica what is handed off to whom, and remembers who refused."""

    def __init__(self, metrics: Metrics, *, enabled: bool) -> None:
        self._enabled = enabled
        self._results = metrics.handoff
        self._requests: dict[str, int] = {}
        self._paused_until: dict[str, float] = {}

    def body(self, given: Offer, endpoint: Endpoint, raw: bytes, view: View, worker_id: str) -> bytes | None:
        """What to send to this worker in place of ``raw``; None if that itself."""
        if not self._enabled:
            return None
        reason = given.reason or self._against(given, endpoint, view, worker_id)
        made = None if reason else spliced(endpoint, raw, [one.json() for one in given.prompts], given.characters)
        self._results.labels(reason or ("body" if made is None else "used")).inc()
        return made

    def refused(self, worker_id: str, status: int) -> None:
        """This worker refused a request with ids, and took it with its text."""
        self._results.labels("refused").inc()
        if len(self._paused_until) >= MAX_WORKERS:
            self._paused_until.clear()
        self._paused_until[worker_id] = time.monotonic() + PAUSE_S
        text = "worker %s answered %d to token ids, but takes the text: no hand-off to it for %d s"
        logger.warning(text, worker_id, status, PAUSE_S)

    def _against(self, given: Offer, endpoint: Endpoint, view: View, worker_id: str) -> str:
        able = view.handoff.get(worker_id)
        if able is None or able.identity_key != given.identity_key or endpoint not in able.endpoints:
            return "worker"
        now = time.monotonic()
        if now - view.read_at > MAX_VIEW_AGE_S:
            return "stale"
        if self._paused_until.get(worker_id, now) > now:
            return "paused"
        if max(one.tokens for one in given.prompts) >= able.limit_tokens:
            return "length"  # the engine words its refusal by what it was given
        if len(self._requests) >= MAX_WORKERS:
            self._requests.clear()
        count = self._requests[worker_id] = self._requests.get(worker_id, -1) + 1
        return "" if count % CHECK_EVERY else "check"


def spliced(endpoint: Endpoint, raw: bytes, ids: Sequence[bytes], characters: int = 0) -> bytes | None:
    """``raw`` (JSON that was parsed before, an object) with the ids in it, a JSON list for each prompt.

    None if it is too odd to find the place. characters: of the prompt, if it is one text.
    """
    if endpoint == "chat":
        end = raw.rindex(b"}")  # of two equal keys the last one counts, here and in the engine
        return b'%b,"kv_transfer_params":{"prompt_token_ids":%b}%b' % (raw[:end], ids[0], raw[end:])
    span = value_span(raw, "prompt", characters)
    if span is None:
        return None
    start, end = span
    value = ids[0] if raw[start] == _QUOTE else b"[%b]" % b",".join(ids)
    return b"%b%b%b" % (raw[:start], value, raw[end:])


def value_span(raw: bytes, key: str, characters: int = 0) -> tuple[int, int] | None:
    """Where the value of ``key`` begins and ends in a JSON object: of the last one that is not nested, which counts.

    None if there is none, or if more than MAX_MARKS strings and brackets would have to be looked at. characters: of
    that value, if it is a string: so much need not be looked at.
    """
    text = _Text(raw)
    found, at = None, raw.index(b"{") + 1
    for _ in range(MAX_MARKS):
        begin = text.raw.find(b'"', at)
        if begin < 0:
            return found
        end = text.string_end(begin)
        start = _position(_NOT_SPACE, raw, raw.index(b":", end) + 1)
        name = raw[begin:end]
        ours = (orjson.loads(name) if b"\\" in name else name[1:-1].decode()) == key
        if raw[start] == _QUOTE:
            at = (ours and text.far_end(start, characters)) or text.string_end(start)
        elif raw[start] in _OPENING:
            at = text.nested_end(start)
        else:
            at = _position(_VALUE_ENDS, raw, start)
        if at < 0:
            return None
        if ours:
            found = start, at
    return None


class _Text:
    """JSON that is known to be valid, read at the speed of ``find``."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._plain = False  # no escaped quote is left in it
        self._looks = MAX_LOOKS

    def far_end(self, start: int, characters: int) -> int:
        """What ``string_end`` says, found at once if the string has so many characters; 0 if not."""
        if characters < MAX_LOOKS:
            return 0
        try:
            end = self.string_end(start + characters)
            orjson.loads(self.raw[start:end])  # one whole string: then it ends nowhere else
        except ValueError:  # not the one that was parsed, but an earlier one of the same name
            return 0
        return end

    def string_end(self, start: int) -> int:
        """After the quote that ends the string which begins at ``start``."""
        text, at = self.raw, start
        while self._looks:
            at = text.index(b'"', at + 1)
            if text[at - 1] != _BACKSLASH:
                return at + 1
            self._looks -= 1
            before = text[max(0, at - MAX_SLASHES) : at]
            slashes = len(before) - len(before.rstrip(b"\\"))
            if slashes % 2 == 0 and slashes < MAX_SLASHES:
                return at + 1
            if slashes == MAX_SLASHES:
                self._looks = 0
        if not self._plain:  # many escapes: cheaper to blank them out, once, than to look at each
            self.raw = self.raw.replace(b"\\\\", b"__").replace(b'\\"', b"__")
            self._plain = True
        return self.raw.index(b'"', start + 1) + 1

    def nested_end(self, start: int) -> int:
        """The end of the object or list that begins at ``start``; -1 if it has too much in it."""
        depth, at = 0, start
        for _ in range(MAX_MARKS):
            at = _position(_NESTED, self.raw, at)
            if self.raw[at] == _QUOTE:
                at = self.string_end(at)
                continue
            depth += 1 if self.raw[at] in _OPENING else -1
            at += 1
            if not depth:
                return at
        return -1


def _position(pattern: re.Pattern[bytes], text: bytes, start: int) -> int:
    match = pattern.search(text, start)
    if match is None:
        raise ValueError("not the JSON object that was parsed")
    return match.start()
