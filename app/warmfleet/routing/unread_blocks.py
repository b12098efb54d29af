"""Frees the blocks of a prompt that no decode engine will read, as its client left just as the prefill engine answered.

The prefill engine would keep them until its lease ends. A decode engine that refuses the second step tells it at once
that they are not needed.
"""

from __future__ import annotations

import asyncio
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

ANSWER_S = 1.0  # time for an answer that is on its way: an engine that was still at work has stopped
REFUSAL_S = 5.0  # time for the decode engine to refuse
MOST = 256  # most prompts at a time; the blocks of further ones stay until their leases end


class UnreadBlocks:
    """Frees them in the background."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def left(self, answer: PrefillAnswer, read: Read, refused: Refused) -> None:
        """Stop the engine whose ``answer`` nobody awaits any more, and free the blocks if it has answered already."""
        response = answer.response
        if len(self._tasks) < MOST and (response.complete or response.end_sending()):
            self._begin(_after(answer, read, refused))
        else:
            response.close()

    def free(self, params: bytes, refused: Refused) -> None:
        """Free the blocks to which these parameters lead."""
        if len(self._tasks) < MOST:
            self._begin(_free(params, refused))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _after(answer: PrefillAnswer, read: Read, refused: Refused) -> None:
    try:
        params = read(answer.response.status, await answer.whole(ANSWER_S))
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
