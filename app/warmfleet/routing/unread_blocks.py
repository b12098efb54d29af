"""Frees the blocks of a prompt that no decode engine will read, because its client left during the first step.

The prefill engine would keep them until its lease ends. A decode engine that refuses the second step tells it at once
that they are not needed.

If the client leaves early in the step, the prefill engine is stopped. Later the prompt may just be computed, and if its
server learns of the client's end before it has answered, vLLM keeps the blocks and tells nobody where they are. So the
answer is awaited.
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
    #: Sends the decode engine a step 2 with these parameters that it must refuse. Raises UpstreamError.
    Refused = Callable[[bytes], EngineResponse]

#: The step may end after this share of the time that it is believed to take: prompts before it may be half done.
STOP_SHARE = 0.25
REFUSAL_S = 5.0  # time for the decode engine to refuse
MOST = 256  # most prompts at a time; the blocks of further ones stay until their leases end


class UnreadBlocks:
    """Frees them in the background."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def left(self, answer: PrefillAnswer, believed_s: float, limit_s: float, read: Read, refused: Refused) -> None:
        """Free the blocks of a step whose client has left.

        believed_s, limit_s: time that the step is believed to take, and that it may take.
        """
        took_s = time.perf_counter() - answer.began_at
        ends_now = answer.response.complete or STOP_SHARE * believed_s <= took_s < limit_s
        if ends_now and len(self._tasks) < MOST:
            self._begin(_after(answer, limit_s - took_s, read, refused))
        else:
            answer.response.close()

    def free(self, params: bytes, refused: Refused) -> None:
        """Free the blocks to which these parameters lead."""
        if len(self._tasks) < MOST:
            self._begin(_free(params, refused))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _after(answer: PrefillAnswer, limit_s: float, read: Read, refused: Refused) -> None:
    try:
        body = await answer.whole(limit_s)
        params = read(answer.response.status, body)
    except (TimeoutError, UpstreamError, PrefillFailed):  # so the engine keeps nothing
        return
    finally:
        answer.response.close()
    await _free(params, refused)


async def _free(params: bytes, refused: Refused) -> None:
    with suppress(TimeoutError, UpstreamError):  # then the lease ends
        response = refused(params)
        try:
            async with asyncio.timeout(REFUSAL_S):
                await response.head()
        finally:
            response.close()
