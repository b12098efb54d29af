"""Finds the proxy of a path whose requests go to engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmfleet.prompt.engine_paths import KNOWN

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.api.completions import CompletionsProxy
    from warmfleet.prompt.engine_paths import EnginePath, EnginePaths


class Proxies:
    """Has a proxy for each known path, and makes a proxy per request to a path that only a pattern covers.

    ``by_target``: the proxies of known paths, by the path in bytes, for requests without a query or escapes.
    """

    def __init__(self, paths: EnginePaths, make: Callable[[EnginePath], CompletionsProxy]) -> None:
        self._paths = paths
        self._make = make
        self._known = {path: make(known) for path, known in KNOWN.items()}
        self.by_target = {path.encode(): proxy for path, proxy in self._known.items()}

    def of(self, path: str) -> CompletionsProxy | None:
        """Return the proxy of a decoded path; None if its requests do not go to engines."""
        known = self._known.get(path)
        if known is not None:
            return known
        found = self._paths.find(path)
        return None if found is None else self._make(found)
