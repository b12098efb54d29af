"""The numbers and letters by which scripts, their parts and routers tell each other what to do.

Each code is defined here once. Scripts use it by the name of its class and its own (``MODE_DRY``, ``NEXT_CONTROL``).
Flags of a load row and stages of a lease are in ``rows``, with the records.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Mode(IntEnum):
    """Mode of decide: whether it books its choice, and how much it answers."""

    BOOK = 0  # choose and book
    DRY = 1  # choose, book nothing, answer all that the choice saw
    EXPLAIN = 2  # choose, book, answer all that the choice saw


class Next(IntEnum):
    """The script to call next for a worker's stream, as apply and apply_control return it."""

    NOTHING = 0  # the stream is empty
    APPLY = 1  # call apply
    CONTROL = 2  # call apply_control


class Standing(IntEnum):
    """The present state of a ticket in the queue."""

    WAITS = 0  # the request waits on, and its ticket keeps its place in the queue
    TURN = 1  # the ticket's turn has come: the replica calls decide again
    DISPLACED = 2  # another request took the ticket's place in the full queue
    UNKNOWN = 3  # the ticket expired, or Redis lost it


class Hint(IntEnum):
    """Bits of what a request tells ``decide`` of its session: the first byte of ``Question.session``."""

    TOOLS = 1  # the request declares tools
    NAMED = 2  # the client named the session
    ENDS = 4  # the session ends with this request


class Mark(StrEnum):
    """Marks that tell kinds apart: behind ``wf-`` in a reservation's id, or last in a field of ``x:<block hash>``."""

    ONE_PROMPT = "0"  # a reservation of one prompt whose token ids are known
    SEVERAL_PROMPTS = "-"  # a reservation of several prompts: each prefill gives back its share of the booked tokens
    ESTIMATED = "_"  # a reservation of a prompt whose token ids are not known: its match is not compared
    PREFILL_LEG = "p"  # a reservation of an engine that only computes the prompt: its context outlives its prefill
    MAKER = "+"  # field of a block hash: a reservation that computes the blocks from this one to the next such
    TRAIL = "="  # field of a block hash: hashes from this block to the next such, in a worker's guessed cache
