"""The probe of a worker: short random prompts show whether it makes token ids and block hashes as announced.

The prompts are a text, a chat, a chat with an image if the worker announces how it hashes images, and a list of token
ids; each asks for one token of answer. The router computes their
block hashes as it does for any request. Exactly these hashes must appear in the worker's own stream, and the worker
must count as many prompt tokens as the router. The replica that applies the stream notes in Redis which of the hashes
the stream reported, so a block that is evicted soon after still counts.

The prompt of token ids is sent last, and its load is booked like a request's. A stream reports the blocks of a prompt
before it reports that its prefill is done. So after that report a block that is still missing is wrong and not late.
"""

from __future__ import annotations

import asyncio
import base64
import random
import struct
import time
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import orjson

from warmfleet.errors import WarmfleetError
from warmfleet.fleet import Flag, Renewal, WorkerView, new_reservation
from warmfleet.pools.identified_prompt import identify_here
from warmfleet.prompt import request as prompt
from warmfleet.prompt.block_hashes import Hasher
from warmfleet.prompt.images import ImageRules
from warmfleet.protocol.wire import HASH_BYTES, UNMATCHED, Scheme, WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.engines.engine_client import EngineClient
    from warmfleet.pools.pool import Pool
    from warmfleet.prompt.request import Endpoint
    from warmfleet.settings import Settings

Part = Literal["text", "chat", "image", "tokens"]
ENDPOINTS: dict[Part, Endpoint] = {"text": "completions", "chat": "chat", "image": "chat", "tokens": "completions"}
WRONG: dict[str, str] = {
    "text": "it does not make token ids of a text as the tokenizer in use here does",
    "chat": "it does not render a chat as the template in use here does, or makes other token ids of it",
    "image": "it counts or hashes an image otherwise than it announced: prompts are known up to their first image",
    "tokens": "its blocks are not hashed as its scheme says, or another engine answers at its URL",
}
KEY_HELP = "set WARMFLEET_WORKER_API_KEY, and WARMFLEET_WORKER_ADDRESSES to the addresses of the engines"
TOKEN_IDS = range(3, 256)  # ids in every vocabulary; a prompt of 32 of them has 250 random bits, so no cache holds it
LETTERS = "abcdefghijklmnopqrstuvwxyz"
#: Texts that tokenizers split differently; they stand between words of random letters.
PIECES: tuple[str, ...] = (
    "don't",
    "I'LL",
    "1234567",
    "3.14",
    "def f(x):\n    return",
    "==",
    '{"k": [1]}',
    "http://a.b/c?d=e",
    "\n\n",
    "  ",
)
PIECES += ("中文字符", "日本語です", "Привет", "مرحبا", "é", "e\u0301", "\ufb01", "①", "😀👩\u200d👧", "\u3000", "\t")
IMAGE_SIDE = 64  # pixels; models take this size
MORE_PIECES = 8  # number of words beyond a block's number of tokens, so that a text fills at least one block
POLL_S = 0.05
#: Most seconds for all three answers together: FIRST_ANSWER_S in the first probe, doubled in each further probe up to
#: MAX_ANSWER_S. An engine may compile at its first request, but a dead engine must not delay the probes of others.
FIRST_ANSWER_S, MAX_ANSWER_S = 5.0, 30.0
IMAGE_ANSWER_S = 2.5  # most seconds for the answer about an image
BEAT_S = 0.1  # a heartbeat that is younger than an answer by this time was surely sent after the answer


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a probe. proof: the state to record in Redis (``prove``), empty if nothing was learned. cause: a
    label for counters. reason: text for people. witnessed: whether the worker's own stream of KV events reported
    something of the probe, which proves that the engine at the URL is the worker."""

    proof: str
    cause: str = ""
    reason: str = ""
    witnessed: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt of a probe, with the token count and the block hashes that the router expects of it."""

    part: Part
    body: dict[str, Any]
    prompt_tokens: int
    hashes: tuple[bytes, ...]


