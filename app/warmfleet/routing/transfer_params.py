"""The ``kv_transfer_params`` of a split request's two steps, by the library that moves the blocks.

NIXL: the answer to step 1 has the parameters of step 2. They tell the decode engine where to read.

Mooncake: both steps name the transfer, and step 2 names the prefill engine's bootstrap server. The decode engine asks
there for the blocks, and the prefill engine writes them into its memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import urlsplit

import orjson

from warmfleet.engines import engine_death
from warmfleet.protocol.transfer import Transfer  # noqa: TC001  a field's type

if TYPE_CHECKING:
    from warmfleet.pools.outliers import Judged

NULL_BLOCK = 0  # in vLLM's block pool
BEFORE: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
AFTER: dict[str, Any] = {"do_remote_decode": False, "do_remote_prefill": True}

Result = Literal["refused", "failed", "late", "unfit"]


class PrefillFailed(Exception):  # noqa: N818  a condition, as in ``errors``
    """The chosen worker does not get the prompt from the other engine, and the client has got nothing.

    result: for the metrics. to_blame: the engine that failed, which gets the blame if another one serves the request;
    not one that was late, because under overload all are. died: it died with the request, which may be the cause.
    """

    def __init__(self, result: Result, why: str, to_blame: Judged | None = None, *, died: bool = False) -> None:
        super().__init__(why)
        self.died = died
        self.result = result
        self.to_blame = to_blame


class Handover(NamedTuple):
    """How a prefill engine hands over a prompt. url: of that engine. name: of this transfer alone."""

    url: str
    transfer: Transfer
    name: str

    def first(self) -> bytes:
        """Return the parameters of step 1 as JSON."""
        return orjson.dumps(BEFORE if self.transfer.library == "NIXL" else {**BEFORE, "transfer_id": self.name})

    def second(self, status: int, answer: bytes, prompt_tokens: int, judged: Judged) -> bytes:
        """Return the parameters of step 2 as JSON, after the engine's answer to step 1. Raises PrefillFailed."""
        if status != 200:
            dead = engine_death.is_reported_in(answer)
            own = status >= 500 or status == 429  # else the request's fault: clients must not have an engine ejected
            why = f"it answered {status}"
            raise PrefillFailed("failed" if dead else "refused", why, judged if own else None, died=dead)
        try:
            whole = orjson.loads(answer)
            if whole["usage"]["prompt_tokens"] != prompt_tokens:
                raise PrefillFailed("refused", "it computed another prompt", judged)
            nixl, at_length = self.transfer.library == "NIXL", whole["choices"][0]["finish_reason"] == "length"
            params = whole["kv_transfer_params"] if nixl else self._mooncake(whole["usage"])
            if not at_length and (params is None or not nixl):
                raise PrefillFailed("unfit", "its token ended the answer, and then vLLM keeps no blocks")
            if params["do_remote_prefill"] is not True:
                raise PrefillFailed("refused", "it keeps no blocks", judged)
            return orjson.dumps(params)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise PrefillFailed("refused", "its answer has no parameters", judged) from error

    def _mooncake(self, usage: dict[str, Any]) -> dict[str, Any]:
        host = self.transfer.host or urlsplit(self.url).hostname or ""
        if ":" in host and host[0] != "[":
            host = f"[{host}]"
        made = {**AFTER, "transfer_id": self.name, "remote_engine_id": self.transfer.engine_id}
        made["remote_bootstrap_addr"] = f"http://{host}:{self.transfer.port}"
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return made if cached is None else {**made, "remote_prefill_cached_tokens": cached}  # for the answer's usage


def lacks_blocks(params: bytes) -> bool:
    """Return whether a block that the decode engine would read is gone: its number is then that of the null block.

    vLLM 0.32 frees the first block of a sliding window a token too early for an engine that computes the prompt's last
    token again: where a window begins with a block, which is so at one length of prompts in as many as a block has.
    """
    groups = orjson.loads(params).get("remote_block_ids")
    return isinstance(groups, list) and any(isinstance(group, list) and NULL_BLOCK in group for group in groups)
