"""What the operator's own Redis user writes and routers only read: approved chat templates, and a switched policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmfleet.fleet.client import ScriptClient, asked, redis_errors
from warmfleet.fleet.connection.packing import pack_command

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable


class OperatorKeys(ScriptClient):
    """``approve``, ``revoke`` and ``switch`` are for the operator: the user ``router`` of ``warmfleet acl`` only reads.

    All methods raise FleetUnavailable; the writing ones do so, too, if this Redis user may not write.
    """

    def approved(self) -> asyncio.Future[frozenset[str]]:
        """The sha256 of every approved template."""
        return asked(self.redis, pack_command("SMEMBERS", self.keys.operator_approved), _digests)

    async def approve(self, digests: Iterable[str]) -> None:
        """Add templates, named by their sha256."""
        with redis_errors():
            await self.redis.sadd(self.keys.operator_approved, *digests)

    async def revoke(self, digests: Iterable[str]) -> None:
        """Remove templates, named by their sha256."""
        with redis_errors():
            await self.redis.srem(self.keys.operator_approved, *digests)

    def switched(self) -> asyncio.Future[str]:
        """The policy that the operator switched to; empty if each replica uses its own setting."""
        return asked(self.redis, pack_command("GET", self.keys.operator_policy), _policy)

    async def switch(self, policy: str) -> None:
        """Switch every replica to ``policy``; an empty name takes the switch back."""
        key = self.keys.operator_policy
        with redis_errors():
            await (self.redis.set(key, policy) if policy else self.redis.unlink(key))


def _digests(answer: Iterable[bytes]) -> frozenset[str]:
    return frozenset(digest.decode() for digest in answer)


def _policy(answer: bytes | None) -> str:
    return (answer or b"").decode("ascii", "replace")