class Probe:
    """Probes workers, each by its record as the pool last read it from Redis."""

    def __init__(self, client: EngineClient, settings: Settings, blocks_timeout_s: float) -> None:
        """blocks_timeout_s: longest wait, after the answers, until the worker's stream reports the prompts' blocks."""
        self._client = client
        self._settings = settings
        self._blocks_timeout_s = blocks_timeout_s

    async def run(self, pool: Pool, worker: WorkerView, *, texts: bool) -> Result:
        """Probe one worker. texts: also send texts and chats; to check them, the tokenizer must be loaded here.

        An image alone at fault leaves the worker proven, with the cause ``image``.

        Raises FleetUnavailable.
        """
        if not worker.url or not worker.models:
            return Result("url", "url", "its server announced no URL or no model")
        hasher, unknown = None, None
        try:
            hasher = Hasher(Scheme.from_dict(worker.record["scheme"]))
        except (WireError, KeyError, TypeError) as error:
            unknown = _unhashed(worker, error)
            texts = False
        questions = [_of_tokens(worker, hasher)]
        parts: tuple[Part, ...] = ("chat", "text", "image") if sees(worker, pool) else ("chat", "text")
        for part in parts if texts else ():
            question = await self._of_text(pool, worker, part)
            if question is not None:
                questions.insert(0, question)
        if texts and len(questions) == 1:
            return Result("", "untested", "no text could be tried: this replica cannot make the worker's token ids")
        reservation = new_reservation(1)
        await pool.fleet.bookings.renew([Renewal(reservation, worker.worker_id, questions[-1].prompt_tokens, 1)])
        try:
            questions = await _await_blocks(pool, worker, questions, reservation)
            wrong, answered = await self._ask_all(pool, worker, questions, reservation)
            wrong = wrong or unknown
            if wrong is not None and (wrong.proof == "url" or wrong.cause == "key"):
                return wrong
            seen = await self._seen(pool, worker, answered, reservation)
            if wrong is None or (wrong.cause == "image" and seen.proof != "proven"):
                return seen
            return replace(wrong, witnessed=seen.witnessed)
        finally:
            await asyncio.shield(_over(pool, worker, questions, reservation))

    # ------------------------------------------------ the questions

    async def _of_text(self, pool: Pool, worker: WorkerView, part: Part) -> Question | None:
        """Make a random text or chat; None if its token ids cannot be made here, or exceed the worker's context."""
        limit = int(worker.record.get("max_model_len") or 0) or 2**31
        pieces = worker.record["scheme"]["block_tokens"] + MORE_PIECES
        while pieces:
            text = random_text(pieces)
            body: dict[str, Any] = {"model": worker.models[0]}
            if part == "text":
                body["prompt"] = text
            else:
                content = text if part == "chat" else [{"type": "text", "text": text}, random_image()]
                body["messages"] = [{"role": "user", "content": content}]
            request = prompt.from_dict(ENDPOINTS[part], body)
            known = await identify_here(request, pool, probing=True)
            chain = next((chain for chain in known.chains if chain.scheme_id == worker.load.scheme), None)
            if known.kind != "exact" or chain is None:
                return None
            if known.prompt_tokens < limit:
                return Question(part, body, known.prompt_tokens, _split(chain.hashes))
            pieces //= 2
        return None

    # ------------------------------------------------ the answers

    async def _ask_all(
        self, pool: Pool, worker: WorkerView, questions: Sequence[Question], reservation: str
    ) -> tuple[Result | None, list[Question]]:
        """Ask all questions; return the failure that an answer shows, or None, and the questions that were answered.

        A worker may refuse a text or a chat (for example if it serves no chats), so a refusal shows no failure. Nor
        does an image without a good answer: its first image may take an engine long.
        """
        headers, answered = headers_for(pool, worker, self._settings), list[Question]()
        wrong: Result | None = None
        try:
            tries = min(int(worker.record.get("tries") or 0), 8)
            async with asyncio.timeout(min(FIRST_ANSWER_S * 2**tries, MAX_ANSWER_S)):
                for question in questions:
                    booked = question.part == "tokens"
                    headers["X-Request-Id"] = f"{reservation if booked else 'unbooked'}.probe"
                    body = orjson.dumps(question.body | {"max_tokens": 1, "temperature": 0})
                    path = prompt.PATHS[ENDPOINTS[question.part]]
                    if question.part == "image":
                        status, text = await self._ask_image(worker, path, body, headers)
                        if status not in (200, 401, 403):
                            continue
                    else:
                        status, text = await self._client.post(worker.url, path, body, headers)
                    if status in (401, 403):
                        return Result("identity", "key", f"it answered {status}: {KEY_HELP}"), []
                    if status == 200:
                        counted, answered = _prompt_tokens(text), [*answered, question]
                        if counted not in (None, question.prompt_tokens):
                            counts = f"{counted} prompt tokens, {question.prompt_tokens} here"
                            result = _wrong(question.part, f": {counts}")
                            wrong = result if wrong is None or wrong.cause == "image" else wrong
                    elif status >= 500 or booked:
                        return Result("url", "url", f"it answered {status} to a completion"), []
        except (WarmfleetError, TimeoutError) as error:
            return Result("url", "url", f"no answer: {error}"[:200]), []
        return wrong, answered

    async def _ask_image(
        self, worker: WorkerView, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        """Return status and text of the answer; status 0 if there is none within IMAGE_ANSWER_S."""
        try:
            async with asyncio.timeout(IMAGE_ANSWER_S):
                return await self._client.post(worker.url, path, body, headers)
        except (WarmfleetError, TimeoutError):
            return 0, b""

    # ------------------------------------------------ the worker's stream

    async def _seen(self, pool: Pool, worker: WorkerView, questions: Sequence[Question], reservation: str) -> Result:
        """Wait for the blocks that the worker's stream reports after its answers; return the result."""
        answered_at = time.monotonic()
        deadline = answered_at + self._blocks_timeout_s
        prefilled = False
        while not prefilled and time.monotonic() < deadline:
            prefilled = await pool.fleet.bookings.prefilled(reservation)
            if _hashes(questions) and await _missing(pool, worker, questions, reservation) == set():
                return Result("proven", witnessed=True)
            if not prefilled:
                await asyncio.sleep(POLL_S)
        fresh = await current(pool, worker)
        if fresh is None:
            return Result("")
        missing = await _missing(pool, worker, questions, reservation)
        if missing == set() and _hashes(questions):
            return Result("proven", witnessed=True)
        witnessed = prefilled or await _some_came(pool, worker, questions, reservation)
        if _incomplete(pool, fresh) or fresh.load.slot != worker.load.slot:
            # A snapshot lists only blocks that the engine still holds, perhaps none of this probe, so it tests nothing.
            return Result("", "untested", "its index is being sent anew: its blocks cannot be tested", witnessed)
        if not missing:
            return Result("", "untested", "Redis lost its notes of the probe's blocks", witnessed)
        beat = fresh.heartbeat_age_s
        if not prefilled and (beat is None or beat > time.monotonic() - answered_at - BEAT_S):
            return Result(
                "", "silent", "its stream tells nothing of a probe: it is behind, or another engine answers", witnessed
            )
        part = next(part for part in ("tokens", "text", "chat", "image") if part in missing)
        return replace(_wrong(part), witnessed=witnessed)


def headers_for(pool: Pool, worker: WorkerView, settings: Settings) -> dict[str, str]:
    """Return the HTTP headers of the router's own request to a worker, a probe or a prefix to warm.

    The engines' API key goes to workers whose URL a probe proved; to others only if WARMFLEET_WORKER_ADDRESSES is set.
    """
    headers = {"Content-Type": "application/json"}
    proved = worker.load.flags & Flag.URL or worker.proof == "warming"
    if settings.worker_api_key and (proved or settings.lists_workers):
        headers["Authorization"] = f"Bearer {settings.worker_api_key}"
    if worker.worker_id in pool.view.ranks:
        headers["X-data-parallel-rank"] = pool.view.ranks[worker.worker_id]
    return headers


async def current(pool: Pool, worker: WorkerView) -> WorkerView | None:
    """Read this worker again; None if it has left or joined anew since ``worker`` was read. Raises FleetUnavailable."""
    for fresh in await pool.fleet.workers.read():
        if fresh.worker_id == worker.worker_id and fresh.record.get("nonce") == worker.record.get("nonce"):
            return fresh
    return None


def random_text(pieces: int) -> str:
    """Make a text of ``pieces`` words, whose random first letters differ from those of any request before."""
    words = ["".join(random.choices(LETTERS, k=random.randrange(3, 9))) for _ in range(pieces)]
    return (
        " ".join([words[0] + words[-1], *[random.choice((word, word, random.choice(PIECES))) for word in words]]) + "."
    )


def _wrong(part: Part, more: str = "") -> Result:
    """Return the result of a probe in which this part is at fault."""
    return Result("proven" if part == "image" else "identity", part, WRONG[part] + more)


def sees(worker: WorkerView, pool: Pool) -> bool:
    """Return whether the worker announces the rules for images by which this replica identifies prompts."""
    fact = ((worker.server or {}).get("facts") or {}).get("images")
    return fact is not None and ImageRules.of(fact) == pool.view.images


def random_image() -> dict[str, Any]:
    """Make a content part with a small random PNG."""
    rows = b"".join([b"\0" + random.randbytes(3 * IMAGE_SIDE) for _ in range(IMAGE_SIDE)])
    header = struct.pack(">IIBBBBB", IMAGE_SIDE, IMAGE_SIDE, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 0)), (b"IEND", b""))
    chunks = [struct.pack(">I", len(data)) + name + data + _crc(name + data) for name, data in parts]
    data = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def _crc(data: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(data))


