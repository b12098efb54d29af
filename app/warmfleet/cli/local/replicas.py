"""``warmfleet serve --workers N``: replicas on the same ports, and the parent that starts, watches and replaces them.

Each replica has its own listening socket for the clients' port (SO_REUSEPORT); the kernel spreads new connections
evenly over these sockets. The parent keeps all of them open, so that no connection is lost that waits in a socket when
its replica ends. Replicas that are ready also listen on the sockets of replicas that are not.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from warmfleet.api.listening.parent import ALIVE, HEARTBEAT_S, READY, RETIRED, Listening
from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local.ports import OWN_ADMIN_PORT, OWN_EPP_PORT, check_rows, claim_shared, listen

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from typing import Any

    from warmfleet.settings import Settings

logger = logging.getLogger("warmfleet.replicas")

BACKLOG = 2_048  # most connections that the kernel keeps until a replica accepts them
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # pause before an ended replica's restart: the first, and the longest
STEADY_S = 60.0  # a replica that lived longer gets the first pause again; else the pause doubles
READY_WITHIN_S = 60.0  # longest start of a replica in a reload; in a fleet without workers it is ready after 15 s
STOPS_LATE_S = 15.0  # time from the end of a stopping replica's time limit (drain and open answers) to its kill
#: A busy replica is not taken as hung: its longest measured pause is 0.3 s (garbage collection, 5,000 streams).
SILENT_BEATS = 30  # missing heartbeats in a row (one is sent per second) after which a replica is killed as hung
USERS_FAULT = 2  # exit status for a wrong setting or option, by which no restart would help


@dataclass(eq=False)
class Replica:
    """A replica's process. line: the socket by which the parent sends it ``Listening``. listening: the last one sent.

    missed: number of heartbeats missing since the last one; None before the first, and after the socket's end.
    """

    place: int
    process: asyncio.subprocess.Process
    line: asyncio.StreamWriter
    began: float
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    listening: Listening | None = None
    failures: int = 0
    missed: int | None = None

    def listen_on(self, listening: Listening) -> None:
        """Let the replica listen on these sockets and on no others."""
        if listening != self.listening:
            self.listening = listening
            self.line.write(listening.line())

    def signal(self, number: int) -> None:
        """Send the process a signal, unless it has ended."""
        if self.process.returncode is None:
            self.process.send_signal(number)


@dataclass(frozen=True, slots=True)
class Shared:
    """The sockets of all replicas: for each replica's number (place) one for clients, and one for operators, gateways
    and their health checks, if there are such ports.
    """

    clients: Sequence[socket.socket]
    operators: Sequence[socket.socket]
    gateways: Sequence[socket.socket] = ()
    probes: Sequence[socket.socket] = ()

    def own(self, place: int) -> list[list[int]]:
        """Return the file numbers of the sockets of one replica alone, by their use."""
        groups = (self.operators, self.gateways, self.probes)
        return [[sock.fileno() for sock in group[place : place + 1]] for group in groups]


def bind(settings: Settings, count: int) -> Shared:
    """Open the sockets of ``count`` replicas; from now on connections wait in them. Raises CommandError."""
    ports = range(settings.admin_port, settings.admin_port + count)
    if count > 1 and not settings.admin_port:
        raise CommandError(
            "--workers needs a WARMFLEET_ADMIN_PORT other than 0, since nobody could ask each replica for its metrics"
            " on the shared port: the first replica takes that port for operators, the others those behind it"
        )
    if settings.admin_port and (settings.port in ports or ports[-1] > 65_535):
        raise CommandError(f"WARMFLEET_ADMIN_PORT to {ports[-1]} are the ports for operators: choose others")
    check_rows(*filter(None, (settings.epp_port, settings.epp_health_port)), count=count)
    with claim_shared(settings.host, settings.port) as claimed:
        port = claimed.getsockname()[1]
        clients = [listen(settings.host, port, shared=True) for _ in range(count)]
    operators = [listen(settings.host, port, chosen_by=OWN_ADMIN_PORT) for port in ports if settings.admin_port]
    gateways, probes = (_in_a_row(settings, first, count) for first in (settings.epp_port, settings.epp_health_port))
    for sock in (*clients, *operators, *gateways, *probes):
        sock.listen(BACKLOG)
    return Shared(clients, operators, gateways, probes)


def _in_a_row(settings: Settings, first: int, count: int) -> list[socket.socket]:
    """Open a port for each replica, from the first one on: a gateway keeps one connection to each picker, so that a
    port that replicas share would leave most of them idle. Raises CommandError.
    """
    ports = range(first, first + count) if first else range(0)
    if ports and ports[-1] > 65_535:
        raise CommandError(f"WARMFLEET_EPP_PORT to {ports[-1]} are the ports for gateways: choose others")
    return [listen(settings.host, port, chosen_by=OWN_EPP_PORT) for port in ports]


class Replicas:
    """The parent process, which starts and watches replicas. ``run`` returns the exit status of the command."""

    def __init__(self, command: Sequence[str], sockets: Shared, stops_within_s: float) -> None:
        """command: starts a replica if ``--place`` is added. stops_within_s: time for draining and open answers."""
        self._command = command
        self._sockets = sockets
        self._kill_after_s = stops_within_s + STOPS_LATE_S
        self._places: list[Replica | None] = [None] * len(sockets.clients)
        self._alive: set[Replica] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._reload = asyncio.Event()
        self._was_ready = False
        self._status = 0

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT; SIGHUP replaces one replica after the other."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload.set)
        for place in range(len(self._places)):
            self._places[place] = await self._start(place)
        self._share()
        rounds = [asyncio.create_task(self._reload_always()), asyncio.create_task(self._end_the_silent())]
        await self._stopping.wait()
        for task in rounds:
            task.cancel()
        while self._alive:
            await asyncio.gather(*map(self._ended, list(self._alive)))
        for task in self._tasks:
            task.cancel()
        return self._status

    # ------------------------------------------------ processes

    async def _start(self, place: int, failures: int = 0) -> Replica:
        ours, theirs = socket.socketpair()
        clients = [sock.fileno() for sock in self._sockets.clients]
        own = self._sockets.own(place)
        with theirs:
            inherited = [theirs.fileno(), *clients, *chain(*own)]
            option = ",".join(
                [str(place), str(theirs.fileno()), *("+".join(map(str, group)) for group in (clients, *own))]
            )
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command, "--place", option, pass_fds=inherited, start_new_session=True
                )
            except BaseException:
                ours.close()
                raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        replica = Replica(place, process, writer, time.monotonic(), failures=failures)
        self._alive.add(replica)
        logger.info("replica %d started (process %d)", place, process.pid)
        self._spawn(self._hear(replica, reader))
        self._spawn(self._watch(replica))
        if self._stopping.is_set():
            replica.signal(signal.SIGTERM)
        return replica

    async def _hear(self, replica: Replica, reader: asyncio.StreamReader) -> None:
        """Read the lines that the replica sends, until the replica closes the socket because it stops or has ended."""
        try:
            while word := await reader.readline():
                if word == ALIVE:
                    replica.missed = 0
                elif word == READY:
                    logger.info("replica %d is ready (process %d)", replica.place, replica.process.pid)
                    self._was_ready = True
                    replica.ready.set()
                    self._share()
        except ConnectionError:
            pass
        finally:
            replica.missed = None

    async def _end_the_silent(self) -> None:
        """Kill every replica that hangs, so that ``_watch`` starts it again.

        Missing heartbeats are counted, not timed, so that none counts as missing while this process does not run.
        """
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for replica in self._alive:
                if replica.missed is None:
                    continue
                replica.missed += 1
                if replica.missed == SILENT_BEATS:
                    text = "replica %d (process %d) hangs: it has been silent for %d s, and is killed"
                    logger.error(text, replica.place, replica.process.pid, SILENT_BEATS * HEARTBEAT_S)
                    replica.signal(signal.SIGKILL)

    async def _watch(self, replica: Replica) -> None:
        """Wait until the replica's process ends. If no new replica has its place, start one after a pause."""
        status = await replica.process.wait()
        replica.line.close()
        self._alive.discard(replica)
        if self._stopping.is_set() or self._places[replica.place] is not replica:
            return
        self._places[replica.place] = None
        self._share()
        if status == USERS_FAULT and not self._was_ready:
            self._status = status
            self._stop(signal.SIGTERM)
            return
        lived_s = time.monotonic() - replica.began
        failures = 1 if lived_s >= STEADY_S else replica.failures + 1
        pause_s = min(FIRST_PAUSE_S * 2 ** (failures - 1), LONGEST_PAUSE_S)
        logger.error(
            "replica %d (process %d) ended by itself after %.1f s, %s; again in %.1f s (time %d in a row)",
            *(replica.place, replica.process.pid, lived_s, _in_words(status), pause_s, failures),
        )
        await asyncio.sleep(pause_s)
        await self._start_again(replica.place, failures)

    async def _start_again(self, place: int, failures: int) -> None:
        """Start a replica at this place, unless a reload has started one. If no process can start, try again later."""
        while self._places[place] is None and not self._stopping.is_set():
            try:
                new = await self._start(place, failures)
            except OSError as error:
                logger.error("replica %d cannot be started (%s); again in %.1f s", place, error, LONGEST_PAUSE_S)  # noqa: TRY400
                await asyncio.sleep(LONGEST_PAUSE_S)
                continue
            if self._places[place] is not None:  # a reload has filled the place meanwhile
                new.listen_on(RETIRED)
                self._spawn(self._ended(new))
                return
            self._places[place] = new
            self._share()

    def _share(self) -> None:
        """Tell each replica where to listen: ready ones share all sockets; if none is ready, each takes its own."""
        present = [replica for replica in self._places if replica is not None]
        serving = [replica for replica in present if replica.ready.is_set()] or present
        served = {replica.place for replica in serving}
        orphans = tuple(place for place in range(len(self._places)) if place not in served)
        for replica in present:
            clients = (replica.place, *orphans) if replica in serving else ()
            replica.listen_on(Listening(clients, operators=True))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------ reload

    async def _reload_always(self) -> None:
        while True:
            await self._reload.wait()
            self._reload.clear()
            for place in range(len(self._places)):
                if not await self._replace(place):
                    break
            else:
                logger.info("reload: every replica was replaced")

    async def _replace(self, place: int) -> bool:
        """Start a new replica, and drain the old one at its place once the new one is ready; False if it never is."""
        try:
            new = await self._start(place)
        except OSError as error:
            logger.error("reload given up: replica %d cannot be started (%s); the others go on as before", place, error)  # noqa: TRY400
            return False
        ended, ready = asyncio.create_task(new.process.wait()), asyncio.create_task(new.ready.wait())
        await asyncio.wait({ended, ready}, timeout=READY_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        ended.cancel()
        if not new.ready.is_set():
            logger.error("reload given up: the new replica %d did not become ready; the others go on as before", place)
            new.signal(signal.SIGTERM)
            self._spawn(self._ended(new))
            return False
        old, self._places[place] = self._places[place], new
        self._share()
        if old is not None:
            old.listen_on(RETIRED)
            await self._ended(old)
        return True

    # ------------------------------------------------ stop

    def _stop(self, number: int) -> None:
        self._stopping.set()
        for replica in self._alive:
            replica.signal(number)

    async def _ended(self, replica: Replica) -> None:
        """Return when the process has ended; kill it if it takes too long."""
        try:
            async with asyncio.timeout(self._kill_after_s):
                await replica.process.wait()
        except TimeoutError:
            logger.error("replica %d (process %d) does not stop: it is killed", replica.place, replica.process.pid)  # noqa: TRY400
            replica.signal(signal.SIGKILL)
            await replica.process.wait()
        self._alive.discard(replica)


def _in_words(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
