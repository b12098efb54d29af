"""How an engine hands the KV blocks of a prompt to another engine, or takes them from one: fact ``transfer`` of a join.

Engines announce it, and routers read it, by this module. An engine with the role ``prefill`` computes prompts for
others, one with the role ``decode`` takes what others have computed, one with the role ``both`` does either.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ROLES = ("prefill", "decode", "both")
#: vLLM's connectors that hand a request's blocks from one engine to another, and the library behind each.
HANDS_OVER: Mapping[str, str] = {
    **dict.fromkeys(("NixlConnector", "NixlPullConnector", "NixlPushConnector"), "NIXL"),
    "MooncakeConnector": "Mooncake",
}
#: Names in ``same`` that routers know: two that differ between versions of vLLM, NIXL's hash of all it compares, and
#: of an engine with Mooncake whether all its layers keep whole prompts (``True``).
OF_A_VERSION = VLLM, NIXL_CONNECTOR = "vLLM", "NIXL connector"
NIXL_HASH = "NIXL's hash"
KEEPS_ALL = "full attention"
#: First release of vLLM whose decode engine outlives that a request ends before Mooncake has its blocks.
MOONCAKE_SINCE = (0, 32)
MAX_SAME = 16  # most settings that partners must have in common
MAX_TEXT = 96  # longest text of the fact; a whole join may have 4,096 bytes
_TEXT = re.compile(f"[ -~]{{0,{MAX_TEXT}}}")  # ASCII without control characters
#: The id that vLLM draws at each start, with the ranks that it adds.
_DRAWN_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}(_dp\d+)*")
_TEXTS = ("role", "connector", "beside", "mode", "engine_id", "host")
_LIMITS = {"port": 65_535, "lease_s": 2**31 - 1}


@dataclass(frozen=True, slots=True)
class Transfer:
    """The fact. same: what partners must have in common, as names and values, sorted by name.

    connector: of those of HANDS_OVER if the engine has one. beside: its other connectors, with commas. mode: who moves
    the blocks, `pull` (the decode engine reads) or `push`. host, port: where partners ask a prefill engine for its
    memory; without a host it is that of the engine's URL. lease_s: how long a prefill engine keeps blocks that nobody
    takes. recomputes: a decode engine computes blocks that it cannot get, in place of failing the request.
    """

    role: str
    connector: str
    beside: str = ""
    mode: str = ""
    engine_id: str = ""
    host: str = ""
    port: int = 0
    lease_s: int = 0
    recomputes: bool = False
    same: tuple[tuple[str, str], ...] = ()

    @property
    def kin(self) -> int:
        """A number of 32 bits that partners have in common: a digest of ``same``."""
        text = "\0".join(f"{name}\0{value}" for name, value in self.same)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")

    @property
    def library(self) -> str:
        """What moves the blocks; empty if this connector hands over no requests."""
        return HANDS_OVER.get(self.connector, "")

    @property
    def prefills(self) -> bool:
        """Whether the engine may compute prompts for others."""
        return bool(self.library) and self.role != "decode"

    @property
    def decodes(self) -> bool:
        """Whether the engine may take what others have computed."""
        return bool(self.library) and self.role != "prefill"

    @property
    def splits(self) -> bool:
        """Whether routers know a safe way to split requests over such engines.

        Mooncake's prefill engines may have freed a block of a sliding window that is needed, and tell nobody. A release
        that is not known counts as new.
        """
        if self.library == "Mooncake":
            same = dict(self.same)
            return same.get(KEEPS_ALL) == "True" and (release(same.get(VLLM, "")) or MOONCAKE_SINCE) >= MOONCAKE_SINCE
        return self.library == "NIXL" and self.mode == "pull"

    @property
    def has_fixed_id(self) -> bool:
        """Whether an operator chose the engine's id, which it then keeps over a restart."""
        return not _DRAWN_ID.fullmatch(self.engine_id)

    @property
    def is_local(self) -> bool:
        """Whether ``host`` means the engine's own machine, wherever it is read."""
        try:
            address = ipaddress.ip_address(self.host.strip("[]"))
        except ValueError:
            return self.host == "localhost"
        return address.is_loopback or address.is_unspecified

    def as_dict(self) -> dict[str, Any]:
        """Return what a join announces. ``kin`` is in it for scripts, which read no further field."""
        told: dict[str, Any] = {name: getattr(self, name) for name in (*_TEXTS, *_LIMITS)}
        return told | {"recomputes": int(self.recomputes), "same": dict(self.same), "kin": self.kin}


def release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version of vLLM; nothing if it has none."""
    numbers = version.split(".")[:2]
    return tuple(map(int, numbers)) if all(number.isdecimal() for number in numbers) else ()


def short(text: str) -> str:
    """Make a text that ``same`` may have: a longer one, or one with other characters, ends in a digest of itself."""
    if _TEXT.fullmatch(text):
        return text
    kept = re.sub("[^ -~]", "?", text)[: MAX_TEXT // 2]
    return f"{kept}... ({hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]})"


def read_transfer(told: object) -> Transfer | None:
    """Read what a join announced; None if any of it is malformed, as an engine may announce anything."""
    if not isinstance(told, dict) or not isinstance(told.get("same"), dict):
        return None
    same, role = told["same"], told.get("role")
    texts, numbers = [told.get(name) for name in _TEXTS], [told.get(name) for name in _LIMITS]
    if not all(isinstance(text, str) and _TEXT.fullmatch(text) for text in (*texts, *same, *same.values())):
        return None
    pairs = zip(numbers, _LIMITS.values(), strict=True)
    if not all(type(number) is int and 0 <= number <= most for number, most in pairs):
        return None
    if role not in ROLES or len(same) > MAX_SAME or told.get("recomputes") not in (0, 1):
        return None
    fields: dict[str, Any] = dict(zip((*_TEXTS, *_LIMITS), (*texts, *numbers), strict=True))
    found = Transfer(**fields, recomputes=bool(told["recomputes"]), same=tuple(sorted(same.items())))
    return found if found.kin == told.get("kin") else None
