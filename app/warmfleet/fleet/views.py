"""Reads the workers of one model, the blocks of a slot, counters, memory, and the artifacts that API servers stored."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from warmfleet.errors import BadRequest, NotFound
from warmfleet.fleet.client import ScriptClient, pairs, redis_errors
from warmfleet.fleet.connection.packing import pack_command
from warmfleet.fleet.rows import Flag, Lease, LoadRow, Stage
from warmfleet.fleet.worker.records import Records
from warmfleet.fleet.worker.state import WorkerState, heard, proof_of, state_of
from warmfleet.protocol import artifacts
from warmfleet.protocol.wire import WORKER_TTL_SECONDS, WireError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator, Mapping, Sequence

    import redis.asyncio as aioredis

    from warmfleet.fleet.client import Timeouts
    from warmfleet.fleet.connection.packing import Argument

ARTIFACT_LIMIT_BYTES = 128 * 2**20  # the largest tokenizers have 30 MB
PIECE_ASKED_OF = 16  # servers that announce it
EMPTY_EXPIRES_S = 86_400  # as long as a file lives that its server does not look after any more
HOLDS_AT_ONCE = 512
PROBE_EXPIRES_S = 120  # a probe lasts 40 s at most
SERVERS_S = 5.0  # between two readings of the records of API servers while no worker changes: an interval of heartbeats

Proved = Literal["OK", "DOWNGRADED", "STALE", "TAKEN"]
Vouched = Literal["VOUCHED", "RENEWED", "REFUSED"]
Verdict = Literal["EJECTED", "READMITTED", "REFUSED", "SAME"]
Registration = Literal["UP", "OUT", "LEAVING", "LISTED", "GONE"]


class Check(NamedTuple):
    """What a replica found of an engine without the plugin. replica: a random word of its own.

    found: ``LEAVING`` if the check passed, but the replica lists the engine no longer; ``SLOW`` if no answer came in
    time. since_s: for how long this replica has found it so, 0 the first time. paused: somebody paused the engine or
    put it to sleep. wait_s: until a request that is sent now would begin there; 0: at once. Both None: not asked.
    cause, reason: of a check that failed, a word (background/worker_words) and a sentence.
    """

    found: Literal["PASSED", "FAILED", "SLOW", "LEAVING"]
    replica: str = ""
    since_s: float = 0.0
    paused: bool | None = None
    wait_s: float | None = None
    cause: str = ""
    reason: str = ""


PASSED = Check("PASSED")


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of a probe: its word, and why in words. cause: a word for counters.

    probed_ms: the record's ``probed`` as it was read before the probe, 0 if it had none; None is recorded in any case.
    owner: the owner of the warming that this ends.
    """

    word: str
    reason: str
    cause: str = ""
    probed_ms: int | None = None
    owner: str = ""


class Registered(NamedTuple):
    """What is registered of such an engine after a check; the words are those of lua/register.lua."""

    slot: int
    in_flight: int
    word: Registration


EJECTED_S = 5.0, 300.0  # how long a worker is out the first time; doubled each time, and never longer than the second


class BadArtifact(BadRequest):
    """A worker's artifact is too large, or its digests are wrong."""

    status, type, code = 502, "server_error", "bad_artifact"


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of the Redis server, in bytes. limit: 0 without one. policy: the name of its eviction policy."""

    used: int
    limit: int
    policy: str

    @property
    def used_permille(self) -> int:
        """The share of the limit that is used; 0 without a limit."""
        return 1_000 * self.used // self.limit if self.limit else 0


@dataclass(slots=True)
class WorkerView:
    """One worker, as one reading found it.

    ``record`` and ``server`` were checked by ``records``: every field that is read later has its type. ``server`` is
    the record of its API server; None for approximate workers and while no API server has joined. ``heartbeat_age_s``
    is None if the worker said goodbye or was never heard. ``proof`` is the result of the last probe, or "approximate"
    where there is none; ``state`` says whether requests may go to the worker. ``probed_age_s`` counts from that
    result; None if there is none, or the clock stepped back. ``server_age_s`` is the ``heartbeat_age_s`` of its API
    server. ``vouched_age_s`` counts from the last time when a replica vouched for the worker; None if none did.
    ``told_age_s`` counts from the last time when a check read the load of an approximate worker from its metrics.
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
        """A decision may choose it now."""
        return self.state.routable

    @property
    def loras(self) -> dict[str, str]:
        """Name and path of the adapters that its API server announced; none that has the name of a model."""
        loras = ((self.server or {}).get("facts") or {}).get("loras") or {}
        return {name: path for name, path in loras.items() if name not in self.models}

    @property
    def names(self) -> list[str]:
        """Every name that its API server answers to: served names, aliases and adapters."""
        return [*self.models, *self.loras]

    @property
    def misnamed(self) -> bool:
        """It does not serve its pool's name."""
        return bool(self.load.flags & Flag.MISNAMED)

    @property
    def heard(self) -> bool:
        """Its heartbeats come, or replicas vouch for it."""
        return heard(self.heartbeat_age_s) or bool(self.load.flags & Flag.UNHEARD)

    @property
    def draining(self) -> bool:
        """The operator drains it, whatever else its state is: a drained worker may also be silent."""
        return bool(self.load.flags & Flag.DRAINING)

    @property
    def said_goodbye(self) -> bool:
        """Its engine core or its API server has ended, or is about to, and told so."""
        return not self.approximate and (
            self.heartbeat_age_s is None or (self.server is not None and self.server_age_s is None)
        )

    @property
    def paused(self) -> bool:
        """Its last heartbeat, or its last check, said that somebody has paused its engine or put it to sleep."""
        return bool(self.load.flags & Flag.PAUSED)

    @property
    def approximate(self) -> bool:
        """It has no plugin: a replica registered it and checks its health."""
        return bool(self.load.flags & Flag.APPROXIMATE)


