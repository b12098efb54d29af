"""Checks that an engine is as its worker announced: token ids of a text and a chat, block hashes, and cached tokens.

Engine and announced tokenizer must make the same ids of a text and a chat. Then the engine gets one prompt twice: the
first time its blocks must appear in the index under the hashes computed here, the second time they must be cached.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from warmfleet.background import announced
from warmfleet.background.probe import random_text
from warmfleet.cli.doctor.engine_checks import KEY_HELP, json_of
from warmfleet.cli.doctor.finding import Finding, fault, note, ok, skipped
from warmfleet.errors import NotFound, UpstreamError, UpstreamGone
from warmfleet.fleet.artifacts import BadArtifact
from warmfleet.pools.capabilities import token_capability
from warmfleet.prompt import request as prompt
from warmfleet.prompt.block_hashes import Hasher
from warmfleet.prompt.messages import NotReproducible
from warmfleet.protocol.wire import HASH_BYTES, Scheme, WireError

if TYPE_CHECKING:
    from warmfleet.cli.doctor.engine_checks import Engine
    from warmfleet.fleet import Fleet, WorkerView
    from warmfleet.pools.identities import Identities
    from warmfleet.prompt.prompt_identity import Identity

ANSWER_S = 30.0  # longest wait for an answer, because an engine may compile kernels at its first request
INDEXED_S = 5.0  # longest wait for blocks in the index; usually reported within 0.1 s, applied within another 0.1 s
POLL_S = 0.05
METRICS_S = 2.0  # longest wait until an engine's metrics count a request that it has answered
PROBE_BLOCKS = 3  # number of full blocks in the probe, if the model's context allows it
PLAIN_BLOCK = 128  # assumed tokens of a block if no worker tells them: the largest usual size
_HITS = re.compile(rb"^vllm:prefix_cache_hits(?:_total)?\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)

RENDER = "/v1/chat/completions/render"
MISMATCH = {
    "tokenizer": "restart the engine, so that the plugin announces the tokenizer that vLLM has loaded now; if it"
    " stays so, compare the tokenizer files and vLLM's --tokenizer and --tokenizer-mode",
    "template": "restart the engine, so that the plugin announces the chat template in use; give all engines of the"
    " model the same --chat-template",
}


@dataclass(frozen=True, slots=True)
class Subject:
    """The engine to examine. worker: None if it has not joined. rank: of its core; empty if the engine has one core."""

    engine: Engine
    model: str
    fleet: Fleet | None = None
    worker: WorkerView | None = None
    rank: str = ""

    @property
    def headers(self) -> dict[str, str]:
        rank = {"X-data-parallel-rank": self.rank} if self.rank else {}
        return {**self.engine.headers, "X-Request-Id": f"doctor-{secrets.token_hex(8)}", **rank}

    @property
    def facts(self) -> dict[str, Any]:
        return dict((self.worker.server or {}).get("facts") or {}) if self.worker else {}

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Send a POST; return the answer's status and its JSON. Raises UpstreamError, TimeoutError."""
        async with asyncio.timeout(ANSWER_S):
            status, raw = await self.engine.client.post(self.engine.url, path, orjson.dumps(body), self.headers)
        return status, json_of(raw)


# ---------------------------------------------------------------- token ids


async def identity_of(subject: Subject, identities: Identities) -> Identity | Finding:
    """Load the identity (tokenizer, template, facts) that this worker announced, or say why there is none."""
    worker, fleet = subject.worker, subject.fleet
    if worker is None or fleet is None or worker.server is None:
        return skipped("tokenizer", "no worker announced a tokenizer for this engine")
    files = {name: entry for name, entry in (worker.server.get("artifacts") or {}).items() if name in announced.FILES}
    if "tokenizer.json" not in files:
        return skipped("tokenizer", f"{worker.worker_id} announces no tokenizer: engines are asked for token ids")
    server = str(worker.record.get("server_id", ""))
    try:
        found = {name: await fleet.artifacts.read(server, entry) for name, entry in files.items()}
        return await identities.build(announced.identity_key(worker), found, subject.facts)
    except (NotFound, BadArtifact) as error:
        remedy = "restart the engine: it then writes its files again; see SETNX in `worker rights`"
        return fault("tokenizer", f"the announced files are not complete in Redis: {error}", remedy)
    except Exception as error:  # noqa: BLE001  a worker's files may raise any exception
        text = f"the announced files cannot be used: {error}"
        return fault("tokenizer", text, "see app/docs/security.md, Tokenizers")


