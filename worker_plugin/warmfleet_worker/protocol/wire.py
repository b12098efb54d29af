"""The wire format shared by routers and workers: names, keys, stream entries, schemes, block hashes.

A leaf: stdlib only; plugin, simulator and router import it. It is the contract: a change of meaning raises ``SCHEMA``.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from . import cbor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

SCHEMA = 1
HASH_BYTES = 8
BATCH_BLOCKS = 128  # blocks in one entry: 0.3-0.45 ms of cold Redis per apply call
PROGRESS_PER_ENTRY = 64
FLUSH_SECONDS = 0.1
PROGRESS_FLUSH_SECONDS = 0.02
HEARTBEAT_SECONDS = 5.0
WORKER_TTL_SECONDS = 15.0
HELLO_MAXLEN = 4_096
SERVER_MAXLEN = 64
UNACKNOWLEDGED_ENTRIES = 256  # the plugin never runs further ahead of `applied` while it sends a snapshot
RESERVATION_PREFIX = "wf-"  # reservation id = this + 22 url-safe characters
RESERVATION_LENGTH = len(RESERVATION_PREFIX) + 22

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
# The engine's own id of a request of ours: [child_]kind-<reservation>.<the client's id>...; vLLM's first child is 0_.
_ENGINE_REQUEST_ID = re.compile(r"(?:(\d+)_)?(?:[a-z]+-)?(wf-[A-Za-z0-9_-]{22})\.")


class WireError(ValueError):
    """A name or a payload that the wire format does not allow."""


def check_name(name: str) -> str:
    """Return ``name`` if it may name a worker, a server or a reservation, else raise WireError."""
    if not _NAME.match(name):
        raise WireError(f"{name[:80]!r} is not a name: 1 to 64 of A-Z a-z 0-9 . _ - are allowed")
    return name


def model_tag(model: str) -> str:
    """The part between the braces of every key: the base model's name (``/`` as ``~``), with an optional ``#pool``."""
    base, _, pool = model.partition("#")
    for part in [*base.split("/"), *([pool] if pool else [])]:
        check_name(part)
    return base.replace("/", "~") + (f"#{pool}" if pool else "")


class Keys:
    """Names of every Redis key of one model. All share one hash tag, hence one cluster slot."""

    def __init__(self, model: str) -> None:
        self.tag = model_tag(model)
        self.prefix = f"wf:{{{self.tag}}}:"

    def __getattr__(self, name: str) -> str:
        """The single keys (``alive``, ``load``, ``leases`` ...): see lua/README.md for the table."""
        if name not in SINGLE_KEYS:
            raise AttributeError(name)
        return self.prefix + name

    def block(self, block_hash: bytes) -> bytes:
        return self.prefix.encode() + b"b:" + block_hash

    def speculative(self, block_hash: bytes) -> bytes:
        return self.prefix.encode() + b"x:" + block_hash

    def slot(self, slot: int) -> str:
        return f"{self.prefix}s:{slot}"

    def events(self, worker_id: str) -> str:
        return f"{self.prefix}events:{worker_id}"

    def server(self, server_id: str) -> str:
        return f"{self.prefix}server:{server_id}"

    def command(self, worker_id: str) -> str:
        return f"{self.prefix}command:{worker_id}"

    def probe(self, worker_id: str) -> str:
        return f"{self.prefix}probe:{worker_id}"

    def artifact(self, server_id: str, sha256: str) -> str:
        return f"{self.prefix}artifact:{server_id}:{sha256}"


SINGLE_KEYS = frozenset(
    {
        *("workers", "servers", "next_slot", "alive", "alive_servers", "load", "leases", "lease", "hello"),
        *("cursor", "batch", "digest", "resync", "retired", "tick", "counts", "audit", "audit_walk"),
        *("queue", "operator_approved", "operator_policy"),
    }
)


