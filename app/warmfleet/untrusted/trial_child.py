"""The program of a process that tries one tokenizer that a worker brought.

``tokenizer_trial`` starts this program; a replica itself runs nothing of it. A tokenizer's file holds patterns,
replacements and tables that a library in Rust applies. A hostile file may need any amount of memory and time, and a
crash of the library ends its process. So everything that may go wrong is tried here first: loading, probing, and texts
that make bad patterns slow. The process answers a single request, framed as in ``render_child``. The request is a
marshalled ``(tokenizer.json, chat template)``; the answer is JSON with the results, with which a replica loads the
tokenizer without probing it.
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

#: Limits of the process: a constant plus an amount per byte or MB of the file. Real tokenizers need about 100 MiB plus
#: 12 bytes per byte, and 0.2 s of CPU time plus 0.2 s per MB.
MEMORY_BYTES, MEMORY_PER_BYTE = 512 * 2**20, 24
CPU_S, CPU_PER_MB = 5.0, 1.0
SHORT, LONG = 2_500, 20_000  # characters of the two texts that are timed; both repeat one of the UNITS
MAX_SECONDS = 0.25  # most CPU time for the LONG text; the slower tokenizer library usually takes 0.03 s
UNNOTICED_SECONDS = 0.03  # CPU time up to which the LONG text passes, whatever the SHORT text takes
TRIES = 5  # most measurements: a busy machine makes single ones slow, but not five in a row
MAX_GROWTH = 32  # highest ratio of CPU time, LONG to SHORT text; 8 if time is linear in length, 64 if quadratic
MAX_IDS = 8  # most token ids per character of the long text; a character has at most 4 bytes
MAX_AFFIXES = 64  # most token ids that the tokenizer may add to every text
MAX_REPLACEMENT = 16  # most characters that all replacements of the file together may make of one character
MAX_CHARSMAP = 40  # most bytes that may replace one character; the longest of Unicode's own replacements has 33
UNITS = ("a", "A", " ", "\n", "\t\n", "1", "=", "'s", "a ", "ab", "\x00", "é", "\u0301", "中", "😀", "\u2581")
MAX_UNITS = 48  # most strings from the patterns of the file that are repeated besides UNITS
_ESCAPED = re.compile(r"\\[pP]\{[^}]*\}|\\.")
_TINY = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []}


def main() -> None:
    """Answer one request. The command's arguments are folders to import from."""
    sys.path[:0] = sys.argv[1:]
    from warmfleet.prompt.tokenizer import ONE_THREAD, Encoder
    from warmfleet.untrusted.render_child import DONE, MEMORY, REFUSED, close_doors, read_request, send_answer

    os.environ.update(ONE_THREAD)  # on a large machine the threads alone would take more memory than the limit allows
    # The first use imports modules and starts threads; after close_doors the kernel refuses both.
    Encoder.load(json.dumps(_TINY).encode())
    request = read_request()
    if request is None:
        return
    close_doors(MEMORY_BYTES + MEMORY_PER_BYTE * len(request))
    signal.setitimer(signal.ITIMER_PROF, CPU_S + CPU_PER_MB * len(request) / 1e6)
    try:
        status, answer = DONE, _tried(*marshal.loads(request))  # noqa: S302  the parent has written it
    except MemoryError:
        status, answer = MEMORY, ""
    except ValueError as error:
        status, answer = REFUSED, str(error)
    send_answer(status, answer.encode())


def _tried(tokenizer_json: bytes, template: str) -> str:
    """Try a tokenizer; return the results as JSON. Raises ValueError with the reason why no replica should load it."""
    from warmfleet.prompt.tokenizer import Encoder, read

    tokenizer = read(tokenizer_json)
    _check_replacements(tokenizer)
    encoder = Encoder.of(tokenizer, tokenizer_json)
    _check_texts(encoder, tokenizer)
    cuts = encoder.cuts(template)
    affixes = encoder.affixes and [ids.tolist() for ids in encoder.affixes]
    return json.dumps({"fast": encoder.fast, "affixes": affixes, "separators": cuts.separators, "spaces": cuts.spaces})


