"""The bodies of a split request's two steps, and how each is sent."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from warmfleet.prompt.json_splice import with_fields
from warmfleet.tracing.last_requests import UNBOOKED

if TYPE_CHECKING:
    from warmfleet.engines.engine_connection import EngineResponse
    from warmfleet.fleet import Decision, PrefillLeg
    from warmfleet.pools.pool import Pool
    from warmfleet.routing.call import Job
    from warmfleet.routing.sender import Sender
    from warmfleet.routing.unread_blocks import Refused

#: Fields of step 1 that differ from the client's.
ONE_TOKEN = {
    "max_tokens": b"1",
    "min_tokens": b"0",
    "stream": b"false",
    "stream_options": b"null",
    "return_token_ids": b"false",
    # With Mooncake a token that ends the answer frees the blocks at once, and a text of ``stop`` in it leaves them with
    # the engine until its lease ends, though it reports that the answer was stopped.
    "ignore_eos": b"true",
    "stop_token_ids": b"null",
    "stop": b"null",
}


class SplitSteps(NamedTuple):
    """The steps of one request. base: the body in which both engines get the prompt. ids: of a chat, as JSON; empty if
    they are in ``base``. headers: further header lines.
    """

    sender: Sender
    job: Job
    pool: Pool
    prefill: PrefillLeg
    decode: Decision
    headers: bytes
    base: bytes
    ids: bytes

    def first(self, params: bytes) -> EngineResponse:
        """Send step 1. params: as JSON. Raises UpstreamError."""
        return self._send(self.prefill, f"{self.prefill.reservation}.", self._body(params, ONE_TOKEN))

    def second(self, params: bytes) -> bytes:
        """Return the body of step 2."""
        return self._body(params, {})

    def refusals(self) -> Refused:
        """Return a function that sends the decode engine a request with parameters that it must refuse, whereupon it
        has the other engine free the blocks. The function keeps nothing of the client's body, and raises UpstreamError.

        A body that an engine cannot read would not do: then it tells nobody.
        """
        request_id = f"{UNBOOKED}{self.job.call.record.request_id}"
        headers = self.sender.headers(self.job, self.pool, self.decode, request_id, self.headers)
        body = {"model": self.job.request.model or None, "prompt": [0], "max_tokens": 1, "min_tokens": 2}
        return partial(_refused, self.sender, self.decode.url, headers, body)

    def _body(self, params: bytes, changes: dict[str, bytes]) -> bytes:
        given = params if not self.ids else b"".join((b'{"prompt_token_ids":', self.ids, b",", params[1:]))
        if changes and self.job.request.endpoint == "chat":
            changes = {**changes, "max_completion_tokens": b"1"}
            if self.job.request.tools:  # an engine may fail to read a call of a tool out of one token
                changes["tool_choice"] = b'"none"'
        return with_fields(self.base, {**changes, "kv_transfer_params": given})

    def _send(self, engine: PrefillLeg | Decision, prefix: str, body: bytes) -> EngineResponse:
        request_id = f"{prefix}{self.job.call.record.request_id}"
        return self.sender.send(self.job, self.pool, engine, request_id, body, self.headers)


def _refused(sender: Sender, url: str, headers: bytes, body: dict[str, Any], params: bytes) -> EngineResponse:
    return sender.complete(url, orjson.dumps(body | {"kv_transfer_params": orjson.Fragment(params)}), headers)
