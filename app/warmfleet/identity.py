"""What a worker's model makes of a request: its chat template and its tokenizer, equal to the engine's.

Built from what the workers bring (``fleet.artifact``), or from a path or hub name. A tokenizer may have a faster twin;
it is used only if both give the same ids for a few hundred difficult strings, checked when it is loaded.
"""

from __future__ import annotations

import array
import asyncio
import hashlib
import logging
import random
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from tokenizers import Tokenizer

from warmfleet import chat, partial
from warmfleet.chat import NotReproducible
from warmfleet.prompt import MAX_MODEL_LEN
from warmfleet.template import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Executor

    from warmfleet.prompt import Request

logger = logging.getLogger("warmfleet.identity")

MAX_TOKENIZERS = 4  # 100 to 240 MB each
MAX_IDENTITIES = 16
MAX_WAITING = 64  # texts in the executor; beyond, requests are routed by load
RENDER_INLINE_BYTES = 65_536  # bodies of larger chats are rendered in the executor: 1 ms of the event loop and more
FAST_FACTOR = 50  # how much longer a text may be inline with the fast engine
PROBES = 300

Ids = list[int]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Encoder:
    """Text → token ids. fast: the 30 to 90 times faster engine proved equal."""

    encode: Callable[[str, bool], Ids]
    fast: bool

    @classmethod
    def load(cls, tokenizer_json: bytes) -> Encoder:
        """Raises ValueError if no engine reads it. Takes 0.5 to 3 s: call it in an executor."""
        text = tokenizer_json.decode()
        try:
            slow = Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"not a tokenizer: {error}") from error
        slow.no_truncation()
        slow.no_padding()

        def encode(text: str, special: bool) -> Ids:
            # Of all ways only this one releases the GIL: other requests go on meanwhile.
            return list(slow.encode_batch_fast([text], add_special_tokens=special)[0].ids)

        specials = [token.content for token in slow.get_added_tokens_decoder().values()][:64]
        fast = _fast_twin(text, encode, specials)
        return cls(fast, fast=True) if fast else cls(encode, fast=False)


def _fast_twin(
    text: str, reference: Callable[[str, bool], Ids], specials: list[str]
) -> Callable[[str, bool], Ids] | None:
    try:
        import fastokens
    except ImportError:
        return None
    if sys.byteorder != "little":
        return None
    try:
        twin = fastokens.Tokenizer.from_json_str(text)
        twin.no_truncation()
        twin.no_padding()

        def encode(text: str, special: bool) -> Ids:
            ids = array.array("I")
            ids.frombytes(twin.encode_batch_flat([text], add_special_tokens=special)[0])
            return ids.tolist()

        for sample in _samples(specials):
            for special in (False, True):
                if encode(sample, special) != reference(sample, special):
                    logger.warning("fastokens differs from tokenizers on a probe: not used for this model")
                    return None
    except Exception as error:  # noqa: BLE001  whatever a faster engine stumbles over, the reference remains
        logger.info("fastokens does not take this tokenizer: %s", error)
        return None
    return encode


def _samples(specials: list[str]) -> list[str]:
    """Strings that tell tokenizers apart: scripts, digits, odd white space, normalisation, special tokens in text."""
    rng = random.Random(20)
    pieces = ["def f(x):\n    return x ** 2\n", "The quick brown fox", " jumps", "don't", "I'LL", "1234567890", "3.14"]
    pieces += [
        "中文字符",
        "日本語です",
        "Привет",
        "مرحبا",
        "שלום",
        "é",
        "e\u0301",
        "\ufb01",
        "①",
        "😀👩\u200d👩\u200d👧",
    ]
    pieces += ["\t\t", "   ", "\n\n\n", "\r\n", "\u00a0", "\u3000", "\u200b", "", "\x00", "\ufffd"]
    pieces += ["a" * 40, "==", "/*", "</", '{"k": [1, null]}', "http://a.b/c?d=e"]
    pieces += specials
    return ["".join(rng.choices(pieces, k=rng.randrange(1, 12))) for _ in range(PROBES)] + pieces


