"""Decides where a worker's chat template runs: in this process if an operator has approved it, else in its own process.

A chat template is code of the worker that brought it. A template is approved if a setting names its digest, if
``warmfleet artifacts approve`` wrote its digest to Redis, or if the settings approve all.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from warmfleet.prompt.chat_template import ChatTemplate, knows_developer
from warmfleet.prompt.messages import NotReproducible
from warmfleet.untrusted.render_process import Sandboxed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from warmfleet.metrics import Metrics
    from warmfleet.prompt.messages import Format, Message

ALL = "*"  # stands in place of a digest, and approves every template
logger = logging.getLogger("warmfleet.untrusted.template_approval")

MAX_TEMPLATES = 16  # most templates that are remembered
MAX_PROCESSES = 4  # most processes, of at most 256 MiB each; one more process ends the oldest
MAX_SOURCE_BYTES = 2**20  # most bytes of a template's source


class Template:
    """A template as workers brought it. Every render asks ``is_approved`` with its digest."""

    def __init__(self, source: str, content_format: str, is_approved: Callable[[str], bool], metrics: Metrics) -> None:
        self.sha256 = hashlib.sha256(source.encode()).hexdigest()
        self.knows_developer = knows_developer(source)
        self.sandbox = Sandboxed(source, content_format, self.sha256[:12], metrics)
        self._is_approved = is_approved
        self._compiled: ChatTemplate | None = None
        self._source = source
        self._content_format = content_format

    @property
    def local(self) -> ChatTemplate | None:
        """The template compiled in this process, or None while the operator has not approved it."""
        return self._compiled if self._is_approved(self.sha256) else None

    @property
    def state(self) -> str:
        """The state as a text for people: ``approved``, or ``Sandboxed.state``."""
        return "approved" if self.local is not None else self.sandbox.state

    async def ready(self) -> Format:
        """Compile the template, here or in its own process; return its content format. Raises NotReproducible."""
        local = self.local
        return local.content_format if local is not None else await self.sandbox.ready()

    async def render(self, messages: list[Message], arguments: dict[str, Any], fixed: dict[str, Any]) -> str:
        """Render the prompt text in this process if approved, else in the template's own. Raises NotReproducible."""
        local = self.local
        if local is not None:
            return local.render(messages, arguments, fixed)
        return await self.sandbox.render(messages, arguments, fixed)

    async def compile(self) -> None:
        """Compile the template in this process, and end the template's own process. Raises jinja2.TemplateError."""
        if self._compiled is None:
            self._compiled = await asyncio.to_thread(ChatTemplate, self._source, self._content_format, trusted=True)
        await self.sandbox.end()


class Templates:
    """All templates of this replica, and the digests of the approved ones."""

    def __init__(self, metrics: Metrics, approved: Collection[str] = ()) -> None:
        """approved: digests that the settings name; ``*`` approves every template."""
        self._metrics = metrics
        self._configured = frozenset(approved)
        self.trust_all = ALL in self._configured
        self._of_model: dict[str, frozenset[str]] = {}
        self._approved = self._configured
        self._known: OrderedDict[tuple[str, str], Template] = OrderedDict()
        self._held: WeakSet[Template] = WeakSet()  # also those no longer in ``_known`` that an identity still uses
        self._processes: OrderedDict[Sandboxed, None] = OrderedDict()
        self._ending: set[asyncio.Task[None]] = set()

    def is_approved(self, sha256: str) -> bool:
        """Return whether the template with this digest may run in this process."""
        return self.trust_all or sha256 in self._approved

    async def take(self, source: bytes, content_format: str) -> Template:
        """Make the template with this source ready to render. Raises ValueError if it is too large or no UTF-8.

        Raises jinja2.TemplateError if it is approved and does not compile.
        """
        if len(source) > MAX_SOURCE_BYTES:
            raise ValueError(f"a chat template has {len(source)} bytes; {MAX_SOURCE_BYTES} are allowed")
        key = hashlib.sha256(source).hexdigest(), content_format
        template = self._known.get(key)
        if template is None:
            template = Template(source.decode(), content_format, self.is_approved, self._metrics)
            self._known[key] = template
            self._held.add(template)
            template.sandbox.on_start = self._make_room
        self._known.move_to_end(key)
        while len(self._known) > MAX_TEMPLATES:
            _, forgotten = self._known.popitem(last=False)
            self._processes.pop(forgotten.sandbox, None)
            self._end_soon(forgotten.sandbox)
        await self._settle(template)
        return template

    async def approve(self, digests: Mapping[str, frozenset[str]], tags: Collection[str]) -> None:
        """Take the digests that the operator has approved, by pool tag, in place of these pools' earlier digests.

        tags: of all present pools. Digests that were approved for any other pool are dropped.
        """
        self._of_model = {tag: kept for tag, kept in self._of_model.items() if tag in tags} | {**digests}
        before, self._approved = self._approved, self._configured.union(*self._of_model.values())
        for template in list(self._held) if before != self._approved else ():
            try:
                await self._settle(template)
            except Exception as error:  # noqa: BLE001  compiling foreign code may raise any exception
                logger.warning("chat template %s does not compile: %s", template.sha256[:12], error)

    async def close(self) -> None:
        """End every process."""
        for sandbox in {*self._processes, *(template.sandbox for template in self._held)}:
            await sandbox.end()
        await asyncio.gather(*self._ending)

    async def _settle(self, template: Template) -> None:
        """Make the template ready: here if it is approved (raises the compiler's error), else in its own process."""
        if self.is_approved(template.sha256):
            await template.compile()
            logger.info("chat template %s is approved: rendered in this process", template.sha256[:12])
            return
        logger.warning(
            "chat template %s is not approved: rendered in a process of its own. Once you have read it: "
            "warmfleet artifacts approve %s",
            template.sha256[:12],
            template.sha256[:12],
        )
        with suppress(NotReproducible):
            await template.ready()

    def _make_room(self, starting: Sandboxed) -> None:
        """End the process that was started first if ``starting`` is one process too many."""
        self._processes[starting] = None
        self._processes.move_to_end(starting)
        while len(self._processes) > MAX_PROCESSES:
            self._end_soon(self._processes.popitem(last=False)[0])

    def _end_soon(self, sandbox: Sandboxed) -> None:
        task = asyncio.ensure_future(sandbox.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
