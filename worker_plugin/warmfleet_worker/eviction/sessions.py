"""Gives up the blocks of sessions that ended or were paused, before those of sessions that may go on.

A session is a conversation, such as an agent's: model call, tool call, model call. Its latest request is remembered, so
that its blocks are known when the routers say that the session has ended or was paused. Such a list of blocks is then a
``Chain`` to be given up. Its last block goes first, so the blocks that are left are always a prefix. A chain keeps what
another remembered request has in common with it: a system prompt, the begin of a fork.

A finished request costs microseconds, however long the request is: the lists of its blocks and hashes are kept as they
are, and compared with others only when blocks are taken.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from copy import copy
from itertools import repeat
from typing import TYPE_CHECKING

from warmfleet_worker.eviction.shared_prefixes import SharedPrefixes
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet_worker.eviction.finished import Finished

MOST_REQUESTS = 2_048  # most requests that are remembered; beyond it the oldest is forgotten
MOST_BLOCKS = 4  # most blocks that are remembered, and that wait to be given up, as multiples of the cache's blocks
#: Blocks of an answer by which the next request of a session finds it; by its last block besides. An answer that comes
#: back changed differs early.
ANSWER_BLOCKS = 16


class Chain:
    """The blocks of a request from index ``start`` of its prompt to before ``end``, or as many as are left of them.

    prompt_blocks: full blocks of the prompt, or 1. age: a number that grows with each request. kept: blocks before this
    index are not given up. checked: age of the latest request with which this chain was compared. keys: hashes by which
    the next request of the session finds this one.
    """

    __slots__ = (
        *("age", "checked", "end", "hashes", "kept", "keys", "numbers"),
        *("prompt_blocks", "prompt_tokens", "reservation", "start"),
    )

    def __init__(self, request: Finished, end: int, prompt_blocks: int, age: int) -> None:
        self.numbers, self.hashes = request.numbers, request.hashes
        self.start = self.kept = self.checked = 0
        self.end, self.prompt_blocks, self.prompt_tokens = end, prompt_blocks, request.prompt_tokens
        self.age, self.reservation = age, wire.first_child(request.request_id)[: wire.RESERVATION_LENGTH]
        first = prompt_blocks - 1
        self.keys = [*self.hashes[first : min(first + ANSWER_BLOCKS, end)], self.hashes[end - 1]]

    @property
    def size(self) -> int:
        return self.end - self.start

    def at(self, index: int) -> bytes:
        """Return the hash of the block with this index in the prompt."""
        return self.hashes[index - self.start]

    def parts(self, other: Chain, low: int) -> int:
        """Return the index at which another chain departs from this one; they agree before ``low``.

        A hash stands for all tokens before its block, too, so behind unequal hashes there are only unequal ones.
        """
        most = min(self.end, other.end)
        if low >= most or self.at(most - 1) == other.at(most - 1):
            return most
        if self.at(low) != other.at(low):
            return low
        return bisect_left(range(most), 1, low, key=lambda index: self.at(index) != other.at(index))

    def cut(self, start: int) -> None:
        """Drop the blocks before ``start``."""
        behind = slice(start - self.start, self.size)
        self.numbers, self.hashes = self.numbers[behind], self.hashes[behind]
        self.start = self.kept = start


class Sessions:
    """Remembers sessions of an engine with ``blocks`` blocks of ``block_tokens`` tokens. For one thread at a time."""

    def __init__(self, block_tokens: int, blocks: int) -> None:
        self.leaving: deque[Chain] = deque()
        self._block_tokens = block_tokens
        self._most_blocks = MOST_BLOCKS * blocks
        self._age = self._blocks = self._leaving_blocks = 0
        self._requests: OrderedDict[int, Chain] = OrderedDict()  # by age
        self._by_reservation: dict[str, Chain] = {}
        self._by_block: dict[bytes, Chain] = {}
        self._shared = SharedPrefixes()

    def freed(self, request: Finished) -> None:
        """Remember a request whose blocks have become free. If it has ended, its blocks go first from now on."""
        end = min(len(request.numbers), len(request.hashes))
        if not end:
            return
        self._age += 1
        chain = Chain(request, end, min(max(1, request.prompt_tokens // self._block_tokens), end), self._age)
        before = self._by_reservation.get(chain.reservation)
        if before is not None:  # the request was preempted
            self._forget(before)
        cached = request.cached_tokens // self._block_tokens
        if 0 < cached < end:
            self._shared.note(chain.hashes[cached - 1], chain.hashes[cached])
            before = self._by_block.get(chain.hashes[cached - 1])
            if before is not None:
                self._succeed(chain, before, cached)
        self._remember(chain)
        if request.ended and not request.preempted:
            self._leave(chain)

    def give_up(self, reservation: str) -> None:
        """Let the blocks of the request with this reservation go first, if it is remembered."""
        chain = self._by_reservation.get(reservation)
        if chain is not None:
            self._leave(chain)

    def take(self, count: int, valid: Callable[[int, bytes], bool]) -> dict[int, None]:
        """Remove up to ``count`` ``valid`` blocks from the oldest chains; return their numbers in order of eviction.

        valid: tells whether the block of this number is free and still has this hash.
        """
        taken: dict[int, None] = {}
        while self.leaving and len(taken) < count:
            self._compare(self.leaving[0])
            chain = self.leaving[0]
            while chain.end > chain.kept and len(taken) < count:
                chain.end -= 1
                number = chain.numbers[chain.end - chain.start]
                if valid(number, chain.at(chain.end)):
                    taken[number] = None
            if chain.end <= chain.kept:
                self._drop()
        return taken

    def _remember(self, chain: Chain) -> None:
        self._requests[chain.age] = chain
        self._blocks += chain.size
        self._by_block.update(zip(chain.keys, repeat(chain), strict=False))
        if chain.reservation:
            self._by_reservation[chain.reservation] = chain
        while self._blocks > self._most_blocks or len(self._requests) > MOST_REQUESTS:
            self._forget(next(iter(self._requests.values())))

    def _succeed(self, chain: Chain, before: Chain, cached: int) -> None:
        """Let ``before`` keep the end of its answer that the next prompt of its session lacks, if there is such an end.

        A template may repeat an answer in another form, such as without its reasoning.
        """
        if cached > before.start:
            common = before.parts(chain, cached)
            if common == before.end:
                self._forget(before)
            else:
                self._blocks -= common - 1 - before.start
                before.cut(common - 1)  # the last common block shows later that the two belong together

    def _forget(self, chain: Chain) -> None:
        del self._requests[chain.age]
        self._blocks -= chain.size
        if self._by_reservation.get(chain.reservation) is chain:
            del self._by_reservation[chain.reservation]
        for block_hash in chain.keys:
            if self._by_block.get(block_hash) is chain:
                del self._by_block[block_hash]

    def _leave(self, chain: Chain) -> None:
        self.leaving.append(copy(chain))  # the chain itself goes on showing what sessions have in common
        self._leaving_blocks += len(chain.numbers)
        while self._leaving_blocks > self._most_blocks:
            self._drop()

    def _drop(self) -> None:
        self._leaving_blocks -= len(self.leaving.popleft().numbers)

    def _compare(self, chain: Chain) -> None:
        """Keep what other requests have in common with a chain; only those are looked at that came since the last time.

        An earlier request of the same session keeps nothing: the end of its answer goes first, before the chain.
        """
        earlier: list[Chain] = []
        for other in reversed(self._requests.values()):
            if other.age <= chain.checked:
                break
            low = max(chain.kept, other.start)
            if low < chain.end and low < other.end and other.age != chain.age and other.at(low) == chain.at(low):
                if self._is_earlier(other, chain):
                    earlier.append(other)
                else:
                    chain.kept = chain.parts(other, low + 1)
        chain.checked = self._age
        for other in earlier:
            common = chain.parts(other, max(chain.kept, other.start) + 1)
            self._forget(other)
            if common < other.end:
                other.cut(common)
                self._leaving_blocks += len(other.numbers)
                self.leaving.appendleft(other)

    def _is_earlier(self, other: Chain, chain: Chain) -> bool:
        """Tell whether the session of ``chain`` had the request ``other`` before, or this very prompt.

        Prompts that differ within their last block only, such as two short questions, are of different sessions.
        """
        last = max(other.prompt_blocks - 1, other.start)
        return (
            other.age < chain.age
            and (other.prompt_blocks < chain.prompt_blocks or other.prompt_tokens == chain.prompt_tokens)
            and chain.start <= last < chain.end
            and other.at(last) == chain.at(last)
            and not self._shared.ends_at(other.at(last))
        )
