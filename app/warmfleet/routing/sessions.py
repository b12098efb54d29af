"""Tells Redis which session (conversation of an agent) a request belongs to, and how a request of a session ended.

The ledger in Redis (lua/parts/decide/session.lua) holds sessions until the caches have room for their contexts. A
session without a name is known there by the beginning of its prompt.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from warmfleet.fleet import Hint, SessionEnd
from warmfleet.pools.policy import session_key

if TYPE_CHECKING:
    from warmfleet.engines.reported_usage import AnswerTail, Finish
    from warmfleet.fleet import Decision
    from warmfleet.fleet.bookings import Outcome
    from warmfleet.pools.identified_prompt import IdentifiedPrompt
    from warmfleet.prompt.request import Request
    from warmfleet.routing.call import Call

TOOLS, NAMED, ENDS = int(Hint.TOOLS), int(Hint.NAMED), int(Hint.ENDS)
FORMS = frozenset(
    {"completions", "chat", "messages", "responses"}
)  # forms of bodies that have one answer to one prompt
NAME_BYTES = 8
_FLAGS = tuple(bytes((flags,)) for flags in range(TOOLS + NAMED + ENDS + 1))


def session_of(call: Call, request: Request, prompt: IdentifiedPrompt) -> bytes:
    """Return ``Question.session`` of a request: a byte of flags, then the session's id if the client names it.

    Empty for a request that takes no part. The id is made of the tenant's flow, too: tenants share no session.
    """
    if call.path.form not in FORMS or prompt.prompt_count != 1:
        return b""
    flags = TOOLS * request.declares_tools + ENDS * call.hints.ended
    name = session_key(request, call.hints.session)
    if not name:
        return _FLAGS[flags]
    return _FLAGS[flags | NAMED] + b"n" + hashlib.blake2b(call.flow + name, digest_size=NAME_BYTES).digest()


def with_id(session: bytes, known: bytes) -> bytes:
    """Return ``Question.session`` with the id by which Redis knows the session. known: empty if it knows none."""
    return session[:1] + known if session and known else session


def end_of(session: bytes, decision: Decision, outcome: Outcome, tail: AnswerTail | None, chunks: int) -> SessionEnd:
    """Return how a request of a session ended.

    session: as in the question. tail: the end of the answer, if any came. chunks: pieces of the answer, which stand for
    its tokens if the engine does not tell them.
    """
    finish: Finish = "?" if tail is None else tail.finish()
    if outcome == "finished" and session[0] & ENDS:
        finish = "e"
    told = 0 if tail is None else tail.context_tokens()
    return SessionEnd(decision.session, finish, told or decision.prompt_tokens + chunks)
