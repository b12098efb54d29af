"""Renders templates that no operator has approved, each in a process of its own, which has limits of time and memory.

Every template has its own process, so a template can harm only the requests that use it. The process renders one
request at a time. If a render meets a limit, its request is routed by load, the process is replaced, and the requests
that wait go to the new process. A template that meets STRIKES limits within WITHIN_S is not run for FIRST_HOLD_S or
longer.
"""

from __future__ import annotations

import asyncio
import logging
import marshal
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import markupsafe

import warmfleet
from warmfleet.prompt.messages import Format, Message, NotReproducible
from warmfleet.untrusted import render_child
from warmfleet.untrusted.render_child import DONE, HEAD_BYTES, MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from warmfleet.metrics import Metrics

logger = logging.getLogger("warmfleet.untrusted.render_process")

START_S = 10.0  # longest time in which a process may start and compile
WALL_S = 3.0  # longest wall time of an answer; the CPU limit does not end a stopped process, which uses no CPU time
WAIT_S = 2.0  # longest wait of a request for the template's process; after that the request is routed by load
MAX_WAITING = 64  # most requests that wait for one template
MAX_REQUEST_BYTES = 4 * 2**20
PIECE_BYTES = 2**20  # most bytes per write to the socket, because copying more at once would delay the event loop
#: Longest output: OUTPUT_BYTES, plus OUTPUT_FACTOR times the request. More would keep the tokenizer from others.
OUTPUT_BYTES, OUTPUT_FACTOR = 65_536, 4
STRIKES, WITHIN_S = 3, 60.0  # a template that meets so many limits within so many seconds is held back (not run)
FIRST_HOLD_S, LONGEST_HOLD_S = 60.0, 600.0  # length of the first hold, doubled with each further one up to the longest


def folders_of(*modules: ModuleType) -> Sequence[str]:
    """Return the folders that a process needs on its path to import these modules."""
    return sorted({str(Path(str(module.__file__)).parents[1]) for module in modules})


_FOLDERS = folders_of(warmfleet, jinja2, markupsafe)


class LimitMet(Exception):  # noqa: N818  not an error: foreign code may fail
    """A process met a limit or died. ``kind``: ``time``, ``memory``, ``output``, ``stuck`` or ``crash``."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Child:
    """A process, and the replica's end of the socket that connects the two. The two share nothing else."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, program: str = render_child.__file__, folders: Sequence[str] = _FOLDERS) -> Child:
        """Start ``program``, which may import from ``folders``. Raises LimitMet if no process can be started."""
        spawning = asyncio.ensure_future(asyncio.to_thread(_spawn, program, folders))
        try:
            process, ours = await asyncio.shield(spawning)
        except asyncio.CancelledError:
            process, ours = await spawning  # else nobody would end the process
            ours.close()
            process.kill()
            process.wait()
            raise
        except OSError as error:
            logger.warning("no process can be started for a template or tokenizer of a worker: %s", error)
            raise LimitMet("crash") from error
        return cls(process, *await asyncio.open_unix_connection(sock=ours))

    async def ask(self, request: bytes, seconds: float | None = None) -> tuple[bytes, bytes]:
        """Send a request; return status and body of the answer. Raises LimitMet; the caller must then call ``end``."""
        try:
            async with asyncio.timeout(seconds or WALL_S):
                self._writer.write(len(request).to_bytes(HEAD_BYTES, "little") + request[:PIECE_BYTES])
                for start in range(PIECE_BYTES, len(request), PIECE_BYTES):
                    await self._writer.drain()
                    self._writer.write(request[start : start + PIECE_BYTES])
                head = await self._reader.readexactly(1 + HEAD_BYTES)
                size = int.from_bytes(head[1:], "little")
                if size > OUTPUT_BYTES + OUTPUT_FACTOR * len(request):
                    raise LimitMet("output")
                body = await self._reader.readexactly(size)
        except TimeoutError as error:
            raise LimitMet("stuck") from error
        except (asyncio.IncompleteReadError, OSError) as error:
            self.process.kill()  # the process may live on with a closed socket; the exit status of a dead one stays
            status = await asyncio.to_thread(self.process.wait)
            raise LimitMet("time" if status == -signal.SIGPROF else "crash") from error
        if head[:1] == MEMORY:
            raise LimitMet("memory")
        return head[:1], body

    async def end(self) -> None:
        """Kill the process and take its exit status."""
        self.process.kill()
        self._writer.close()
        await asyncio.to_thread(self.process.wait)


