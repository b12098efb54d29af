"""Turns requests for one model into token ids and block hashes, exactly as its engines do.

A new prompt often begins like an earlier one. The common beginning is neither tokenised nor hashed again
(``prefix_trie``).
"""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import orjson

from warmfleet.prompt.cut_points import Cuts
from warmfleet.prompt.dialects.messages_request import with_system_first
from warmfleet.prompt.dialects.responses_request import with_names_first
from warmfleet.prompt.images import MAX_IMAGES, UNKNOWN, Images, none_learned
from warmfleet.prompt.media_prefix import MODALITIES, agreed, as_engine, variants
from warmfleet.prompt.messages import NotReproducible, conversation, developer_to_system, tool_schemas
from warmfleet.prompt.prefix_trie import NO_IDS, Prompt, Reading, Trie

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor

    from warmfleet.prompt.block_hashes import Hasher, Lora
    from warmfleet.prompt.chat_template import ChatTemplate
    from warmfleet.prompt.images import ImageRules, Item, Learned
    from warmfleet.prompt.media_prefix import Change
    from warmfleet.prompt.messages import Format, Message
    from warmfleet.prompt.prefix_trie import Node
    from warmfleet.prompt.request import Request
    from warmfleet.prompt.tokenizer import Encoder

MAX_WAITING = 64  # most texts that wait for the executor; the prompts of further requests are not identified
INLINE_BYTES = 65_536  # most bytes of a body rendered in the event loop; others take over 1 ms, so in the executor
INLINE_CHARACTERS = 2_000  # most new characters tokenised in the event loop: 1.5 ms with the slow tokenizer
FAST_FACTOR = 20  # number of times INLINE_CHARACTERS that the fast tokenizer reads in the same 1.5 ms

Result = TypeVar("Result")
Rendering = tuple["list[Message]", dict[str, Any], dict[str, Any]]


class KnownInPart(NotReproducible):
    """A prompt is known up to an image that is not known, whose first token is the last of ``prompt``. Its chains have
    the blocks before that token. tokens: about as many as the whole prompt has.
    """

    def __init__(self, reason: str, prompt: Prompt, tokens: int) -> None:
        super().__init__(reason)
        self.prompt, self.tokens = prompt, tokens


class WorkerTemplate(Protocol):
    """A chat template that a worker brought. Until an operator approves it, it renders in a process of its own."""

    knows_developer: bool

    @property
    def local(self) -> ChatTemplate | None:
        """The template compiled in this process, or None while the operator has not approved it."""

    @property
    def state(self) -> str:
        """For people: ``approved``, or the state of the process that renders."""

    async def ready(self) -> Format:
        """Wait until the template is ready; return its content format. Raises NotReproducible if it cannot be used."""

    async def render(self, messages: list[Message], arguments: dict[str, Any], fixed: dict[str, Any]) -> str:
        """Render the prompt text. Raises NotReproducible."""


