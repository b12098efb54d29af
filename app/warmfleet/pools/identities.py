"""The identities of this replica's models: built from the files that workers bring, or from a path or hub name."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from warmfleet.prompt.prompt_identity import Identity
from warmfleet.untrusted.tokenizer_trial import Encoders

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from concurrent.futures import Executor

    from warmfleet.prompt.prefix_trie import Trie
    from warmfleet.untrusted.template_approval import Templates

logger = logging.getLogger("warmfleet.pools.identities")

MAX_UNUSED = 2  # most unused identities kept, because a fleet may change back; a tokenizer takes 100 to 240 MB


class Identities:
    """Builds each identity (tokenizer and template) once and keeps those in use. Equal tokenizers are loaded once."""

    def __init__(self, executor: Executor, trie: Trie, templates: Templates) -> None:
        self._executor = executor
        self._trie = trie
        self.templates = templates
        self._encoders = Encoders(executor)
        self._built: dict[str, Identity] = {}

    def known(self, key: str) -> Identity | None:
        """Return the identity with this key, or None if it is not built."""
        return self._built.get(key)

    def keep(self, used: Collection[str]) -> None:
        """Forget all identities but those with these keys and the MAX_UNUSED newest others."""
        for key in [key for key in self._built if key not in used][:-MAX_UNUSED]:
            del self._built[key]

    async def build(
        self, key: str, artifacts: Mapping[str, bytes], facts: Mapping[str, Any], *, trusted: bool = False
    ) -> Identity:
        """Build the identity from files, by their names, and from a server's facts.

        trusted: the operator chose the files; the tokenizer then needs no trial. Raises ValueError or
        jinja2.TemplateError for files that cannot be used.
        """
        tokenizer = artifacts.get("tokenizer.json")
        if tokenizer is None:
            raise ValueError("the worker brought no tokenizer")
        source = artifacts.get("chat_template.jinja")
        text = source.decode() if source is not None else ""
        trusted = trusted or self.templates.trust_all  # an operator who trusts templates trusts tokenizers, too
        encoder, cuts = await self._encoders.take(tokenizer, text, trusted=trusted)
        template = None
        if source is not None:
            template = await self.templates.take(source, str(facts.get("content_format", "auto")))
        identity = Identity(encoder, template, facts, self._executor, self._trie, cuts)
        identity.key = key
        self._built[key] = identity
        if identity.tokenizer != "fast":
            logger.warning("%s: slower than others, its tokenizer is %s (see /workers)", key[:12], identity.tokenizer)
        return identity

    async def load(self, name: str) -> Identity:
        """Load the identity of a path or hub name of the settings. Raises ValueError if transformers cannot read it."""
        key = f"override {name}"
        known = self.known(key)
        if known is not None:
            return known
        loop = asyncio.get_running_loop()
        artifacts, facts = await loop.run_in_executor(self._executor, _with_transformers, name)
        return await self.build(key, artifacts, facts, trusted=True)


def _with_transformers(name: str) -> tuple[dict[str, bytes], dict[str, Any]]:
    try:
        from transformers import AutoTokenizer  # takes 2 s and 400 MB: only where the settings name a model
    except ModuleNotFoundError as error:
        raise ValueError(f"the tokenizer {name!r} needs transformers: pip install 'transformers>=5'") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        artifacts = {"tokenizer.json": tokenizer.backend_tokenizer.to_str().encode()}
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"cannot load the tokenizer {name!r}: {error}") from error
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        artifacts["chat_template.jinja"] = template.encode()
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    return artifacts, {"special_tokens": special}
