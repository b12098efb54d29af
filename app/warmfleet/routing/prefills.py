"""Has an engine compute the prompt of a split request, so that the chosen worker can take the blocks from there.

vLLM's connectors hand a prompt over in two steps. Step 1 goes to the prefill engine: the client's request for one
token, with ``do_remote_decode``. Step 2 goes to the decode engine: the client's request with ``kv_transfer_params``
that tell where the blocks are. With NIXL that engine reads the blocks out of the other's memory, and neither checks
that they are still those of the prompt. Therefore:

* Both steps have the same token ids, since a longer prompt kills the decode engine, and another one spoils its cache.
* The parameters go out once, to one engine, on no connection that would send them again, and not after the prefill
  engine's lease less ``MARGIN_S``, by which time the decode engine may have begun to extend the lease.
* Whatever fails, the request is decided anew and served by one engine (``PrefillFailed``), which computes its prompt.
"""

from __future__ import annotations

import asyncio
import time
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from warmfleet.errors import UpstreamError, UpstreamGone
from warmfleet.pools.outliers import Judged
from warmfleet.prompt.json_splice import spliced
from warmfleet.prompt.request import decoded
from warmfleet.routing.prefill_answer import PrefillAnswer
from warmfleet.routing.split_steps import SplitSteps
from warmfleet.routing.transfer_params import Handover, PrefillFailed, lacks_blocks
from warmfleet.routing.unread_blocks import UnreadBlocks

if TYPE_CHECKING:
    from warmfleet.fleet import Decision, PrefillLeg
    from warmfleet.metrics import Metrics
    from warmfleet.pools.identified_prompt import IdentifiedPrompt
    from warmfleet.pools.pairing import Splits
    from warmfleet.pools.pool import Pool
    from warmfleet.prompt.request import Request
    from warmfleet.routing.booking import Booking
    from warmfleet.routing.call import Job
    from warmfleet.routing.prefill_booking import PrefillBooking
    from warmfleet.routing.sender import Sender
    from warmfleet.routing.token_handoff import Handoff
    from warmfleet.tracing.request_record import Attributes, TryRecord

#: Time before the end of the lease at which the parameters count as too old: the first handshake of a pair takes up to
#: 9 s, and the lease is not extended before.
MARGIN_S = 10.0
#: The step may take SLOWER times as long as decisions believe, and LEAST_S more; then its engine counts as hung.
SLOWER, LEAST_S = 4.0, 2.0
UNKNOWN_TOKEN_S = 1e-4  # prefill of a token if no worker's speed is known, as in lua/parts/shared/alive_workers.lua


def unfit(request: Request, form: str, prompt: IdentifiedPrompt, splits: Splits, max_model_len: int) -> bool:
    """Return whether one engine must serve this request: because of its fields, or of token ids that are not known.

    form: of its path. max_model_len: the longest context of an engine, in tokens. A request for more is refused by the
    engine that would make the answer, after its prompt was computed.
    """
    if prompt.kind != "exact" or prompt.prompt_count != 1 or request.samples != 1:
        return True
    if request.unforeseen or request.text_only or not request.from_json or request.dialect != "chat":
        return True
    if prompt.prompt_tokens + (request.max_tokens or 0) > max_model_len:
        return True
    known = len(prompt.prompts) == 1 and prompt.prompts[0].tokens > 0  # not so with images
    return not known or form not in splits.endpoints


