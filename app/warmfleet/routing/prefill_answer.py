"""The answer of an engine that computes a prompt for another engine."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from warmfleet.errors import UpstreamError

if TYPE_CHECKING:
    from warmfleet.engines.engine_connection import EngineResponse

#: Time between two looks at the clock while the answer is awaited: if this process stood still, the answer may be as
#: old as the last look.
LOOK_S = 1.0
ANSWER_MAX_BYTES = 4_194_304  # most bytes of the answer: it lists a number for each block of the prompt


class PrefillAnswer:
    """began_at, looked_at: when the request was sent, and a time at which the answer was not whole yet (by
    ``time.perf_counter``).
    """

    def __init__(self, response: EngineResponse) -> None:
        self.response = response
        self.began_at = self.looked_at = time.perf_counter()
        self._body = b""

    async def whole(self, limit_s: float) -> bytes:
        """Return the whole body. It may be called again after any error. Raises UpstreamError, TimeoutError."""
        response = self.response
        self.looked_at = time.perf_counter()
        ends = self.looked_at + limit_s
        while True:
            try:
                async with asyncio.timeout(min(LOOK_S, ends - time.perf_counter())):
                    await response.head()
                    while not response.at_eof:
                        self._body += await response.read_any()
                        if len(self._body) > ANSWER_MAX_BYTES:
                            raise UpstreamError("The answer is too long.")
                    return self._body
            except TimeoutError:
                if not response.complete:  # else it may have come before this process stood still
                    self.looked_at = time.perf_counter()
                    if self.looked_at >= ends:
                        raise