def _check_replacements(tokenizer: Tokenizer) -> None:
    """Raise ValueError if the file's replacements may make a text much longer, which ``_check_texts`` may miss."""
    growth = 1
    for part in (*_parts(tokenizer.normalizer), *_parts(tokenizer.pre_tokenizer)):
        kind = part.get("type")
        if kind == "Prepend":
            growth *= 1 + len(part["prepend"])
        elif kind == "Replace":
            content = len(part["content"])
            replaced = len(part["pattern"].get("String", ""))
            growth *= max(1, -(-content // replaced)) if replaced else 1 + content  # a pattern may match empty text
        elif kind == "ByteLevel":
            growth *= 2
        elif kind == "Precompiled":
            growth *= _charsmap_growth(base64.b64decode(part["precompiled_charsmap"]))
    if growth > MAX_REPLACEMENT:
        raise ValueError(f"it may make {min(growth, 10**9)} characters of one character")


def _charsmap_growth(charsmap: bytes) -> int:
    """Return the length of the longest replacement in SentencePiece's table; 1 if it is within MAX_CHARSMAP bytes.

    The table consists of a length, a tree, and the replacement texts, each with a zero byte at its end.
    """
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    longest = max(map(len, texts.split(b"\0")))
    return 1 if longest <= MAX_CHARSMAP else longest


def _check_texts(encoder: Encoder, tokenizer: Tokenizer) -> None:
    """Time the tokenizer on long texts, each of which repeats one unit (a short string).

    Raises ValueError if a text fails, takes more CPU time than MAX_SECONDS or MAX_GROWTH allow, or becomes more than
    MAX_IDS ids per character; also if the tokenizer adds more than MAX_AFFIXES ids to every text.
    """
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
    """Try texts that repeat ``unit``. The ``tail`` behind lets a bad pattern search in vain from each place."""
    short, long = ((unit * size)[:size] + tail for size in (SHORT, LONG))
    quick, (slow, ids) = _seconds(encode, short)[0], _seconds(encode, long)
    if ids > MAX_IDS * LONG:
        raise ValueError(f"it makes {ids} tokens of {LONG} characters, {unit!r} repeated")
    for _ in range(TRIES - 1):
        if slow <= UNNOTICED_SECONDS or (slow <= MAX_SECONDS and slow <= MAX_GROWTH * quick):
            return
        quick, slow = max(quick, _seconds(encode, short)[0]), min(slow, _seconds(encode, long)[0])
    if slow > UNNOTICED_SECONDS and (slow > MAX_SECONDS or slow > MAX_GROWTH * quick):
        raise ValueError(f"{LONG} characters, {unit!r} repeated, take it {slow:.2f} s; {SHORT} take {quick:.4f} s")


def _seconds(encode: Encode, text: str) -> tuple[float, int]:
    """Encode a text; return the seconds of CPU time and the number of ids."""
    begun = time.process_time()
    ids = encode(text, True)
    return time.process_time() - begun, len(ids)


def _units(tokenizer: Tokenizer) -> list[str]:
    """Return the units to repeat: common ones, and the characters and words in this tokenizer's own patterns."""
    found: dict[str, None] = {}
    for part in (*_parts(tokenizer.normalizer), *_parts(tokenizer.pre_tokenizer)):
        pattern = part.get("pattern")
        if isinstance(pattern, dict):
            found |= dict.fromkeys(_ESCAPED.sub("", pattern.get("Regex", "")))
            found[pattern.get("String", "")[:100]] = None
    return [*UNITS, *[unit for unit in found if unit and unit not in UNITS][:MAX_UNITS]]


def _parts(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a normalizer or pre-tokenizer as its file describes them."""
    return _objects(json.loads(part.__getstate__())) if part is not None else iter(())


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object within a JSON value, the value itself among them."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for member in value:
            yield from _objects(member)


if __name__ == "__main__":
    main()