class Identity:
    """Makes the token ids and block hashes of one model's requests, exactly as its engines do.

    facts: announced by the server that brought the template and the tokenizer. cuts: where texts may be cut (``None``:
    nowhere). ``key`` names the identity among those of this replica.
    """

    kind = "exact"

    def __init__(
        self,
        encoder: Encoder,
        template: ChatTemplate | WorkerTemplate | None,
        facts: Mapping[str, Any],
        executor: Executor,
        trie: Trie,
        cuts: Cuts | None = None,
    ) -> None:
        self.key = ""
        self.encoder = encoder
        self._template = template
        self._fixed = {"tools": None, "documents": None, **(facts.get("special_tokens") or {})}
        self._defaults = dict(facts.get("default_chat_template_kwargs") or {})
        self._drop_unused_tools = bool(facts.get("exclude_tools_when_tool_choice_none"))
        self._tools_known = bool(facts.get("same_template_with_tools", True))
        self._merges_system = facts.get("merges_inline_system")
        self._not_thinking = facts.get("disabled_thinking_effort")
        self._multimodal = bool(facts.get("multimodal"))
        self._placeholders = dict(facts.get("placeholders") or {})
        self._executor = executor
        self._trie = trie
        self._readings = {special: _base_reading(encoder, cuts, special=special) for special in (False, True)}
        self._last_reading = self._readings[True]
        self._waiting = 0

    @property
    def tokenizer(self) -> str:
        """For people: ``fast`` or ``slow``, and ``no pieces`` if texts cannot be cut, so are tokenised as a whole."""
        cuts = self._readings[True].cuts
        engine = "fast" if self.encoder.fast else "slow"
        return engine if cuts.separators or cuts.spaces else f"{engine}, no pieces"

    @property
    def template(self) -> str:
        """For people: the state of the chat template, or ``none``."""
        return self._template.state if self._template is not None else "none"

    async def prompts(
        self, request: Request, hashers: tuple[Hasher, ...], lora: Lora, inline_characters: int
    ) -> list[Prompt]:
        """Make all prompts of the request. Only the longest gets chains, because all go to the worker chosen by it.

        A text with more than ``inline_characters`` new characters (FAST_FACTOR times as many with the fast tokenizer)
        is read in the executor. A large chat is rendered there as well. Raises NotReproducible with the reason.
        """
        reading = self._reading(request, hashers, lora)
        large = request.size_bytes > INLINE_BYTES
        if request.endpoint == "chat":
            template = self._template
            if template is None:
                raise NotReproducible("no_template")
            local = template.local
            if local is None:
                text = await self._render_apart(request, cast("WorkerTemplate", template))
            elif large:
                return [await self._in_executor(lambda: self._read_now(self.render(request), reading))]
            else:
                text = local.render(*self._rendering(request, local, local.content_format))
        elif large or len(request.prompts) > 1:
            return await self._in_executor(self._read_all, request.prompts, reading)
        else:
            (prompt,) = request.prompts
            if isinstance(prompt, list):
                return [_prompt_of_ids(prompt, reading)]
            text = prompt
        path = self._trie.find(text, reading)
        if len(text) - path[-1].end > inline_characters * (FAST_FACTOR if self.encoder.fast else 1):
            return [await self._in_executor(self._read_now, text, reading, path)]
        return [self._read_now(text, reading, path)]

    def _reading(self, request: Request, hashers: tuple[Hasher, ...], lora: Lora) -> Reading:
        """Return the ``Reading`` (tokenizer, hashers, salt, adapter) of this request: mostly that of the last one."""
        base, last = self._readings[request.add_special_tokens], self._last_reading
        # ``is`` is fast, and enough, because each base reading has its own name object, and each view its own hashers.
        same = last.name is base.name and last.hashers is hashers
        if not (same and last.salt == request.salt and last.lora == lora):
            last = replace(base, hashers=hashers, salt=request.salt, lora=lora)
            self._last_reading = last
        return last

    async def token_ids(self, request: Request, inline_characters: int) -> list[list[int]]:
        """Make the ids alone, one list for each prompt. Raises NotReproducible with the reason."""
        return [prompt.ids for prompt in await self.prompts(request, (), None, inline_characters)]

    async def with_images(
        self,
        request: Request,
        rules: ImageRules,
        hashers: tuple[Hasher, ...],
        lora: Lora,
        learned: Learned = none_learned,
    ) -> Prompt:
        """Make the prompt of a chat with images. learned: see ``ImageRules.item``.

        Raises NotReproducible with the reason, or KnownInPart if the first image that is not known has a known place.
        """
        template = self._template
        if template is None or not self._multimodal:
            raise NotReproducible("parts")
        form = await template.ready() if template.local is None else template.local.content_format
        variant, change, parts = as_engine(request, form, self._placeholders)
        if len(parts) > MAX_IMAGES:
            raise NotReproducible("image_size")
        text = await self._variant(template, form, variant, change)

        def read() -> Prompt:
            base = self._readings[request.add_special_tokens]
            items, reason, behind = _items(rules, parts, request.media_id, learned)
            images = Images(rules, items, base.encode)
            reading = replace(
                base,
                name=("images", base.name, rules.token_id),  # not that of texts, in which a client may write a mark
                encode=images.ids,
                hashers=hashers,
                salt=request.salt,
                lora=lora,
                media=images.places,
            )
            marked, rest = images.marked(text, len(parts))
            prompt = self._read_now(marked, reading)
            if reason:
                raise KnownInPart(reason, prompt, prompt.tokens + len(base.encode(rest)) + behind)
            prompt.image_tokens = sum(item.tokens for item in items)
            prompt.learned_images = frozenset(
                item.identifier for item in items if item.runs and item.runs != rules.runs
            )
            prompt.named_images = any(part.get("uuid") is not None for part in parts)
            return prompt

        return await self._in_executor(read)

    async def beginning(self, request: Request) -> tuple[list[int], int]:
        """Return the certain first ids of a chat with images, and about how many it has. Raises NotReproducible."""
        template = self._template
        if template is None or not self._multimodal:
            raise NotReproducible("parts")
        form = await template.ready() if template.local is None else template.local.content_format
        texts = [
            await self._variant(template, form, variant, change)
            for variant, change in variants(request, form, self._placeholders)
        ]
        reading = self._readings[request.add_special_tokens]
        return await self._in_executor(lambda: agreed(texts, lambda text: self._read_now(text, reading).ids))

    async def _variant(
        self, template: ChatTemplate | WorkerTemplate, form: Format, request: Request, change: Change
    ) -> str:
        make = partial(self._rendering, request, template, form, change)
        local = template.local
        if local is None:
            return await cast("WorkerTemplate", template).render(*await self._in_executor(make))
        return await self._in_executor(lambda: local.render(*make()))

    def render(self, request: Request) -> str:
        """Render the prompt text of a chat in this process. Raises NotReproducible."""
        template = None if self._template is None else self._template.local
        if template is None:
            raise NotReproducible("no_template")
        return template.render(*self._rendering(request, template, template.content_format))

    async def _render_apart(self, request: Request, template: WorkerTemplate) -> str:
        """Render the prompt text of a chat in the template's own process. Raises NotReproducible."""
        make = partial(self._rendering, request, template, await template.ready())
        large = request.size_bytes > INLINE_BYTES
        return await template.render(*(await self._in_executor(make) if large else make()))

    def _rendering(
        self,
        request: Request,
        template: ChatTemplate | WorkerTemplate,
        content_format: Format,
        change: Change | None = None,
    ) -> Rendering:
        """Return the messages, the variables that requests may set, and the fixed variables, as the template gets them.

        change: applied to the messages of ``conversation``.
        """
        tools = request.tools
        if tools and not self._tools_known:
            raise NotReproducible("tools")
        if self._drop_unused_tools and request.tool_choice == "none":
            tools = None
        messages, arguments = request.messages, request.arguments
        if request.dialect == "messages":
            messages, arguments = self._of_anthropic(request)
        messages = conversation(messages, content_format)
        if request.dialect == "responses":
            messages = with_names_first(messages)
        if change is not None:
            messages = change(messages)
        if not template.knows_developer:
            messages = developer_to_system(messages)
        return (
            messages,
            {**self._defaults, **arguments},
            {**self._fixed, "tools": tool_schemas(tools) if tools else None},
        )

    def _of_anthropic(self, request: Request) -> tuple[list[Message], dict[str, Any]]:
        """Return a chat of Anthropic's API and the template's arguments, as the engine's settings make them."""
        messages, arguments = request.messages, request.arguments
        if any(message["role"] == "system" for message in messages[1:]):
            if not isinstance(self._merges_system, bool):
                raise NotReproducible("inline_system")
            messages = with_system_first(messages) if self._merges_system else messages
        if request.thinking_off:
            effort = self._not_thinking
            if not isinstance(effort, str):
                raise NotReproducible("thinking")
            arguments = {"enable_thinking": effort != "none", **arguments, "reasoning_effort": effort}
        return messages, arguments

    def _read_now(self, text: str, reading: Reading, path: list[Node] | None = None) -> Prompt:
        try:
            return self._trie.read(text, reading, path)
        except (UnicodeEncodeError, UnicodeDecodeError) as error:  # the engine answers half a surrogate pair with 400
            raise NotReproducible("unicode") from error

    def _read_all(self, sources: Sequence[str | list[int]], reading: Reading) -> list[Prompt]:
        plain = replace(reading, hashers=()) if len(sources) > 1 else reading
        prompts = [
            _prompt_of_ids(source, plain) if isinstance(source, list) else self._read_now(source, plain)
            for source in sources
        ]
        if len(sources) > 1:
            longest = max(range(len(prompts)), key=lambda k: prompts[k].tokens)
            prompts[longest] = _prompt_of_ids(prompts[longest].ids, reading)
        return prompts

    async def _in_executor(self, work: Callable[..., Result], *args: Any) -> Result:
        """Run ``work`` in the executor. Raises NotReproducible while MAX_WAITING texts wait for the executor."""
        if self._waiting >= MAX_WAITING:
            raise NotReproducible("busy")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)
        finally:
            self._waiting -= 1


