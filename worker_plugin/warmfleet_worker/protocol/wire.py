"""The wire format between workers and routers: names, Redis keys, stream entries, schemes, block hashes.

Plugin, simulator and router import it. Any change of meaning raises ``SCHEMA``, and the scripts refuse other schemas.
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
HASH_BYTES = 8  # length of a block hash, which is the last bytes of vLLM's digest
BATCH_BLOCKS = 128  # most block hashes in one entry; a call of apply adds as many to a cold Redis in 0.3-0.45 ms
PROGRESS_PER_ENTRY = 64  # most finished prefills, ended requests or running reservations in one entry
FLUSH_SECONDS = 0.1  # time between two batches of block changes
PROGRESS_FLUSH_SECONDS = 0.02  # longest time until a finished prefill is reported
HEARTBEAT_SECONDS = 5.0
WORKER_TTL_SECONDS = 15.0  # time without a heartbeat until a worker gets no requests, unless it answers routers' probes
YIELDS_SECONDS = 0.5  # least time between two readings of a worker's list ``yields``
YIELDS_PER_READING = 256  # most reservation ids in one reading
HELLO_MAXLEN = 4_096  # most entries that the stream ``hello`` keeps
SERVER_MAXLEN = 64  # most entries that a server's stream keeps
UNACKNOWLEDGED_ENTRIES = 256  # most entries of a snapshot that are sent and not yet applied
RESERVATION_PREFIX = "wf-"  # a reservation id is this and 22 url-safe characters
RESERVATION_LENGTH = len(RESERVATION_PREFIX) + 22
#: Stands before the client's part of an engine's request id if the client said that its conversation ends with this
#: request. Clients' own ids never begin with this character, because routers remove it from them.
ENDED_MARK = "~"
CLIENT_TAG_LENGTH = 11  # characters of the client's tag, which follows a reservation id if the client has limits
_WORD = "[A-Za-z0-9_-]"
RESERVATION = rf"{RESERVATION_PREFIX}{_WORD}{{22}}(?:{_WORD}{{{CLIENT_TAG_LENGTH}}})?"  # pattern of such an id

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_NOT_IN_A_TAG = re.compile(r"[^A-Za-z0-9._/-]")
# The engine's own id of a request from a router: [child_]kind-<reservation id>.<the client's id>... The kind may be two
# words (generate-tokens-), or resp_. A request for several answers has several children; vLLM numbers them from 0.
_ENGINE_REQUEST_ID = re.compile(rf"(?:(\d+)_)?(?:[a-z]+[-_]){{0,2}}({RESERVATION})\.")


class WireError(ValueError):
    """A name or a payload that the wire format does not allow."""


def check_name(name: str) -> str:
    """Return ``name`` if it may name a worker, a server or a reservation, else raise WireError."""
    if not _NAME.match(name):
        raise WireError(f"{name[:80]!r} is not a name: 1 to 64 of A-Z a-z 0-9 . _ - are allowed")
    return name


def model_tag(model: str) -> str:
    """Return the part of every key between the braces: the base model's name with ``~`` for ``/``, and any ``#pool``.

    Raises WireError if a part of ``model`` is not a name, and for a ``#`` with nothing behind it.
    """
    base, mark, pool = model.partition("#")
    if mark and not pool:
        text = f"{model[:80]!r} names no pool behind its '#': leave the '#' out, or name one ({base[:80]}#1)"
        raise WireError(f"{text}; is a shell variable unset?")
    for part in [*base.split("/"), *([pool] if pool else [])]:
        check_name(part)
    return base.replace("/", "~") + (f"#{pool}" if pool else "")


def tag_of(served_name: str) -> str:
    """Turn a served name into a model tag: other characters become hyphens, as in lua's ``shared/misnamed``."""
    return _NOT_IN_A_TAG.sub("-", served_name).strip("/")


