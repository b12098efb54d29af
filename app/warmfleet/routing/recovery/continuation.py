"""Mid-stream continuation: if an engine dies in the middle of a stream, another worker continues the stream.

The other worker's prompt is the first prompt plus the tokens produced so far, whose blocks may be cached there. This
prompt is sent as token ids, because text might be tokenised differently from how it was produced, and only to workers
that announced the same tokenizer as the first worker.

A greedy request (``temperature`` 0) then gets the text that it would have got. A request that samples is
continued only if its client asks for that: vLLM restarts its random numbers, even with a ``seed``, so the rest of the
text is a valid sample, but not the text that the first worker would have produced.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import orjson

from warmfleet.engines.followed_stream import MAX_KEPT_TOKENS, Continuable, ContinuedStream, FollowedStream, KeptIds
from warmfleet.errors import NoWorker, Stopping, UpstreamError, WarmfleetError
from warmfleet.pools.identified_prompt import identify_ids
from warmfleet.prompt.json_splice import spliced, with_key
from warmfleet.prompt.lax_values import whole
from warmfleet.prompt.request import decoded
from warmfleet.routing.attempt import Attempt
from warmfleet.routing.error_events import ErrorEvents

if TYPE_CHECKING:
    from warmfleet.engines.followed_stream import StreamCut
    from warmfleet.fleet.bookings import Outcome
    from warmfleet.metrics import Metrics
    from warmfleet.pools.fleet_view import View
    from warmfleet.prompt.request import Request
    from warmfleet.routing.admission_queue import AdmissionQueue
    from warmfleet.routing.call import Job
    from warmfleet.routing.client_answer import ClientAnswer
    from warmfleet.routing.recovery.retries import RetryBudget
    from warmfleet.routing.relay import Relay
    from warmfleet.routing.settlements import Settlements
    from warmfleet.settings import Settings

logger = logging.getLogger("warmfleet.routing.recovery.continuation")

IDENTIFIED = ("exact", "engine")  # kinds of prompts whose token ids are known
COMPLETIONS_MAX_TOKENS = 16  # vLLM's default of max_tokens for completions; chats have no default
#: Fields with which a request may be continued. With others, the rest of an answer may depend on more than its ids.
CONTINUABLE = frozenset(
    {
        *("model", "stream", "stream_options", "prompt", "messages", "max_tokens", "max_completion_tokens"),
        *("min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "logit_bias"),
        *("ignore_eos", "stop_token_ids", "user", "cache_salt", "priority", "prompt_cache_key", "metadata", "store"),
        *("service_tier", "safety_identifier", "add_special_tokens", "add_generation_prompt"),
        *("continue_final_message", "chat_template_kwargs", "documents"),
    }
)
#: Values of other fields that have no effect. ``stop`` is not among CONTINUABLE because an engine holds back text that
#: may become a stop string, and the held back text would be lost.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([], ""),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logprobs": (False,),
    "echo": (False,),
    "skip_special_tokens": (True,),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
}


class Continuation:
    """Continues the streams of one replica that were cut."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        settlements: Settlements,
        queue: AdmissionQueue,
        relay: Relay,
        budget: RetryBudget,
    ) -> None:
        self._greedy_ones = settings.continue_greedy
        self._request_max_s = settings.request_max_s
        self._metrics = metrics
        self._settlements = settlements
        self._queue = queue
        self._relay = relay
        self._budget = budget
        self._kept = KeptIds()

    def prepared(self, job: Job) -> Job:
        """Return the job; made continuable if the operator or the client wants that and the request allows it.

        The body of a continuable job asks the engine for token ids. Other bodies are not parsed here.
        """
        call, request, asked = job.call, job.request, job.call.hints.continues
        if asked is False or not (asked or self._greedy_ones) or not request.stream:
            return job
        if call.path.form not in ("completions", "chat") or job.prompt.kind not in IDENTIFIED:
            return job
        data = decoded(call.body)
        if not (asked or whole(data.get("temperature")) == 0) or not continuable(data):
            return job
        if job.prompt.image_tokens or job.prompt.prompt_count != 1 or job.prompt.prompt_tokens >= MAX_KEPT_TOKENS:
            return job
        limit, least = request.max_tokens, whole(data.get("min_tokens")) or 0
        if request.endpoint == "completions" and limit is None:
            limit = COMPLETIONS_MAX_TOKENS
        wanted = Continuable(limit, least, self._kept)
        return job._replace(body=with_key(job.body, "return_token_ids", b"true"), continuable=wanted)

    async def go_on(self, job: Job, cut: StreamCut, answer: ClientAnswer) -> None:
        """Let another worker continue the stream, or else end the stream with the error that cut it.

        The caller has released the attempt at the worker that failed.
        """
        result, error, record = "failed", cut.error, job.call.record
        errors = ErrorEvents(job.call.path.form)
        record.event("continuation", **{"warmfleet.worker": cut.worker_id, "error.type": error.code})
        try:
            result = await self._try(job, cut.worker_id, cut.followed)
        except UpstreamError as second:
            error = second
        except WarmfleetError as why:
            logger.info("no worker goes on with a stream: %s", why)
        except asyncio.CancelledError:
            await errors.end(answer, Stopping(), record)
            raise
        self._metrics.continued.labels(result).inc()
        logger.warning("a stream of worker %s broke off (%s): %s", cut.worker_id, cut.error.message, result)
        if result != "continued":
            self._metrics.stream_errors.labels(job.pool.tag).inc()
            await errors.end(answer, error, record)

    async def _try(self, job: Job, failed_worker: str, followed: FollowedStream) -> str:
        """Try one other worker; return ``continued`` or why not, for the metrics. Raises WarmfleetError."""
        age_s = time.perf_counter() - job.call.received_at
        rest = _rest(job, followed)
        if rest is None or 0 < self._request_max_s <= age_s:
            return "unfit"
        if self._budget.empty:
            return "budget"
        self._budget.spend()
        views = [pool.view for pool in job.pools]
        unable = [worker for view in views for worker in view.ids if not takes(view, worker, job, followed)]
        attempt = Attempt(self._settlements, rest, (failed_worker, *unable), avoids_failing=False)
        outcome: Outcome = "cancelled"
        try:
            decision = await self._queue.admit(rest, attempt)
            view = attempt.chosen.pool.view
            if not takes(view, decision.worker_id, job, followed):  # it joined meanwhile, or was chosen without Redis
                raise NoWorker("The worker that has room does not take the ids of this stream.")
            outcome = "failed"
            outcome = await self._relay.go_on(rest, attempt, decision, ContinuedStream(followed))
        finally:
            attempt.release(outcome)
        return "continued"


