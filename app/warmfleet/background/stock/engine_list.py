"""Lists the engines without the plugin, which the operator names in the settings, in a followed file, or in DNS."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import orjson

from warmfleet.engines.allowed_addresses import gives_credentials
from warmfleet.errors import BadArgument
from warmfleet.followed_file import FollowedFile
from warmfleet.settings import EngineSource, engine_source, engine_url, without_userinfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

logger = logging.getLogger("warmfleet.background.stock.engine_list")

MAX_FILE_BYTES = 1_048_576
MAX_ENGINES = 1_024  # most engines of one replica; later engines of the lists are left out
LOOK_UP_TIMEOUT_S = 3.0


class ListedEngine(NamedTuple):
    """An engine that the operator listed. cache_tokens: size of its cache; 0: the size that the engine reports."""

    url: str
    cache_tokens: int = 0
    labels: str = ""


class EngineList:
    """The engines of all sources. A source that cannot be read keeps the engines of its last reading."""

    def __init__(self, entries: Sequence[str], *, read: bool = True) -> None:
        """entries: of WARMFLEET_STATIC_WORKERS. read: read files now, raise BadArgument for an unusable one; otherwise
        ``look`` reads them, and ``problems`` names the unusable ones."""
        self._sources = [engine_source(entry) for entry in entries]
        self._files = {source.where: _WatchedFile(source.where) for source in self._sources if source.kind == "file"}
        self._resolved: dict[EngineSource, list[ListedEngine]] = {}
        self._problems: dict[str, str] = {}
        for file in self._files.values() if read else ():
            file.read_if_changed()

    @property
    def problems(self) -> Iterable[str]:
        """Return why files and names of the list could not be read at the last look, a sentence each."""
        return self._problems.values()

    @property
    def urls(self) -> list[str]:
        """Return the URLs of the engines that are listed by a URL, as far as the sources were read."""
        sources = [*self._sources, *(source for file in self._files.values() for source in file.sources)]
        return [source.where for source in sources if source.kind == "url"]

    async def look(self) -> list[ListedEngine]:
        """Read the files that changed, resolve the names, and return the engines in the order of the lists."""
        for path, file in self._files.items():
            try:
                await asyncio.to_thread(file.read_if_changed)
                self._note(path, "")
            except BadArgument as error:
                self._note(path, str(error))
        given = [source for source in self._sources if source.kind != "file"]
        given += [source for file in self._files.values() for source in file.sources]
        named = [source for source in given if source.kind == "dns"]
        await asyncio.gather(*map(self._resolve, named))
        self._resolved = {source: engines for source, engines in self._resolved.items() if source in named}
        found: dict[str, ListedEngine] = {}
        for source in given:
            engines = [ListedEngine(source.where, source.cache_tokens, source.labels)]
            for engine in self._resolved.get(source, []) if source.kind == "dns" else engines:
                found.setdefault(engine.url, engine)
        self._note("engines", "" if len(found) <= MAX_ENGINES else f"only the first {MAX_ENGINES} engines are used")
        return list(found.values())[:MAX_ENGINES]

    async def _resolve(self, source: EngineSource) -> None:
        parts = urlsplit(source.where)
        host, port = parts.hostname or "", parts.port or 80
        try:
            async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
                addresses = await _addresses(host, port)
        except (OSError, ValueError) as error:  # a time-out, too; ValueError: no name that DNS could know
            self._note(source.where, f"{host} cannot be resolved, so its last addresses stay: {error}")
            return
        # The router calls these addresses like listed ones, so a cloud's metadata service must not be one.
        engines = [address for address in addresses if not gives_credentials(address)]
        left_out = f"{host}: addresses that tell a machine's credentials are no engines and are left out"
        self._note(source.where, left_out if len(engines) < len(addresses) else "")
        hosts = [f"[{address}]" if ":" in address else address for address in engines]
        self._resolved[source] = [
            ListedEngine(engine_url(f"http://{name}:{port}{parts.path}"), source.cache_tokens, source.labels)
            for name in hosts
        ]

    def _note(self, what: str, problem: str) -> None:
        """Log a problem when it begins and when it ends."""
        if problem and problem != self._problems.get(what):
            logger.warning("%s", problem)
        elif not problem and what in self._problems:
            logger.info("%s: read again", without_userinfo(what))
        if problem:
            self._problems[what] = problem
        else:
            self._problems.pop(what, None)


class _WatchedFile:
    """A file that lists engines. ``sources``: its entries when it could last be read."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = FollowedFile(path, f"WARMFLEET_STATIC_WORKERS: {path}", MAX_FILE_BYTES)
        self.sources: list[EngineSource] = []

    def read_if_changed(self) -> None:
        """Read the file if it changed. Raises BadArgument if it cannot be used."""
        found = self._file.read_if_changed(lambda data: parse(data, self._path))
        if found is not None:
            self.sources = found


def parse(data: bytes, name: str) -> list[EngineSource]:
    """Parse the engines of a file called ``name``. Raises BadArgument that names the line.

    A line is a URL, as in the setting, or a JSON object with ``url`` and perhaps ``cache_tokens``. Empty lines, and
    those that begin with ``#``, are left out.
    """
    found = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not (text := line.strip()) or text.startswith(b"#"):
            continue
        try:
            source = engine_source(_as_entry(text))
            if source.kind == "file":
                raise BadArgument("a file cannot name another file")  # noqa: TRY301
        except (ValueError, BadArgument) as error:
            raise BadArgument(f"WARMFLEET_STATIC_WORKERS: {name}, line {number}: {error}") from None
        found.append(source)
    return found


def _as_entry(line: bytes) -> str:
    """Convert a line of the file to an entry of WARMFLEET_STATIC_WORKERS. Raises ValueError."""
    if not line.startswith(b"{"):
        return line.decode()
    entry = orjson.loads(line)
    if strange := entry.keys() - {"url", "cache_tokens"}:
        raise ValueError(f"known fields are url and cache_tokens, not {min(strange)[:80]!r}")
    url, cache_tokens = entry.get("url"), entry.get("cache_tokens")
    if not isinstance(url, str) or not isinstance(cache_tokens, int | None) or isinstance(cache_tokens, bool):
        raise ValueError("url must be a text, and cache_tokens a whole number")  # noqa: TRY004  content of a file
    return url if cache_tokens is None else f"{url}#cache_tokens={cache_tokens}"


async def _addresses(host: str, port: int) -> list[str]:
    """Resolve a name: to addresses of IPv4 if it has any, so that an engine with both versions counts only once."""
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    versions = {family for family, *_ in entries}
    only = socket.AF_INET if socket.AF_INET in versions else socket.AF_INET6
    return sorted({str(address[0]) for family, _, _, _, address in entries if family == only})
