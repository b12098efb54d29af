"""Frees the blocks of a prompt that no decode engine will read, because its client has left.

The prefill engine would keep them until its lease ends. A decode engine that refuses a request with their parameters
tells it at once that they are not needed.

If the client leaves long before the prompt is computed, the prefill engine is stopped. Later it may just be done, and
if its server learns of the client's end before it has answered, vLLM keeps the blocks and tells nobody where they are.
So the answer is awaited.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from warmfleet.errors import UpstreamError
from warmfleet.routing.transfer_params import PrefillFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from warmfleet.engines.engine_connection import EngineResponse
    from warmfleet.routing.prefill_answer import PrefillAnswer

    #: Returns the parameters of step 2 in an answer with this status and body. Raises PrefillFailed.
    Read = Callable[[int, bytes], bytes]
    #: Sends the decode engine a request with these parameters that it must refuse. Raises UpstreamError.
    Refused = Callable[[bytes], EngineResponse]

#: The answer is awaited if the engine is believed to be done within this time: for no longer it computes for nobody.
#: What waits before a prompt counts, so this bounds the work that an engine does beyond its bookings.
REST_S = 1.0
REFUSAL_S = 5.0  # time for the decode engine to refuse
READ_S = 2.0  # time in which the decode engine's server must have read the parameters
DRAIN_S = 2.0  # longest time that a replica which stops waits for all this
MOST = 64  # most requests at a time; the blocks of further ones stay until their leases end


class UnreadBlocks:
    """Frees them in the background."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def left(self, answer: PrefillAnswer, believed_s: float, limit_s: float, read: Read, refused: Refused) -> None:
        """Free the blocks of a first step whose client has left.

        believed_s, limit_s: time that the step is believed to take, and that it may take.
        """
        response, took_s = answer.response, time.perf_counter() - answer.began_at
        response.on_stale = None  # a request whose connection is lost is not sent again
        if response.complete or believed_s - took_s <= REST_S:
            self._begin(_after(answer, limit_s - took_s, read, refused), response)
        else:
            response.close()

    def free(self, params: bytes, refused: Refused) -> None:
        """Free the blocks to which these parameters lead, and which no engine has read."""
        with suppress(UpstreamError):  # then the lease ends
            response = refused(params)
            self._begin(_until_read(response, REFUSAL_S), response)

    def close(self, response: EngineResponse) -> None:
        """Close the answer of a decode engine that has got the parameters, once it must have read them.

        If its client leaves before that, vLLM frees nothing.
        """
        if response.complete or response.began:
            response.close()
        else:
            self._begin(_until_read(response, READ_S), response)

    async def drained(self) -> None:
        """Return when nothing is left to be done, or after DRAIN_S."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=DRAIN_S)

    def _begin(self, work: Coroutine[None, None, None], response: EngineResponse) -> None:
        if len(self._tasks) >= MOST:
            work.close()
            response.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _after(answer: PrefillAnswer, limit_s: float, read: Read, refused: Refused) -> None:
    with suppress(TimeoutError, UpstreamError, PrefillFailed):  # then the engine keeps nothing, or its lease ends
        try:
            body = await answer.whole(limit_s)
            params = read(answer.response.status, body)
        finally:
            answer.response.close()
        await _until_read(refused(params), REFUSAL_S)


async def _until_read(response: EngineResponse, limit_s: float) -> None:
    """Close an answer once some of its body came."""
    with suppress(TimeoutError, UpstreamError):
        try:
            async with asyncio.timeout(limit_s):
                await response.read_any()
        finally:
            response.close()
