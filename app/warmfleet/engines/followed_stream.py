"""A stream of events that is read on its way to the client, so that another worker can go on where it breaks off.

Only the streams of requests that may be continued are read (``routing/recovery/continuation``); the bytes of all others
pass unread.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import orjson

from warmfleet.errors import UpstreamError, UpstreamGone

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_EVENT_BYTES = 2_097_152  # most bytes of an event: the first lists the prompt's ids, with at most 8 bytes for each
MAX_KEPT_TOKENS = 131_072  # most tokens of prompt and answer together; a stream with more is not continued
MAX_KEPT_BYTES = 67_108_864  # most bytes of the ids of all streams of a replica
ID_BYTES = 4
#: Fields whose values are equal in all events of one stream.
CONSTANT = ("id", "created", "model", "system_fingerprint")
#: Fields of a chat's delta that may have a value in an answer that is continued.
PLAIN_DELTA = frozenset({"role", "content"})


class KeptIds:
    """Counts the bytes that the ids of all streams of a replica take."""

    def __init__(self) -> None:
        self.bytes = 0


class Sink(Protocol):
    """The receiver of a stream's pieces: a client's answer, or a wrapper around one."""

    def pass_on(self, data: bytes) -> bool:
        """Send a piece between first and last; return False if ``body`` must be awaited before further pieces."""

    async def body(self, data: bytes, *, more: bool) -> None:
        """Send a piece; it is the last one unless there is ``more``."""


class EventReader:
    """Takes the pieces of a stream in the client's place, and passes each event on after ``change``.

    ``cut``: the error by which the engine ended the stream in its middle; no event after it reaches the client.
    """

    def __init__(self, client: Sink) -> None:
        self.client = client
        self.cut: UpstreamError | None = None
        self._unended = b""  # the beginning of the next event

    def change(self, chunk: dict[str, Any]) -> bool:
        """Change an event; returns whether the client gets it."""
        raise NotImplementedError

    def ends(self) -> None:
        """Note that the engine's answer is complete."""

    def pass_on(self, data: bytes) -> bool:
        """Take a piece as ``Sink.pass_on`` does. Returns False also once the stream was cut; ``body`` then raises."""
        events = self._events(data)
        goes_on = self.client.pass_on(events) if events else True
        return goes_on and self.cut is None

    async def body(self, data: bytes, *, more: bool) -> None:
        """Take a piece as ``Sink.body`` does. Raises UpstreamError if the engine cut the stream."""
        events = self._events(data)
        if not more and self.cut is None:
            self.ends()
        if self.cut is not None:
            if events:
                await self.client.body(events, more=True)  # sends the head as well if this is the first piece
            raise self.cut
        if not more:
            events, self._unended = events + self._unended, b""
        await self.client.body(events, more=more)

    def _events(self, data: bytes) -> bytes:
        """Take a piece of the stream; return the whole events that it completes, as the client gets them."""
        *events, self._unended = (self._unended + data).split(b"\n\n")
        if len(self._unended) > MAX_EVENT_BYTES:
            self.cut = UpstreamError("The worker sent an event that is too long.")
        return b"".join([self._event(event) for event in events])

    def _event(self, event: bytes) -> bytes:
        if self.cut is not None:
            return b""
        if not event.startswith(b"data: {"):
            return event + b"\n\n"
        try:
            chunk = orjson.loads(event[6:])
            if chunk.get("error") is not None:
                self.cut = UpstreamGone(f"The worker ended the stream: {_message(chunk['error'])}")
                return b""
            return b"data: %b\n\n" % orjson.dumps(chunk) if self.change(chunk) and self.cut is None else b""
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError):
            self.cut = UpstreamError("The worker's event cannot be read.")
            return b""


