"""``warmfleet key``: makes a new key for a client, and the line about the key for the replicas' file of keys."""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from warmfleet.api.access.client_keys import NAME
from warmfleet.cli.command_error import CommandError

if TYPE_CHECKING:
    import argparse

KEY_BYTES = 32  # random bytes of a key, so many that nobody can find the key by its unsalted hash


def run(options: argparse.Namespace) -> int:
    """Print the line on standard output and the key on standard error, so ``>> keys.jsonl`` gets no key."""
    if not NAME.fullmatch(options.name):
        raise CommandError("NAME must be 1 to 128 letters, digits and ._@-")
    key = f"wf-{secrets.token_urlsafe(KEY_BYTES)}"
    entry: dict[str, Any] = {"name": options.name, "sha256": hashlib.sha256(key.encode()).hexdigest()}
    if options.models is not None:
        entry["models"] = [name.strip() for name in options.models.split(",") if name.strip()]
        if not entry["models"]:
            raise CommandError("--models names no model")
    if options.days:
        entry["expires"] = (datetime.now(UTC) + timedelta(days=options.days)).isoformat(timespec="seconds")
    limits = {"concurrency": options.concurrency, "tokens_per_minute": options.tokens_per_minute}
    entry |= {field: limit for field, limit in limits.items() if limit is not None}
    print(json.dumps(entry), flush=True)
    print(f"key (it is stored nowhere, the line has its hash): {key}", file=sys.stderr)
    return 0
