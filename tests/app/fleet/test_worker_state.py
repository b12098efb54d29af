"""A worker in a real Redis changes its state as the diagram in app/docs/worker-life.md says."""

from __future__ import annotations

import asyncio
import json
import random
import re
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pytest
from tests.support.fleet.reporting_server import ReportingServer
from tests.support.fleet.reporting_worker import ReportingWorker
from tests.support.fleet.ticking import EVERY, slow_tick

from warmfleet.fleet import Check, Flag, LoadRow, Proof, WorkerState
from warmfleet.fleet.worker.state import METRIC_LABELS, ROUTABLE, SERVING, state_of

if TYPE_CHECKING:
    import redis.asyncio as aioredis

    from warmfleet.fleet import Fleet

PAGE = (Path(__file__).parents[3] / "app/docs/worker-life.md").read_text()
READY = Flag.SERVER | Flag.URL | Flag.PROVEN
URL = "http://10.0.0.7:8000"
OLD_MS = 60_000
STEPS = 3_500


# ---------------------------------------------------------------- the drawing


class Event(StrEnum):
    """An event that changes a worker's state; the value is the event's text in the diagram."""

    CORE_JOINS = "its engine core joins"
    SERVER_JOINS = "a new process of its API server joins"
    REGISTERED = "a replica finds the stock engine healthy"
    PROBE_PASSES = "a probe passes"
    IDENTITY_FAILS = "a probe finds another identity, or cannot test it"
    URL_FAILS = "a probe gets no answer at its URL"
    WARMING_BEGINS = "a probe passes and a replica warms it"
    WARMING_ENDS = "it is warm, or warming is given up"
    WARMING_STALLS = "it does not answer while it is warmed"
    WARMING_EXPIRES = "the replica that warms it is gone"
    SUSPICION = "answers or blocks differ from what was expected"
    FORGOTTEN = "it was silent for ten minutes"
    GOODBYE = "its engine core or its API server says goodbye"
    FALLS_SILENT = "no heartbeat for a TTL, or a failed health check"
    HEARD = "it is heard again"
    STREAM_BREAKS = "its stream breaks the rules"
    SERVER_LOST = "its API server is silent for a TTL"
    SERVER_HEARD = "its API server is heard"
    MISNAMED = "it does not serve its pool's name"
    RENAMED = "it serves its pool's name"
    DRAIN = "warmfleet drain"
    UNDRAIN = "warmfleet drain --undo"
    PAUSED = "its engine is paused or put to sleep"
    RESUMED = "its engine is resumed or woken up"
    VOUCHED = "its heartbeats are missing, but its engine answers a replica"
    LAPSES = "its engine answers no replica either"
    EJECTED = "it fails requests that other workers serve"
    ACQUITTED = "it serves a request on trial, or other workers are gone"


class Arrow(NamedTuple):
    before: str
    event: Event
    after: str


def drawn(section: str) -> list[Arrow]:
    """The arrows of a section's diagram, with one arrow for each state of a group."""
    text = PAGE.partition(f"## {section}\n")[2].partition("```mermaid")[2].partition("```")[0]
    arrows = re.findall(r"^ +(\w+) --> (\w+) : (.*)$", text, re.MULTILINE)
    assert len(arrows) == len(text.strip().splitlines()) - 1, "each line is an arrow"
    return [
        Arrow(state, Event(event), after.replace("_", "-"))
        for before, after, event in arrows
        for state in GROUPS.get(before, [before.replace("_", "-")])
    ]


#: The rows of the table of states: word, layer, whether a worker in the state takes requests.
ROWS = re.findall(r"^\| `([\w-]+)` \| (standing|hold) \| (yes|no) \|", PAGE, re.MULTILINE)
#: The standings of a worker with the plugin, and those of them in which the result of a probe is recorded.
JOINED = ["pending", "warming", "proven", "suspected", "load-only", "unreachable"]
GROUPS = {"joined": JOINED, "probed": [word for word in JOINED if word != "warming"]}
CHANGES, OF_HOLDS = drawn("Standings"), drawn("Holds")
HOLDS = [WorkerState(word) for word, layer, _ in ROWS if layer == "hold"]  # the first of several holds is shown
BEGINS = {arrow.event: WorkerState(arrow.after) for arrow in OF_HOLDS if arrow.before == "standing"}
ENDS = [(arrow.event, WorkerState(arrow.before)) for arrow in OF_HOLDS if arrow.after == "standing"]
#: Arrows from one hold to another.
TURNS = [arrow for arrow in OF_HOLDS if "standing" not in arrow]
#: Events that undo a worker's progress; the test draws them less often than others.
SETBACKS = {Event.CORE_JOINS, Event.SERVER_JOINS, *BEGINS}
PROBES = {Event.PROBE_PASSES, Event.IDENTITY_FAILS, Event.URL_FAILS, Event.WARMING_BEGINS}
HEARTBEATS = {Event.HEARD, Event.PAUSED, Event.RESUMED}


