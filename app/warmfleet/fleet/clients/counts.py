"""Counts requests of clients with limits where a model has several pools: one of them counts (lua/client.lua)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmfleet.fleet.client import ScriptClient, argv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.fleet.clients.limits import ClientLimits
    from warmfleet.fleet.connection.multiplexed import OnAnswer
    from warmfleet.fleet.constants import Spans

KEEP_AT_ONCE = 200  # requests; lua/client.lua takes no more in one call


class ClientCounts(ScriptClient):
    """Calls of the pool that counts for a client, wherever the client's requests are placed.

    An id is that of a reservation with the tag of its client at the end.
    """

    spans: Spans

    def admit(self, name: str, limits: ClientLimits, prompt_tokens: int, on_answer: OnAnswer) -> None:
        """Count a request, unless a limit refuses it. ``on_answer`` gets the answer of the script as it is."""
        args = argv(
            "client",
            [name, limits.record, prompt_tokens],
            prefix=self._prefix,
            verb="admit",
            lease_ms=self.spans.lease_ms,
        )
        self.send("client", self.packed["client"].call(args), self.timeouts.request_s, on_answer)

    async def keep_counted(self, names: Sequence[str]) -> None:
        """Let these requests, KEEP_AT_ONCE at most, count on. Sent before this waits. Raises FleetUnavailable."""
        await self.keep("client", names, prefix=self._prefix, verb="keep", lease_ms=self.spans.lease_ms)

    def end_counted(self, name: str, tokens: int, on_answer: OnAnswer) -> None:
        """A request counts no longer. tokens: that it has used besides those of its prompt; it is safe to repeat."""
        args = argv("client", [name, tokens], prefix=self._prefix, verb="end", lease_ms=self.spans.lease_ms)
        self.send("client", self.packed["client"].call(args), self.timeouts.upkeep_s, on_answer, patient=True)
