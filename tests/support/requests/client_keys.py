"""The file with the keys of clients."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def line(name: str, key: str, **more: Any) -> str:
    return json.dumps({"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()} | more) + "\n"


def put(path: Path, text: str | None) -> None:
    """Give the file this content; None deletes it."""
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