def test_the_table_of_states_is_whole() -> None:
    assert [word for word, _, _ in ROWS] == [state.value for state in WorkerState]
    assert {word for word, _, requests in ROWS if requests == "yes"} == ROUTABLE
    assert set(BEGINS.values()) == {hold for _, hold in ENDS} == set(HOLDS)
    assert {arrow.event for arrow in (*CHANGES, *OF_HOLDS)} == set(Event)


# ---------------------------------------------------------------- reading a state


@pytest.mark.parametrize(
    ("flags", "record", "age_s", "wanted"),
    [
        (READY, {}, 0.0, "proven"),
        (READY, {"suspect": "prompt"}, 0.0, "suspected"),
        (READY & ~Flag.PROVEN, {"proof": "identity"}, 0.0, "load-only"),
        (Flag.SERVER, {}, 0.0, "pending"),
        (Flag.SERVER, {"proof": "proven"}, 0.0, "pending"),
        (Flag.SERVER, {"proof": "url"}, 0.0, "unreachable"),
        (Flag.SERVER, {"proof": "warming", "warming": {"owner": "a", "ends": 2_000}}, 0.0, "warming"),
        (Flag.SERVER, {"proof": "warming", "warming": {"owner": "a", "ends": 1_000}}, 0.0, "pending"),
        (Flag.SERVER | Flag.URL | Flag.APPROXIMATE, {}, 0.0, "approximate"),
        (Flag.URL | Flag.PROVEN, {}, 0.0, "joining"),
        (READY | Flag.DRAINING, {"suspect": "blocks"}, 0.0, "draining"),
        (READY | Flag.HOSTILE | Flag.DRAINING, {}, 0.0, "hostile"),
        (READY | Flag.HOSTILE | Flag.MISNAMED, {}, 0.0, "hostile"),
        (READY | Flag.MISNAMED | Flag.DRAINING, {}, 0.0, "misnamed"),
        (READY | Flag.MISNAMED | Flag.APPROXIMATE | Flag.EJECTED, {}, 0.0, "misnamed"),
        (READY | Flag.HOSTILE, {}, 15.1, "silent"),
        (READY, {}, None, "silent"),
        (READY, {"left": True}, None, "left"),
        (READY, {"left": True}, 300.0, "left"),
        (READY & ~Flag.SERVER, {"left": True}, 0.0, "left"),
        (READY & ~Flag.SERVER, {"left": True}, 300.0, "left"),
        (READY & ~Flag.SERVER | Flag.DRAINING, {"left": True}, None, "left"),
        (READY, {"left": True}, 0.0, "proven"),
        (READY, {}, 15.0, "proven"),
        (READY | Flag.PAUSED, {"suspect": "blocks"}, 0.0, "paused"),
        (READY | Flag.PAUSED | Flag.EJECTED, {}, 0.0, "paused"),
        (READY | Flag.PAUSED | Flag.DRAINING, {}, 0.0, "draining"),
        (READY | Flag.EJECTED, {}, 0.0, "ejected"),
        (READY | Flag.TRIAL | Flag.UNHEARD, {}, 300.0, "ejected"),
        (READY | Flag.EJECTED | Flag.DRAINING, {}, 0.0, "draining"),
        (Flag.SERVER | Flag.EJECTED, {}, 0.0, "pending"),
        (READY | Flag.UNHEARD, {}, 0.0, "unheard"),
        (READY | Flag.UNHEARD, {"suspect": "prompt"}, 300.0, "unheard"),
        (READY | Flag.UNHEARD | Flag.DRAINING, {}, 300.0, "draining"),
        (Flag.SERVER | Flag.UNHEARD, {}, 300.0, "pending"),
        (Flag.URL | Flag.UNHEARD, {}, 300.0, "joining"),
    ],
)
def test_a_state_is_read_from_the_row_the_record_and_the_heartbeat(
    flags: int, record: dict[str, Any], age_s: float | None, wanted: str
) -> None:
    assert state_of(flags, record, URL, age_s, 1.0) == wanted


def test_nobody_is_sent_to_a_worker_without_a_url() -> None:
    assert state_of(READY, {}, "", 0.0, 1.0) is WorkerState.UNREACHABLE


# ---------------------------------------------------------------- living through the diagram


