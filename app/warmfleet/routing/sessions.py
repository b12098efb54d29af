"""Tells Redis which session (conversation of an agent) a request belongs to.

The ledger in Redis (lua/parts/decide/session.lua) holds sessions until the caches have room for their contexts. A
session without a name is known there by the beginning of its prompt.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from warmfleet.fleet import Hint
from warmfleet.pools.policy import session_key

if TYPE_CHECKING:
    from warmfleet.pools.identified_prompt import IdentifiedPrompt
    from warmfleet.prompt.request import Request
    from warmfleet.routing.call import Hints

TOOLS, NAMED, ENDS = int(Hint.TOOLS), int(Hint.NAMED), int(Hint.ENDS)
#: Forms of bodies that ask for one answer to one prompt.
FORMS = ("completions", "chat", "messages", "responses", "generate")
NAME_BYTES = 12  # with a letter before them as long as every id in the ledger (lua/parts/decide/session.lua)
_FLAGS = tuple(bytes((flags,)) for flags in range(TOOLS + NAMED + ENDS + 1))


def session_of(form: str, flow: bytes, hints: Hints, request: Request, prompt: IdentifiedPrompt) -> bytes:
    """Return ``Question.session`` of a request: a byte of flags, then the session's id if the client names it.

    Empty for a request that takes no part. form: of its path. The id is made of the tenant's flow, too: tenants share
    no session.
    """
    if form not in FORMS or prompt.prompt_count != 1:
        return b""
    flags = TOOLS * request.declares_tools + ENDS * hints.ended
    name = session_key(request, hints.session) if hints.session or request.cache_key else b""
    if not name:
        return b"" if prompt.kind == "prefix" else _FLAGS[flags]  # by a part of its prompt it would not be known
    return _FLAGS[flags | NAMED] + b"n" + hashlib.blake2b(flow + name, digest_size=NAME_BYTES).digest()
