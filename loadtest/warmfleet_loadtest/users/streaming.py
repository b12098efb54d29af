"""A streamed request as an OpenAI client makes it: sent again where the connection breaks, and timed per token.

Every request opens a connection of its own, so that a TCP balancer spreads the requests of one session over replicas.
Under Locust the sockets are gevent's, because Locust replaces those of the standard library before this is imported.
"""

from __future__ import annotations

import http.client
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

import orjson

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from warmfleet_loadtest.users.sessions import Ask

TIMEOUT_S = 60.0  # longest time without a byte
TRIES = 3  # most times that a request is sent
READ_BYTES = 65_536
DATA = b"data: "
Result = TypeVar("Result")


class Refused(Exception):  # noqa: N818  # a result of a load test, not a fault of it
    """The server's status was not 200, its stream held an error, or nothing came for TIMEOUT_S seconds."""


class Broken(Exception):  # noqa: N818  # as above
    """The connection broke. kind: ``retried`` if no byte had come, ``cut`` if the stream had begun."""

    def __init__(self, kind: str, reason: BaseException) -> None:
        super().__init__(f"{kind}: {reason!r}")
        self.kind = kind


@dataclass(slots=True)
class Answer:
    """A whole answer. first_at: ``time.perf_counter`` at its first event. gaps_s: between events that hold text."""

    first_at: float = 0.0
    text: str = ""
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)


class OpenAIClient:
    """A client of an OpenAI server. url: with or without a path before ``/v1``. api_key: the bearer token; or empty."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self._url = urlsplit(url.rstrip("/"))
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            raise ValueError(f"--host {url!r}: write the server's address, such as http://127.0.0.1:8080")
        self._path = self._url.path.removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.model = ""

    def find_model(self, broken: Callable[[Broken], None]) -> None:
        """Ask for the first model that the server serves. Raises Refused, or Broken after TRIES tries."""
        found = retried(lambda: self._get("/v1/models"), broken)
        try:
            self.model = str(found["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise Refused(f"{self._url.geturl()}/v1/models names no model: {found!r:.200}") from error

    def _get(self, path: str) -> Any:
        with self._connection(Answer()) as connection:
            connection.request("GET", self._path + path, headers=self._headers)
            response = connection.getresponse()
            body = response.read()
            if response.status != http.client.OK:
                raise Refused(f"{response.status} {body[:300].decode(errors='replace')}")
            return orjson.loads(body)

    def answer(self, ask: Ask, session: str, broken: Callable[[Broken], None]) -> Answer:
        """Send a request; return the answer. session: X-Session-ID. Raises Refused, or Broken after TRIES tries."""
        options = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        body = orjson.dumps(ask.body | options)
        return retried(lambda: self._stream(ask.path, body, session), broken)

    def _stream(self, path: str, body: bytes, session: str) -> Answer:
        """Send a request in a single try; return the answer. Raises Refused, Broken."""
        answer = Answer()
        with self._connection(answer) as connection:
            connection.request("POST", self._path + path, body, self._headers | {"X-Session-ID": session})
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise Refused(f"{response.status} {response.read(300).decode(errors='replace')}")
            answer.headers = {name.lower(): value for name, value in response.getheaders()}
            if _read(response, answer):
                return answer
        raise Broken(_kind(answer), EOFError("the stream ended without [DONE]"))

    @contextmanager
    def _connection(self, answer: Answer) -> Iterator[http.client.HTTPConnection]:
        """Yield a connection for an answer. Raises Refused, Broken for the errors of the block."""
        made = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = made(cast("str", self._url.hostname), self._url.port, timeout=TIMEOUT_S)
        try:
            yield connection
        except TimeoutError as error:
            raise Refused(f"no answer within {TIMEOUT_S:.0f} s") from error
        except (ConnectionError, http.client.HTTPException) as error:
            raise Broken(_kind(answer), error) from error
        except (OSError, ValueError) as error:  # no address, or no JSON
            raise Refused(f"{error!r}") from error
        finally:
            connection.close()


def retried(attempt: Callable[[], Result], broken: Callable[[Broken], None]) -> Result:
    """Return the result of ``attempt``, called again if its connection breaks. broken: called for every break."""
    for left in reversed(range(TRIES)):
        try:
            return attempt()
        except Broken as reason:
            broken(reason)
            if not left:
                raise
    raise AssertionError("unreachable")


def _kind(answer: Answer) -> str:
    return "cut" if answer.first_at else "retried"


def _read(response: http.client.HTTPResponse, answer: Answer) -> bool:
    """Fill in the answer from its stream; return whether the stream ended with ``[DONE]``. Raises Refused."""
    pieces: list[str] = []
    latest = 0.0
    for event, now in _events(response):
        if event is None:
            answer.text = "".join(pieces)
            return True
        answer.first_at = answer.first_at or now
        if "error" in event:
            raise Refused(f"error in the stream: {event['error']}")
        text = "".join(_text(choice) for choice in event.get("choices") or ())
        if text:
            if latest:
                answer.gaps_s.append(now - latest)
            latest = now
            pieces.append(text)
        if event.get("usage"):
            _use(event["usage"], answer)
    return False


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[dict[str, Any] | None, float]]:
    """Yield (an event, when it came), with None for ``[DONE]``. SSE comments, such as keep-alives, are left out."""
    partial = b""
    while piece := response.read1(READ_BYTES):
        now = time.perf_counter()
        *lines, partial = (partial + piece).split(b"\n")
        for line in lines:
            if line.startswith(DATA):
                data = line[len(DATA) :].strip()
                yield (None if data == b"[DONE]" else orjson.loads(data)), now


def _text(choice: dict[str, Any]) -> str:
    """Return the text of a choice, of a chat or of a completion."""
    delta = choice.get("delta")
    return (delta.get("content") if delta is not None else choice.get("text")) or ""


def _use(usage: dict[str, Any], answer: Answer) -> None:
    answer.prompt_tokens = int(usage.get("prompt_tokens") or 0)
    answer.output_tokens = int(usage.get("completion_tokens") or 0)
    answer.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