def _unhashed(worker: WorkerView, error: Exception) -> Result:
    """Say why no prompt can match this worker's blocks: the engine keeps none, or hashes them in an unknown way."""
    kept = UNMATCHED.get((worker.record.get("scheme") or {}).get("algorithm", ""))
    if kept is not None:
        return Result("identity", "unmatched", f"{kept}: it is chosen by load")
    return Result("identity", "scheme", f"its scheme is not known here: {error}")


def _of_tokens(worker: WorkerView, hasher: Hasher | None) -> Question:
    """Make a question of random token ids. hasher: None if the worker's scheme is not known here."""
    size = hasher.scheme.block_tokens if hasher else 16
    limit = int(worker.record.get("max_model_len") or 0) or 2 * size + 2
    blocks = max(1, min(2, (limit - 2) // size))
    ids = [random.choice(TOKEN_IDS) for _ in range(blocks * size + 1)]
    hashes = _split(hasher.chain(ids).hashes) if hasher else ()
    return Question("tokens", {"model": worker.models[0], "prompt": ids}, len(ids), hashes)


def _split(packed: bytes) -> tuple[bytes, ...]:
    return tuple(packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES))


def _prompt_tokens(answer: bytes) -> int | None:
    """Read the engine's count of prompt tokens; None if the answer has none."""
    try:
        return int(orjson.loads(answer)["usage"]["prompt_tokens"])
    except (ValueError, KeyError, TypeError):
        return None


async def _await_blocks(pool: Pool, worker: WorkerView, questions: Sequence[Question], probe: str) -> list[Question]:
    """Let Redis note which of these blocks the stream reports; return the questions with only the noted blocks.

    Blocks that the worker already holds (such as a chat template's first) are left out: no stream reports them again.
    """
    held = iter(await pool.fleet.index.holds(worker.load.slot, _hashes(questions)))
    questions = [replace(sent, hashes=tuple(block for block in sent.hashes if not next(held))) for sent in questions]
    # While Redis is short of memory, no block is indexed, so Redis is asked to note none (and might refuse to).
    if not pool.fleet.upkeep.last_tick.short:
        await pool.fleet.probes.await_blocks(worker.worker_id, probe, _hashes(questions))
    return questions


async def _missing(pool: Pool, worker: WorkerView, questions: Sequence[Question], probe: str) -> set[Part] | None:
    """Return the parts (text, chat ...) whose blocks are not all reported yet; None if Redis lost the notes."""
    awaited = await pool.fleet.probes.awaited(worker.worker_id, probe, _hashes(questions))
    if awaited is None:
        return None
    missing = iter(awaited)
    return {question.part for question in questions for _ in question.hashes if next(missing)}


async def _some_came(pool: Pool, worker: WorkerView, questions: Sequence[Question], probe: str) -> bool:
    """Whether the stream has reported some of the blocks, whose random prompts only this worker got."""
    awaited = await pool.fleet.probes.awaited(worker.worker_id, probe, _hashes(questions))
    return awaited is not None and not all(awaited)


async def _over(pool: Pool, worker: WorkerView, questions: Sequence[Question], probe: str) -> None:
    """End the probe's booking, and delete the notes of its blocks in Redis."""
    await pool.fleet.bookings.settle(probe, "finished")
    await pool.fleet.probes.await_no_blocks(worker.worker_id, probe, _hashes(questions))


def _hashes(questions: Sequence[Question]) -> list[bytes]:
    return [block for question in questions for block in question.hashes]


def _incomplete(pool: Pool, worker: WorkerView) -> bool:
    """Whether blocks of the worker are not in the index: its snapshot is under way, or Redis has no memory for them."""
    truth = worker.record.get("truth") or {}
    return bool(
        pool.fleet.upkeep.last_tick.short
        or worker.load.flags & Flag.PARTIAL
        or worker.record.get("shadow")
        or truth.get("cause")
    )