class Prefills:
    """Takes step 1 for the split jobs of one replica. unread: frees blocks that nobody will read."""

    def __init__(self, sender: Sender, handoff: Handoff, metrics: Metrics) -> None:
        self._sender = sender
        self._handoff = handoff
        self.unread = UnreadBlocks()
        self._results = cache(metrics.splits.labels)

    async def body(
        self, job: Job, booking: Booking, decision: Decision, held: PrefillBooking, record: TryRecord
    ) -> bytes:
        """Have the prompt computed; return the body for the chosen worker, which must be sent at once and once.

        held: of ``booking``. Raises PrefillFailed.
        """
        pool, engine = booking.pool, held.engine
        began_at = time.perf_counter()
        try:
            base, ids = self._ids(job, booking.prompt, pool, engine, decision)
            steps = SplitSteps(self._sender, job, pool, engine, decision, record.headers, base, ids)
            params = await self._params(steps, held, booking.prompt.prompt_tokens)
        except PrefillFailed as error:
            held.release("failed" if error.result in ("failed", "refused") else "cancelled")
            self._results(error.result, pool.tag).inc()
            raise
        self._results("split", pool.tag).inc()
        pool.outliers.served(Judged(engine.worker_id, engine.trial))
        told: Attributes = {"warmfleet.worker": engine.worker_id}
        told["prefill_ms"] = round(1_000 * (time.perf_counter() - began_at), 1)
        job.call.record.event("prefill", **told)
        return steps.second(params)

    def overdue(self, pool: Pool) -> PrefillFailed:
        """Return the failure of a request whose worker waits in vain for the blocks: the other engine hangs."""
        self._results("late", pool.tag).inc()
        return PrefillFailed("late", "its blocks did not come")

    def _ids(
        self, job: Job, prompt: IdentifiedPrompt, pool: Pool, engine: PrefillLeg, decision: Decision
    ) -> tuple[bytes, bytes]:
        """Return the body in which both engines get the prompt, and the ids of a chat as JSON. Raises PrefillFailed."""
        request, data = job.request, decoded(job.body)
        if not plain(data):
            raise PrefillFailed("unfit", "a field that both steps need is not plain")
        if list in map(type, request.prompts):
            return job.body, b""
        if not all(
            self._handoff.takes(request, prompt, pool.view, one) for one in (engine.worker_id, decision.worker_id)
        ):
            raise PrefillFailed("unfit", "an engine takes no token ids")
        ids = prompt.prompts[0].json()
        if request.endpoint == "chat":
            return job.body, b"".join(ids)
        text = request.prompts[0]
        made = spliced(request.endpoint, job.body, [ids], len(text))
        if made is None:
            raise PrefillFailed("unfit", "the body has too many parts")
        return made, b""

    async def _params(self, steps: SplitSteps, held: PrefillBooking, prompt_tokens: int) -> bytes:
        """Send step 1, and return the parameters for step 2 as JSON. Raises PrefillFailed."""
        pool, engine = steps.pool, held.engine
        handover = _handover(pool, engine)
        token_s = pool.view.token_s_of(engine.worker_id) or UNKNOWN_TOKEN_S
        believed_s = token_s * (engine.wait_tokens + engine.prefill_tokens) + engine.tier_s
        limit_s = LEAST_S + SLOWER * believed_s
        judged = Judged(engine.worker_id, engine.trial)
        read = partial(handover.second, prompt_tokens=prompt_tokens, judged=judged)
        try:
            answer = PrefillAnswer(steps.first(handover.first()))
        except UpstreamError as error:
            raise PrefillFailed("failed", error.message, judged) from error
        held.sent(answer.response, steps.job.call.received_at)
        try:
            body = await answer.whole(limit_s)
        except asyncio.CancelledError:
            self.unread.left(answer, believed_s, limit_s, read, steps.refusals())
            raise
        except TimeoutError as error:
            answer.response.close()
            pool.avoid(engine.worker_id)
            raise PrefillFailed("late", f"no answer within {limit_s:.1f} s") from error
        except UpstreamError as error:
            answer.response.close()
            if not isinstance(error, UpstreamGone) or error.warns_others:
                pool.avoid(engine.worker_id)
            died = isinstance(error, UpstreamGone) and not error.refused
            raise PrefillFailed("failed", error.message, judged, died=died) from error
        params = read(answer.response.status, body)
        held.answered()
        if lacks_blocks(params):
            self.unread.free(params, steps.refusals())
            raise PrefillFailed("unfit", "it keeps no longer all blocks that are needed")
        here = any(view.worker_id == engine.worker_id for view in pool.view.workers)
        if not here or time.perf_counter() - answer.looked_at > handover.transfer.lease_s - MARGIN_S:
            held.given_up()
            raise PrefillFailed("late", "the lease of the blocks may have ended, or the engine has left")
        return params


def plain(data: dict[str, Any]) -> bool:
    """Return whether the prefill engine's check of a request covers the fields that only the decode engine gets.

    A decode engine that cannot read a body tells nobody, and the blocks stay with the prefill engine until its lease
    ends. No beam search is split, because each of its beams would take the blocks.
    """
    most = 2**31
    options = data.get("stream_options")
    least, limit = data.get("min_tokens"), data.get("max_completion_tokens") or data.get("max_tokens")
    return (
        data.get("stream") in (None, False, True)
        and all((type(data.get(name)) is int and 0 < data[name] < most) or data.get(name) is None for name in LIMITS)
        and (least is None or (type(least) is int and 0 <= least <= (limit or 0)))
        and (options is None or (bool(data.get("stream")) and _are_flags(options)))
        and all(data.get(name) in (None, False, True) for name in ("return_token_ids", "ignore_eos"))
        and _are_ids(data.get("stop_token_ids"))
        and _are_texts(data.get("stop"))
        and data.get("tool_choice") in TOOL_CHOICES
        and not data.get("use_beam_search")
    )


LIMITS = ("max_tokens", "max_completion_tokens")
TOOL_CHOICES = (None, "auto", "none", "required")  # not a tool by its name, which may be missing among the tools
MOST_STOPS = 4  # vLLM's default of VLLM_MAX_STOP_STRINGS


def _are_ids(ids: Any) -> bool:
    return ids is None or (isinstance(ids, list) and all(type(each) is int for each in ids))


def _are_texts(stop: Any) -> bool:
    """Return whether any engine can read this ``stop``."""
    several = isinstance(stop, list) and len(stop) <= MOST_STOPS and all(isinstance(each, str) for each in stop)
    return stop is None or isinstance(stop, str) or several


def _are_flags(options: Any) -> bool:
    return isinstance(options, dict) and all(type(value) is bool for value in options.values())


def _handover(pool: Pool, engine: PrefillLeg) -> Handover:
    """Return how this engine hands over the prompt. Raises PrefillFailed if it has left."""
    for view in pool.view.workers:
        if view.worker_id == engine.worker_id and view.transfer is not None:
            return Handover(view.url, view.transfer, engine.reservation)
    raise PrefillFailed("failed", "it has left")
