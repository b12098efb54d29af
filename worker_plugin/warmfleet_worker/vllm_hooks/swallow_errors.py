"""Nothing that this package does may end the engine that it reports."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

logger = logging.getLogger("vllm.warmfleet")  # below vllm's logger: its handlers and format apply


def guarded(what: str) -> AbstractContextManager[None]:
    """Log and swallow any exception.

    Why so broad: vLLM calls plugins and the scheduler unguarded, so anything raised here would end the engine. Not
    being reported to the fleet is the lesser evil, and the log says so.
    """
    return _Guard(what)


class _Guard:
    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> bool:
        if isinstance(error, Exception):
            logger.error("warmfleet: %s: this engine is not, or not fully, reported", self.what, exc_info=error)
            return True
        return False
