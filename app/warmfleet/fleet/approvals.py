"""Which chat templates the operator approved: digests, written by the operator's own Redis user and read by routers."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from warmfleet.fleet.client import ScriptClient, redis_errors

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable


class Approvals(ScriptClient):
    """``approve`` and ``revoke`` are the operator's: the user ``router`` of ``warmfleet acl`` may only read."""

    async def approved(self) -> frozenset[str]:
        """The sha256 of every approved template. Raises FleetUnavailable."""
        with redis_errors():
            found = await cast("Awaitable[set[bytes]]", self.redis.smembers(self.keys.operator_approved))
        return frozenset(one.decode() for one in found)

    async def approve(self, digests: Iterable[str]) -> None:
        """Raises FleetUnavailable, also if this user may not."""
        with redis_errors():
            await self.redis.sadd(self.keys.operator_approved, *digests)

    async def revoke(self, digests: Iterable[str]) -> None:
        """Raises FleetUnavailable, also if this user may not."""
        with redis_errors():
            await self.redis.srem(self.keys.operator_approved, *digests)
