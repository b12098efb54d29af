"""The room of engines as tickets take it, beside a plain form that looks at every worker for every ticket."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from warmfleet.fleet import connect
from warmfleet.fleet.script_loader import with_values

if TYPE_CHECKING:
    from collections.abc import Sequence

PART = Path(__file__).parents[2] / "lua/parts/shared/turns.lua"
SPEED, US, LEAST_WAIT_PRICE, MAKING_PRICE, NO_ROOM_S = 10_000, 1e6, 0.1, 0.5, 1e-9
MAX_US, PRICE_STEP = 2**32 - 1, 64
SCRIPT = f"""
local turns = (function()
{PART.read_text()}
end)()
local workers, tickets = cjson.decode(ARGV[1]), cjson.decode(ARGV[2])
local s = {{ count = #workers, slots = {{}}, base_s = {{}}, speed = {{}}, rows = {{}}, busy_share = {{}} }}
for i, worker in ipairs(workers) do
  s.slots[i], s.base_s[i], s.speed[i], s.rows[i] = worker[1], worker[3], {SPEED}, ("x"):rep(ROW_BYTES) .. i
  s.busy_share[i] = worker[4]
end
local function room_of(i) return workers[i][2] end
local left, told = turns.room_left(s, room_of, function() return 0 end), {{}}
for k, ticket in ipairs(tickets) do
  local named, barred = ticket.named, {{}}
  local prices = struct.pack(TICKET_PRICES, 100, ticket.size, ticket.tie, ticket.rest, #named)
  local record = {{ prices, ("f"):rep(TICKET_OWN_AT - TICKET_FLOW_AT) }}
  for _, one in ipairs(named) do record[#record + 1] = struct.pack(TICKET_OWN, one[1], one[2]) end
  for _, slot in ipairs(ticket.barred) do record[#record + 1] = struct.pack(BARRED_SLOT, slot) end
  if ticket.making then record[#record + 1] = MAKING end
  local text = table.concat(record)
  local worker, is_turn, possible = left.stands(text)
  local any, chosen, work = left.any() and 1 or 0, left.take(text)
  told[k] = {{ any, tonumber(worker) or 0, is_turn and 1 or 0, possible and 1 or 0, chosen or 0, work or 0 }}
end
return told
"""


@dataclass(frozen=True, slots=True)
class Asks:
    """The prices of a ticket's record. named: slot and price. making: a worker is making half of its prompt."""

    size: int
    tie: int
    rest: int
    named: tuple[tuple[int, int], ...]
    barred: tuple[int, ...]
    making: bool = False


class Worker(NamedTuple):
    """base_s: seconds before its turn. busy: the share of its time in prefill lately."""

    slot: int
    room_s: float
    base_s: float
    busy: float


@dataclass(slots=True)
class Plain:
    """The plain form. ahead: what the wait for each worker counts. wait_price: of a second of waiting, by the mean."""

    workers: Sequence[Worker]
    room: list[float]
    ahead: list[float]
    wait_price: float

    @classmethod
    def of(cls, workers: Sequence[Worker]) -> Self:
        price = max(1 - sum(worker.busy for worker in workers) / len(workers), LEAST_WAIT_PRICE)
        ahead = [price * worker.base_s for worker in workers]
        return cls(workers, [worker.room_s for worker in workers], ahead, price)

    def cheapest(self, asks: Asks, among: Sequence[int]) -> tuple[float, int, int]:
        """Seconds, number from 0, and price of the cheapest: of those that are not named the least busy of equals."""
        least = (math.inf, -1, 0)
        others = [at for at in among if self.workers[at].slot not in asks.barred]
        scale = self.scale(asks)
        if others:
            at = min(others, key=lambda at: (self.ahead[at], self.workers[at].busy, at))
            least = (self.wait(at, scale) + asks.rest / US, at, asks.rest)
        slots = [worker.slot for worker in self.workers]
        for slot, price in asks.named:
            at = slots.index(slot)
            if at in among and self.wait(at, scale) + price / US < least[0]:
                least = (self.wait(at, scale) + price / US, at, price)
        return least

    def wait(self, at: int, scale: float) -> float:
        """In the order of operations of the script, because prices are no powers of two in seconds."""
        return self.ahead[at] + (scale - 1) * self.ahead[at]

    def scale(self, asks: Asks) -> float:
        """The weight of a second of waiting for this ticket, as a share of its weight for other tickets."""
        return min(self.wait_price, MAKING_PRICE) / self.wait_price if asks.making else 1.0

    def takes(self, asks: Asks, best: float, chosen: int, lowest: float, nearest: int) -> bool:
        """Whether ``chosen``, which has room, serves the ticket: it has little to do, or no worker is cheaper."""
        price = max(1 - 2 * self.workers[chosen].busy, self.wait_price)
        if asks.making:
            price = min(price, MAKING_PRICE)
        more = price / self.wait_price - self.scale(asks)
        return best + more * self.ahead[chosen] <= lowest + more * self.ahead[nearest] + asks.tie / US

    def step(self, asks: Asks) -> list[int]:
        """The script's answers: room, the worker that the ticket gets or waits for, the serving worker, its work."""
        free = [at for at, room in enumerate(self.room) if room > NO_ROOM_S]
        lowest, nearest, _ = self.cheapest(asks, range(len(self.workers)))
        best, chosen, price = self.cheapest(asks, free)
        serves = chosen >= 0 and self.takes(asks, best, chosen, lowest, nearest)
        told = [int(bool(free)), (chosen if serves else nearest) + 1, int(serves), int(chosen >= 0)]
        if not serves:
            if nearest >= 0:
                self.ahead[nearest] += self.wait_price * asks.size / US
            return [*told, 0, 0]
        share = price % PRICE_STEP
        taken_us = max(asks.size, (price - share) * share / (PRICE_STEP - 1))
        self.ahead[chosen] += self.wait_price * taken_us / US
        self.room[chosen] -= taken_us / US
        return [*told, chosen + 1, math.floor(taken_us / US * SPEED + 0.5)]


#: Powers of two in seconds, so that their sums are exact, and many are equal.
PARTS = st.integers(0, 64).map(lambda number: number / 64)
BUSY = st.sampled_from([0.0, 0.25, 0.5, 0.875])
TIMES_US = st.integers(0, 64).map(lambda number: number * 15_625)
PRICES = st.builds(lambda us, share: us - us % PRICE_STEP + share, TIMES_US, st.sampled_from([0, 20, PRICE_STEP - 1]))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Worker], list[Asks]]:
    count = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16]))
    slots = list(range(101, 101 + count))
    shares = draw(st.lists(BUSY, min_size=count, max_size=count))
    busy = [shares[0] if count in (3, 5) else share for share in shares]  # so that their mean is exact
    workers = [Worker(slot, draw(PARTS), draw(PARTS), share) for slot, share in zip(slots, busy, strict=True)]
    tickets = []
    sets = draw(st.lists(st.sets(st.sampled_from(slots)).map(sorted).map(tuple), min_size=1, max_size=3))
    for _ in range(draw(st.integers(1, 40))):
        barred = draw(st.sampled_from([(), *sets]))
        rest = draw(PRICES)
        own = draw(st.lists(st.sampled_from([slot for slot in slots if slot not in barred] or slots), max_size=3))
        named = tuple((slot, draw(PRICES)) for slot in dict.fromkeys(own) if slot not in barred)
        tie = draw(st.sampled_from([0, 15_625, MAX_US]))
        tickets.append(Asks(draw(TIMES_US), tie, rest, named, barred, draw(st.booleans())))
    return workers, tickets


async def told(client: Any, workers: Sequence[Any], tickets: Sequence[Asks]) -> list[list[int]]:
    asked = [
        {"size": ticket.size, "tie": ticket.tie, "rest": ticket.rest, "named": ticket.named, "barred": ticket.barred}
        | {"making": ticket.making}
        for ticket in tickets
    ]
    return cast("list[list[int]]", await client.eval(with_values(SCRIPT), 0, json.dumps(workers), json.dumps(asked)))


@pytest.mark.in_turn
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
async def test_turns_are_those_of_the_plain_form(redis_url: str, case: tuple[list[Worker], list[Asks]]) -> None:
    """For each ticket: the cheapest worker, the workers with room, the serving worker, and the tokens to compute."""
    workers, tickets = case
    plain = Plain.of(workers)
    client = connect(redis_url, timeout_s=10)
    try:
        assert await told(client, workers, tickets) == [plain.step(ticket) for ticket in tickets]
    finally:
        await client.aclose()


HELD = Asks(100_000, 0, 600_063, ((101, 100_031),), ())  # .1 s at the first worker, which holds its beginning


async def chosen(url: str, workers: Sequence[Worker], *tickets: Asks) -> list[int]:
    """Return for each ticket the number of the worker that serves it now, 0 if it waits."""
    client = connect(url, timeout_s=10)
    try:
        return [row[4] for row in await told(client, workers, tickets)]
    finally:
        await client.aclose()


@pytest.mark.parametrize(
    ("busy", "at_most_s"), [(0.0, 0.5), (0.25, 0.5 / 0.75), (0.5, 1.0), (0.8, 2.5), (0.95, 5.0), (1.0, 5.0)]
)
async def test_the_busier_the_engines_the_longer_a_request_waits_for_the_one_that_holds_it(
    redis_url: str, busy: float, at_most_s: float
) -> None:
    """A prompt that is computed once more delays all requests that come. Ten times the saving is the most."""
    for wait_s, served_by in ((at_most_s - 0.01, 0), (at_most_s + 0.01, 2)):
        workers = [Worker(101, 0.0, wait_s, busy), Worker(102, 1.0, 0.0, busy)]
        assert await chosen(redis_url, workers, HELD) == [served_by], wait_s


@pytest.mark.parametrize(("busy", "at_most_s"), [(0.0, 1.0), (0.25, 1.0), (0.5, 1.0), (0.75, 2.0)])
async def test_a_request_waits_longer_for_what_an_engine_is_making(
    redis_url: str, busy: float, at_most_s: float
) -> None:
    """On an idle fleet as long as it takes to compute it twice. Where engines are busy as long as for other work."""
    for wait_s, served_by in ((at_most_s - 0.01, 0), (at_most_s + 0.01, 2)):
        workers = [Worker(101, 0.0, wait_s, busy), Worker(102, 1.0, 0.0, busy)]
        assert await chosen(redis_url, workers, replace(HELD, making=True)) == [served_by], wait_s


async def test_an_engine_that_has_just_joined_waits_too_for_what_is_being_made(redis_url: str) -> None:
    fleet = [*BUSY_FLEET, Worker(109, 1.0, 0.0, 0.0)]
    assert await chosen(redis_url, fleet, replace(HELD, making=True)) == [0]


BUSY_FLEET = [Worker(slot, 0.0, 0.6, 1.0) for slot in range(101, 109)]


@pytest.mark.parametrize(("share", "served_by"), [(0.0, 9), (0.5, 0)], ids=["just joined", "has much to do by now"])
async def test_an_engine_that_has_just_joined_a_busy_fleet_is_not_left_idle(
    redis_url: str, share: float, served_by: int
) -> None:
    assert await chosen(redis_url, [*BUSY_FLEET, Worker(109, 1.0, 0.0, share)], HELD) == [served_by]


async def test_an_idle_engine_makes_no_other_compute_what_is_held(redis_url: str) -> None:
    """An idle engine does not count if it cannot serve the ticket, has no room, or gave it to the ticket before."""
    busy, idle = Worker(108, 1.0, 0.0, 0.95), Worker(109, 0.5, 0.0, 0.0)
    fleet = [*BUSY_FLEET[:7], busy, idle]
    assert await chosen(redis_url, fleet, replace(HELD, barred=(109,))) == [0]
    assert await chosen(redis_url, [*fleet[:8], idle._replace(room_s=0.0)], HELD) == [0]
    assert await chosen(redis_url, fleet, HELD, HELD) == [9, 0]