class Keys:
    """The names of all Redis keys of one pool. They share one hash tag, hence one slot of a Redis Cluster."""

    def __init__(self, model: str) -> None:
        self.tag = model_tag(model)
        self.prefix = f"wf:{{{self.tag}}}:"

    def __getattr__(self, name: str) -> str:
        """Return a key in SINGLE_KEYS (``alive``, ``load``, ``leases`` ...); lua/README.md has a table of them."""
        if name not in SINGLE_KEYS:
            raise AttributeError(name)
        return self.prefix + name

    def block(self, block_hash: bytes) -> bytes:
        return self.prefix.encode() + b"b:" + block_hash

    def end(self, block_hash: bytes) -> bytes:
        return self.prefix.encode() + b"e:" + block_hash

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

    def yields(self, worker_id: str) -> str:
        return f"{self.prefix}yields:{worker_id}"

    def running(self, worker_id: str) -> str:
        return f"{self.prefix}running:{worker_id}"

    def probe(self, worker_id: str) -> str:
        return f"{self.prefix}probe:{worker_id}"

    def artifact(self, server_id: str, sha256: str) -> str:
        return f"{self.prefix}artifact:{server_id}:{sha256}"


SINGLE_KEYS = frozenset(
    {
        *("workers", "servers", "next_slot", "alive", "alive_servers", "load", "leases", "lease", "hello"),
        *("cursor", "batch", "digest", "resync", "retired", "tick", "counts", "audit", "audit_walk"),
        *("sets", "tiers", "stores"),
        *("queue2", "sessions", "session_line", "places", "images"),
        *("ejections", "operator_approved", "operator_policy", "replicas"),
        *("pools", "placement"),  # these belong to the served model as a whole: see protocol/pools.py
    }
)


