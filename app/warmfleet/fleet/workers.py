"""The workers of one pool: reads their state, and writes what replicas find out and operators order about them."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from warmfleet.fleet.client import pairs
from warmfleet.fleet.connection.packing import pack_command
from warmfleet.fleet.rows import Flag, LoadRow
from warmfleet.fleet.worker.records import Records
from warmfleet.fleet.worker.state import WorkerState, heard, proof_of, state_of
from warmfleet.protocol.wire import WORKER_TTL_SECONDS

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from warmfleet.fleet.client import Scripts
    from warmfleet.protocol.transfer import Transfer

SERVERS_S = 5.0  # time between two readings of the API servers' records while no worker changes; a heartbeat's interval

Vouched = Literal["VOUCHED", "RENEWED", "REFUSED"]
Verdict = Literal["EJECTED", "READMITTED", "REFUSED", "SAME"]
Registration = Literal["UP", "OUT", "LEAVING", "LISTED", "GONE"]


class Check(NamedTuple):
    """A replica's check of an engine without the plugin. replica: a random word that names the replica.

    found: ``LEAVING`` if the replica does not list the engine any more; ``SLOW`` if no answer came in
    time. since_s: the time for which this replica has had the same result, 0 the first time. paused: the engine is
    paused or asleep. wait_s: the time until a request that is sent now would start there. Both are None if not asked.
    cause, reason: of a failed check, a word (background/worker_words) and a sentence.
    """

    found: Literal["PASSED", "FAILED", "SLOW", "LEAVING"]
    replica: str = ""
    since_s: float = 0.0
    paused: bool | None = None
    wait_s: float | None = None
    cause: str = ""
    reason: str = ""


PASSED = Check("PASSED")


class Registered(NamedTuple):
    """The state of an engine without the plugin after a check; lua/register.lua explains the words."""

    slot: int
    in_flight: int
    word: Registration


EJECTED_S = 5.0, 300.0  # first and longest time for which a worker is ejected; each ejection lasts twice the last


@dataclass(slots=True)
class WorkerView:
    """A worker, as one reading found it.

    ``record`` and ``server`` were checked by ``records``: every field that is read later has its type. ``server`` is
    the record of its API server; None for approximate workers and while no API server has joined. ``heartbeat_age_s``
    is None if the worker left or was never heard. ``proof`` is the result of the last probe, or "approximate"
    for a worker that is not probed; ``state`` says whether requests may go to the worker. ``probed_age_s`` is the age
    of that result; None without one, or if the clock stepped back. ``server_age_s`` is the ``heartbeat_age_s`` of its
    API server. ``vouched_age_s`` is the time since the last ``vouch`` for the worker; None without one.
    ``told_age_s`` is the time since a check last read the load of an approximate worker from its metrics.
    """

    worker_id: str
    record: dict[str, Any]
    server: dict[str, Any] | None
    load: LoadRow
    heartbeat_age_s: float | None
    state: WorkerState
    proof: str
    url: str
    models: list[str]
    probed_age_s: float | None = None
    server_age_s: float | None = None
    vouched_age_s: float | None = None
    told_age_s: float | None = None

    @property
    def routable(self) -> bool:
        """Whether a decision may choose the worker now."""
        return self.state.routable

    @property
    def loras(self) -> dict[str, str]:
        """Name and path of each adapter that the API server announced, except adapters with the name of a model."""
        loras = ((self.server or {}).get("facts") or {}).get("loras") or {}
        return {name: path for name, path in loras.items() if name not in self.models}

    @property
    def labels(self) -> frozenset[str]:
        """The labels of the worker, each as ``name=value``."""
        return frozenset(f"{name}={value}" for name, value in self.record.get("labels", {}).items())

    @property
    def transfer(self) -> Transfer | None:
        """How the worker exchanges blocks with others; None without a KV connector, or if that is malformed."""
        return self.record.get("transfer")

    @property
    def names(self) -> list[str]:
        """Every name that the worker's API server answers to: served names, aliases and adapters."""
        return [*self.models, *self.loras]

    @property
    def misnamed(self) -> bool:
        """Whether the worker does not serve its pool's name."""
        return bool(self.load.flags & Flag.MISNAMED)

    @property
    def heard(self) -> bool:
        """Whether the last heartbeat is recent, or a replica has reached the engine over HTTP instead (``vouch``)."""
        return heard(self.heartbeat_age_s) or bool(self.load.flags & Flag.UNHEARD)

    @property
    def draining(self) -> bool:
        """Whether the operator drains the worker, whatever its state: a drained worker may also be silent."""
        return bool(self.load.flags & Flag.DRAINING)

    @property
    def said_goodbye(self) -> bool:
        """Whether the engine core or the API server has announced its end."""
        return not self.approximate and (
            self.heartbeat_age_s is None or (self.server is not None and self.server_age_s is None)
        )

    @property
    def paused(self) -> bool:
        """Whether the engine was paused or put to sleep, by its last heartbeat or its last check."""
        return bool(self.load.flags & Flag.PAUSED)

    @property
    def approximate(self) -> bool:
        """Whether the worker has no plugin, so that replicas register it and check its health."""
        return bool(self.load.flags & Flag.APPROXIMATE)


