"""The wire form of the KV events that vLLM (0.28 to 0.33) and SGLang publish over ZMQ, read into plain values.

A batch is msgpack of ``[time, events, rank]``. An event is a map with the class name under ``type``; earlier versions
of both wrote an array that begins with the class name. Fields are read by name; those that an engine does not know are
absent. Fields that the bridge does not need are not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

from warmfleet_worker.protocol.wire import CPU, DISK

#: The hash of a block in an event: the last 8 bytes of vLLM's digest as a number, or the whole digest
#: (``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0``). Keys are only compared for equality.
BlockKey = int | bytes

#: The order of the fields where an event is an array.
STORED_ARRAY = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
VLLM_STORED_ARRAY = (*STORED_ARRAY, "lora_name", "extra_keys", "group_idx")
SGLANG_STORED_ARRAY = (*STORED_ARRAY, "cache_salt", "session_id", "lora_name")
REMOVED_ARRAY = ("block_hashes", "medium", "group_idx")
DEVICE = ""  # the place of blocks in the engine's own cache; the other places are kinds of tiers
#: Place by the medium of an event, in lower case. Events of other media are not read.
PLACES = {None: DEVICE, "gpu": DEVICE, "cpu": CPU, "cpu_pinned": CPU, "storage": DISK, "disk": DISK}

#: The media that vLLM's OffloadingConnector names so, without a locality. Other connectors, which write them otherwise,
#: load no block of a prompt's last token.
OFFLOADED = ("CPU", "STORAGE")


class EventError(ValueError):
    """A batch or an event is malformed: no known engine writes such a one."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that follow ``parent`` (None: they begin a prompt) have come into the cache.

    extra_keys: by block, what entered its hash besides tokens: the adapter's name, media, the salt, embeddings.
    salt: the request's cache salt, if the event has it in a field of its own (SGLang). behind: by block, the tokens
    behind it that entered its hash, too (vLLM since 0.33 with EAGLE or MTP); for all blocks equally many.
    """

    keys: tuple[BlockKey, ...]
    parent: BlockKey | None
    token_ids: list[Any]
    block_tokens: int
    group: int = 0
    lora: str | None = None
    extra_keys: tuple[Any, ...] = ()
    salt: str | None = None
    behind: tuple[tuple[Any, ...], ...] = ()
    lora_unnamed: bool = False  # an adapter is in use, and the event does not name it
    kind: str = ""  # of the group, as vLLM names it
    window: int = 0  # tokens of the group's sliding window


@dataclass(frozen=True, slots=True)
class Offloaded:
    """Copies of these blocks have come into a tier (``wire.CPU``, ``wire.DISK``) of the engine.

    loads_last: the engine loads the last block of a prompt from there, too, behind which is no token.
    """

    keys: tuple[BlockKey, ...]
    tier: str
    group: int = 0
    loads_last: bool = False


@dataclass(frozen=True, slots=True)
class Removed:
    """A copy of each of these blocks has gone from this place."""

    keys: tuple[BlockKey, ...]
    group: int = 0
    place: str = DEVICE


@dataclass(frozen=True, slots=True)
class Cleared:
    """The cache is empty."""


Event = Stored | Offloaded | Removed | Cleared


def decode(payload: bytes, *, sglang: bool = False) -> list[Event]:
    """Read the events of a batch, in order, but none about places that several engines share. Raises EventError."""
    try:
        batch = msgpack.unpackb(payload, strict_map_key=False)
        raw = batch["events"] if isinstance(batch, dict) else batch[1]
        found = [_event(event, SGLANG_STORED_ARRAY if sglang else VLLM_STORED_ARRAY) for event in raw]
    except (ValueError, TypeError, LookupError, ArithmeticError, msgpack.UnpackException) as error:
        raise EventError(f"not a batch of KV events: {type(error).__name__}: {error}"[:200]) from error
    return [event for event in found if event is not None]


def _event(raw: Any, stored_fields: tuple[str, ...]) -> Event | None:
    """Read an event; None if it is about a place that several engines share, or that is not known."""
    if isinstance(raw, dict):
        kind, fields = raw["type"], raw
    else:
        kind, values = raw[0], raw[1:]
        fields = dict(zip(stored_fields if kind == "BlockStored" else REMOVED_ARRAY, values, strict=False))
    if kind == "AllBlocksCleared":
        return Cleared()
    medium = fields.get("medium")
    place = PLACES.get(medium.lower() if isinstance(medium, str) else medium)
    if place is None or fields.get("locality") == "REMOTE":
        return None
    group = int(fields.get("group_idx") or 0)
    if kind == "BlockRemoved":
        return Removed(_keys(fields["block_hashes"]), group, place)
    if kind != "BlockStored":
        raise EventError(f"unknown event {kind!r}")
    if place:
        loads_last = medium in OFFLOADED and fields.get("locality") is None
        return Offloaded(_keys(fields["block_hashes"]), place, group, loads_last)
    return _stored(fields, group)


def _stored(fields: dict[str, Any], group: int) -> Stored:
    parent, lora, salt = fields["parent_block_hash"], fields.get("lora_name"), fields.get("cache_salt")
    if parent is not None and not isinstance(parent, BlockKey):
        raise EventError("a parent hash is neither a number nor bytes")
    if not isinstance(lora, str | None) or not isinstance(salt, str | None):
        raise EventError("an adapter's name or a salt is no text")
    keys, block_tokens, token_ids = _keys(fields["block_hashes"]), int(fields["block_size"]), list(fields["token_ids"])
    extra_keys = tuple(fields.get("extra_keys") or ())
    behind = tuple(map(tuple, fields.get("lookahead_token_ids") or ()))
    if block_tokens < 1 or any(parts and len(parts) != len(keys) for parts in (extra_keys, behind)):
        raise EventError("the sizes of a stored event do not match")
    return Stored(
        keys=keys,
        parent=parent,
        token_ids=token_ids,
        block_tokens=block_tokens,
        group=group,
        lora=lora,
        extra_keys=extra_keys,
        salt=salt,
        behind=behind,
        lora_unnamed=lora is None and fields.get("lora_id") is not None,
        kind=str(fields.get("kv_cache_spec_kind") or ""),
        window=int(fields.get("kv_cache_spec_sliding_window") or 0),
    )


def _keys(values: Any) -> tuple[BlockKey, ...]:
    keys = tuple(values)
    if not all(isinstance(key, BlockKey) for key in keys):
        raise EventError("a block hash is neither a number nor bytes")
    return keys