def events_maxlen(capacity_blocks: int) -> int:
    """Return the number of entries that an events stream keeps: two full snapshots and some more."""
    return 2 * -(-capacity_blocks // BATCH_BLOCKS) + 1_024


def worker_id_of(server_id: str, rank: int) -> str:
    """Return the worker_id of one engine core; each data-parallel rank of a server is a worker of its own."""
    return check_name(f"{server_id}.{rank}")


# ---------------------------------------------------------------- stream entries

#: The operations on ``events:<worker_id>``. A stream ``server:<server_id>`` has only join, heartbeat and leave.
OPERATIONS = (
    *("join", "stored", "removed", "cleared", "heartbeat", "digests", "progress", "image"),
    *("begin", "chunk", "end", "leave"),
    *("ended", "running", "tally"),  # of an engine that reports the ends of requests; older routers count them, too
)
MARK_AT = len(RESERVATION_PREFIX)  # the place of the mark (see fleet/codes.py) in a reservation id
SEVERAL_PROMPTS = "-"  # the mark of a reservation of several prompts, which are requests of their own in the engine
#: Kinds of sets of blocks that a worker may report beside its main one (lua/parts/shared/further_sets): by ``digests``,
#: and by ``stored``, ``removed`` and ``cleared`` with a point and the kind behind. Older routers count all these as
#: malformed, and go on.
ENDS, CPU, DISK = "ends", "cpu", "disk"


def entry(nonce: str, batch: int, operation: str, data: bytes | str = b"") -> dict[bytes, bytes]:
    """Return the fields of one stream entry, in the order that the scripts expect.

    nonce: the random name of the writer's join. batch: the entry's number. data: JSON or packed block hashes.
    """
    payload = data.encode() if isinstance(data, str) else data
    return {b"n": nonce.encode(), b"b": b"%d" % batch, b"o": operation.encode(), b"d": payload}


def dumps(value: Any) -> str:
    """Write compact JSON with sorted keys, so that equal values always give equal bytes."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def entry_id(text: bytes | str) -> tuple[int, int]:
    """Read a Redis stream id as two numbers, which compare in the order of the stream."""
    ms, _, sequence = (text.decode() if isinstance(text, bytes) else text).partition("-")
    return int(ms), int(sequence)


@dataclass(slots=True)
class Digest:
    """A summary of a set of block hashes, to compare two sets with: their count and two sums modulo 2**32."""

    count: int = 0
    high: int = 0
    low: int = 0

    def add(self, packed: bytes, sign: int = 1) -> None:
        """Add packed hashes that are not in the set, or with ``sign=-1`` remove hashes that are."""
        words = struct.unpack(f">{len(packed) // 4}I", packed)
        self.count += sign * (len(words) // 2)
        self.high = (self.high + sign * sum(words[0::2])) % 2**32
        self.low = (self.low + sign * sum(words[1::2])) % 2**32

    def as_list(self) -> list[int]:
        return [self.count, self.high, self.low]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The report of an engine core, at least every HEARTBEAT_SECONDS.

    running, waiting: numbers of requests. blocks: number of held block hashes. foreign_*: tokens of requests that no
    router has sent. speed_tps: prefill tokens per second of prefill, 0 = not measured. evicted: blocks evicted since
    the last heartbeat. digest: of the published block set; None while a snapshot is under way and after lost events.
    paused: the engine takes no new request until somebody resumes it or wakes it up. step_us: shortest duration of an
    engine step in microseconds, however little it computes, 0 = not measured.
    """

    running: int
    waiting: int
    blocks: int
    foreign_prefill_tokens: int
    foreign_decode_tokens: int
    speed_tps: int
    evicted: int
    digest: Digest | None = None
    paused: bool = False
    step_us: int = 0

    def encode(self) -> str:
        """Return a JSON list of numbers. The last: paused, step_us; without step_us a 1 if paused, else nothing."""
        numbers = [self.running, self.waiting, self.blocks, self.foreign_prefill_tokens]
        numbers += [self.foreign_decode_tokens, self.speed_tps, self.evicted]
        numbers += self.digest.as_list() if self.digest else []
        return dumps(numbers + ([int(self.paused), self.step_us] if self.step_us else [1] * self.paused))


def reservation_of(request_id: str) -> tuple[str, int] | None:
    """Find (reservation id, number of the child) in an engine's own request id; None if no router sent the request.

    A request for several answers (``n`` > 1) has several children; an only child is number 0.
    """
    match = _ENGINE_REQUEST_ID.match(request_id)
    return (match[2], int(match[1] or 0)) if match else None


def first_child(request_id: str) -> str:
    """Return the reservation id of an engine's request; empty if no router sent it, or another child stands for it."""
    found = reservation_of(request_id)
    return found[0] if found is not None and found[1] == 0 else ""


def reservations_digest(reservations: Iterable[str]) -> Digest:
    """Summarise a set of reservations: each counts with 8 of its random characters."""
    digest = Digest()
    digest.add("".join([each[MARK_AT + 1 : MARK_AT + 1 + HASH_BYTES] for each in reservations]).encode())
    return digest


def conversation_ended(request_id: str) -> bool:
    """Tell whether a router has marked an engine's own request id as the last of its conversation."""
    match = _ENGINE_REQUEST_ID.match(request_id) if ENDED_MARK in request_id else None
    return match is not None and request_id.startswith(ENDED_MARK, match.end())


# ---------------------------------------------------------------- schemes and block hashes


#: Words in place of the algorithm if an engine's blocks cannot be matched with prompts, so that only its load counts.
NO_CACHE, NO_PREFIXES = "none", "no_prefixes"
UNMATCHED = {
    NO_CACHE: "its prefix caching is off",
    NO_PREFIXES: "its model has no full-attention layers, whose blocks alone are kept for whole prefixes",
}
#: Digest length by vLLM's ``--prefix-caching-hash-algo``: SHA-256 or XXH3-128, of pickle bytes or canonical CBOR.
DIGEST_BYTES = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}


#: An image in a prompt: the number of its first token, how many tokens it has, and the identifier that vLLM gives it.
Media = tuple[int, int, str]