class Identity:
    """Token ids of requests of one model, exactly as its engines see them."""

    kind = "exact"

    def __init__(
        self, encoder: Encoder, template: ChatTemplate | None, facts: Mapping[str, Any], executor: Executor
    ) -> None:
        self.key = ""
        self.max_model_len = int(facts.get("max_model_len") or MAX_MODEL_LEN)
        self.loras: Mapping[str, str] = facts.get("loras") or {}
        self._encoder = encoder
        self._template = template
        self._fixed = {"tools": None, "documents": None, **(facts.get("special_tokens") or {})}
        self._defaults = dict(facts.get("default_chat_template_kwargs") or {})
        self._drop_unused_tools = bool(facts.get("exclude_tools_when_tool_choice_none"))
        self._tools_known = bool(facts.get("same_template_with_tools", True))
        self._multimodal = bool(facts.get("multimodal"))
        self._placeholders = dict(facts.get("placeholders") or {})
        self._executor = executor
        self._waiting = 0

    async def token_ids(self, request: Request, inline_characters: int) -> list[Ids]:
        """One list for each prompt; raises NotReproducible with the reason. Texts longer than ``inline_characters`` (of
        the slow engine) go to the executor, large chats as a whole."""
        if request.endpoint == "chat" and request.size_bytes > RENDER_INLINE_BYTES:
            return [await self._elsewhere(self._render_and_encode, request)]
        if request.endpoint == "chat":
            return [await self._encode(self.render(request), request.add_special_tokens, inline_characters)]
        return [
            prompt
            if isinstance(prompt, list)
            else await self._encode(prompt, request.add_special_tokens, inline_characters)
            for prompt in request.prompts
        ]

    async def beginning(self, request: Request) -> tuple[Ids, int]:
        """Ids that a chat with images certainly begins with, and how many it has about. Raises NotReproducible."""
        if self._template is None or not self._multimodal:
            raise NotReproducible("parts")
        return await self._elsewhere(self._beginning, request)

    def _beginning(self, request: Request) -> tuple[Ids, int]:
        form = self._template.content_format if self._template else "string"
        text, whole = partial.certain_text(request, self.render, form, self._placeholders)
        certain, real = (self._encode_now(one, request.add_special_tokens) for one in (text, whole))
        return partial.common(certain, real)[: -partial.UNSAFE_TOKENS], len(real)

    def render(self, request: Request, change: Callable[[list[chat.Message]], list[chat.Message]] | None = None) -> str:
        """The prompt text of a chat request. change: of the messages, once they are the template's."""
        if self._template is None:
            raise NotReproducible("no_template")
        tools = request.tools
        if tools and not self._tools_known:
            raise NotReproducible("tools")
        if self._drop_unused_tools and request.tool_choice == "none":
            tools = None
        messages = chat.conversation(request.messages, self._template.content_format)
        if change is not None:
            messages = change(messages)
        if not self._template.knows_developer:
            messages = chat.developer_to_system(messages)
        fixed = {**self._fixed, "tools": chat.tool_schemas(tools)}
        return self._template.render(messages, {**self._defaults, **request.arguments}, fixed)

    async def _encode(self, text: str, special: bool, inline_characters: int) -> Ids:
        if len(text) > inline_characters * (FAST_FACTOR if self._encoder.fast else 1):
            return await self._elsewhere(self._encode_now, text, special)
        return self._encode_now(text, special)

    def _encode_now(self, text: str, special: bool) -> Ids:
        try:
            return self._encoder.encode(text, special)
        except (UnicodeEncodeError, UnicodeDecodeError) as error:  # a lone surrogate: the engine answers 400
            raise NotReproducible("unicode") from error

    def _render_and_encode(self, request: Request) -> Ids:
        return self._encode_now(self.render(request), request.add_special_tokens)

    async def _elsewhere(self, work: Callable[..., Result], *args: Any) -> Result:
        """In the executor. Raises NotReproducible if too many wait for it."""
        if self._waiting >= MAX_WAITING:
            raise NotReproducible("busy")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)
        finally:
            self._waiting -= 1


def canonical_text(request: Request) -> list[bytes]:
    """What stands for the token ids where no tokenizer is known: equal prompts give equal bytes, and so do prefixes."""
    try:
        head = orjson.dumps([request.model, request.salt, request.tools])
    except TypeError as error:  # nested deeper than orjson goes
        raise NotReproducible("tools") from error
    if request.endpoint == "completions":
        return [
            head + (prompt.encode() if isinstance(prompt, str) else array.array("I", prompt).tobytes())
            for prompt in request.prompts
        ]
    try:
        return [head + b"".join([orjson.dumps(message) for message in chat.conversation(request.messages, "string")])]
    except TypeError as error:  # a lone surrogate in a tool call's arguments
        raise NotReproducible("unicode") from error


class Identities:
    """Builds identities once, keeps the last few; the tokenizers, which are the heavy part, are shared by content."""

    def __init__(self, executor: Executor, *, trust_templates: bool = False) -> None:
        self._executor = executor
        self._trusted = trust_templates
        self._encoders: OrderedDict[str, Encoder] = OrderedDict()
        self._built: OrderedDict[str, Identity] = OrderedDict()

    def known(self, key: str) -> Identity | None:
        return self._built.get(key)

    async def build(self, key: str, artifacts: Mapping[str, bytes], facts: Mapping[str, Any]) -> Identity:
        """Raises ValueError (or jinja2.TemplateError) for artifacts that cannot be used."""
        loop = asyncio.get_running_loop()
        tokenizer = artifacts.get("tokenizer.json")
        if tokenizer is None:
            raise ValueError("the worker brought no tokenizer")
        sha = hashlib.sha256(tokenizer).hexdigest()
        encoder = self._encoders.get(sha)
        if encoder is None:
            encoder = await loop.run_in_executor(self._executor, Encoder.load, tokenizer)
            _remember(self._encoders, sha, encoder, MAX_TOKENIZERS)
        source = artifacts.get("chat_template.jinja")
        template = None
        if source is not None:
            form = str(facts.get("content_format", "auto"))
            template = await loop.run_in_executor(
                self._executor, lambda: ChatTemplate(source.decode(), form, trusted=self._trusted)
            )
        identity = Identity(encoder, template, facts, self._executor)
        identity.key = key
        _remember(self._built, key, identity, MAX_IDENTITIES)
        return identity

    async def load(self, name: str) -> Identity:
        """From a local path or a hub name, as the operator says; raises ValueError if transformers cannot read it."""
        key = f"override {name}"
        known = self.known(key)
        if known is not None:
            return known
        loop = asyncio.get_running_loop()
        artifacts, facts = await loop.run_in_executor(self._executor, _with_transformers, name)
        return await self.build(key, artifacts, facts)


def _with_transformers(name: str) -> tuple[dict[str, bytes], dict[str, Any]]:
    try:
        from transformers import AutoTokenizer  # 2 s and 400 MB: only where an operator names a model
    except ModuleNotFoundError as error:
        raise ValueError(f"the tokenizer {name!r} needs transformers: pip install 'warmfleet[hub]'") from error
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


def _remember(cache: OrderedDict[str, Any], key: str, value: Any, limit: int) -> None:
    cache[key] = value
    cache.move_to_end(key)
    while len(cache) > limit:
        cache.popitem(last=False)