async def token_ids(subject: Subject, identity: Identity) -> list[Finding]:
    """Compare the engine's ids of a text and a chat with those by the announced tokenizer and template."""
    text = random_text(24)
    findings = [await _same_ids(subject, identity, "tokenizer", {"prompt": text})]
    if identity.template == "none":
        why = "no chat template is announced: the engine renders chats in its own way"
        return [*findings, skipped("template", why)]
    chat = {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": text}]}
    return [*findings, await _same_ids(subject, identity, "template", chat)]


async def _same_ids(subject: Subject, identity: Identity, check: str, question: dict[str, Any]) -> Finding:
    body = {"model": subject.model, **question}
    request = prompt.from_dict("chat" if "messages" in body else "completions", body)
    try:
        (ours,) = await identity.token_ids(request, 1)
    except NotReproducible as error:
        remedy = "see app/docs/identity.md for this reason; such prompts are placed by load"
        return note(check, f"its prompts cannot be made here ({error})", remedy)
    theirs, path = await _engine_ids(subject, body)
    if theirs is None:
        return skipped(check, f"the engine tells no token ids ({path})")
    if theirs == ours:
        return ok(check, f"{path} and the announced {check} make the same {len(ours)} token ids")
    at = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    part = "tokenizer" if check == "tokenizer" else "chat template or tokenizer"
    text = (
        f"the engine uses another {part} than it announced: {len(theirs)} ids by {path}, {len(ours)} here, unequal"
        f" from id {at}"
    )
    return fault(check, text, MISMATCH[check])


async def _engine_ids(subject: Subject, body: dict[str, Any]) -> tuple[list[int] | None, str]:
    """Ask for the engine's token ids of a prompt or chat; return them and the path that told them, or None and why."""
    renders = subject.facts.get("renders") or {}
    chat = "messages" in body
    if chat and renders.get("render"):
        path, field = RENDER, "token_ids"
    elif chat and not renders.get("tokenize", True):
        return None, "it has no path for that"
    else:
        path, field = "/tokenize", "tokens"
    status, answer = await subject.post(path, body)
    ids = answer.get(field) if isinstance(answer, dict) else None
    return (ids, path) if status == 200 and isinstance(ids, list) else (None, f"{path} answers {status}")


# ---------------------------------------------------------------- the probe


async def probed(subject: Subject, identity: Identity | None) -> list[Finding]:
    """Send the same completion twice: check its ids, its blocks in the index, and the cached tokens of the second."""
    hasher = _hasher(subject.worker)
    block = hasher.scheme.block_tokens if hasher else PLAIN_BLOCK
    text = random_text(min(PROBE_BLOCKS * block, max(8, int(subject.facts.get("max_model_len") or 2**20) // 8)))
    body = {"model": subject.model, "prompt": text, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    before = await _hits(subject)
    first = await _answer(subject, body)
    if isinstance(first, Finding):
        return [first]
    findings = [
        ok("completion", f"a completion of {first.prompt_tokens} prompt tokens was answered in {first.seconds:.2f} s")
    ]
    ids = first.prompt_ids
    if identity is not None and ids:
        (ours,) = await identity.token_ids(prompt.from_dict("completions", body), 1)
        if ours != ids:
            text = f"the engine computed {len(ids)} token ids for the probe, the announced tokenizer makes {len(ours)}"
            findings.append(fault("token ids", f"{text} others", MISMATCH["tokenizer"]))
        else:
            findings.append(ok("token ids", "the engine computed the ids that the announced tokenizer makes"))
        ids = ids or ours
    if hasher is not None and ids and subject.fleet is not None and subject.worker is not None:
        findings.append(await _indexed(subject.fleet, subject.worker, hasher.chain(ids).hashes))
    second = await _answer(subject, body)
    if isinstance(second, Finding):
        return [*findings, second]
    predicted = (first.prompt_tokens - 1) // block * block if hasher else 0
    return findings + await _cached(subject, second, predicted, before)


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion's answer. cached: number of cached tokens; None if not reported. prompt_ids: empty if none came."""

    prompt_tokens: int
    cached: int | None
    prompt_ids: list[int]
    seconds: float


async def _answer(subject: Subject, body: dict[str, Any]) -> Answer | Finding:
    began = time.perf_counter()
    try:
        status, answer = await subject.post("/v1/completions", body)
    except (UpstreamError, TimeoutError) as error:
        why = "none within 30 s" if isinstance(error, TimeoutError) else str(error)
        text = f"no answer to a completion for one token ({why}), though /health answers"
        return fault("completion", text, "read the engine's log: its core may hang; restart it")
    if status in (401, 403):
        return fault("completion", f"a completion is answered {status}", KEY_HELP)
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if status != 200 or not isinstance(usage, dict):
        remedy = "read the engine's log; a model without completions cannot be probed this way"
        return fault("completion", f"a completion for one token is answered {status}", remedy)
    details = usage.get("prompt_tokens_details")
    choice = (answer.get("choices") or [{}])[0]
    ids = choice.get("prompt_token_ids") or answer.get("prompt_token_ids") or []
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Answer(int(usage.get("prompt_tokens") or 0), cached, list(ids), time.perf_counter() - began)


async def _indexed(fleet: Fleet, worker: WorkerView, packed: bytes) -> Finding:
    """Check that the probe's blocks came through the worker's own stream, under the hashes computed here."""
    hashes = [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]
    if not hashes:
        return skipped("index", "the model's context is shorter than two blocks")
    end, held = time.monotonic() + INDEXED_S, [False]
    while not all(held) and time.monotonic() < end:
        held = await fleet.index.holds(worker.load.slot, hashes)
        await asyncio.sleep(0 if all(held) else POLL_S)
    if all(held):
        return ok("index", f"its stream reported the probe's {len(hashes)} blocks under the hashes computed here")
    text = f"of the probe's {len(hashes)} blocks {sum(held)} came into the index within {INDEXED_S:g} s"
    remedy = (
        "if routers run and nothing lags: another engine answers at this URL, prefix caching is off, or its blocks are"
        " hashed otherwise than announced: restart it, and compare its hash algorithm and seed"
    )
    return fault("index", text, remedy)


async def _cached(subject: Subject, second: Answer, predicted: int, before: float | None) -> list[Finding]:
    """Check that the second of two equal prompts was cached, by its answer's usage, else by the engine's metrics."""
    remedy = "start vLLM without --no-enable-prefix-caching; without a prefix cache this engine is routed by load only"
    if await _caching_off(subject):
        return [fault("prefix caching", "prefix caching is off: the engine says so in its metrics", remedy)]
    if second.cached:
        if predicted and second.cached != predicted:
            text = f"{second.cached} tokens of the second probe were cached, {predicted} were predicted"
            again = "if the engine is busy its cache may have evicted some: try again; else compare block sizes"
            return [note("prefix caching", text, again)]
        text = f"{second.cached} of {second.prompt_tokens} tokens of the second probe were cached"
        return [ok("prefix caching", f"{text}, {'as predicted' if predicted else 'prefix caching works'}")]
    if second.cached is None and before is None:
        text = "neither answers nor metrics tell how many prompt tokens were cached"
        remedy = "start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report"
        return [note("prefix caching", text, f"{remedy}: routers correct by it what they believe of its cache")]
    if second.cached is not None or not await _more_hits(subject, before):
        text = "the same prompt sent twice was not cached the second time: prefix caching is off, or its cache is full"
        return [fault("prefix caching", text, remedy)]
    off = "prompt_tokens_details is off: answers do not say how many prompt tokens were cached"
    return [
        ok("prefix caching", "the second probe was cached, by the engine's metrics"),
        note("prompt_tokens_details", off, "start vLLM with --enable-prompt-tokens-details"),
    ]


async def _caching_off(subject: Subject) -> bool:
    return b'enable_prefix_caching="False"' in await _metrics(subject)


async def _more_hits(subject: Subject, before: float | None) -> bool:
    end = time.monotonic() + METRICS_S
    while before is not None and time.monotonic() < end:
        if (await _hits(subject) or 0.0) > before:
            return True
        await asyncio.sleep(POLL_S)
    return False


async def _hits(subject: Subject) -> float | None:
    """Return how many prompt tokens the engine has found cached so far, by its metrics; None if these do not tell."""
    found = _HITS.findall(await _metrics(subject))
    return sum(map(float, found)) if found else None


async def _metrics(subject: Subject) -> bytes:
    try:
        status, page = await subject.engine.client.get(subject.engine.url, "/metrics", subject.engine.headers, 5.0)
    except UpstreamGone:
        return b""
    return page if status == 200 else b""


# ---------------------------------------------------------------- hand-off


def handoff(subject: Subject, *, wanted: bool) -> list[Finding]:
    """Check that routers can send this engine token ids in place of text. wanted: WARMFLEET_TOKEN_HANDOFF."""
    worker = subject.worker
    if worker is None or worker.approximate or not subject.facts:
        return []  # no worker announced whether this engine takes token ids
    able = token_capability(worker, announced.identity_key(worker))
    if not wanted:
        text = "WARMFLEET_TOKEN_HANDOFF=0: the engine tokenises every prompt again"
        return [note("token hand-off", text, "set it to 1")]
    if able is not None:
        return [ok("token hand-off", f"routers may send token ids for {' and '.join(sorted(able.endpoints))}")]
    told = (
        "its vLLM takes none" if "token_handoff" in subject.facts else "nobody told that it takes ids, as for a bridge"
    )
    why = told if worker.state.matched else f"it is {worker.state}"
    text = f"the engine tokenises every prompt again: {why}"
    return [note("token hand-off", text, "see app/docs/identity.md, Token hand-off")]


def _hasher(worker: WorkerView | None) -> Hasher | None:
    if worker is None or worker.approximate:
        return None
    try:
        return Hasher(Scheme.from_dict(worker.record["scheme"]))
    except (WireError, KeyError, TypeError):
        return None
