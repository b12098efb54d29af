"""Labels: an operator's facts about an engine, such as its zone, as ``name=value``. Routers choose workers by them."""

from __future__ import annotations

import re

from .wire import WireError

MAX_LABELS = 8  # most labels of an engine; lua/parts/apply_control/worker_join.lua takes no more
_WORD = re.compile(r"[A-Za-z0-9._-]{1,63}")


def is_label(name: object, value: object) -> bool:
    """Tell whether these are the name and the value of a label."""
    return all(isinstance(word, str) and _WORD.fullmatch(word) is not None for word in (name, value))


def read_labels(text: str) -> dict[str, str]:
    """Read ``zone=eu-1a,hardware=h100`` into values by name; ``&`` may replace the comma, in lists of engines.

    Raises WireError.
    """
    labels: dict[str, str] = {}
    for part in filter(None, map(str.strip, re.split("[,&]", text))):
        name, _, value = part.partition("=")
        if not is_label(name, value):
            raise WireError(f"{part[:80]!r} is no label: name=value, each 1 to 63 of A-Z a-z 0-9 . _ -")
        if name in labels:
            raise WireError(f"the label {name!r} is given twice")
        labels[name] = value
    if len(labels) > MAX_LABELS:
        raise WireError(f"{len(labels)} labels are given; at most {MAX_LABELS} may be")
    return labels
