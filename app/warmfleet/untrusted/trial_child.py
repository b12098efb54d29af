"""The process that tries one tokenizer that a worker brought. Started by ``trial``, a replica runs nothing of it.

A tokenizer's file holds patterns, replacements and tables that a library in Rust obeys: they may ask for any memory and
time, and what ends that library ends its process. So it happens here first: loading, every probe, and texts that make
bad patterns slow. One request and one answer, as in ``sandbox_child``: marshalled ``(tokenizer.json, chat template)``
comes in; what the replica needs in order to construct it without trying goes out as JSON.
"""

from __future__ import annotations

import base64
import json
import marshal
import os
import re
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

    from warmfleet.prompt.tokenizer import Encode, Encoder

#: Real ones need some 100 MiB and 12 bytes, 0.2 s and 0.2 s for each MB.
MEMORY_BYTES, MEMORY_PER_BYTE = 512 * 2**20, 24
CPU_S, CPU_PER_MB = 5.0, 1.0
SHORT, LONG = 2_500, 20_000  # characters
MAX_SECONDS = 0.25  # for the long one: 0.03 are usual for the slow engine
UNNOTICED_SECONDS = 0.03
TRIES = 5  # a busy machine makes one slow now and then, not five in a row
MAX_GROWTH = 32  # of time from the short to the long one: 8 is linear, 64 quadratic
MAX_IDS = 8  # of one character: bytes are 4 at most
MAX_AFFIXES = 64
MAX_REPLACEMENT = 16  # characters that replacements of the file's own may make of one, all together
MAX_CHARSMAP = 40  # bytes: Unicode has a character that stands for 33
UNITS = ("a", "A", " ", "\n", "\t\n", "1", "=", "'s", "a ", "ab", "\x00", "é", "\u0301", "中", "😀", "\u2581")
MAX_UNITS = 48  # more of them, from the file's patterns
_ESCAPED = re.compile(r"\\[pP]\{[^}]*\}|\\.")
_TINY = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []}


def main() -> None:
    """Answer one request. Arguments: folders to import from."""
    sys.path[:0] = sys.argv[1:]
    os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    from warmfleet.prompt.tokenizer import Encoder
    from warmfleet.untrusted.render_child import DONE, MEMORY, REFUSED, close_doors, read_request, send_answer

    Encoder.load(json.dumps(_TINY).encode())  # what is imported or started late, threads among it, is refused below
    request = read_request()
    if request is None:
        return
    close_doors(MEMORY_BYTES + MEMORY_PER_BYTE * len(request))
    signal.setitimer(signal.ITIMER_PROF, CPU_S + CPU_PER_MB * len(request) / 1e6)
    try:
        status, said = DONE, _tried(*marshal.loads(request))  # noqa: S302  what the parent made
    except MemoryError:
        status, said = MEMORY, ""
    except ValueError as error:
        status, said = REFUSED, str(error)
    send_answer(status, said.encode())


def _tried(tokenizer_json: bytes, template: str) -> str:
    """Raises ValueError with the reason why no replica should load it."""
    from warmfleet.prompt.tokenizer import Encoder, read

    tokenizer = read(tokenizer_json)
    _check_replacements(tokenizer)
    encoder = Encoder.of(tokenizer, tokenizer_json)
    _check_texts(encoder, tokenizer)
    cuts = encoder.cuts(template)
    affixes = encoder.affixes and [one.tolist() for one in encoder.affixes]
    return json.dumps({"fast": encoder.fast, "affixes": affixes, "separators": cuts.separators, "spaces": cuts.spaces})


def _check_replacements(tokenizer: Tokenizer) -> None:
    """Whatever the text: a rare character that becomes a million would not show in any probe."""
    grown = 1
    for part in (*_parts(tokenizer.normalizer), *_parts(tokenizer.pre_tokenizer)):
        kind = part.get("type")
        if kind == "Prepend":
            grown *= 1 + len(part["prepend"])
        elif kind == "Replace":
            content = len(part["content"])
            replaced = len(part["pattern"].get("String", ""))
            grown *= max(1, -(-content // replaced)) if replaced else 1 + content  # a pattern may match nothing
        elif kind == "ByteLevel":
            grown *= 2
        elif kind == "Precompiled":
            grown *= _charsmap_growth(base64.b64decode(part["precompiled_charsmap"]))
    if grown > MAX_REPLACEMENT:
        raise ValueError(f"it may make {min(grown, 10**9)} characters of one")


def _charsmap_growth(charsmap: bytes) -> int:
    """Of SentencePiece's table; it is a tree, behind its length, and texts that end with a zero byte."""
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    longest = max(map(len, texts.split(b"\0")))
    return 1 if longest <= MAX_CHARSMAP else longest


def _check_texts(encoder: Encoder, tokenizer: Tokenizer) -> None:
    from warmfleet.prompt.messages import NotReproducible
    from warmfleet.prompt.tokenizer import in_words

    try:
        affixes = len(encoder.whole(""))
        units = _units(tokenizer)
        for unit in units:
            _check_run(encoder.encode, unit, "!" + "".join(units))
    except NotReproducible as error:
        raise ValueError(f"it fails on a long text: {in_words(error.__cause__)}") from error
    if affixes > MAX_AFFIXES:
        raise ValueError(f"it adds {affixes} tokens to every text")


def _check_run(encode: Encode, unit: str, tail: str) -> None:
    """Many of the same, then something else where a pattern hopes for what comes only later."""
    short, long = ((unit * size)[:size] + tail for size in (SHORT, LONG))
    quick, (slow, ids) = _seconds(encode, short)[0], _seconds(encode, long)
    if ids > MAX_IDS * LONG:
        raise ValueError(f"it makes {ids} tokens of {LONG} characters, {unit!r} and again")
    for _ in range(TRIES - 1):
        if slow <= UNNOTICED_SECONDS or (slow <= MAX_SECONDS and slow <= MAX_GROWTH * quick):
            return
        quick, slow = max(quick, _seconds(encode, short)[0]), min(slow, _seconds(encode, long)[0])
    if slow > UNNOTICED_SECONDS and (slow > MAX_SECONDS or slow > MAX_GROWTH * quick):
        raise ValueError(f"{LONG} characters, {unit!r} and again, take it {slow:.2f} s, {SHORT} take {quick:.4f}")


def _seconds(encode: Encode, text: str) -> tuple[float, int]:
    """CPU, and how many ids it gave."""
    begun = time.process_time()
    ids = encode(text, True)
    return time.process_time() - begun, len(ids)


def _units(tokenizer: Tokenizer) -> list[str]:
    """What long texts are made of: what every tokenizer meets, and what this one's patterns speak of."""
    found: dict[str, None] = {}
    for part in (*_parts(tokenizer.normalizer), *_parts(tokenizer.pre_tokenizer)):
        pattern = part.get("pattern")
        if isinstance(pattern, dict):
            found |= dict.fromkeys(_ESCAPED.sub("", pattern.get("Regex", "")))
            found[pattern.get("String", "")[:100]] = None
    return [*UNITS, *[unit for unit in found if unit and unit not in UNITS][:MAX_UNITS]]


def _parts(part: Any) -> Iterator[dict[str, Any]]:
    """A normalizer or pre-tokenizer as its file describes it, each part of a sequence alone."""
    return _objects(json.loads(part.__getstate__())) if part is not None else iter(())


def _objects(said: Any) -> Iterator[dict[str, Any]]:
    if isinstance(said, dict):
        yield said
        said = list(said.values())
    if isinstance(said, list):
        for one in said:
            yield from _objects(one)


if __name__ == "__main__":
    main()