class FollowedStream(EventReader):
    """Remembers the token ids of a stream, and takes them out of the events, because the client did not ask for them.

    ``prompt`` and ``produced`` are the ids so far. The client has all text of the first ``safe`` produced ids, and
    ``beyond`` is the text that it has of the ids behind them. (A token may end in the middle of a character, whose text
    comes with a later token.) ``finished``: the client has the reason why the answer ended. ``known`` turns False when
    ids are missing, so that no other worker can go on. ``identity_key``: the tokenizer whose ids these are; empty if
    none is known.
    """

    def __init__(self, client: Sink, kept: KeptIds, identity_key: str) -> None:
        super().__init__(client)
        self.identity_key = identity_key
        self.prompt = array("I")
        self.produced = array("I")
        self.safe = 0
        self.beyond = ""
        self.finished = False
        self.known = bool(identity_key)
        self.constant: dict[str, Any] = {}
        self._kept = kept
        self._kept_bytes = 0

    def change(self, chunk: dict[str, Any]) -> bool:
        if not self.constant:
            self.constant = {name: chunk[name] for name in CONSTANT if name in chunk}
        prompt = _take_ids(chunk, "prompt_token_ids")
        choices = chunk.get("choices")
        if choices:
            choice = choices[0]
            prompt = _take_ids(choice, "prompt_token_ids") or prompt
            ids = _take_ids(choice, "token_ids")
            text, plain = text_of(choice)
            self.finished = self.finished or choice.get("finish_reason") is not None
            self.known = self.known and plain and len(choices) == 1
            if self.known:
                self._note(prompt, ids, text)
        return True

    def ends(self) -> None:
        if self.known and not self.finished:
            self.cut = UpstreamGone("The worker's stream ended before the answer did.")

    def close(self) -> None:
        """Give back the memory that was counted for the ids."""
        self._kept.bytes -= self._kept_bytes
        self._kept_bytes = 0

    def _note(self, prompt: Sequence[int] | None, ids: Sequence[int] | None, text: str) -> None:
        if prompt and not self.prompt:
            self.prompt.extend(prompt)
        if (text or ids) and not (ids and self.prompt):
            self.known = False  # the worker sends no ids
            return
        if ids:
            self.produced.extend(ids)
            if text and len(ids) == 1:  # the token ends a character, so the client has all text so far
                self.safe, self.beyond = len(self.produced), ""
            else:
                self.beyond += text
        self._count()

    def _count(self) -> None:
        tokens = len(self.prompt) + len(self.produced)
        grown = tokens * ID_BYTES - self._kept_bytes
        if tokens > MAX_KEPT_TOKENS or self._kept.bytes + grown > MAX_KEPT_BYTES:
            self.known = False
            self.prompt, self.produced = array("I"), array("I")
            self.close()
        else:
            self._kept.bytes += grown
            self._kept_bytes += grown


class Continuable(NamedTuple):
    """A request whose stream may be continued. max_tokens: of the whole answer, None for no limit."""

    max_tokens: int | None
    min_tokens: int
    kept: KeptIds

    def follow(self, client: Sink, identity_key: str) -> FollowedStream:
        """Wrap ``client`` to follow a worker's answer. identity_key: of the worker's tokenizer; empty if unknown."""
        return FollowedStream(client, self.kept, identity_key)


class StreamCut(Exception):  # noqa: N818  a condition, as in ``errors``
    """The engine broke off a stream that is followed. error: for the client, if no other worker goes on."""

    def __init__(self, followed: FollowedStream, error: UpstreamError, worker_id: str) -> None:
        super().__init__(error.message)
        self.worker_id = worker_id
        self.followed = followed
        self.error = error


class ContinuedStream(EventReader):
    """The second part of a stream, from another worker, made to look like the first worker's.

    The worker begins behind the ``safe`` ids, so the text that the client has ``beyond`` them comes again. That text
    must be the same, and the client does not get it twice.
    """

    def __init__(self, first: FollowedStream) -> None:
        super().__init__(first.client)
        self._constant = first.constant
        self._before = first.safe
        self._again = first.beyond

    def change(self, chunk: dict[str, Any]) -> bool:
        chunk.update({name: value for name, value in self._constant.items() if name in chunk})
        self._correct(chunk.get("usage"))
        choices = chunk.get("choices")
        if not choices:
            return True
        choice, began = choices[0], False
        if "delta" in choice:
            began = choice["delta"].pop("role", None) is not None
        text, plain = text_of(choice)
        if not plain:
            raise ValueError("the first worker's answer was plain text")
        new = self._new(text)
        if new != text:
            choice["delta" if "delta" in choice else "text"] = {"content": new} if "delta" in choice else new
        ends = choice.get("finish_reason") is not None
        if ends and self._again:
            self._differs()
        return bool(new) or ends or not (began or text)

    def _new(self, text: str) -> str:
        """Return the part of ``text`` that the client does not have yet."""
        again = self._again
        if again.startswith(text):
            self._again = again[len(text) :]
            return ""
        if not text.startswith(again):
            self._differs()
        self._again = ""
        return text[len(again) :]

    def _differs(self) -> None:
        self.cut = UpstreamError("Another worker went on with another text.")

    def _correct(self, usage: dict[str, Any] | None) -> None:
        """Count the first worker's tokens in ``usage`` as answer, because this worker counted them as prompt."""
        if not usage:
            return
        usage["prompt_tokens"] -= self._before
        usage["completion_tokens"] += self._before
        details = usage.get("prompt_tokens_details")
        if details and details.get("cached_tokens") is not None:
            details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])


def text_of(choice: dict[str, Any]) -> tuple[str, bool]:
    """Return the text of an event, and whether it has nothing besides: no tool call, no reasoning, no logprobs."""
    plain = choice.get("logprobs") is None
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or "", plain
    others = any(value for name, value in delta.items() if name not in PLAIN_DELTA)
    return delta.get("content") or "", plain and not others


def _take_ids(fields: dict[str, Any], name: str) -> Sequence[int] | None:
    """Take out the ids under this name, and put null there, as in an event whose client did not ask for ids."""
    ids: Sequence[int] | None = fields.get(name)
    if ids is not None:
        fields[name] = None
    return ids


def _message(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:200]
