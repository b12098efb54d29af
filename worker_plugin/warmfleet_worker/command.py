"""The message of the fleet to a worker: an acknowledgement, perhaps a command, and signs of a rival process."""

from __future__ import annotations

import json
from dataclasses import dataclass

from warmfleet_worker.protocol import wire


@dataclass(frozen=True, slots=True)
class Command:
    """The fleet's message to the process that holds this worker_id.

    nonce, joined: random name of the latest join that the fleet has read for this worker_id, and its stream id.
    applied: number of the last entry that the fleet has applied. id, do: a command; None and "None" if there is none.
    """

    nonce: str
    applied: int
    id: str | None
    do: str
    joined: tuple[int, int] = (0, 0)

    @classmethod
    def parse(cls, raw: object) -> Command:
        """Read a command. Raises ValueError for anything else."""
        try:
            value = json.loads(raw)  # type: ignore[arg-type]  # a TypeError is caught below
            identity = value.get("id")
            joined = wire.entry_id(value.get("joined", "0-0"))
            command_id = identity and str(identity)
            return cls(str(value["nonce"]), int(value["applied"]), command_id, str(value.get("do")), joined)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"not a command: {error}") from error


@dataclass(slots=True)
class Rival:
    """Another process that joined under our worker_id after us. It may be dead: perhaps its join reached Redis late.

    A living rival writes a heartbeat at least every HEARTBEAT_SECONDS, so the number of its last applied entry
    (``applied`` in the commands to it) goes on growing.
    """

    nonce: str = ""
    first_read: float = 0.0  # when we first read a command to the rival, monotonic seconds
    applied: int = 0
    last_read: float = 0.0

    def is_alive(self, command: Command, now: float) -> bool:
        """Return True if ``applied`` still grew HEARTBEAT_SECONDS after we first read a command to the rival.

        By then the fleet has applied everything that a dead process had sent.
        """
        if command.nonce != self.nonce:
            self.nonce, self.first_read, self.applied, self.last_read = command.nonce, now, command.applied, now
        late = self.last_read - self.first_read >= wire.HEARTBEAT_SECONDS
        moved, self.applied, self.last_read = command.applied != self.applied, command.applied, now
        return moved and late

    def had_time(self, now: float) -> bool:
        """Return True if the rival has had WORKER_TTL_SECONDS to write, so that its silence shows that it is dead."""
        return now - self.first_read >= wire.WORKER_TTL_SECONDS
