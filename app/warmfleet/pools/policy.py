"""Keeps the policy that a model's decisions follow, and the hash ring that some policies use. The rules are in lua/."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import xxhash

from warmfleet.settings import POLICIES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from warmfleet.pools.fleet_view import View
    from warmfleet.prompt.request import Request

POINTS = 256  # points of each worker on the ring; this and PREFIX_CHARACTERS are KubeAI's defaults
PREFIX_CHARACTERS = 100
HOMES = 8  # number of a session's first workers by the ring that decide gets, as some may not be routable


class PolicyChoice:
    """The policy of one model: the operator's if one is ordered, else the setting's. ``name``: the policy in force."""

    def __init__(self, configured: str = "cost") -> None:
        self.configured = self.name = configured
        self.operators = ""
        self.ring = Ring()

    @property
    def source(self) -> str:
        """The origin of the policy: ``operator`` or ``setting``."""
        return "operator" if self.operators else "setting"

    def follow(self, ordered: str) -> bool:
        """Follow the operator's order; returns whether the policy changed.

        "" means that the operator ordered none. An unknown policy, from a later version, counts as "".
        """
        before, self.operators = self.name, ordered if ordered in POLICIES else ""
        self.name = self.operators or self.configured
        return before != self.name

    def order(self, view: View, request: Request, session: bytes) -> tuple[str, ...]:
        """Return the workers by a hash ring for this request, best first; empty if the policy looks at no ring."""
        if self.name == "chwbl":
            return self.ring.order(prefix_key(request, view.names.paths), view.ids, len(view.ids))
        session = session_key(request, session)
        if session and self.name in ("cost", "session"):
            return self.ring.order(session, view.ids, HOMES)
        return ()

    def orders(self, view: View, request: Request, session: bytes) -> dict[str, tuple[str, ...]]:
        """Return the ``order`` under each policy that looks at a ring, by the policy's name, for the decision log."""
        session = session_key(request, session)
        found = {"chwbl": self.ring.order(prefix_key(request, view.names.paths), view.ids, len(view.ids))}
        homes = self.ring.order(session, view.ids, HOMES) if session else ()
        return found | {"cost": homes, "session": homes}


class Ring:
    """A consistent-hash ring of workers. When the workers change, a new ring is made."""

    def __init__(self) -> None:
        self._points: dict[str, list[int]] = {}
        self._ring: list[int] = []
        self._names: Sequence[str] = ()

    def order(self, key: bytes, workers: Sequence[str], limit: int) -> tuple[str, ...]:
        """Return the first ``limit`` different workers that the ring names from the hash of ``key`` on."""
        if workers != self._names:
            self._build(workers)
        ring, names, found = self._ring, self._names, dict[str, None]()
        limit = min(limit, len(names))
        at = bisect_left(ring, xxhash.xxh64_intdigest(key) << 16)
        while len(found) < limit:
            found[names[ring[at % len(ring)] & 0xFFFF]] = None
            at += 1
        return tuple(found)

    def _build(self, workers: Sequence[str]) -> None:
        hashes = xxhash.xxh64_intdigest
        known = {
            name: self._points.get(name) or [hashes(f"{name}{n}".encode()) for n in range(POINTS)] for name in workers
        }
        self._points, self._names = known, workers
        self._ring = sorted(point << 16 | at for at, name in enumerate(workers) for point in known[name])


def session_key(request: Request, session: bytes) -> bytes:
    """Return the client's key of the conversation: of a header (session), else of the body; empty without any."""
    return session or request.cache_key.encode("utf-8", "surrogatepass")


def prefix_key(request: Request, adapters: Collection[str] | Mapping[str, object]) -> bytes:
    """Return the bytes that ``chwbl`` hashes: the adapter's name and the first characters of the prompt.

    For a chat, the text of its first user message stands for the prompt. Token ids are written as digits.
    """
    adapter = request.model if request.model in adapters else ""
    text = ""
    if request.messages:
        users = (message for message in request.messages if message.get("role") == "user")
        text = _text(next(users, {}).get("content"))
    elif request.prompts:
        first = request.prompts[0]
        text = first if isinstance(first, str) else " ".join(map(str, first[:PREFIX_CHARACTERS]))
    return (adapter + text[:PREFIX_CHARACTERS]).encode("utf-8", "surrogatepass")


def _text(content: object) -> str:
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""
