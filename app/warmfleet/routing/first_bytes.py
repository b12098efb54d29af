"""Notes the first byte of an engine's answer: metrics, the end of the prefill, and who watches the rest."""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING

from warmfleet.engines.reported_usage import AnswerTail, ResponsesTail
from warmfleet.metrics import PLAIN, STREAM

if TYPE_CHECKING:
    from warmfleet.fleet import Decision
    from warmfleet.metrics import Metrics
    from warmfleet.routing.attempt import Attempt
    from warmfleet.routing.call import Job


class FirstBytes:
    """The first bytes of answers, whether this replica passes the answers on or a gateway does."""

    def __init__(self, metrics: Metrics) -> None:
        self._requests, self._waits = cache(metrics.requests.labels), cache(metrics.first_byte_seconds.labels)

    def note(
        self, job: Job, attempt: Attempt, decision: Decision, status: int, whole: bytes | None, *, events: bool
    ) -> None:
        """Note the first byte of an answer. whole: the complete answer; None if more will come, so prefill is done.

        events: the answer is a stream of events.
        """
        streams = events and status < 400
        if (decision.approximate or decision.session or attempt.chosen.prompt.image_tokens) and status == 200:
            kind = ResponsesTail if job.call.path.form == "responses" else AnswerTail
            attempt.tail = kind(whole or b"")
        if attempt.on_first_byte is not None:
            attempt.on_first_byte(attempt)
        booking, now = attempt.chosen, time.perf_counter()
        pool, prompts = booking.pool, booking.prompt.prompt_count
        waited_s = now - job.call.received_at
        attempt.record.first_byte(status, now)
        self._waits(pool.tag, STREAM if streams else PLAIN).observe(waited_s)
        if streams:  # the first byte of a plain answer comes with its last token
            pool.ttft.observe(waited_s)
        word = booking.reservation_word
        if streams and word == "booked" and prompts == 1:
            took_s = now - booking.asked_at
            pool.lead_time.first_byte(decision, pool.view.speeds.get(decision.worker_id, 0), took_s)
        self._requests(job.call.path.name, status, word, pool.tag).inc()
        if booking.prefill is not None:
            booking.prefill.taken(decision, attempt.record, streams=streams)
        if whole is not None:
            return
        # With several prompts in a request, only the engine knows when each prefill is done; its plugin reports it.
        if prompts == 1 or decision.approximate or decision.worker_id in pool.view.unreported:
            booking.prefill_done()