class Life:
    """A worker with the plugin in a real Redis, and its standing and holds by the diagram."""

    def __init__(self, store: aioredis.Redis, fleet: Fleet) -> None:
        self.store, self.fleet, fleet.upkeep.pace = store, fleet, EVERY
        self.reporter, self.server = ReportingWorker(store, fleet), ReportingServer(store, fleet)
        self.standing, self.holds = WorkerState.GONE, {WorkerState.JOINING}
        self.warmed = False  # each incarnation is warmed once
        self.serial, self.server_known = 0, False
        self.server_quiet = False  # the API server's heartbeats are missing
        self.core_left = False  # no replica may vouch for the worker, and only a join brings the core back
        self.server_left = False  # only a join brings the API server back

    @property
    def expected(self) -> WorkerState:
        if self.standing is WorkerState.GONE:
            return self.standing
        return next((hold for hold in HOLDS if hold in self.holds), self.standing)

    async def state(self) -> WorkerState:
        views = {view.worker_id: view for view in await self.fleet.workers.read()}
        view = views.get(self.reporter.worker_id)
        return view.state if view else WorkerState.GONE

    def possible(self) -> list[Event]:
        """The events that may happen in the current state."""
        found = {made.event for made in CHANGES if self.standing == made.before} - {Event.REGISTERED}
        found |= {Event.SERVER_JOINS, Event.SERVER_HEARD, Event.SERVER_LOST}
        if self.standing is not WorkerState.GONE:
            found |= {*BEGINS, *(event for event, _ in ENDS)}
        if self.holds:
            found -= PROBES  # only workers without holds are probed
        if self.warmed:
            found.discard(Event.WARMING_BEGINS)
        if not self.server_known:
            found -= {Event.SERVER_HEARD, Event.SERVER_LOST, Event.MISNAMED, Event.RENAMED}
        found -= self._excluded_by_goodbye()
        if self.core_left or self.standing not in SERVING or self.holds & {WorkerState.JOINING, WorkerState.HOSTILE}:
            found.discard(Event.VOUCHED)
        if self.standing not in SERVING:
            found.discard(Event.EJECTED)
        if WorkerState.EJECTED not in self.holds:
            found.discard(Event.ACQUITTED)
        if WorkerState.MISNAMED not in self.holds:
            found.discard(Event.RENAMED)
        if WorkerState.UNHEARD in self.holds:
            found -= {Event.FALLS_SILENT, Event.SERVER_LOST}  # both halves are unheard already
            found |= {Event.LAPSES}
            if WorkerState.JOINING in self.holds:
                found -= HEARTBEATS | {Event.LAPSES}
        return sorted(found)

    def _excluded_by_goodbye(self) -> set[Event]:
        """The events that cannot happen, because a half that left or whose stream broke comes back only by a join."""
        broken = WorkerState.HOSTILE in self.holds
        excluded = set(HEARTBEATS) if broken or self.core_left else set[Event]()
        if self.server_left:
            excluded |= {Event.SERVER_HEARD, Event.SERVER_LOST, Event.MISNAMED, Event.RENAMED}
        return excluded | ({Event.GOODBYE} if broken and not self.server_known else set())

    async def happen(self, event: Event) -> None:
        await getattr(self, f"_{event.name.lower()}")()
        for made in CHANGES:
            if made.event is event and self.standing == made.before:
                self.standing = WorkerState(made.after)
                break
        if event in BEGINS:
            self.holds.add(BEGINS[event])
        self.holds -= {hold for ends, hold in ENDS if event is ends}
        self._settle(event)

    def _settle(self, event: Event) -> None:
        """Apply the effects that the diagram omits, because the two halves of a worker are heard separately."""
        self._settle_heartbeat(event)
        if event is Event.CORE_JOINS and self.server_quiet:  # the missing API server counts again
            self.holds.add(WorkerState.JOINING)
        if event in (Event.CORE_JOINS, Event.SERVER_JOINS) and WorkerState.UNHEARD in self.holds:
            self.holds.add(WorkerState.SILENT)
            self.holds.discard(WorkerState.UNHEARD)
        if event in (Event.CORE_JOINS, Event.SERVER_JOINS):
            self.holds.discard(WorkerState.EJECTED)
        for turn in TURNS:
            if event is turn.event:
                self.holds.discard(WorkerState(turn.before))
                self.holds.add(WorkerState(turn.after))
        if event is Event.CORE_JOINS:
            self.holds.discard(WorkerState.SILENT)
        if event is Event.SERVER_JOINS:
            self.server_left = False
            self.holds -= {WorkerState.JOINING, WorkerState.LEFT, WorkerState.MISNAMED}  # joins announce names
        if event in (Event.MISNAMED, Event.RENAMED):  # renaming implies that the API server is heard
            self.holds.discard(WorkerState.JOINING)
        if event is Event.FORGOTTEN:
            self.holds, self.server_known = {WorkerState.JOINING}, False
            self.server_quiet = self.server_left = self.core_left = False  # the API server has no other worker

    def _settle_heartbeat(self, event: Event) -> None:
        """Apply the effects of each heartbeat and each join of the engine core."""
        if event is Event.CORE_JOINS or event in HEARTBEATS:
            self.core_left = False
        if event in (Event.CORE_JOINS, Event.HEARD):
            self.holds.discard(WorkerState.PAUSED)  # a restarted engine is not paused
        if event in HEARTBEATS:
            self.holds -= {WorkerState.SILENT, WorkerState.UNHEARD}

    async def _prove(self, proof: str, owner: str = "") -> None:
        nonce = (await self.reporter.record())["nonce"]
        assert await self.fleet.probes.prove(self.reporter.worker_id, nonce, Proof(proof, "", owner=owner)) in (
            "OK",
            "DOWNGRADED",
        )

    async def _core_joins(self) -> None:
        self.serial, self.warmed = self.serial + 1, False
        await self.reporter.join(f"n{self.serial}")
        await self.reporter.applied()

    async def _server_joins(self) -> None:
        self.serial, self.server_known, self.server_quiet = self.serial + 1, True, False
        await self.server.join(f"m{self.serial}")
        await self.server.applied()

    async def _probe_passes(self) -> None:
        await self._prove("proven")

    async def _identity_fails(self) -> None:
        await self._prove("identity")

    async def _url_fails(self) -> None:
        await self._prove("url")

    async def _warming_begins(self) -> None:
        nonce, self.warmed = (await self.reporter.record())["nonce"], True
        assert await self.fleet.probes.warming(self.reporter.worker_id, nonce, "a", 60_000) == "OK"

    async def _warming_ends(self) -> None:
        await self._prove("proven", "a")

    async def _warming_stalls(self) -> None:
        await self._prove("pending", "a")

    async def _warming_expires(self) -> None:
        await self._rewrite(warming={"owner": "a", "ends": 1})

    async def _suspicion(self) -> None:
        await self._rewrite(suspect="prompt")  # tests/lua/test_suspicion.py tests how `apply` sets this

    async def _rewrite(self, **fields: Any) -> None:
        name, record = self.reporter.worker_id, await self.reporter.record()
        await cast("Any", self.store.hset(self.fleet.keys.workers, name, json.dumps(record | fields)))

    async def _forgotten(self) -> None:
        assert await self.fleet.upkeep.forget(self.reporter.worker_id)

    async def _falls_silent(self) -> None:
        then_ms = (await self.store.time())[0] * 1000 - OLD_MS
        await self.store.zadd(self.fleet.keys.alive, {self.reporter.worker_id: then_ms}, xx=True)

    async def _goodbye(self) -> None:
        if self.server_known and (self.serial % 2 or WorkerState.HOSTILE in self.holds):
            await self.server.send("leave")
            await self.server.applied()
            self.server_left = self.server_quiet = True
            self.holds.add(WorkerState.JOINING)
        else:
            await self.reporter.send("leave")
            await self.reporter.applied()
            self.core_left = True
            self.holds.add(WorkerState.SILENT)
            self.holds.discard(WorkerState.UNHEARD)

    async def _heard(self, *, paused: bool = False) -> None:
        await asyncio.sleep(0.002)  # a heartbeat in the millisecond of the vouch counts as earlier
        await self.reporter.heartbeat(paused=paused)
        await self.reporter.applied()
        if WorkerState.UNHEARD in self.holds:
            await self._server_heard()
            await slow_tick(self.fleet)

    async def _vouched(self) -> None:
        then_ms = (await self.store.time())[0] * 1000 - OLD_MS
        await self.store.zadd(self.fleet.keys.alive, {self.reporter.worker_id: then_ms})
        await self.store.zadd(self.fleet.keys.alive_servers, {"s": then_ms})
        self.server_quiet = True
        known = "RENEWED" if WorkerState.UNHEARD in self.holds else "VOUCHED"
        assert await self.fleet.workers.vouch(self.reporter.worker_id, self.reporter.nonce) == known

    async def _ejected(self) -> None:
        others = {name: LoadRow(flags=int(Flag.SERVER | Flag.URL | Flag.APPROXIMATE)).pack(name) for name in "xy"}
        await self.store.zadd(self.fleet.keys.alive, dict.fromkeys(others, 1e15))
        await self.store.hset(self.fleet.keys.load, mapping=cast("Any", others))
        assert await self.fleet.workers.eject(self.reporter.worker_id, good=False) in ("EJECTED", "SAME")

    async def _acquitted(self) -> None:
        row = await self.reporter.row()
        tried = replace(row, flags=row.flags & ~Flag.EJECTED | Flag.TRIAL).pack(self.reporter.worker_id)
        await cast("Any", self.store.hset(self.fleet.keys.load, self.reporter.worker_id, tried))
        assert await self.fleet.workers.eject(self.reporter.worker_id, good=True) == "READMITTED"

    async def _lapses(self) -> None:
        await self._server_heard()
        await self._rewrite(vouched=1)
        await slow_tick(self.fleet)

    async def _stream_breaks(self) -> None:
        await self.store.unlink(self.reporter.stream)
        await self.store.set(self.reporter.stream, "no stream")
        await self.reporter.applied()

    async def _server_lost(self) -> None:
        then_ms, self.server_quiet = (await self.store.time())[0] * 1000 - OLD_MS, True
        await self.store.zadd(self.fleet.keys.alive_servers, {"s": then_ms})
        await slow_tick(self.fleet)

    async def _server_heard(self) -> None:
        self.server_quiet = False
        await self.server.send("heartbeat")
        await self.server.applied()

    async def _misnamed(self) -> None:
        await self._renamed("other")

    async def _renamed(self, *names: str) -> None:
        """Let the same process announce other names."""
        self.server_quiet = False
        await self.server.join(self.server.nonce, models=names or (self.fleet.keys.tag.replace("~", "/"), "alias"))
        await self.server.applied()

    async def _paused(self) -> None:
        await self._heard(paused=True)

    async def _resumed(self) -> None:
        await self._heard()

    async def _drain(self) -> None:
        await self.fleet.workers.drain(self.reporter.worker_id, draining=True)

    async def _undrain(self) -> None:
        await self.fleet.workers.drain(self.reporter.worker_id, draining=False)


