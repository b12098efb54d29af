"""Makes stream entries that no honest plugin writes: valid entries with a change, and random bytes. Repeats by seed."""

from __future__ import annotations

import random
from typing import Any

from tests.support.fleet.reporting_worker import SCHEME, SHA, block

from warmfleet_worker.protocol import wire

NUMBERS = (
    "0",
    "-1",
    "1e3",
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "-0",
    "0x10",
    "1.5",
    "4294967296",
    "9007199254740993",
)
NUMBERS_TOO = (
    "18446744073709551616",
    "1" * 40,
    "00000000000001",
    " 7",
    "7 ",
    "+7",
    "",
    "null",
    "true",
    '"7"',
    "[]",
    "{}",
)
WORDS = (
    b"",
    b"\0",
    b"\xff\xfe\xc0\x80",
    b"\xed\xa0\x80",
    b"__index",
    b"constructor",
    b"-",
    b"*",
    b"$",
    b"a" * 300,
    b"\r\n",
)
OTHER_OPERATIONS = ("Join", "STORED", "join ", "__index", "forget", "drain", "heartbeat\0", "")
NAME = "5ea50001"
BOMBS = (
    b"[" * 900, b"[" * 20_000, b'{"a":' * 900, b'{"a":' * 5_000, b"[" * 2_000 + b"]" * 2_000, b"{" * 70_000,
    b"[" + b"1," * 30_000 + b"1]", b'{"schema":1,"x":"' + b"x" * 300_000 + b'"}', b"[[" + b'"a",' * 4_000 + b"1]]",
    b'{"schema":1,"schema":2,' * 500, b'"' + b"\\u0000" * 3_000 + b'"', b"[" + b"null," * 3_000 + b"null]",
    b'{"' + b"k" * 70_000 + b'":1}', b"[" + b"9" * 16_000 + b"]", b'["\\ud800"]', b"[1,2,3,4,5,6,7,8,9,1e308]",
)  # fmt: skip