class Workers:
    """Reads workers. ``register``, ``vouch`` and ``eject`` write for routers, ``drain`` for the operator.

    servers: the records of API servers by id, of the last reading. quiet_s: the longest silence at that reading, of all
    workers and API servers that were ever heard and have not left.
    """

    def __init__(self, scripts: Scripts) -> None:
        self._scripts, keys = scripts, scripts.keys
        self.records = Records(keys.tag)
        self._reading = [
            ("", pack_command("HGETALL", keys.workers)),
            ("", pack_command("HGETALL", keys.load)),
            ("", pack_command("ZRANGE", keys.alive, 0, -1, "WITHSCORES")),
            ("", pack_command("ZRANGE", keys.alive_servers, 0, -1, "WITHSCORES")),
            ("", pack_command("HLEN", keys.servers)),
            ("", pack_command("HGET", keys.counts, "announced")),
            ("", pack_command("TIME")),
        ]
        self.servers: dict[str, dict[str, Any]] = {}
        self.quiet_s = 0.0
        self._raw_servers: dict[bytes, bytes] = {}
        self._announcements: bytes | None = None  # the counter of announcements at the last reading
        self._servers_until = 0.0  # monotonic time until which ``look`` need not read ``_raw_servers`` again
        self._rows: dict[bytes, tuple[bytes, LoadRow]] = {}  # the rows of the last reading, packed and unpacked

    async def read(self) -> list[WorkerView]:
        """Read every worker that has a row and a readable record, by name. Raises FleetUnavailable."""
        return await self._read(await self.reading(), fresh=True)

    def reading(self) -> asyncio.Future[list[Any]]:
        """Read the raw data for ``look`` from Redis. Raises FleetUnavailable."""
        return self._scripts.together(self._reading)

    async def look(self, reading: list[Any]) -> list[WorkerView]:
        """Return the workers as ``read`` does, for a caller that repeats this often. reading: from ``reading``.

        The records of API servers, the largest part of the data, are read only when one of them has changed, when a
        worker comes, goes or changes its state, and else every SERVERS_S.
        """
        return await self._read(reading, fresh=False)

    async def _read(self, reading: list[Any], *, fresh: bool) -> list[WorkerView]:
        records, rows, *scores, servers_known, announcements, (seconds, micros) = reading
        loads = self._loads(pairs(rows))
        changed = servers_known != len(self._raw_servers) or announcements != self._announcements
        doubt = changed or time.monotonic() >= self._servers_until
        if fresh or doubt or self._moved(loads):
            self._servers_until = 0.0  # if reading the records fails, the next call tries again
            self._raw_servers = pairs(await self._scripts.ask("HGETALL", self._scripts.keys.servers))
            self._servers_until, self._announcements = time.monotonic() + SERVERS_S, announcements
        self._rows = loads
        now = int(seconds) + int(micros) / 1e6
        ages, server_ages = (
            {name.decode(): max(0.0, now - float(ms) / 1000) for name, ms in pairs(score).items()} for score in scores
        )
        self.quiet_s = max((*ages.values(), *server_ages.values()), default=0.0)
        whole = [(name, raw) for name, raw in sorted(pairs(records).items()) if name in loads]
        told, self.servers = self.records.read(whole, self._raw_servers.items())
        return [
            _view(name, record, loads[name.encode()][1], self.servers, ages, server_ages, now)
            for name, record in told.items()
        ]

    def _loads(self, rows: Mapping[bytes, bytes]) -> dict[bytes, tuple[bytes, LoadRow]]:
        """Return each row packed and unpacked; a row that did not change since the last reading is not unpacked."""
        last, found = self._rows, dict[bytes, tuple[bytes, LoadRow]]()
        for name, raw in rows.items():
            known = last.get(name)
            found[name] = known if known is not None and known[0] == raw else (raw, LoadRow.unpack(raw))
        return found

    def _moved(self, loads: Mapping[bytes, tuple[bytes, LoadRow]]) -> bool:
        """Return whether a worker came, went or changed its flags or its incarnation since the last reading."""
        last = self._rows
        return loads.keys() != last.keys() or any(
            row is not last[name][1] and _standing(row) != _standing(last[name][1]) for name, (_, row) in loads.items()
        )

    async def register(
        self, worker_id: str, record: dict[str, Any], capacity_blocks: int, check: Check = PASSED
    ) -> Registered:
        """Record the check of an approximate worker. record: scheme_id, url, models, started, ...

        Raises FleetUnavailable.
        """
        slot, in_flight, word = await self._scripts.keep(
            "register",
            worker_id=worker_id,
            record_json=json.dumps(record, separators=(",", ":")),
            capacity_blocks=capacity_blocks,
            found=check.found,
            replica=check.replica,
            since_ms=round(1000 * check.since_s),
            ttl_ms=round(1000 * WORKER_TTL_SECONDS),
            paused="" if check.paused is None else int(check.paused),
            wait_ms="" if check.wait_s is None else round(1000 * check.wait_s),
            cause=check.cause,
            reason=check.reason,
        )
        return Registered(slot, in_flight, cast("Registration", word.decode()))

    async def vouch(self, worker_id: str, nonce: str) -> Vouched:
        """Keep a worker without heartbeats routable for a TTL, because its engine answers this replica over HTTP.

        Returns REFUSED if the worker joined anew (with another nonce), left, or must not be vouched for
        (lua/vouch.lua). Raises FleetUnavailable.
        """
        return cast("Vouched", (await self._scripts.keep("vouch", worker_id=worker_id, nonce=nonce)).decode())

    async def eject(self, worker_id: str, *, good: bool) -> Verdict:
        """Report this replica's verdict on a worker: good (after a trial), or else to be ejected.

        Returns REFUSED if half of the workers are ejected already. Raises FleetUnavailable.
        """
        first_ms, most_ms = (round(1000 * seconds) for seconds in EJECTED_S)
        answer = await self._scripts.keep(
            "eject", worker_id=worker_id, good=int(good), first_ms=first_ms, most_ms=most_ms
        )
        return cast("Verdict", answer.decode())

    async def drain(self, worker_id: str, *, draining: bool) -> bool:
        """Send no new request to a worker, or send them again. Requests that run there go on.

        Returns False if Redis has no such worker.

        For the operator: no replica calls this. Raises FleetUnavailable.
        """
        return bool(await self._scripts.keep("drain", worker_id=worker_id, draining=int(draining)))


