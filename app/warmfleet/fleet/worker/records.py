"""Checks the records of workers and of API servers field by field: a worker may write anything about itself.

The scripts refuse a malformed join, but they store a server's join unchanged, and scripts of another version may have
stored other fields. Only this module checks the types of the fields that are read later. A record with a wrong
type counts as missing: its worker is not routable, and the other workers are not affected.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import orjson

from warmfleet.protocol.labels import MAX_LABELS, is_label
from warmfleet.protocol.transfer import read_transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Check = Callable[[Any], bool]

logger = logging.getLogger("warmfleet.records")

MAX_DEPTH = 500


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 2**53


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _or_null(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _any_of(*words: str) -> Check:
    return lambda value: value in words


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _object_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _fields(**checks: Check) -> Check:
    """Make the check of an object in which each of these fields passes its check or is missing; ignore others."""
    return lambda value: isinstance(value, dict) and not _wrong(value, checks)


def _wrong(record: Mapping[str, Any], checks: Mapping[str, Check]) -> str:
    """Return the name of the first field that fails its check; empty if none does."""
    return next((name for name, check in checks.items() if name in record and not check(record[name])), "")


def _deep(value: Any) -> bool:
    """Return whether the nesting is too deep to be written as JSON; the scripts take 500 brackets at most."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _models(value: Any) -> bool:
    return value == {} or _list_of(_text)(value)  # cjson writes an empty list as {}


def _manifest(value: Any) -> bool:
    """Check a manifest: file name -> digest, size and pieces, of which none may be missing."""
    file = _fields(sha256=_text, bytes=_count, chunks=_list_of(_text))
    return _object_of(lambda entry: file(entry) and {"sha256", "bytes", "chunks"} <= entry.keys())(value)


def _labels(value: Any) -> bool:
    return isinstance(value, dict) and len(value) <= MAX_LABELS and all(map(is_label, value, value.values()))


FACTS: dict[str, Check] = {
    "max_model_len": _count,
    "content_format": _text,
    "special_tokens": _object_of(_text),
    "default_chat_template_kwargs": _object,
    "same_template_with_tools": _flag,
    "exclude_tools_when_tool_choice_none": _flag,
    "merges_inline_system": _flag,
    "disabled_thinking_effort": _text,
    "multimodal": _flag,
    "placeholders": _object_of(_or_null(_text)),
    "renders": _object,
    "token_handoff": _list_of(_text),
    "reports_prefills": _flag,
    "takes_priority": _flag,
    "loras": _object_of(_text),
    "ranks": _count,
    "images": _object,
}
SERVER: dict[str, Check] = {
    "nonce": _text,
    "url": _text,
    "models": _models,
    "artifacts": _manifest,
    "facts": _fields(**{name: _or_null(check) for name, check in FACTS.items()}),
}
WORKER: dict[str, Check] = {
    **dict.fromkeys(("nonce", "server_id", "version", "reason", "cause", "suspect", "snapshot", "url"), _text),
    **dict.fromkeys(("identity", "leaving"), _text),
    **dict.fromkeys(("slot", "shadow", "rank", "scheme_id", "capacity_blocks", "max_model_len", "tries"), _count),
    **dict.fromkeys(("step_us", "step_tokens"), _count),
    "left": _flag,
    "models": _models,
    "proof": _any_of("pending", "proven", "identity", "url", "warming"),
    "warming": _fields(owner=_text, ends=_time),
    "parents": _object_of(_text),
    **dict.fromkeys(("started", "joined", "probed", "vouched", "told"), _time),
    "scheme": _fields(
        algorithm=_text, none_hash=_text, block_tokens=_count, extra_keys=_text, hash_block_tokens=_count
    ),
    "differs": _flag,
    "sets": _object_of(
        _fields(
            **dict.fromkeys(("slot", "capacity_blocks", "bytes_per_token", "ps_per_byte"), _count),
            **dict.fromkeys(("promises_all", "loads_last", "loads_dropped"), _count),
            store=_text,
        )
    ),
    "truth": _fields(cause=_text, found=_count, healed=_count, checked=_time, resyncs=_object_of(_count)),
}


class Records:
    """Checks one model's records. A record that did not change since the last reading is not checked again.

    unreadable: number of records that failed at the last reading. Each is logged once, until it is readable again.
    """

    def __init__(self, tag: str) -> None:
        self.unreadable = 0
        self._tag = tag
        self._servers: dict[bytes, dict[str, Any] | None] = {}
        self._workers: dict[bytes, tuple[bytes, dict[str, Any] | None]] = {}
        self._logged: frozenset[str] = frozenset()
        self._wrong_now: set[str] = set()

    def read(
        self, workers: Iterable[tuple[bytes, bytes]], servers: Iterable[tuple[bytes, bytes]]
    ) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """Return the readable records of one reading, by name: of the workers, and of their API servers."""
        before, self._servers, self._wrong_now = self._servers, {}, set()
        last, self._workers = self._workers, {}
        found: dict[str, dict[str, Any]] = {}
        records: dict[str, dict[str, Any]] = {}
        for name, raw in servers:
            known = before[raw] if raw in before else self._parsed("server", name, raw, SERVER)
            self._servers[raw] = known
            if known is not None:
                found[name.decode()] = known
            elif raw in before:
                self._wrong_now.add(f"server {_shown(name)}")
        for name, raw in workers:
            entry = last.get(name)
            if entry is None or entry[0] != raw:
                entry = raw, self._parsed("worker", name, raw, WORKER)
            elif entry[1] is None:
                self._wrong_now.add(f"worker {_shown(name)}")
            self._workers[name] = entry
            if entry[1] is not None:
                records[name.decode()] = entry[1]
        self._logged, self.unreadable = frozenset(self._wrong_now), len(self._wrong_now)
        return records, found

    def _parsed(self, kind: str, name: bytes, raw: bytes, checks: Mapping[str, Check]) -> dict[str, Any] | None:
        """Return the record, or None if it is unreadable.

        orjson reads strict JSON: no NaN, no number beyond a double, no half of a surrogate pair.
        """
        try:
            name.decode("ascii")
            record = orjson.loads(raw)
            deep = raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _deep(record)
            wrong = _wrong(record, checks) if isinstance(record, dict) and not deep else "itself"
        except ValueError as error:
            record, wrong = None, str(error)
        if not wrong:
            if not _labels(record.get("labels", {})):  # the worker then counts as unlabelled
                del record["labels"]
            if "transfer" in record:  # None: the worker then counts as one without a KV connector
                record["transfer"] = read_transfer(record["transfer"])
            return dict(record)
        owner = f"{kind} {_shown(name)}"
        self._wrong_now.add(owner)
        if owner not in self._logged:
            logger.warning("%s: the record of %s cannot be read and is left out: %s", self._tag, owner, wrong[:80])
        return None


def _shown(name: bytes) -> str:
    return ascii(name[:64].decode("ascii", "replace"))
