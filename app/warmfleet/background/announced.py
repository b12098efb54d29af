"""Groups a model's workers by the files and facts that turn prompts into token ids, as their servers announced them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from warmfleet.protocol.wire import dumps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from warmfleet.fleet import WorkerView

MAX_SERVERS = 8  # most API servers from which the same files are read, one after the other, until one read succeeds
NAMED = 3  # most differing facts that a sentence names; engines of different models differ in nearly all facts
#: The files that decide token ids, so routers read them. Other files of a worker in Redis are not read.
FILES = ("tokenizer.json", "chat_template.jinja")
#: The facts of a server that decide token ids. Its other facts (limits, parsers, keys) may differ within a fleet.
TOKEN_FACTS = (
    "add_special_tokens",
    "content_format",
    "default_chat_template_kwargs",
    "disabled_thinking_effort",
    "exclude_tools_when_tool_choice_none",
    "merges_inline_system",
    "multimodal",
    "placeholders",
    "same_template_with_tools",
    "special_prefix_ids",
    "special_tokens",
)


def identity_key(worker: WorkerView) -> str:
    """Return the digest of a worker's files and token facts. Equal keys mean equal token ids; adapters do not count."""
    return hashlib.sha256(dumps(_identity_of(worker)).encode()).hexdigest()


class Grouping:
    """Groups the workers of one model each time they are read from Redis. An unchanged record is hashed only once."""

    def __init__(self) -> None:
        #: ``id()`` of a server's record -> record, its identity key. An unchanged record is the same object each time.
        self._known: dict[int, tuple[Mapping[str, Any], str]] = {}

    def by_identity(self, workers: Sequence[WorkerView]) -> dict[str, list[WorkerView]]:
        """Return identity key (``identity_key``) -> its workers; largest group first, equal sizes by first worker.

        A worker that announced no files is in no group. A worker that announces fewer facts than a group, and
        contradicts none, joins the end of that group, because `warmfleet bridge`, which announces engines without a
        plugin, cannot know all their facts. The probe of such a worker tests whether the group is right.
        """
        groups: dict[str, list[WorkerView]] = {}
        known: dict[int, tuple[Mapping[str, Any], str]] = {}
        for worker in workers:
            server = worker.server
            if server and server.get("artifacts"):
                at = id(server)
                known[at] = self._known.get(at) or (server, identity_key(worker))
                groups.setdefault(known[at][1], []).append(worker)
        self._known = known
        for key in list(groups) if len(groups) > 1 else ():
            # A group joins another group that announces all the same facts and more.
            facts = _identity_of(groups[key][0]).items()
            fuller = (other for other in groups if other != key and facts < _identity_of(groups[other][0]).items())
            if home := next(fuller, None):
                groups[home] += groups.pop(key)
        return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def differences(worker: WorkerView, other: WorkerView) -> list[str]:
    """Name the files and facts in which two workers differ. Adapters do not count: block hashes tell them apart."""
    ours, theirs = _identity_of(worker), _identity_of(other)
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def listed(names: Sequence[str]) -> str:
    """Return differing files and facts as words of a sentence: the first NAMED by name, the others by their number."""
    shown = [*names[:NAMED], *([f"{len(names) - NAMED} more"] if len(names) > NAMED else ())]
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def pieces(server: Mapping[str, Any]) -> list[str]:
    """Return the digests of the chunks in which Redis stores this server's FILES."""
    files = server.get("artifacts") or {}
    return [str(digest) for name in FILES if name in files for digest in files[name]["chunks"]]


def in_words(key: str, workers: Sequence[WorkerView]) -> str:
    """Return the common identity key of these workers and the digests of their files, for a person to compare."""
    artifacts = (workers[0].server or {})["artifacts"]
    files = (f"{name} {str(entry.get('sha256'))[:12]}" for name, entry in sorted(artifacts.items()))
    return f"{key[:12]} ({', '.join(files)})"


def _identity_of(worker: WorkerView) -> dict[str, Any]:
    facts = _facts(worker)
    artifacts = (worker.server or {}).get("artifacts") or {}
    digests = {name: entry.get("sha256") for name, entry in artifacts.items()}
    return {name: facts[name] for name in TOKEN_FACTS if name in facts} | digests


def _facts(worker: WorkerView) -> Mapping[str, Any]:
    return (worker.server or {}).get("facts") or {}
