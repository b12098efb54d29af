"""Engines that compute prompts for others: their roles as ``decide`` takes them, and what it books for such a request.

The rules are in lua/parts/decide/joint.lua.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from warmfleet.fleet.codes import Mark
from warmfleet.protocol.wire import MARK_AT, RESERVATION_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MAX_CLASSES = 32  # most different sets of partners in a pool; prefill engines with further ones get no partner
ID_BYTES = 25  # length of a reservation's id without a client's tag


class Split(IntEnum):
    """Whether ``decide`` may choose two engines for a request."""

    ROLES_IGNORED = 0  # each engine serves alone, whatever its role
    FORBIDDEN = 1  # one engine serves it, and none that only computes prompts for others, if there is another
    ALLOWED = 2  # one engine or two, by cost; with a policy that looks at no costs one


class Role(NamedTuple):
    """The role of an engine that hands prompts over, by classes: bits, each for prefill engines with equal partners.

    gives: its class; 0: it computes no prompts for others. takes: sum of the classes whose prompts it takes. alone:
    whether it also serves requests alone.
    """

    gives: int
    takes: int
    alone: bool


def roles_of(slots: Mapping[str, int], roles: Mapping[str, str], pairs: Iterable[tuple[str, str]]) -> dict[int, Role]:
    """Return the roles by slot. slots: by worker id. roles: ``prefill``, ``decode`` or ``both`` by worker id. pairs: of
    prefill engine and decode engine. Only engines of the role ``prefill`` do not serve alone."""
    partners: dict[str, set[str]] = {}
    for prefill, decode in pairs:
        partners.setdefault(prefill, set()).add(decode)
    sets = sorted({tuple(sorted(those)) for those in partners.values()})[:MAX_CLASSES]
    classes = {those: 1 << at for at, those in enumerate(sets)}
    return {
        slots[worker_id]: Role(
            classes.get(tuple(sorted(partners.get(worker_id, ()))), 0),
            sum(bit for those, bit in classes.items() if worker_id in those),
            role != "prefill",
        )
        for worker_id, role in roles.items()
        if worker_id in slots
    }


def prefill_leg(reservation: str) -> str:
    """Return the id of the reservation of the engine that only computes the prompt, from that of the request.

    The engine must get it as the request's id, as any other. A client's tag is not in it.
    """
    return RESERVATION_PREFIX + Mark.PREFILL_LEG + reservation[MARK_AT + 1 : ID_BYTES]


@dataclass(slots=True)
class PrefillLeg:
    """The engine that computes the prompt of a split request, and what is booked there. Fields as in ``Decision``.

    It is settled by itself: ``started`` when the engine has answered, ``finished`` when the other engine has sent a
    token (so that it has the blocks), ``failed`` if the engine failed, ``cancelled`` if its request was ended before it
    answered. If it has answered, and nobody will take the blocks, it must be neither settled nor renewed: it expires
    about when the engine gives the blocks up. Until it is settled it needs renewals like the request.
    """

    reservation: str
    worker_id: str
    server_id: str
    url: str
    matched_tokens: int
    speculative: bool
    wait_tokens: int
    prefill_tokens: int
    decode_tokens: int
    approximate: bool
    trial: bool
    reports_ends: bool
    tier_tokens: int
    tier_s: float
    tier: str


class Way(NamedTuple):
    """A way to serve a request that may be split: by one engine, or by one that computes the prompt for a partner.

    cost_s: all of it, as decisions compare it. Of a pair's cost: transfer_s is for the blocks, room_s until the partner
    has room for the context (the longer of both counts), answer_s for the partner's steps and for its other answers,
    queue_s for what of the partner's own prefill is left when the blocks have come.
    """

    worker_id: str
    partner_id: str
    cost_s: float
    transfer_s: float
    room_s: float
    answer_s: float
    queue_s: float

    @classmethod
    def of(cls, told: bytes, rows: Sequence[Any]) -> Way:
        """Read what decide tells: numbers of the rows of both engines (0: none), and seconds."""
        worker, partner, *seconds = told.split()
        names = ["", *(row[0].decode() for row in rows)]
        return cls(names[int(worker)], names[int(partner)], *map(float, seconds))


class Moved(NamedTuple):
    """A handover, from which the speed of its link is learned. slot: of the engine that took the blocks. tokens: of the
    prompt that it lacked. seconds: from the end of the prefill leg to the first token of the other."""

    slot: int
    tokens: int
    seconds: float
