"""What workers bring to tell how a prompt becomes token ids, and who brought something else than most of its model."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from warmfleet.protocol.wire import dumps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from warmfleet.fleet import WorkerView

MAX_SERVERS = 8  # that are asked for the same files
#: What an identity is built of; whatever else a worker may bring is not read.
FILES = ("tokenizer.json", "chat_template.jinja")
#: Of a server's facts, those that decide token ids. The others (limits, parsers, keys) may differ within a fleet.
TOKEN_FACTS = (
    "add_special_tokens",
    "content_format",
    "default_chat_template_kwargs",
    "exclude_tools_when_tool_choice_none",
    "multimodal",
    "placeholders",
    "same_template_with_tools",
    "special_prefix_ids",
    "special_tokens",
)


def key(worker: WorkerView) -> str:
    """Two workers with equal keys see every prompt alike, whatever adapters they serve."""
    return hashlib.sha256(dumps(_parts(worker)).encode()).hexdigest()


def groups(workers: Sequence[WorkerView]) -> dict[str, list[WorkerView]]:
    """key -> workers, of those that brought anything. What most brought comes first; of ties, what the first did."""
    found: dict[str, list[WorkerView]] = {}
    for worker in workers:
        if worker.server and worker.server.get("artifacts"):
            found.setdefault(key(worker), []).append(worker)
    return dict(sorted(found.items(), key=lambda one: -len(one[1])))


def differences(worker: WorkerView, other: WorkerView) -> list[str]:
    """The files and facts in which they differ, by name. Adapters do not count: each has hashes of its own."""
    ours, theirs = _parts(worker), _parts(other)
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def in_words(workers: Sequence[WorkerView]) -> str:
    """The digest of what these brought and those of its files, for a person to compare."""
    artifacts = (workers[0].server or {})["artifacts"]
    files = (f"{name} {str(entry.get('sha256'))[:12]}" for name, entry in sorted(artifacts.items()))
    return f"{key(workers[0])[:12]} ({', '.join(files)})"


def _parts(worker: WorkerView) -> dict[str, Any]:
    facts = _facts(worker)
    artifacts = (worker.server or {}).get("artifacts") or {}
    shas = {name: entry.get("sha256") for name, entry in artifacts.items()}
    return {name: facts[name] for name in TOKEN_FACTS if name in facts} | shas


def _facts(worker: WorkerView) -> Mapping[str, Any]:
    return (worker.server or {}).get("facts") or {}
