"""Keys that the operator's Redis user writes and routers only read: approved chat templates, and a switched policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmfleet.fleet.client import asked, redis_errors
from warmfleet.fleet.connection.packing import pack_command

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from warmfleet.fleet.client import Scripts


class OperatorKeys:
    """``approve``, ``revoke`` and ``switch`` are for the operator: the Redis user of routers may only read.

    All methods raise FleetUnavailable, also if this Redis user may not write.
    """

    def __init__(self, scripts: Scripts) -> None:
        self._redis, keys = scripts.redis, scripts.keys
        self._approved, self._policy = keys.operator_approved, keys.operator_policy

    def approved(self) -> asyncio.Future[frozenset[str]]:
        """Read the sha256 of every approved template."""
        return asked(self._redis, pack_command("SMEMBERS", self._approved), _digests)

    async def approve(self, digests: Iterable[str]) -> None:
        """Approve the chat templates with these sha256 digests."""
        with redis_errors():
            await self._redis.sadd(self._approved, *digests)

    async def revoke(self, digests: Iterable[str]) -> None:
        """Withdraw the approval of the chat templates with these sha256 digests."""
        with redis_errors():
            await self._redis.srem(self._approved, *digests)

    def switched(self) -> asyncio.Future[str]:
        """Read the policy that the operator switched to; empty if each replica uses its own setting."""
        return asked(self._redis, pack_command("GET", self._policy), _policy)

    async def switch(self, policy: str) -> None:
        """Make every replica use ``policy``; with an empty name each uses the policy of its own settings again."""
        key = self._policy
        with redis_errors():
            await (self._redis.set(key, policy) if policy else self._redis.unlink(key))


def _digests(answer: Iterable[bytes]) -> frozenset[str]:
    return frozenset(digest.decode() for digest in answer)


def _policy(answer: bytes | None) -> str:
    return (answer or b"").decode("ascii", "replace")
