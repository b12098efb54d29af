"""The operator's switch: one model's policy, written by the operator's own Redis user and read by routers."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from warmfleet.fleet.client import ScriptClient, redis_errors

if TYPE_CHECKING:
    from collections.abc import Awaitable


class Switches(ScriptClient):
    """``switch`` is the operator's: the user ``router`` of ``warmfleet acl`` may only read."""

    async def switched(self) -> str:
        """The policy that the operator named, "" without one. Raises FleetUnavailable."""
        with redis_errors():
            found = await cast("Awaitable[bytes | None]", self.redis.get(self.keys.operator_policy))
        return (found or b"").decode("ascii", "replace")

    async def switch(self, policy: str) -> None:
        """ "" takes it back. Raises FleetUnavailable, also if this user may not."""
        key = self.keys.operator_policy
        with redis_errors():
            await (self.redis.set(key, policy) if policy else self.redis.unlink(key))
