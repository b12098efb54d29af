"""The requests of users: sessions of four kinds, whose requests extend each other as in real sessions.

All texts are generated from seeds, so equal seeds give equal sessions, in any process and in any run. About 2.5 tokens
make a word.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_WORDS = "the cache of a model holds blocks that every request may share when its first tokens are known".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. path: of the URL. body: without ``model`` and without the options of a stream."""

    path: str
    body: dict[str, object]


class Session:
    """A session of one user: requests that follow each other, each after the answer to the one before.

    kind: its name in options and statistics. share: default share of the requests, relative to other kinds. key: the
    session's own name, sent with all its requests. shared: the seed of texts that several sessions share.
    """

    kind: ClassVar[str] = ""
    share: ClassVar[float] = 0
    turns: ClassVar[tuple[int, int]] = (1, 1)  # at least, at most
    think_s: ClassVar[float] = 0.0  # mean seconds between an answer and the next request
    words: ClassVar[tuple[int, int]] = (20, 100)  # fewest and most new words in a request
    answer_tokens: ClassVar[int] = 96

    def __init__(self, key: str, shared: str) -> None:
        self.key = key
        self.random = random.Random(key)
        self._left = self.random.randint(*self.turns)
        self.messages = self.opening(shared)

    def opening(self, shared: str) -> list[dict[str, str]]:
        """Return the messages before the user's first question."""
        raise NotImplementedError

    def question(self) -> str:
        """Return the text that the next request adds."""
        return prose(self.random, self.random.randint(*self.words))

    def ask(self) -> Ask:
        """Return the next request."""
        self.messages.append({"role": "user", "content": self.question()})
        self._left -= 1
        return Ask("/v1/chat/completions", {"messages": self.messages, "max_tokens": self.answer_tokens})

    def answered(self, text: str) -> float | None:
        """Add an answer. Returns the seconds until the session's next request, or None if there is no next one."""
        self.messages.append({"role": "assistant", "content": text})
        return self.random.expovariate(1 / self.think_s) if self._left > 0 else None


class Chat(Session):
    """A conversation: one of a few system prompts, then question and answer in turn, with time to read."""

    kind = "chat"
    share = 4
    turns = (2, 10)
    think_s = 4.0
    prompts: ClassVar[int] = 4

    def opening(self, shared: str) -> list[dict[str, str]]:
        number = self.random.randrange(self.prompts)
        return [{"role": "system", "content": f"You are helpful. {shared_prose(shared, self.kind, number, 300)}"}]


class Rag(Session):
    """A few short questions about a long document that others ask about, too; some documents are more popular."""

    kind = "rag"
    share = 3
    turns = (1, 3)
    think_s = 4.0
    words = (10, 30)
    documents: ClassVar[int] = 40
    document_words: ClassVar[int] = 1_200

    def opening(self, shared: str) -> list[dict[str, str]]:
        popularity = [(rank + 1) ** -0.8 for rank in range(self.documents)]
        (number,) = self.random.choices(range(self.documents), popularity)
        text = shared_prose(shared, self.kind, number, self.document_words)
        return [{"role": "system", "content": f"Answer from document {number}:\n{text}"}]


class Agent(Session):
    """An agent: a long prefix with its tools, then many short answers, each followed at once by a tool's result."""

    kind = "agent"
    share = 2
    turns = (6, 16)
    think_s = 0.5  # mean seconds that a tool takes
    words = (10, 160)
    answer_tokens = 32
    roles: ClassVar[int] = 3

    def opening(self, shared: str) -> list[dict[str, str]]:
        role = self.random.randrange(self.roles)
        tools = "\n".join(shared_prose(shared, f"tool {number}", role, 60) for number in range(16))
        task = f"Task: {prose(self.random, 40)}"
        return [{"role": "system", "content": f"You are agent {role}. Your tools:\n{tools}"}, message("user", task)]

    def question(self) -> str:
        return f"Result of the tool:\n{super().question()}"


class OneOff(Session):
    """A single prompt that shares nothing with any other; its length varies by a factor of 16."""

    kind = "one-off"
    share = 1
    words = (50, 800)

    def opening(self, shared: str) -> list[dict[str, str]]:  # noqa: ARG002  # a single prompt shares no text
        return []

    def question(self) -> str:
        low, high = self.words
        return prose(self.random, round(low * (high / low) ** self.random.random()))


@dataclass(slots=True)
class Pool:
    """The sessions of one source that wait for their next request. begin: makes a session, given its number."""

    begin: Callable[[int], Session]
    _waiting: list[tuple[float, int, Session]] = field(default_factory=list)  # a heap: (ready when, tie, session)
    _numbers: Iterator[int] = field(default_factory=count)

    def take(self, now: float) -> Session:
        """Return the session that has been ready for longest, or a new one if none is ready."""
        if self._waiting and self._waiting[0][0] <= now:
            return heapq.heappop(self._waiting)[2]
        return self.begin(next(self._numbers))

    def give_back(self, session: Session, ready_at: float) -> None:
        """Let this session send its next request from ``ready_at`` on."""
        heapq.heappush(self._waiting, (ready_at, next(self._numbers), session))


#: Classes of sessions by kind.
SESSIONS: dict[str, type[Session]] = {made.kind: made for made in (Chat, Rag, Agent, OneOff)}


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@lru_cache(maxsize=128)  # holds all shared texts: making one of 1,200 words would send a request 1 ms late
def shared_prose(shared: str, name: str, number: int, words: int) -> str:
    """Make the shared text that ``name`` and ``number`` identify."""
    return prose(random.Random(f"{shared} {name} {number}"), words)


def prose(source: random.Random, words: int) -> str:
    """Make a text of ``words`` words."""
    return " ".join(f"{source.choice(_WORDS)}{source.randrange(100)}" for _ in range(words))