LOOKAHEAD, DROPS = "lookahead_", "_drop"
_FORMS = re.compile("(?:tagged|plain|lookahead_[1-9][0-9]?)(?:_drop)?")  # of Scheme.extra_keys


@dataclass(frozen=True)
class Scheme:
    """The rules by which an engine hashes blocks; with them a router computes the same block hashes.

    algorithm: a key of DIGEST_BYTES, or of UNMATCHED. none_hash: used in place of a parent's hash in a prompt's first
    block. block_tokens: tokens in a block. extra_keys: the form of salts and LoRA names in a hash, ``tagged`` (since
    vLLM 0.31) or ``plain`` (0.28 to 0.30); or ``lookahead_<L>``: tagged, and the L tokens behind a block are hashed
    with it, for an engine that drafts tokens (EAGLE and MTP since 0.33). With ``_drop`` behind the form an engine that
    drafts tokens computes the last block that it has cached of a prompt once more. hash_block_tokens: tokens that are
    hashed at a time; default: a block's. An engine whose KV cache groups have blocks of several sizes hashes fewer
    tokens at a time: the hash of a block is then the hash of its last step.

    To add a field, change ``as_dict`` and ``from_dict``; ``scheme_of`` in the plugin's ``vllm_hooks/engine_core``,
    which announces it; ``lua/parts/apply_control/worker_join.lua`` and the router's ``fleet/worker/records``, which
    accept only known fields; and the router's ``prompt/block_hashes``, which computes with it.
    """

    algorithm: str
    none_hash: bytes
    block_tokens: int
    extra_keys: str = "tagged"
    hash_block_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.hash_block_tokens:
            object.__setattr__(self, "hash_block_tokens", self.block_tokens)

    @property
    def steps(self) -> int:
        """The number of hashing steps in one block; the last step's hash is the block's."""
        return self.block_tokens // self.hash_block_tokens

    @cached_property
    def lookahead(self) -> int:
        """The number of tokens behind a block that its hash covers."""
        form = self.extra_keys.removesuffix(DROPS)
        return int(form.removeprefix(LOOKAHEAD)) if form.startswith(LOOKAHEAD) else 0

    @property
    def drops(self) -> bool:
        """Whether an engine computes the last block that it has cached of a prompt once more."""
        return self.extra_keys.endswith(DROPS)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields; ``hash_block_tokens`` only if it differs from block_tokens: older routers lack it."""
        announced: dict[str, Any] = {
            "algorithm": self.algorithm,
            "none_hash": self.none_hash.hex(),
            "block_tokens": self.block_tokens,
            "extra_keys": self.extra_keys,
        }
        if self.hash_block_tokens != self.block_tokens:
            announced["hash_block_tokens"] = self.hash_block_tokens
        return announced

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Scheme:
        """Read an announced scheme; raises WireError for one that no router of this version can compute."""
        try:
            scheme = cls(
                str(value["algorithm"]),
                bytes.fromhex(value["none_hash"]),
                int(value["block_tokens"]),
                str(value["extra_keys"]),
                int(value.get("hash_block_tokens", 0)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"malformed scheme: {error}") from error
        if scheme.algorithm in UNMATCHED:
            raise WireError(UNMATCHED[scheme.algorithm])
        if scheme.algorithm not in DIGEST_BYTES or not _FORMS.fullmatch(scheme.extra_keys):
            raise WireError(f"unknown scheme {scheme.algorithm}/{scheme.extra_keys}")
        lengths = (DIGEST_BYTES[scheme.algorithm], 32)  # vLLM 0.28 takes 32 random bytes, whatever the algorithm
        if not 1 <= scheme.block_tokens <= 4_096 or len(scheme.none_hash) not in lengths:
            raise WireError(f"scheme out of range: block_tokens 1..4096, none_hash one of {lengths} bytes")
        if scheme.hash_block_tokens < 1 or scheme.block_tokens % scheme.hash_block_tokens:
            raise WireError("scheme out of range: hash_block_tokens is no divisor of block_tokens")
        return scheme

    @cached_property
    def scheme_id(self) -> int:
        """The scheme's id, by which the scripts compare schemes: 31 bits of a digest."""
        digest = hashlib.sha256(dumps(self.as_dict()).encode()).digest()
        return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