@pytest.mark.in_turn
@pytest.mark.parametrize("seed", range(2))
async def test_a_worker_lives_as_it_is_drawn(store: aioredis.Redis, fleet: Fleet, seed: int) -> None:
    lived, rng, path, seen = Life(store, fleet), random.Random(seed), list[str](), set[tuple[str, str]]()
    for _ in range(STEPS):
        possible = lived.possible()
        new = [event for event in possible if (lived.expected, event) not in seen]
        weights = [1 if event is Event.FORGOTTEN else 2 if event in SETBACKS else 12 for event in possible]
        event = rng.choice(new) if new and rng.random() < 0.25 else rng.choices(possible, weights)[0]
        path.append(f"{lived.expected} - {event.name}")
        seen |= {(lived.standing, event), (lived.expected, event)}
        await lived.happen(event)
        assert await lived.state() == lived.expected, str(path[-14:])
    tried = {(arrow.before, arrow.event) for arrow in (*CHANGES, *TURNS) if arrow.before != "approximate"}
    tried |= {(hold, event) for event, hold in ENDS}
    assert tried - seen == {("gone", Event.REGISTERED)}, "what no step has tried"


async def test_a_stock_engine_lives_as_it_is_drawn(store: aioredis.Redis, fleet: Fleet) -> None:
    pool = fleet.keys.tag.replace("~", "/")

    async def checked(*names: str, healthy: bool) -> WorkerState:
        found = Check("PASSED" if healthy else "FAILED")
        await fleet.workers.register("stock", {"scheme_id": 1, "url": URL, "models": names or [pool]}, 100, found)
        (view,) = await fleet.workers.read()
        assert view.approximate
        return view.state

    assert await checked(healthy=True) == "approximate"
    assert await checked(healthy=False) == "silent"
    assert await checked(healthy=True) == "approximate"
    await fleet.workers.drain("stock", draining=True)
    assert await checked(healthy=True) == "draining", "its heartbeat takes nothing back"
    assert await checked(healthy=False) == "silent"
    assert await checked(healthy=True) == "draining"
    await fleet.workers.drain("stock", draining=False)
    assert await checked(healthy=True) == "approximate"
    assert await checked("other", healthy=True) == "misnamed"
    assert await checked("other", healthy=False) == "silent"
    assert await checked("other", pool, healthy=True) == "approximate"
    assert await fleet.upkeep.forget("stock")
    assert await fleet.workers.read() == []


def test_only_what_is_alive_is_counted_as_such() -> None:
    assert [state.value for state in WorkerState if not state.alive] == ["gone", "left", "silent", "joining"]
    assert set(METRIC_LABELS) >= ROUTABLE