def continuable(data: dict[str, Any]) -> bool:
    """Return whether the rest of an answer depends only on its first ids and these fields of the request."""
    return all(name in CONTINUABLE or value is None or value in NEUTRAL.get(name, ()) for name, value in data.items())


def takes(view: View, worker_id: str, job: Job, followed: FollowedStream) -> bool:
    """Return whether this worker takes the ids of the stream so far, and has the tokenizer that made them."""
    able = view.handoff.get(worker_id)
    if able is None or able.identity_key != followed.identity_key:
        return False
    return job.request.endpoint in able.endpoints and len(followed.prompt) + followed.safe < able.limit_tokens


def _rest(job: Job, followed: FollowedStream) -> Job | None:
    """Return the job for another worker, whose prompt is prompt and answer so far; None if their ids are not known.

    Further keys are appended to the client's body. If a key occurs twice, the last value counts, so they prevail.
    """
    wanted, request = job.continuable, job.request
    if wanted is None or not followed.known or followed.finished or not followed.prompt:
        return None
    so_far = followed.safe
    ids = [*followed.prompt, *followed.produced[:so_far]]
    body = spliced(request.endpoint, job.body, [[orjson.dumps(ids)]], _characters(request))
    if body is None or (wanted.max_tokens is not None and wanted.max_tokens <= so_far):
        return None
    changes = {"return_token_ids": b"false"}
    if wanted.max_tokens is not None:
        name = "max_tokens" if request.endpoint == "completions" else "max_completion_tokens"
        changes[name] = b"%d" % (wanted.max_tokens - so_far)
    if wanted.min_tokens:
        changes["min_tokens"] = b"%d" % max(0, wanted.min_tokens - so_far)
    for name, value in changes.items():
        body = with_key(body, name, value)
    prompt = identify_ids(request, job.pool.view, [ids], "engine")
    return job._replace(
        body=body, prompt=prompt, continuable=None, session=b"", alone=True
    )  # a begun answer is never held


def _characters(request: Request) -> int:
    given = request.prompts[0] if len(request.prompts) == 1 else ""
    return len(given) if isinstance(given, str) else 0
