"""The event by which the router ends a stream that was cut, in the format of the client's API.

The official clients raise an error for each of these events; without it a client would take half an answer for a whole.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import orjson

from warmfleet.engines.output_tokens import WatchedClient

if TYPE_CHECKING:
    from warmfleet.engines.followed_stream import Sink
    from warmfleet.errors import WarmfleetError
    from warmfleet.prompt.engine_paths import Form
    from warmfleet.routing.client_answer import ClientAnswer
    from warmfleet.tracing.request_record import RequestRecord

_NUMBER = b'"sequence_number"'  # does not occur in a text of the answer, where quotes are escaped
_NUMBERED = re.compile(_NUMBER + rb" ?: ?(\d{1,15})")
_KEPT = 40  # last bytes of a piece that are searched again with the next piece: a number and its name fit


class ErrorEvents:
    """Makes the error event that ends one stream. form: the format of the client's API, by the request's path."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._number = -1
        self._tail = b""

    def see(self, piece: bytes) -> None:
        """Remember the number of the last event in this piece of the stream."""
        seen = self._tail + piece
        at = seen.rfind(_NUMBER)
        if at >= 0 and (found := _NUMBERED.match(seen, at)):
            self._number = int(found[1])
        self._tail = seen[-_KEPT:]

    def watching(self, client: Sink) -> Sink:
        """Return ``client``, wrapped so that ``see`` gets each piece first, if the API numbers its events."""
        return WatchedClient(self.see, client) if self._form == "responses" else client

    async def end(self, answer: ClientAnswer, error: WarmfleetError, record: RequestRecord) -> None:
        """End the answer with the error, and note it in the request's record. A client that hung up gets nothing."""
        if answer.lost:
            return
        record.refused(error)
        await answer.body(self.event(error), more=False)

    def event(self, error: WarmfleetError) -> bytes:
        """Return the last event of the stream.

        It begins with an empty line, which ends an event that was cut off; after a whole event it has no effect.
        """
        if self._form == "messages":
            return b"\n\nevent: error\ndata: %b\n\n" % orjson.dumps(error.as_anthropic())
        body = error.as_dict()
        if self._form != "responses":
            return b"\n\ndata: %b\n\n" % orjson.dumps(body)
        # OpenAI's reference has the fields beside the type, its own server and clients in ``error``: both get them.
        fields = {name: body["error"][name] for name in ("code", "message", "param")}
        event = {"type": "error", "sequence_number": self._number + 1, **fields, **body}
        return b"\n\nevent: error\ndata: %b\n\n" % orjson.dumps(event)
