"""The index equals the engines' tables after quiescence, whatever was lost, repeated, swapped, restarted or restored.

Hypothesis chooses the steps of ``ChaosFleet``; ``quiet`` lets the fleet come to rest as it does in production, and
compares every entry. The long run takes more steps: ``python -m pytest -m long tests/lua/test_sync_property.py``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.fleet.chaos import NUMBERS, PACE, ChaosFleet
from tests.support.fleet.invariants import check_noticed, quiet
from tests.support.fleet.stepped_publisher import small_pieces
from tests.support.redis.servers import PATIENT, redis7_binary, server, valkey_binary

from warmfleet.fleet import Fleet, connect

if TYPE_CHECKING:
    from collections.abc import Iterator

Step = tuple[str, int, int, int]
Script = list[Step]

OFTEN = (
    ["stored"] * 4 + ["removed"] * 2 + ["further"] * 4 + ["round"] * 5 + ["beat"] * 3 + ["listen"] * 2 + ["apply"] * 4
)
CHECKED = ("apply", "upkeep")
FAULTLESS = [
    *OFTEN,
    "cleared",
    "upkeep",
    "upkeep",
    "collect",
    "collect",
    "leave",
    "server",
    "decide",
    "settle",
    "quiet",
]
HARMLESS = [*FAULTLESS, *["restart", "twin", "late", "repeated"] * 2, "clock", "forget"]
PROCESSES = ["restart", "twin", "vanish", "late", "snapshot"]
STREAMS = ["repeated", "lost", "swapped", "trimmed", "deleted", "recreated", "forged"]
SERVERS = ["save", "save", "failover", "emptied", "clock", "aged", "command", "command"]
FAULTS = [*FAULTLESS, *PROCESSES, *STREAMS, *SERVERS, "forget", "decide", "settle", "renew", "expire"]


def scripts(actions: list[str], at_least: int, at_most: int) -> st.SearchStrategy[Script]:
    step = st.tuples(st.sampled_from(actions), st.integers(0, 2), st.integers(0, NUMBERS - 1), st.integers(0, 19))
    return st.lists(step, min_size=at_least, max_size=at_most)


# ---------------------------------------------------------------- the tests


class Lab:
    """A server for this test alone, two clients, and one ``ChaosFleet`` after another."""

    def __init__(self, url: str, runner: asyncio.Runner) -> None:
        self.store: Any = redis.Redis.from_url(url)
        self.fleets = [Fleet(connect(url, timeout_s=5), "chaos", timeouts=PATIENT) for _ in range(2)]
        for fleet in self.fleets:
            fleet.upkeep.pace = PACE
        self.runner, self.steps = runner, 0

    def play(self, script: Script, *, faultless: bool = False) -> None:
        self.steps += len(script)
        self.runner.run(self._play(script, faultless))

    async def _play(self, script: Script, faultless: bool) -> None:
        chaos = ChaosFleet(self.store, self.fleets, queue=10_000 if faultless else 30)
        for number in range(3):
            await chaos.step("restart", number, 0, 0)
            await chaos.step("apply", number, 0, 0)
            await chaos.step("server", number, 0, 0)
        for name, who, a, b in script:
            await (quiet(chaos) if name == "quiet" else chaos.step(name, who, a, b))
            if name in CHECKED:
                check_noticed(chaos)
        await quiet(chaos)
        if faultless:
            healed = {"gap", "mismatch", "spoilt", "malformed", "regress", "interleaved"}
            assert not healed & set(await self.fleets[0].index.counts()), "it was healed although nothing was wrong"

    async def close(self) -> None:
        self.store.close()
        for fleet in self.fleets:
            await fleet.close()


@pytest.fixture(scope="module", params=[valkey_binary, redis7_binary], ids=["valkey", "redis7"])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    with server(request.param()) as url, asyncio.Runner() as runner, small_pieces():
        lab = Lab(url, runner)
        yield lab
        runner.run(lab.close())


def relaxed(examples: int) -> settings:
    return settings(max_examples=examples, database=None, print_blob=True, suppress_health_check=list(HealthCheck))


def explore(lab: Lab, examples: int, length: int) -> int:
    """Play ``examples`` random histories of at least ``length`` steps; returns the number of steps."""
    before = lab.steps

    @relaxed(examples)
    @given(script=scripts(FAULTS, length, length + 20))
    def every(script: Script) -> None:
        lab.play(script)

    every()
    return lab.steps - before


CASES: dict[str, Script] = {
    # each of these has failed once
    "replaced before it was ever acknowledged: it stops, too": [("twin", 2, 46, 10)],
    "a failover brings back the predecessor's join": [
        *[("restart", 1, 18, 13), ("save", 2, 1, 14), ("quiet", 2, 40, 9), ("failover", 0, 29, 19)],
    ],
    "a failover loses a join that nobody had read": [
        *[("quiet", 0, 0, 0), ("save", 0, 0, 0), ("restart", 0, 5, 9), ("failover", 0, 0, 0)],
    ],
    "a failover loses the join of the second restart": [
        *[("quiet", 0, 0, 0), ("save", 0, 0, 0), ("restart", 0, 5, 9), ("quiet", 0, 0, 0), ("restart", 0, 7, 3)],
        *[("quiet", 0, 0, 0), ("failover", 0, 0, 0)],
    ],
    "a stream that nobody was told of": [("emptied", 0, 5, 4), ("forged", 0, 31, 15)],
    "ids of the future, then a new stream": [
        *[("forged", 1, 2, 0), ("quiet", 0, 26, 2), ("twin", 1, 31, 19), ("forged", 1, 33, 15)],
    ],
    "an entry of a worker that was silent for long is lost": [
        *[("quiet", 0, 0, 0), ("aged", 0, 0, 0), ("stored", 0, 0, 9), ("round", 0, 0, 0), ("lost", 0, 0, 0)],
        *[("apply", 0, 0, 0), ("upkeep", 0, 0, 0)],
    ],
    # each of these is a guard's reason
    "a dead process's entries after its successor's": [
        *[("stored", 0, 1, 9), ("round", 0, 0, 0), ("restart", 0, 5, 5), ("late", 0, 7, 0), ("late", 0, 7, 0)],
    ],
    "a dead process's join after its successor's": [
        *[("round", 0, 0, 0), ("restart", 0, 5, 5), ("quiet", 0, 0, 0), ("late", 0, 7, 0), ("apply", 0, 2, 0)],
    ],
    "two processes write in turn under one name": [
        *[("twin", 0, 5, 9), *[("stored", 0, 20, 3), ("round", 0, 0, 3), ("stored", 0, 30, 2), ("round", 0, 0, 2)] * 3],
    ],
    "the clock steps back and forth": [
        *[("clock", 0, 1, 1), ("upkeep", 0, 0, 0), ("aged", 0, 0, 0), ("clock", 0, 0, 0), ("upkeep", 0, 1, 0)],
    ],
    "a stream begins anew with lower ids": [
        *[("stored", 0, 1, 9), ("round", 0, 0, 0), ("recreated", 0, 3, 0), ("apply", 0, 2, 0)],
    ],
    "an entry is lost, and all that follow are there": [
        *[("stored", 0, 1, 9), ("round", 0, 0, 0), ("stored", 0, 30, 9), ("round", 0, 0, 0)],
        *[("lost", 0, 1, 0), ("apply", 0, 2, 0), ("apply", 0, 2, 0)],
    ],
    "the command to resync is lost, then comes twice": [
        *[("stored", 0, 1, 9), ("round", 0, 0, 0), ("lost", 0, 0, 0), ("stored", 0, 9, 2), ("round", 0, 0, 0)],
        *[("apply", 0, 2, 0), ("upkeep", 0, 0, 0), ("command", 0, 0, 0), ("quiet", 0, 0, 0), ("command", 0, 0, 0)],
        *[("listen", 0, 0, 0), ("command", 0, 0, 0), ("listen", 0, 0, 0)],
    ],
    "a snapshot begins twice": [("stored", 0, 0, 19), ("snapshot", 0, 0, 0), ("snapshot", 0, 0, 0), ("apply", 0, 2, 0)],
    "a clear cuts a snapshot": [("stored", 0, 0, 19), ("snapshot", 0, 0, 0), ("cleared", 0, 0, 0), ("round", 0, 0, 0)],
    "a gap cuts a snapshot": [
        *[("stored", 0, 0, 19), ("snapshot", 0, 0, 0), ("lost", 0, 1, 0), ("apply", 0, 2, 0), ("round", 0, 0, 0)],
    ],
    "death cuts a snapshot": [("stored", 0, 0, 19), ("snapshot", 0, 0, 0), ("apply", 0, 2, 0), ("vanish", 0, 0, 0)],
    "what was sent comes twice": [
        *[("stored", 0, 0, 9), ("removed", 0, 0, 4), ("beat", 0, 0, 0), ("apply", 0, 2, 0), ("repeated", 0, 7, 0)],
    ],
    "settle after forget": [
        *[("decide", 0, 9, number) for number in range(4)],
        *[(step, who, 0, 0) for step in ("forget", "beat", "round", "apply", "server") for who in range(3)],
        *[("decide", 0, 9, 4), *[("settle", 0, 1, number) for number in range(4)]],
    ],
    "decide after its cancel": [("settle", 0, 3, 0), ("decide", 0, 9, 0), ("settle", 0, 3, 0), ("decide", 0, 9, 0)],
    "another type under the stream's name": [("forged", 0, 0, 0), ("stored", 0, 3, 3), ("round", 0, 0, 0)],
    "an id at the end of time": [("forged", 0, 5, 3), ("stored", 0, 3, 3), ("round", 0, 0, 0)],
}


@pytest.mark.parametrize("case", CASES)
def test_it_comes_to_rest_after(lab: Lab, case: str) -> None:
    lab.play(CASES[case])


@pytest.mark.in_turn
def test_the_index_equals_the_tables(lab: Lab) -> None:
    assert explore(lab, 100, 50) >= 5_000


@pytest.mark.long(
    minutes=40,
    shows="the stateful test of the index protocol with 128 times the steps of the default run",
)
@pytest.mark.timeout(7200)
def test_the_index_equals_the_tables_for_long(lab: Lab) -> None:
    assert explore(lab, 4_000, 80) >= 320_000


@pytest.mark.in_turn
@pytest.mark.parametrize("actions", [FAULTLESS, HARMLESS], ids=["faultless", "harmless"])
def test_nothing_is_healed_that_is_not_wrong(lab: Lab, actions: list[str]) -> None:
    """Restarts, twins, and entries that come twice or too late are not mistaken for losses."""

    @relaxed(24)
    @given(script=scripts(actions, 40, 60))
    def every(script: Script) -> None:
        lab.play(script, faultless=True)

    every()
