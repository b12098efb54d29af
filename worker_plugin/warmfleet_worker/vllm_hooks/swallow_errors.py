"""Nothing that this package does may end the engine that it reports."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

logger = logging.getLogger("vllm.warmfleet")


REPORT_LACKS = "this engine is not, or not fully, reported"


def swallow_errors(failure: str, consequence: str = REPORT_LACKS) -> AbstractContextManager[None]:
    """Make a context that suppresses every exception, and logs ``failure`` ("could not ...") and ``consequence``.

    Every exception, because vLLM calls plugins and the scheduler without a guard: an exception of ours would end the
    engine. An engine that serves and is missing in the fleet is the lesser evil, and the log says so.
    """
    return _SwallowErrors(failure, consequence)


class _SwallowErrors:
    """A class, because ``contextlib.contextmanager`` costs more and ``done`` enters it at every engine step."""

    def __init__(self, failure: str, consequence: str) -> None:
        self.failure, self.consequence = failure, consequence

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> bool:
        if isinstance(error, Exception):
            logger.error("warmfleet: %s: %s", self.failure, self.consequence, exc_info=error)
            return True
        return False