def _spawn(program: str, folders: Sequence[str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    zone = {"TZ": os.environ["TZ"]} if "TZ" in os.environ else {}  # strftime_now must give the engine's time
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", program, *folders],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # a traceback might quote a prompt
            cwd="/",
            env=zone,
            start_new_session=True,
        )
    except BaseException:  # if the start is cancelled or fails, nothing else closes the socket
        ours.close()
        raise
    finally:
        theirs.close()
    ours.setblocking(False)
    return process, ours


class Sandboxed:
    """A template that is not approved. The process starts with the first request and may be ended at any time."""

    def __init__(self, source: str, content_format: str, name: str, metrics: Metrics) -> None:
        self.name = name
        self.content_format: Format | None = None  # None until the template is compiled
        self.on_start: Callable[[Sandboxed], None] = lambda _: None
        self._source = source
        self._wanted_format = content_format
        self._metrics = metrics
        self._child: Child | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._refused = False  # whether the template does not compile
        self._strikes: deque[float] = deque(maxlen=STRIKES)
        self._held_until = 0.0
        self._hold_s = FIRST_HOLD_S

    @property
    def state(self) -> str:
        """The state as a text for people: ``sandbox``, ``held back`` or ``does not compile``."""
        return "does not compile" if self._refused else "held back" if self._held else "sandbox"

    async def ready(self) -> Format:
        """Compile the template if that was not done yet, and return its content format. Raises NotReproducible."""
        if self.content_format is None:
            await self._in_turn(b"")
        if self.content_format is None:
            raise NotReproducible("template")
        return self.content_format

    async def render(self, messages: list[Message], arguments: dict[str, Any], fixed: dict[str, Any]) -> str:
        """Render the prompt. Raises NotReproducible if the template refuses, meets a limit or has too many requests."""
        try:
            request = marshal.dumps((messages, arguments, fixed))
        except ValueError as error:  # nested too deep
            raise NotReproducible("template") from error
        if len(request) > MAX_REQUEST_BYTES:
            raise NotReproducible("template_limit")
        text: str = await self._in_turn(request)
        return text

    async def end(self) -> None:
        """End the process after its current answer. The next request starts a new one."""
        async with self._turn:
            await self._end_child()

    async def _in_turn(self, request: bytes) -> str:
        """Ask the process in turn. Goes on if the client hangs up, so that no unread answer stays in the socket."""
        if self._waiting >= MAX_WAITING:
            raise NotReproducible("busy")
        task = asyncio.ensure_future(self._serve(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _serve(self, request: bytes) -> str:
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self._turn.acquire()
        except TimeoutError:
            raise NotReproducible("busy") from None
        finally:
            self._waiting -= 1
        try:
            return await self._ask(request)
        except LimitMet as limit:
            await self._strike(limit.kind)
            raise NotReproducible("template_limit") from limit
        finally:
            self._turn.release()

    async def _ask(self, request: bytes) -> str:
        if self._refused:
            raise NotReproducible("template")
        if self._held:
            self._metrics.template_limits.labels("held_back").inc()
            raise NotReproducible("template_limit")
        if self._child is None:
            await self._start()
        if not request or self._child is None:
            return ""
        status, body = await self._child.ask(request)
        if status != DONE:
            raise NotReproducible("template")  # without the template's message: reasons become labels of metrics
        return _text(body)

    async def _start(self) -> None:
        """Start a process and have it compile the template."""
        self._child = await Child.start()
        self._metrics.template_processes.inc()
        self.on_start(self)
        status, body = await self._child.ask(marshal.dumps((self._source, self._wanted_format)), START_S)
        text = _text(body)
        if status == DONE and text in ("string", "openai"):
            self.content_format = text  # type: ignore[assignment]  # checked above
            return
        self._refused = True
        logger.warning("chat template %s does not compile (%s): chats are routed by load", self.name, text[:80])
        await self._end_child()
        raise NotReproducible("template")

    async def _strike(self, kind: str) -> None:
        """End the process that met a limit; after STRIKES limits within WITHIN_S, hold the template back."""
        self._metrics.template_limits.labels(kind).inc()
        await self._end_child()
        now = time.monotonic()
        self._strikes.append(now)
        logger.warning("chat template %s met a limit: %s; the request is routed by load", self.name, kind)
        if len(self._strikes) < STRIKES or self._strikes[0] < now - WITHIN_S:
            return
        if now - self._held_until > LONGEST_HOLD_S:
            self._hold_s = FIRST_HOLD_S
        self._held_until = now + self._hold_s
        logger.error("chat template %s keeps meeting limits: not rendered for %.0f s", self.name, self._hold_s)
        self._hold_s = min(2 * self._hold_s, LONGEST_HOLD_S)
        self._strikes.clear()

    @property
    def _held(self) -> bool:
        """Whether the template is held back, so that no request is rendered now."""
        return time.monotonic() < self._held_until

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.end()


def _text(body: bytes) -> str:
    """Return the text of an answer. Raises LimitMet if the answer is no text."""
    try:
        return body.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise LimitMet("crash") from error