class Views(ScriptClient):
    """Reads workers and their blocks. ``prove`` and ``register`` write for routers, ``drain`` for the operator."""

    def __init__(self, redis: aioredis.Redis, model: str, timeouts: Timeouts | None = None) -> None:
        super().__init__(redis, model, timeouts)
        keys = self.keys
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
        self._servers: dict[bytes, bytes] = {}
        self._announcements: bytes | None = None  # the count of them at that reading
        self._servers_until = 0.0  # monotonic seconds: until then ``look`` need not read them again
        self._rows: dict[bytes, tuple[bytes, LoadRow]] = {}  # of the last reading
        self._announced: dict[str, dict[str, Any]] = {}  # of the last reading: the records of API servers
        self.quiet_s = 0.0  # of all that were ever heard and have not said goodbye, the longest silence at that reading

    async def workers(self) -> list[WorkerView]:
        """Every worker that has a row and a record that can be read, by name. Raises FleetUnavailable."""
        return await self._workers(await self.reading(), fresh=True)

    def reading(self) -> asyncio.Future[list[Any]]:
        """What ``look`` is made of, as Redis has it now. Raises FleetUnavailable."""
        return self.together(self._reading)

    async def look(self, reading: list[Any]) -> list[WorkerView]:
        """As ``workers``, for a caller that asks again and again.

        The records of API servers, the largest part of all that a reading reads, are read when one of them has changed,
        or a worker comes, goes or changes its state, else every SERVERS_S.
        """
        return await self._workers(reading, fresh=False)

    async def _workers(self, reading: list[Any], *, fresh: bool) -> list[WorkerView]:
        records, rows, *scores, servers_known, announcements, (seconds, micros) = reading
        loads = self._loads(pairs(rows))
        changed = servers_known != len(self._servers) or announcements != self._announcements
        doubt = changed or time.monotonic() >= self._servers_until
        if fresh or doubt or self._moved(loads):
            self._servers_until = 0.0  # until they are read: this may fail
            self._servers = pairs(await self.ask("HGETALL", self.keys.servers))
            self._servers_until, self._announcements = time.monotonic() + SERVERS_S, announcements
        self._rows = loads
        now = int(seconds) + int(micros) / 1e6
        ages, server_ages = (
            {name.decode(): max(0.0, now - float(ms) / 1000) for name, ms in pairs(one).items()} for one in scores
        )
        self.quiet_s = max(max(one.values(), default=0.0) for one in (ages, server_ages))
        whole = [(name, raw) for name, raw in sorted(pairs(records).items()) if name in loads]
        told, servers = self.records.read(whole, self._servers.items())
        self._announced = servers
        return [
            _view(name, record, loads[name.encode()][1], servers, ages, server_ages, now)
            for name, record in told.items()
        ]

    def _loads(self, rows: Mapping[bytes, bytes]) -> dict[bytes, tuple[bytes, LoadRow]]:
        """Each row as it was packed and unpacked; one that did not change since the last reading is not unpacked."""
        last, found = self._rows, dict[bytes, tuple[bytes, LoadRow]]()
        for name, raw in rows.items():
            known = last.get(name)
            found[name] = known if known is not None and known[0] == raw else (raw, LoadRow.unpack(raw))
        return found

    def _moved(self, loads: Mapping[bytes, tuple[bytes, LoadRow]]) -> bool:
        """Whether a worker came, went or changed its flags or its incarnation since the last reading."""
        last = self._rows
        return loads.keys() != last.keys() or any(
            row is not last[name][1] and _standing(row) != _standing(last[name][1]) for name, (_, row) in loads.items()
        )

    async def holds(self, slot: int, hashes: Sequence[bytes]) -> list[bool]:
        """For each of these 8-byte hashes: whether ``slot`` holds it, by the index. Raises FleetUnavailable."""
        answer: list[bool] = []
        with redis_errors():
            for start in range(0, len(hashes), HOLDS_AT_ONCE):
                chunk = list(hashes[start : start + HOLDS_AT_ONCE])
                found = await cast("Awaitable[list[int]]", self.redis.smismember(self.keys.slot(slot), chunk))
                answer += [one == 1 for one in found]
        return answer

    async def counts(self) -> dict[str, int]:
        """Fleet-wide counters of protocol events."""
        with redis_errors():
            found = await cast("Awaitable[dict[bytes, bytes]]", self.redis.hgetall(self.keys.counts))
        return {name.decode(): int(value) for name, value in found.items()}

    async def memory(self) -> Memory:
        """The memory of the Redis server. Raises FleetUnavailable."""
        told: bytes = await self.ask("INFO", "memory")
        info = dict(line.partition(b":")[::2] for line in told.split(b"\r\n"))
        policy = info.get(b"maxmemory_policy", b"").decode("ascii", "replace")
        return Memory(int(info[b"used_memory"]), int(info.get(b"maxmemory", 0)), policy)

    async def artifact(self, server_id: str, entry: dict[str, Any]) -> bytes:
        """The content of one manifest entry ``{sha256, bytes, chunks}``; each piece and the whole are checked.

        A piece that this server does not have (any more) is taken from another one that announces it.
        Raises BadArtifact if a digest is wrong or the content is over 128 MB, NotFound if a piece is missing.
        """
        name, pieces, held = str(entry.get("sha256"))[:12], [], 0
        for digest in entry["chunks"]:
            piece = await self._piece(server_id, str(digest)) or await self._piece_elsewhere(str(digest))
            if not piece:
                raise NotFound(f"artifact {name} of {server_id}: a piece is not there")
            held += len(piece)
            if held > ARTIFACT_LIMIT_BYTES:
                raise BadArtifact(f"artifact {name} of {server_id} has over {ARTIFACT_LIMIT_BYTES} compressed bytes")
            pieces.append(piece)
        try:  # 30 MB take 0.2 s of inflating and hashing: not on the event loop
            return await asyncio.to_thread(artifacts.join, entry, pieces, ARTIFACT_LIMIT_BYTES)
        except (WireError, ValueError, TypeError, KeyError) as error:
            raise BadArtifact(f"artifact {name} of {server_id}: {error}") from error

    async def _piece(self, server_id: str, digest: str) -> bytes | None:
        with redis_errors():
            return await cast("Awaitable[bytes | None]", self.redis.get(self.keys.artifact(server_id, digest)))

    async def _piece_elsewhere(self, digest: str) -> bytes | None:
        """The piece as one of the first few servers has it that announced it at the last reading, if one has it right.

        Most servers of a large pool have empty pieces (``background/spare_files``).
        """
        for server_id in islice(self._announcing(digest), PIECE_ASKED_OF):
            piece = await self._piece(server_id, digest)
            if piece and hashlib.sha256(piece).hexdigest() == digest:
                return piece
        return None

    def _announcing(self, digest: str) -> Iterator[str]:
        for server_id, record in sorted(self._announced.items()):
            if any(digest in entry["chunks"] for entry in (record.get("artifacts") or {}).values()):
                yield server_id

    async def piece_sizes(self, server_id: str, digests: Sequence[str]) -> list[int]:
        """The bytes of each of these pieces of a server's files; 0 for one that is empty or not there."""
        return await self._of_pieces(server_id, digests, "STRLEN")

    async def empty_pieces(self, server_id: str, digests: Sequence[str]) -> None:
        """Let a server's pieces take no memory. Their keys stay, so that the server does not store them again.

        Pieces that do not expire are left as they are: their server does not look after them, and would never notice
        that they are wanted again.
        """
        if all(await self._of_pieces(server_id, digests, "EXPIRE", EMPTY_EXPIRES_S, "XX")):
            await self._of_pieces(server_id, digests, "SET", b"", "XX", "KEEPTTL")

    async def want_pieces(self, server_id: str, digests: Sequence[str]) -> None:
        """Delete the empty ones of a server's pieces: it stores them again when it looks after its files next."""
        sizes = await self.piece_sizes(server_id, digests)
        empty = [digest for digest, size in zip(digests, sizes, strict=True) if not size]
        await self._of_pieces(server_id, empty, "UNLINK")

    async def _of_pieces(self, server_id: str, digests: Sequence[str], command: str, *options: Argument) -> list[Any]:
        keys = [self.keys.artifact(server_id, digest) for digest in digests]
        return await self.together([("", pack_command(command, key, *options)) for key in keys]) if keys else []

    async def await_blocks(self, worker_id: str, probe: str, hashes: Sequence[bytes]) -> None:
        """Let apply note from now on which of these blocks the worker's stream reports, even if evicted soon after.

        Two probes of one worker do not disturb each other: their prompts are random, so their blocks differ.
        ``await_no_blocks`` ends it; the notes of a replica that died expire. Raises FleetUnavailable.
        """
        key = self.keys.probe(worker_id)
        with redis_errors():
            async with self.redis.pipeline(transaction=False) as pipe:
                pipe.sadd(key, probe, *hashes)
                pipe.expire(key, PROBE_EXPIRES_S)
                await pipe.execute()

    async def awaited(self, worker_id: str, probe: str, hashes: Sequence[bytes]) -> list[bool] | None:
        """For each block: True while the stream has not reported it. None if Redis has lost the notes.

        Raises FleetUnavailable.
        """
        key = self.keys.probe(worker_id)
        with redis_errors():
            noted, *left = await cast("Awaitable[list[int]]", self.redis.smismember(key, [probe, *hashes]))
        return [one == 1 for one in left] if noted else None

    async def await_no_blocks(self, worker_id: str, probe: str, hashes: Sequence[bytes]) -> None:
        """The probe is over: note nothing more for it."""
        with redis_errors():
            await self.redis.srem(self.keys.probe(worker_id), probe, *hashes)

    async def prefilled(self, reservation: str) -> bool:
        """The stream of this reservation's worker has reported that its prefill is done. Raises FleetUnavailable."""
        lease = await self.lease(reservation)
        return lease is not None and lease.stage >= Stage.STARTED

    async def lease(self, reservation: str) -> Lease | None:
        """What Redis holds of a reservation, None if it holds nothing. Raises FleetUnavailable."""
        with redis_errors():
            packed = await cast("Awaitable[bytes | None]", self.redis.hget(self.keys.lease, reservation))
        return None if packed is None else Lease.unpack(packed)

    async def prove(self, worker_id: str, nonce: str, proof: Proof) -> Proved:
        """Record the result of a probe.

        Returns STALE if the worker joined anew (its nonce is another), or if this is a failure and another result came
        first; TAKEN if another replica warms the worker, or if this owner's lease is over; DOWNGRADED if the worker was
        proven before and is not any more. Raises FleetUnavailable.
        """
        answer = await self.keep(
            "prove",
            worker_id=worker_id,
            nonce=nonce,
            proof=proof.word,
            cause=proof.cause,
            reason=proof.reason,
            probed="" if proof.probed_ms is None else proof.probed_ms,
            owner=proof.owner,
            lease_ms=0,
        )
        return cast("Proved", answer.decode())

    async def warming(self, worker_id: str, nonce: str, owner: str, lease_ms: int) -> Proved:
        """``owner`` warms this worker before it takes requests, for ``lease_ms`` from now on; calling again renews it.

        Returns TAKEN if another owner warms it or has done so. Raises FleetUnavailable.
        """
        answer = await self.keep(
            "prove",
            worker_id=worker_id,
            nonce=nonce,
            proof="warming",
            cause="",
            reason="",
            probed="",
            owner=owner,
            lease_ms=lease_ms,
        )
        return cast("Proved", answer.decode())

    async def register(
        self, worker_id: str, record: dict[str, Any], capacity_blocks: int, check: Check = PASSED
    ) -> Registered:
        """Tell what a check of an approximate worker found. record: scheme_id, url, models, started, ...

        Raises FleetUnavailable.
        """
        slot, in_flight, word = await self.keep(
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
        """This worker's engine answers over HTTP, though its heartbeats are missing: it stays routable for a TTL.

        Returns REFUSED if the worker joined anew (its nonce is another), said goodbye, or must not be vouched for
        (lua/vouch.lua). Raises FleetUnavailable.
        """
        return cast("Vouched", (await self.keep("vouch", worker_id=worker_id, nonce=nonce)).decode())

    async def eject(self, worker_id: str, *, good: bool) -> Verdict:
        """The verdict of this replica on a worker: ejected, or (after a trial) good.

        Returns REFUSED if half of the workers are ejected already. Raises FleetUnavailable.
        """
        first_ms, most_ms = (round(1000 * seconds) for seconds in EJECTED_S)
        answer = await self.keep("eject", worker_id=worker_id, good=int(good), first_ms=first_ms, most_ms=most_ms)
        return cast("Verdict", answer.decode())

    async def drain(self, worker_id: str, *, draining: bool) -> bool:
        """Send no new request to a worker, or send them again. Requests that run there go on.

        Returns False if Redis has no such worker.

        For the operator: no replica calls this. Raises FleetUnavailable.
        """
        return bool(await self.keep("drain", worker_id=worker_id, draining=int(draining)))


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