def default_none_hash(algorithm: str, seed: str = "vllm-none-hash") -> bytes:
    """Return vLLM's NONE_HASH since 0.29 (``init_none_hash``), the hash of a seed string."""
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
    media: Sequence[Media] = (),
) -> list[bytes]:
    """Return the digest of every full block of ``token_ids``, as vLLM's ``hash_block_tokens`` computes it.

    Under a scheme that looks ahead, blocks with fewer than ``lookahead`` tokens behind them have none.
    parent: the digest of the block before these tokens; None at the begin of a prompt. salt: part of a prompt's first
    block only. lora: (name, path) of the adapter, part of every block. new: makes a hash object; for the xxhash
    algorithms the caller passes XXH3-128, which the standard library lacks. media: in order; each is part of every
    block that it touches, also with the tokens behind the block that are hashed with it.
    """
    previous = parent or scheme.none_hash
    size, steps, ahead = scheme.hash_block_tokens, scheme.steps, scheme.lookahead
    payload = _cbor_payload if scheme.algorithm.endswith("_cbor") else _pickle_payload
    hashes = []
    for start in range(0, len(token_ids) - size - ahead + 1, size):
        end = start + size
        touching = media_keys(media, start, end + ahead) if media else ()
        extra = extra_keys(scheme, salt if parent is None and start == 0 else None, lora, touching)
        covered = (extra, *token_ids[end : end + ahead]) if ahead else extra
        previous = new(payload(previous, tuple(token_ids[start:end]), covered)).digest()
        hashes.append(previous)
    return hashes[steps - 1 :: steps]


def pack_hashes(hashes: Iterable[bytes]) -> bytes:
    """Concatenate the block hashes of these digests, which are the last 8 bytes of each, as in vLLM's KV events."""
    return b"".join([digest[-HASH_BYTES:] for digest in hashes])


def media_keys(media: Sequence[Media], start: int, end: int) -> list[tuple[str, int]]:
    """Return the identifier of each item that the tokens from ``start`` to ``end`` touch, and its place behind start.

    Each identifier is a new object, because pickle would write the second of two equal objects in another way.
    """
    return [
        (item.encode().decode(), offset - start)
        for offset, tokens, item in media
        if offset < end and offset + tokens > start
    ]


def extra_keys(
    scheme: Scheme, salt: str | None, lora: tuple[str, str] | None, media: Sequence[tuple[str, int]] = ()
) -> tuple[Any, ...] | None:
    """Return adapter, media and salt in the form in which a block's hash includes them; None if there is none."""
    tagged = not scheme.extra_keys.startswith("plain")
    keys: list[Any] = [] if lora is None else [("lora", *lora) if tagged else lora[0]]
    keys += [("mm", *key) for key in media] if tagged else media
    if salt is not None:
        keys.append(("cache_salt", salt) if tagged else salt)
    return tuple(keys) or None


def _pickle_payload(parent: bytes, tokens: tuple[int, ...], extra: tuple[Any, ...] | None) -> bytes:
    # pickle writes an object that occurs twice only once. So this is not exact if an adapter's name is a single letter
    # that is also its path or the salt.
    return pickle.dumps((parent, tokens, extra), protocol=5)


def _cbor_payload(parent: bytes, tokens: tuple[int, ...], extra: tuple[Any, ...] | None) -> bytes:
    head = b"\x83", cbor.encode(parent), cbor.head(0x80, len(tokens))
    return b"".join((*head, *map(cbor.integer, tokens), cbor.encode(extra)))