class Malformed:
    """Fields of entries for the streams of ``worker_id`` and its server; ``victim``'s name and blocks are in them."""

    def __init__(self, seed: int, worker_id: str, victim: str) -> None:
        self.rng = random.Random(seed)
        self.worker_id, self.victim = worker_id, victim
        self.nonce, self.batch = "n1", 1

    def entry(self) -> list[bytes]:
        """Make an entry for a worker's stream. Most entries are partly right, so that they pass the first checks."""
        rng = self.rng
        operation = rng.choice(wire.OPERATIONS)
        self.batch += 1
        fields = [b"n", self.nonce.encode(), b"b", b"%d" % self.batch, b"o", operation.encode(), b"d"]
        fields.append(self.data(operation))
        return self._bent(fields)

    def server_entry(self) -> list[bytes]:
        """Make an entry for a server's stream."""
        operation = self.rng.choice(("join", "join", "join", "heartbeat", "leave", "stored"))
        nonce = self.rng.choice((b"s1", b"s2", b"s" * 65, b"\xff", b'"'))
        return self._bent([b"n", nonce, b"b", b"1", b"o", operation.encode(), b"d", self._bend(self._server_join())])

    def hello(self) -> list[bytes]:
        name = self.rng.choice((self.worker_id, self.victim, "x" * 90, "../load", "", "a b", "\0"))
        kind = self.rng.choice(("events:", "server:", "load", "b:", ""))
        return self.rng.choice(([b"s", (kind + name).encode()], [b"q", b"1"], [b"s", self.rng.randbytes(40)]))

    def entry_id(self, now_ms: int) -> str:
        """An id for an entry: nearly always ``*``, by which Redis chooses it, else a made-up id."""
        if self.rng.random() > 0.0002:
            return "*"
        far = (f"{now_ms + 7_200_000}-0", f"{2**64 - 1}-{2**64 - 1}", f"{2**63}-1", f"{now_ms + 5}-{2**64 - 2}")
        return self.rng.choice((*far, f"{now_ms + 60_000}-{2**53}"))

    # ------------------------------------------------ data

    def data(self, operation: str) -> bytes:
        rng = self.rng
        if rng.random() < 0.003:
            return rng.choice(BOMBS)
        if operation in ("stored", "removed", "chunk"):
            packed = b"".join(block(rng.randrange(300)) for _ in range(rng.randrange(20)))
            head = rng.choice((NAME, NAME, "0000beef")).encode() if operation == "chunk" else b""
            tail = rng.choice((b"", b"", b"x" * rng.randrange(1, 8), b"y" * 1100))
            return head[: rng.randrange(9)] + packed + tail if rng.random() < 0.5 else head + packed
        made: dict[str, Any] = {
            "join": self._join, "heartbeat": self._heartbeat, "progress": self._progress, "begin": self._begin,
            "end": self._end,
        }  # fmt: skip
        return self._bend(made[operation]()) if operation in made else rng.choice(WORDS)

    def _join(self) -> str:
        told = {"schema": wire.SCHEMA, "worker_id": self.worker_id, "server_id": self.worker_id[:-2], "rank": 0}
        told |= {"scheme": SCHEME.as_dict(), "scheme_id": SCHEME.scheme_id, "capacity_blocks": 100}
        told |= {"max_model_len": 4096, "version": "1", "closed": True}
        name = self.rng.choice(list(told))
        told[name] = self.rng.choice(
            (self.victim, self.victim[:-2], [], {}, None, -1, 1.5, 2**60, "\0", "é" * 40, True)
        )
        return wire.dumps(told)

    def _server_join(self) -> str:
        file = {"sha256": SHA, "bytes": 5, "chunks": [SHA]}
        told: dict[str, Any] = {"schema": 1, "server_id": self.worker_id[:-2], "url": "http://10.0.0.1:8000"}
        told |= {"models": ["m"], "artifacts": {"t": file}, "facts": {"a": [1]}, "version": "1"}
        name = self.rng.choice(list(told))
        odd: tuple[Any, ...] = (
            self.victim[:-2],
            [],
            {},
            None,
            5,
            "http://x\"'<>",
            [None],
            {"a": None},
            {"t": file | {"chunks": {}}},
            [[]],
        )
        told[name] = self.rng.choice((*odd, {str(n): file for n in range(12)}, {"\0": file}, ["m"] * 300))
        return wire.dumps(told)

    def _heartbeat(self) -> str:
        beat: list[Any] = [self.rng.choice((0, 5, 2**32 - 1)) for _ in range(self.rng.choice((7, 10, 10, 11)))]
        if self.rng.random() < 0.6:
            beat[self.rng.randrange(7)] = self.rng.choice((2**32, -1, 0.5, "1", None, [], {}, True, 1e300))
        return wire.dumps(beat)

    def _progress(self) -> str:
        ids = ("wf-victim", "wf-victim+", "wf--x", "", "+", "x" * 500, 7, None, ["wf-victim"])
        return wire.dumps([[self.rng.choice(ids), 16, 2**31] for _ in range(self.rng.choice((1, 3, 64, 65)))])

    def _begin(self) -> str:
        return wire.dumps(
            {"snapshot": self.rng.choice((NAME, NAME, "xyz", 5, None)), "command": self.rng.choice((None, 5, []))}
        )

    def _end(self) -> str:
        numbers = {key: self.rng.choice((0, 1, -1, "0", None, 2**40)) for key in ("count", "high", "low")}
        return wire.dumps({"snapshot": self.rng.choice((NAME, 5, None, "other"))} | numbers)

    # ------------------------------------------------ bending

    def _bend(self, text: str) -> bytes:
        """JSON as it is, cut, with one number or byte exchanged, or wrapped."""
        rng, raw = self.rng, text.encode()
        way = rng.randrange(8)
        if way == 0:
            return raw[: rng.randrange(len(raw) + 1)]
        if way == 1:
            at = rng.randrange(len(raw))
            return raw[:at] + rng.randbytes(1) + raw[at + 1 :]
        if way == 2:
            return raw.replace(b"0", rng.choice((*NUMBERS, *NUMBERS_TOO)).encode(), 1)
        if way == 3:
            return b"[" + raw + b"]"
        return raw if way > 4 else rng.randbytes(rng.randrange(60))

    def _bent(self, fields: list[bytes]) -> list[bytes]:
        """The frame around the data: fields that are missing, doubled, renamed, swapped or of a wrong kind."""
        rng, way = self.rng, self.rng.randrange(24)
        if way == 0:
            return fields[: rng.choice((2, 4, 6))]
        if way == 1:
            return fields + fields[: rng.choice((2, 8))] * rng.choice((1, 40))
        if way == 2:
            fields[rng.randrange(8)] = rng.choice(WORDS)
        elif way == 3:
            fields[3] = rng.choice((*NUMBERS, *NUMBERS_TOO)).encode()
            if fields[3].isdigit() and len(fields[3]) <= 14:  # taken for a number: later numbers must follow it
                self.batch = max(self.batch, int(fields[3]))
        elif way == 4:
            fields[5] = rng.choice(OTHER_OPERATIONS).encode()
        elif way == 5:
            fields[1] = rng.choice((b"other", b"n2", b"N1", b"n1\0", b"x" * 5_000))
        elif way == 6:
            fields = fields[2:] + fields[:2]
        elif way == 7:
            fields[7] = rng.randbytes(rng.randrange(200))
        return fields