def _standing(row: LoadRow) -> tuple[int, int, int]:
    return row.epoch, row.slot, row.flags


def _view(
    worker_id: str,
    record: dict[str, Any],
    load: LoadRow,
    servers: dict[str, dict[str, Any]],
    ages: Mapping[str, float],
    server_ages: Mapping[str, float],
    now: float,
) -> WorkerView:
    age, server_id = ages.get(worker_id), str(record.get("server_id", ""))
    approximate = bool(load.flags & Flag.APPROXIMATE)
    server = None if approximate else servers.get(server_id)
    source = record if approximate else server or {}
    url = str(source.get("url") or "")
    return WorkerView(
        worker_id=worker_id,
        record=record,
        server=server,
        load=load,
        heartbeat_age_s=age,
        state=state_of(load.flags, record, url, age, now),
        proof="approximate" if approximate else proof_of(record, now),
        url=url,
        models=list(source.get("models") or []),
        probed_age_s=_age(record.get("probed"), now),
        server_age_s=server_ages.get(server_id),
        vouched_age_s=_age(record.get("vouched"), now),
        told_age_s=_age(record.get("told"), now),
    )


def _age(since_ms: float | None, now: float) -> float | None:
    return None if since_ms is None or since_ms / 1000 > now else now - since_ms / 1000