def events_maxlen(capacity_blocks: int) -> int:
    """Entries an events stream keeps: two full snapshots and some slack."""
    return 2 * -(-capacity_blocks // BATCH_BLOCKS) + 1_024


def worker_id_of(server_id: str, rank: int) -> str:
    """One engine core (a data-parallel rank) is a worker of its own."""
    return check_name(f"{server_id}.{rank}")


# ---------------------------------------------------------------- stream entries

#: Operations on ``events:<worker_id>``. On ``server:<server_id>`` only join, heartbeat and leave.
OPERATIONS = ("join", "stored", "removed", "cleared", "heartbeat", "progress", "begin", "chunk", "end", "leave")


def entry(nonce: str, batch: int, operation: str, data: bytes | str = b"") -> dict[bytes, bytes]:
    """Fields of one stream entry, in the order in which the scripts expect them."""
    payload = data.encode() if isinstance(data, str) else data
    return {b"n": nonce.encode(), b"b": b"%d" % batch, b"o": operation.encode(), b"d": payload}


def dumps(value: Any) -> str:
    """Compact canonical JSON: the same value always gives the same bytes."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def entry_id(text: bytes | str) -> tuple[int, int]:
    """A stream id as numbers, which compare as Redis orders them."""
    ms, _, sequence = (text.decode() if isinstance(text, bytes) else text).partition("-")
    return int(ms), int(sequence)


@dataclass(slots=True)
class Digest:
    """Count and two sums (mod 2**32) over a set of 8-byte hashes: 12 bytes that tell two sets apart."""

    count: int = 0
    high: int = 0
    low: int = 0

    def add(self, packed: bytes, sign: int = 1) -> None:
        """Add (or with ``sign=-1`` take away) packed 8-byte hashes. Each must be a real change."""
        words = struct.unpack(f">{len(packed) // 4}I", packed)
        self.count += sign * (len(words) // 2)
        self.high = (self.high + sign * sum(words[0::2])) % 2**32
        self.low = (self.low + sign * sum(words[1::2])) % 2**32

    def as_list(self) -> list[int]:
        return [self.count, self.high, self.low]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What an engine core says of itself every HEARTBEAT_SECONDS.

    running, waiting: requests. blocks: held hashes. foreign_*: tokens of requests that are not the fleet's.
    speed_tps: prefill tokens per busy second, 0 = not measured. evicted: blocks evicted since the last heartbeat.
    digest: of everything published; None while a snapshot is under way.
    """

    running: int
    waiting: int
    blocks: int
    foreign_prefill_tokens: int
    foreign_decode_tokens: int
    speed_tps: int
    evicted: int
    digest: Digest | None = None

    def encode(self) -> str:
        head = [self.running, self.waiting, self.blocks, self.foreign_prefill_tokens]
        head += [self.foreign_decode_tokens, self.speed_tps, self.evicted]
        return dumps(head + (self.digest.as_list() if self.digest else []))


def reservation_of(request_id: str) -> tuple[str, int] | None:
    """The reservation id in an engine's own request id and the number of the ``n`` > 1 child (0: first or only).

    None: not a request of this fleet.
    """
    match = _ENGINE_REQUEST_ID.match(request_id)
    return (match[2], int(match[1] or 0)) if match else None


# ---------------------------------------------------------------- schemes and block hashes


#: vLLM's ``--prefix-caching-hash-algo`` and the bytes of its digests: SHA-256 or XXH3-128 of pickle or canonical CBOR.
DIGEST_BYTES = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}


