"""Turns a parsed request into its identified prompt: block hashes, token counts, and how certain both are.

Identifying never fails. A request whose prompt cannot be reproduced is routed by load, and the reason is kept for the
metrics.
"""

from __future__ import annotations

import logging
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from warmfleet.pools.fleet_view import MAX_SCHEMES
from warmfleet.prompt import request as requests
from warmfleet.prompt.block_hashes import text_block_tokens, text_chain, text_tokens
from warmfleet.prompt.messages import NotReproducible
from warmfleet.prompt.prompt_identity import INLINE_CHARACTERS, KnownInPart, canonical_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from warmfleet.pools.fleet_view import View
    from warmfleet.pools.pool import Pool
    from warmfleet.prompt.block_hashes import Chain, Lora
    from warmfleet.prompt.prefix_trie import Prompt
    from warmfleet.prompt.request import Request

logger = logging.getLogger("warmfleet.pools.identified_prompt")

#: Reasons for which a chat with images, sound or unknown parts is not wholly known.
MEDIA = frozenset(
    {
        *("parts", "audio", "video", "image_url", "image_id", "image_format", "image_header", "image_size"),
        *("image_place", "image_new", "image_wrong"),
    }
)
BEGINNING_BLOCKS = 16  # number of first blocks; requests that share them go to one worker while Redis is away


@dataclass(slots=True)  # never changed, but not frozen: a frozen one is slower to make
class IdentifiedPrompt:
    """The prompt or prompts of one request, as far as this replica knows them.

    ``kind`` says how they were identified: ``exact`` (token ids made here), ``engine`` (token ids from an engine),
    ``text`` (workers are matched by the text), ``prefix`` (only the beginning is known) or ``load`` (nothing is known).
    ``reason`` says why a prompt is not wholly known; it is empty for a prompt that is.
    ``prompts`` holds the token ids of every prompt if the kind is ``exact``; ``identity_key`` names the tokenizer and
    template that made them. ``unable_workers`` cannot serve the request at all. ``image_tokens``: tokens of images
    in an exact prompt; with any, no engine takes the prompt as token ids. ``named_images``: a client named one by an id
    of its own. ``learned_images``: identifiers of those that are known from reports.
    """

    chains: tuple[Chain, ...]
    prompt_tokens: int
    decode_tokens: int
    kind: str
    reason: str = ""
    prompt_count: int = 1
    prompts: tuple[Prompt, ...] = ()
    identity_key: str = ""
    unable_workers: tuple[str, ...] = ()
    image_tokens: int = 0
    named_images: bool = False
    learned_images: frozenset[str] = frozenset()

    @property
    def beginning(self) -> bytes:
        """The first block hashes, which requests with the same beginning share; empty if no block hash is known."""
        return self.chains[0].hashes[: BEGINNING_BLOCKS * 8] if self.chains else b""


class _Found(NamedTuple):
    """The part of an IdentifiedPrompt that follows from the prompt alone."""

    chains: tuple[Chain, ...]
    prompt_tokens: int
    kind: str
    reason: str = ""
    prompts: tuple[Prompt, ...] = ()
    identity_key: str = ""
    image_tokens: int = 0
    named_images: bool = False
    learned_images: frozenset[str] = frozenset()


async def identify_here(request: Request, pool: Pool, *, probing: bool = False) -> IdentifiedPrompt:
    """Identify the prompt by the identity that this replica has loaded, without asking an engine. Never fails.

    Identifying may take seconds, so ``unable_workers`` is found by the reading that is the newest afterwards.
    probing: images count as known even if a probe has failed with one.
    """
    view = pool.view
    try:
        found = await _reproduced(request, view)
    except NotReproducible as why:
        found = await _with_media(request, pool, view, why.reason, probing=probing)
    except Exception as error:  # noqa: BLE001  a bug in reading a prompt must not fail a request that engines can serve
        found = _unknown(request, error)
    return _identified(found, request, pool.view)


def identify_ids(request: Request, view: View, prompts: list[list[int]], kind: str) -> IdentifiedPrompt:
    """Identify a request whose token ids came from elsewhere: from the client, or from an engine."""
    chains = _chains(view, request, max(prompts, key=len))
    return _identified(_Found(chains, sum(map(len, prompts)), kind), request, view)


def same_in(prompt: IdentifiedPrompt, request: Request, view: View, other: View) -> IdentifiedPrompt | None:
    """Return the prompt for another pool's view; None if that pool may make other token ids or block hashes.

    view: the view by which the prompt was identified. Each pool knows images of its own, and may doubt its rule.
    """
    if prompt.image_tokens or prompt.reason in MEDIA:
        return None
    schemes = {hasher.scheme.scheme_id for hasher in view.hashers}
    alike = other.identity is view.identity and other.text == view.text and other.max_model_len == view.max_model_len
    if not alike or not all(hasher.scheme.scheme_id in schemes for hasher in other.hashers):
        return None
    if _lora(other, request) != _lora(view, request):
        return None
    return as_of(prompt, request, other)


def as_of(prompt: IdentifiedPrompt, request: Request, view: View) -> IdentifiedPrompt:
    """Return the prompt with ``unable_workers`` by this view: served names may change while a request waits."""
    barred = _barred(request, view, prompt.prompts, prompt.prompt_count, prompt.prompt_tokens)
    return prompt if barred == prompt.unable_workers else replace(prompt, unable_workers=barred)


