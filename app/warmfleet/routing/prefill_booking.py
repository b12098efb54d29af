"""The booking at the engine that computes the prompt of a split request: from the decision until it is given back."""

from __future__ import annotations

import asyncio
import time
from enum import Enum, auto
from typing import TYPE_CHECKING

from warmfleet.errors import UpstreamGone, WarmfleetError
from warmfleet.fleet import Moved, Renewal
from warmfleet.pools.stalled_requests import Try

if TYPE_CHECKING:
    from warmfleet.engines.engine_connection import EngineResponse
    from warmfleet.fleet import Decision, PrefillLeg
    from warmfleet.fleet.bookings import Outcome
    from warmfleet.pools.pool import Pool
    from warmfleet.routing.settlements import Settlements
    from warmfleet.tracing.request_record import TryRecord

#: The blocks may take SLOWER times as long as the engine that takes them would compute them, and MOVED_S more: the
#: first handshake of a pair takes up to 9 s.
SLOWER, MOVED_S = 4.0, 12.0


class PrefillState(Enum):
    """How far the step at the engine that computes the prompt has come.

    BOOKED: not sent. SENT: no answer yet. ANSWERED: the engine keeps the blocks for another engine. ENDED: nothing is
    booked any more, or the rest expires.
    """

    BOOKED = auto()
    SENT = auto()
    ANSWERED = auto()
    ENDED = auto()


class PrefillBooking:
    """What a split request holds at the engine that computes its prompt. It belongs to the request's ``Booking``, whose
    release ends it. How it is settled: ``fleet.PrefillLeg``.

    engine: as decided. answered_at, begun_at: when this engine's answer was read, and when the first bytes of the
    other's stream were (``time.perf_counter``). overdue: the blocks did not come, so the other engine's answer was
    ended: that engine would wait for ever if this one hangs.
    """

    overdue = False
    answered_at = begun_at = 0.0
    _due: asyncio.TimerHandle | None = None
    _limit: asyncio.TimerHandle | None = None
    _asking: asyncio.Task[None] | None = None

    def __init__(self, settlements: Settlements, pool: Pool, engine: PrefillLeg) -> None:
        self._settlements = settlements
        self._pool = pool
        self.engine = engine
        self.state = PrefillState.BOOKED
        pool.reservations.add(
            Renewal(engine.reservation, engine.worker_id, engine.prefill_tokens, engine.decode_tokens)
        )
        pool.degraded.take(engine.worker_id)

    def sent(self, response: EngineResponse, received_at: float) -> None:
        """Note that the step is sent, and watch whether its engine falls silent. received_at: see ``Call``."""
        self.state = PrefillState.SENT
        self._pool.tries.begin(self.engine.reservation, Try(self.engine.worker_id, response, received_at))

    def answered(self) -> None:
        """Note that the prompt is computed, and its blocks wait for the other engine."""
        self.state, self.answered_at = PrefillState.ANSWERED, time.perf_counter()
        self._pool.tries.end(self.engine.reservation)
        if self._pool.reservations.prefill_done(self.engine.reservation):
            self._settlements.settle_later(self._pool, self.engine.reservation, "started")

    def begun(self) -> None:
        """Note that the other engine's stream has begun, as it does with its first token: text may come much later."""
        self.begun_at = time.perf_counter()

    def taken(self, decision: Decision, record: TryRecord, *, streams: bool) -> None:
        """Note that the other engine has sent a token, so it has the blocks. streams: this was its first token."""
        self._stop_clock()
        self._take(decision, record, streams=streams)

    def _take(self, decision: Decision, record: TryRecord, *, streams: bool) -> None:
        if self.state is not PrefillState.ANSWERED:
            return
        moved = None
        if streams:
            slots = [view.load.slot for view in self._pool.view.workers if view.worker_id == decision.worker_id]
            lacked, took_s = decision.prompt_tokens - decision.matched_tokens, self.begun_at - self.answered_at
            moved = Moved(slots[0], lacked, took_s) if slots else None
        self._end("finished", moved, record)

    def handed_over(self, decision: Decision, record: TryRecord, response: EngineResponse, *, streams: bool) -> None:
        """Note that the other engine gets the parameters. An answer that is not streamed comes long after the blocks,
        so these count as moved after the time in which the engine would compute them.

        response: ended if the blocks do not come, as far as the answer or the engine's plugin tells that.
        """
        loop, view = asyncio.get_running_loop(), self._pool.view
        lacked = decision.prompt_tokens - decision.matched_tokens
        due_s = view.token_s_of(decision.worker_id) * (decision.wait_tokens + lacked)
        if not streams:
            self._due = loop.call_later(due_s, lambda: self._take(decision, record, streams=False))
        self._limit = loop.call_later(MOVED_S + SLOWER * due_s, self._look, decision, record, response)

    def _look(self, decision: Decision, record: TryRecord, response: EngineResponse) -> None:
        self._asking = asyncio.get_running_loop().create_task(self._give_up(decision, record, response))

    async def _give_up(self, decision: Decision, record: TryRecord, response: EngineResponse) -> None:
        """End the other engine's answer, unless its plugin has reported that the prompt is done.

        Then it has the blocks, though a stream may have no text: vLLM's parser of tools may hold it back for long.
        """
        try:
            if await self._pool.fleet.bookings.prefilled(decision.reservation):
                self._take(decision, record, streams=False)
                return
        except WarmfleetError:
            return  # nobody knows, so the client waits on
        self.overdue = response.fail(UpstreamGone("The blocks of the prompt did not come in time."))
        self._pool.avoid(self.engine.worker_id)

    def _stop_clock(self) -> None:
        for running in (self._due, self._limit, self._asking):
            if running is not None:
                running.cancel()

    def given_up(self) -> None:
        """Note that the other engine, which has got the parameters, failed. Perhaps nobody tells this engine to free
        the blocks, so what is booked expires when the engine's lease does.
        """
        if self.state is PrefillState.ANSWERED:
            self._end(None)

    def release(self, outcome: Outcome) -> None:
        """Give back what is still booked. outcome: of the request, or of this step. Never waits; a second call does
        nothing.
        """
        self._stop_clock()
        if self.state is PrefillState.ANSWERED:
            # If the client hung up, the other engine gives the request up, and tells this one to free the blocks.
            self._end(None if outcome == "failed" else "finished")
        elif self.state is not PrefillState.ENDED:
            self._end(outcome if outcome in ("failed", "unsent") else "cancelled")

    def _end(self, outcome: Outcome | None, moved: Moved | None = None, record: TryRecord | None = None) -> None:
        self.state = PrefillState.ENDED
        pool, reservation = self._pool, self.engine.reservation
        pool.reservations.remove(reservation)
        pool.tries.end(reservation)
        pool.degraded.give(self.engine.worker_id)
        if outcome is not None:
            self._settlements.settle_later(pool, reservation, outcome, record=record, moved=moved)