@dataclass(frozen=True)
class Scheme:
    """How an engine hashes: everything a router needs to compute the same block hashes.

    algorithm: a key of DIGEST_BYTES.
    none_hash: the parent of a first block. block_tokens: tokens in a block.
    extra_keys: ``tagged`` (vLLM 0.31 and later) or ``plain`` (0.28 to 0.30).
    """

    algorithm: str
    none_hash: bytes
    block_tokens: int
    extra_keys: str = "tagged"

    def as_dict(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm,
            "none_hash": self.none_hash.hex(),
            "block_tokens": self.block_tokens,
            "extra_keys": self.extra_keys,
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Scheme:
        """Read an announced scheme; raises WireError for one that no router of this version can compute."""
        try:
            scheme = cls(
                str(value["algorithm"]),
                bytes.fromhex(value["none_hash"]),
                int(value["block_tokens"]),
                str(value["extra_keys"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"malformed scheme: {error}") from error
        if scheme.algorithm not in DIGEST_BYTES or scheme.extra_keys not in ("tagged", "plain"):
            raise WireError(f"unknown scheme {scheme.algorithm}/{scheme.extra_keys}")
        lengths = (DIGEST_BYTES[scheme.algorithm], 32)  # vLLM 0.28 takes 32 random bytes for any algorithm
        if not 1 <= scheme.block_tokens <= 4_096 or len(scheme.none_hash) not in lengths:
            raise WireError(f"scheme out of range: block_tokens 1..4096, none_hash one of {lengths} bytes")
        return scheme

    @cached_property
    def scheme_id(self) -> int:
        """31 bits of a digest of the scheme: what the scripts compare."""
        digest = hashlib.sha256(dumps(self.as_dict()).encode()).digest()
        return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


def default_none_hash(algorithm: str, seed: str = "vllm-none-hash") -> bytes:
    """NONE_HASH of vLLM >= 0.29 (``init_none_hash``): the hash of its seed string."""
    if algorithm == "sha256":
        return hashlib.sha256(pickle.dumps(seed, protocol=5)).digest()
    return hashlib.sha256(cbor.encode(seed)).digest()


def chain_hashes(
    scheme: Scheme,
    token_ids: Sequence[int],
    parent: bytes | None = None,
    salt: str | None = None,
    lora: tuple[str, str] | None = None,
    new: Callable[[bytes], Any] = hashlib.sha256,
) -> list[bytes]:
    """Whole hashes of every full block of ``token_ids``, as vLLM's ``hash_block_tokens`` computes them.

    parent: the last hash before these tokens (None: a new prompt). salt counts in a prompt's first block only.
    lora: (name, path) of the adapter, in every block. new: makes a hash; of the xxhash algorithms XXH3-128, which
    the standard library lacks.
    """
    previous = parent or scheme.none_hash
    size = scheme.block_tokens
    payload = _cbor_payload if scheme.algorithm.endswith("_cbor") else _pickle_payload
    hashes = []
    for start in range(0, len(token_ids) - size + 1, size):
        extra = extra_keys(scheme, salt if parent is None and start == 0 else None, lora)
        previous = new(payload(previous, tuple(token_ids[start : start + size]), extra)).digest()
        hashes.append(previous)
    return hashes


def pack_hashes(hashes: Iterable[bytes]) -> bytes:
    """The last 8 bytes of every digest, concatenated: what vLLM's KV events carry and Redis holds."""
    return b"".join([digest[-HASH_BYTES:] for digest in hashes])


def extra_keys(scheme: Scheme, salt: str | None, lora: tuple[str, str] | None) -> tuple[Any, ...] | None:
    tagged = scheme.extra_keys == "tagged"
    keys: list[Any] = [] if lora is None else [("lora", *lora) if tagged else lora[0]]
    if salt is not None:
        keys.append(("cache_salt", salt) if tagged else salt)
    return tuple(keys) or None


def _pickle_payload(parent: bytes, tokens: tuple[int, ...], extra: tuple[Any, ...] | None) -> bytes:
    # Not exact for an adapter named by the very letter that is its path or the salt: pickle writes one object once.
    return pickle.dumps((parent, tokens, extra), protocol=5)


def _cbor_payload(parent: bytes, tokens: tuple[int, ...], extra: tuple[Any, ...] | None) -> bytes:
    head = b"\x83", cbor.encode(parent), cbor.head(0x80, len(tokens))
    return b"".join((*head, *map(cbor.integer, tokens), cbor.encode(extra)))
