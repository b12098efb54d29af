"""How a function of vLLM is replaced by one that calls it and then adds something."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_MARK = "__warmfleet_hooked__"


def first_time(owner: Any) -> bool:
    """Return True once for every module or class of vLLM, which may load plugins again in the same process."""
    if hasattr(owner, _MARK):
        return False
    setattr(owner, _MARK, True)
    return True


def wrap(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``replacement(original, *arguments)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def hook(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, hook)
