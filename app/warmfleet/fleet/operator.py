"""What the operator's own Redis user writes and routers only read: approved chat templates, and a switched policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from warmfleet.fleet.client import ScriptClient, redis_errors

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable


class OperatorKeys(ScriptClient):
    """``approve``, ``revoke`` and ``switch`` are for the operator: the user ``router`` of ``warmfleet acl`` only reads.

    All methods raise FleetUnavailable; the writing ones do so, too, if this Redis user may not write.
    """

    async def approved(self) -> frozenset[str]:
        """The sha256 of every approved template."""
        with redis_errors():
            digests = await cast("Awaitable[set[bytes]]", self.redis.smembers(self.keys.operator_approved))
        return frozenset(digest.decode() for digest in digests)

    async def approve(self, digests: Iterable[str]) -> None:
        """Add templates, named by their sha256."""
        with redis_errors():
            await self.redis.sadd(self.keys.operator_approved, *digests)

    async def revoke(self, digests: Iterable[str]) -> None:
        """Remove templates, named by their sha256."""
        with redis_errors():
            await self.redis.srem(self.keys.operator_approved, *digests)

    async def switched(self) -> str:
        """The policy that the operator switched to; empty if each replica uses its own setting."""
        with redis_errors():
            policy = await cast("Awaitable[bytes | None]", self.redis.get(self.keys.operator_policy))
        return (policy or b"").decode("ascii", "replace")

    async def switch(self, policy: str) -> None:
        """Switch every replica to ``policy``; an empty name takes the switch back."""
        key = self.keys.operator_policy
        with redis_errors():
            await (self.redis.set(key, policy) if policy else self.redis.unlink(key))