def _items(
    rules: ImageRules, parts: Sequence[Any], rename: Callable[[str], str] | None, learned: Learned
) -> tuple[list[Item], str, int]:
    """Return the images of these parts up to the first that is not known, which is UNKNOWN, why it is not known, and
    the tokens of the known ones behind.

    Raises NotReproducible for other parts than images: their place is not looked for.
    """
    items: list[Item] = []
    reason, behind = "", 0
    for part in parts:
        try:
            item = rules.item(part, rename, learned)
        except NotReproducible as why:
            if any(MODALITIES[other["type"]] != "image" for other in parts):
                raise
            items, reason = items if reason else [*items, UNKNOWN], reason or why.reason
            continue
        if reason:
            behind += item.tokens
        else:
            items.append(item)
    return items, reason, behind


def _base_reading(encoder: Encoder, cuts: Cuts | None, *, special: bool) -> Reading:
    """Return a ``Reading`` without hashers, salt and adapter, which differ by request."""
    if encoder.affixes is None or cuts is None:
        encode = encoder.whole if special else encoder.plain
        return Reading((encoder.name, special), encode, Cuts((), spaces=False))
    prefix, suffix = encoder.affixes if special else (NO_IDS, NO_IDS)
    name = encoder.name, cuts.separators, cuts.spaces
    return Reading(name, encoder.plain, cuts, prefix, suffix)


def _prompt_of_ids(ids: list[int], reading: Reading) -> Prompt:
    packed = array("I", ids)
    chains = tuple(hasher.chain(packed, reading.salt, reading.lora) for hasher in reading.hashers)
    return Prompt((packed,), len(packed), chains)


def canonical_text(request: Request) -> list[bytes]:
    """Return for each prompt the bytes that are hashed in place of token ids while no tokenizer is known.

    Equal prompts give equal bytes, and prompts that begin alike give bytes that begin alike. Raises NotReproducible.
    """
    try:
        head = orjson.dumps([request.model, request.salt, request.tools])
    except TypeError as error:  # nested deeper than orjson can write
        raise NotReproducible("tools") from error
    if request.endpoint == "completions":
        return [
            head + (prompt.encode() if isinstance(prompt, str) else array("I", prompt).tobytes())
            for prompt in request.prompts
        ]
    try:
        return [head + b"".join([orjson.dumps(message) for message in conversation(request.messages, "string")])]
    except TypeError as error:  # half a surrogate pair in the arguments of a tool call
        raise NotReproducible("unicode") from error
