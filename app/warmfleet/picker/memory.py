"""The memory that calls take together: bodies, messages that have come in part, answers that wait for their peer."""

from __future__ import annotations

from typing import Protocol

from warmfleet.errors import UploadsFull, WarmfleetError

BODIES = 32  # bodies of the largest size that fit into the memory, as on the clients' port


class Holder(Protocol):
    """Takes memory. ``held``: bytes of it."""

    held: int

    def give_up_body(self, error: WarmfleetError) -> None:
        """Give all of it back, because no other holder takes as much."""


class Memory:
    """A number of bytes that holders share. ``held``: bytes that are taken."""

    def __init__(self, most: int) -> None:
        self.held = 0
        self._most = most
        self._holders: dict[Holder, None] = {}

    def hold(self, holder: Holder, size: int) -> None:
        """Count more bytes. Raises UploadsFull if there is no room for them, and this holder takes the most."""
        holder.held += size
        self.held += size
        self._holders[holder] = None
        while self.held > self._most:
            largest = max(self._holders, key=lambda other: other.held)
            error = UploadsFull("Too many large requests are being sent: ask again.")
            if largest is holder:
                raise error
            largest.give_up_body(error)

    def free(self, holder: Holder, size: int) -> None:
        """Count bytes that were given back."""
        holder.held -= size
        self.held -= size
        if not holder.held:
            self._holders.pop(holder, None)