def _identified(found: _Found, request: Request, view: View) -> IdentifiedPrompt:
    chains, prompt_tokens, kind, reason, prompts, identity_key, image_tokens, named, learned = found
    count = len(request.prompts) or 1
    decode_tokens = requests.decode_tokens(request, prompt_tokens)
    barred = _barred(request, view, prompts, count, prompt_tokens)
    return IdentifiedPrompt(
        chains,
        prompt_tokens,
        decode_tokens,
        kind,
        reason,
        count,
        prompts,
        identity_key,
        barred,
        image_tokens,
        named,
        learned,
    )


def _barred(
    request: Request, view: View, prompts: tuple[Prompt, ...], count: int, prompt_tokens: int
) -> tuple[str, ...]:
    """Return the workers that lack a label, do not keep the answer that the request follows, do not serve the request's
    model name, or have too short a context.

    count: of its prompts, all of which have ``prompt_tokens``.
    """
    unlabelled = view.unlabelled(request.labels) if request.labels else ()
    if request.follows:
        unlabelled += view.not_keeping(request.follows)
    if not (view.limits or view.names.differ):
        return unlabelled
    longest = max([prompt.tokens for prompt in prompts], default=0 if count > 1 else prompt_tokens)
    return tuple(dict.fromkeys((*unlabelled, *view.barred(request.model, longest + (request.max_tokens or 1)))))


async def _reproduced(request: Request, view: View) -> _Found:
    """Tokenize the prompt as the engines will. Raises NotReproducible with the reason."""
    if request.unforeseen:
        raise NotReproducible(request.unforeseen)
    if requests.too_long(request, view.max_model_len):
        raise NotReproducible("too_long")
    identity = view.identity
    if identity is None and not view.text:
        raise NotReproducible("no_identity")
    chains: tuple[Chain, ...] = ()
    prompts: tuple[Prompt, ...] = ()
    tokens, kind, key = 0, "text", ""
    if identity is not None:
        kind, key = "exact", identity.key
        lora = _lora(view, request) if view.names.paths else None
        prompts = tuple(await identity.prompts(request, view.hashers, lora, INLINE_CHARACTERS))
        if len(prompts) == 1:
            chains, tokens = prompts[0].chains, prompts[0].tokens or 1
        else:
            chains = next(prompt.chains for prompt in prompts if prompt.chains or not view.hashers)
            tokens = max(1, sum([prompt.tokens for prompt in prompts]))
    if view.text:
        texts = canonical_text(request)
        chain = text_chain(longest := max(texts, key=len))
        if identity is not None:  # the number of token ids tells how many tokens a text block of this prompt has
            held = text_block_tokens(len(longest), max(prompt.tokens for prompt in prompts))
            chain = chain._replace(block_tokens=held)
        chains = (*chains[: MAX_SCHEMES - 1], chain)
        tokens = tokens or sum(text_tokens(len(text)) for text in texts)
    return _Found(chains, tokens, kind, "", prompts, key)


async def _with_media(request: Request, pool: Pool, view: View, reason: str, *, probing: bool) -> _Found:
    """Make the prompt of a chat with images as the engines will, or find its certain beginning."""
    rules, identity = view.images, view.identity
    if reason != "parts" or request.unforeseen or rules is None or identity is None or request.endpoint != "chat":
        return await _in_part(request, view, reason)
    if (view.images_wrong or pool.image_counts.doubted) and not probing:
        return await _in_part(request, view, "image_wrong")
    try:
        prompt = await identity.with_images(request, rules, view.hashers, _lora(view, request), pool.learned.find)
    except KnownInPart as why:
        chains = _known_part(why.prompt.chains)
        return _Found(chains, why.tokens, "prefix" if chains else "load", why.reason)
    except NotReproducible as why:
        return await _in_part(request, view, why.reason)
    except Exception as error:  # noqa: BLE001  a bug must not fail the request
        return _unknown(request, error)
    images = prompt.image_tokens, prompt.named_images, prompt.learned_images
    return _Found(prompt.chains, prompt.tokens, "exact", "", (), identity.key, *images)


async def _in_part(request: Request, view: View, reason: str) -> _Found:
    """Find the tokens with which a chat with images certainly begins, if any; the chat's length is estimated."""
    tokens = requests.estimated_tokens(request)
    chains: tuple[Chain, ...] = ()
    if reason in MEDIA and view.identity is not None and request.endpoint == "chat":
        try:
            ids, tokens = await view.identity.beginning(request)
            chains = _known_part(_chains(view, request, ids))
        except NotReproducible:
            pass
        except Exception as error:  # noqa: BLE001  a bug must not fail the request
            return _unknown(request, error)
    return _Found(chains, max(tokens, 1), "prefix" if chains else "load", reason)


def _unknown(request: Request, error: Exception) -> _Found:
    place = traceback.extract_tb(error.__traceback__)[-1]  # the message is not logged: it may contain the prompt
    logger.error("%s at %s:%s: a prompt is not known", type(error).__name__, place.filename, place.lineno)
    return _Found((), requests.estimated_tokens(request), "load", "error")


def _chains(view: View, request: Request, ids: list[int]) -> tuple[Chain, ...]:
    lora = _lora(view, request)
    return tuple(hasher.chain(ids, request.salt, lora) for hasher in view.hashers)


def _known_part(chains: Iterable[Chain]) -> tuple[Chain, ...]:
    """Return these chains of the beginning of a prompt, which does not end where they do."""
    return tuple(chain._replace(last=b"") for chain in chains if chain.hashes)


def _lora(view: View, request: Request) -> Lora:
    """Return name and path of the request's adapter, because both are part of each of its block hashes."""
    path = view.names.paths.get(request.model)
    return None if path is None else (request.model, path)
