"""Faults of a simulated engine that tests order over HTTP (``POST /sim/faults``)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

MOMENTS = ("now", "prefill", "answered", "read")
KINDS = ("die", "hang")


class FaultError(ValueError):
    """An order that no engine understands."""


@dataclass(slots=True)
class Faults:
    """Which faults are to come. Each comes once.

    armed: ``die`` or ``hang``, by the moment: ``prefill``, when a prefill leg arrives; ``answered``, when its answer
    was sent; ``read``, when another engine reads blocks. bytes_per_s: of the link, in place of the configured speed.
    handshake_s: time that a handshake takes. runs: not set while the engine hangs.
    """

    die: Callable[[], None]
    armed: dict[str, str] = field(default_factory=dict)
    bytes_per_s: float | None = None
    handshake_s: float = 0.0
    runs: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.runs.set()

    def order(self, told: Any) -> None:
        """Take an object with some of hang and die (each a moment), resume (true), bytes_per_s and handshake_s.

        Raises FaultError, and then has changed nothing.
        """
        if not isinstance(told, dict) or told.keys() - {*KINDS, "resume", "bytes_per_s", "handshake_s"}:
            raise FaultError("known are hang, die, resume, bytes_per_s, handshake_s")
        moments = {told[kind]: kind for kind in KINDS if kind in told}
        numbers = [told.get(name, 1) for name in ("bytes_per_s", "handshake_s")]
        if not moments.keys() <= set(MOMENTS) or not all(type(n) in (int, float) and n >= 0 for n in numbers):
            raise FaultError(f"hang and die take one of {', '.join(MOMENTS)}; bytes_per_s, handshake_s take numbers")
        if told.get("resume"):
            self.armed.clear()
            self.runs.set()
        self.bytes_per_s = told.get("bytes_per_s") or self.bytes_per_s
        self.handshake_s = told.get("handshake_s", self.handshake_s)
        now = moments.pop("now", None)
        self.armed |= moments
        if now == "hang":
            self.runs.clear()
        elif now == "die":
            self.die()

    async def reach(self, moment: str) -> None:
        """Let the fault come that was ordered for this moment; wait while the engine hangs."""
        kind = self.armed.pop(moment, None)
        if kind == "die":
            self.die()
            await asyncio.Event().wait()  # until the lost connection ends the request
        if kind == "hang":
            self.runs.clear()
        await self.runs.wait()

    @web.middleware
    async def gate(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer nothing while the engine hangs, except to tests."""
        if not request.path.startswith("/sim/"):
            await self.runs.wait()
        return await handler(request)
