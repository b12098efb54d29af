"""The version of this package, as it was installed."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def version() -> str:
    """Return the version, such as ``0.1.0``; ``(not installed)`` in a source tree that nobody installed."""
    try:
        return metadata.version("warmfleet")
    except metadata.PackageNotFoundError:
        return "(not installed)"
