"""A chat with images, audio or parts we do not understand: what its prompt certainly begins with. Pure.

The engine puts a model's own placeholder where such a part stands and replaces it by tokens that only it can know. So
the prompt is rendered as the engine renders it, and twice more with two different words in the part's place: what all
three begin with, down to the ids, is the text before the first part. A template whose beginning depends on what comes
later (one that counts messages, say) shows in the comparison; one that drops the part does not say where it goes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from warmfleet.prompt import messages as chat
from warmfleet.prompt.messages import NotReproducible

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from warmfleet.prompt.messages import Format, Message
    from warmfleet.prompt.request import Request

    Change = Callable[[list[Message]], list[Message]]

Line = TypeVar("Line", str, list[int])

#: Types of parts → what a template is told that they are.
MODALITIES = {
    kind: kind.removeprefix("input_").partition("_")[0]
    for kind in (
        *("image_url", "input_image", "image_embeds"),
        *("audio_url", "input_audio", "audio_embeds"),
        *("video_url", "video_embeds"),
    )
}
#: They differ from their first character on, from each other and from any placeholder.
REAL, FIRST, SECOND = "\ue0a1", "\ue0b2", "\ue0c3"
UNSAFE_TOKENS = 8  # before the part: what an engine's processor might make of its surroundings


def variants(request: Request, form: Format, placeholders: Mapping[str, Any]) -> list[tuple[Request, Change]]:
    """What to render, and what to change in its messages when they are the template's: for ``agreed``.

    placeholders: the model's own text for each modality, for templates that take text only. Raises NotReproducible if
    there is no telling where the parts go.
    """
    if all(chat.is_text(part) for message in request.messages for part in _parts(message)):
        raise NotReproducible("parts")
    if any(REAL in text for message in request.messages for text in _texts(message)):
        raise NotReproducible("parts")  # the client knows our word
    items = [MODALITIES[part["type"]] for message in request.messages for part in _parts(message) if _is_item(part)]
    if form == "string" and not all(placeholders.get(item) for item in items):
        raise NotReproducible("parts")  # such models put their tokens anywhere, mostly in front of everything
    changes: list[tuple[str, Change]] = [(REAL, lambda m: _as_engine(m, placeholders)), (FIRST, _same), (SECOND, _same)]
    found = [
        (replace(request, messages=[_with(message, word, form) for message in request.messages]), change)
        for word, change in changes
    ]
    return [*found, (_without(request), _same)] if items and form == "openai" else found


def agreed(texts: list[str], encode: Callable[[str], list[int]]) -> tuple[list[int], int]:
    """Ids that the prompt certainly begins with, and how many it has about. texts: the rendered variants.

    Raises NotReproducible if the template drops the parts.
    """
    real, first, second, *without = texts
    if real in without:
        raise NotReproducible("parts")
    certain, whole = encode(common(first, second)), encode(real)
    return common(certain, whole)[:-UNSAFE_TOKENS], len(whole)


def common(one: Line, other: Line) -> Line:
    """The longest common beginning, by bisection: comparisons of slices are fast."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return one[:low]


def _texts(message: Message) -> list[str]:
    parts = _parts(message) or [message.get("content")]
    return [
        text
        for part in parts
        for text in (part.values() if isinstance(part, dict) else [part])
        if isinstance(text, str)
    ]


def _parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else ()


def _is_item(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in MODALITIES


def _with(message: Message, word: str, form: Format) -> Message:
    """``word`` and the modality for every part that is one; alone for the whole content if we do not understand it."""
    parts = _parts(message)
    if all(map(chat.is_text, parts)):
        return message
    if message["role"] != "user" or not all(chat.is_text(part) or _is_item(part) for part in parts):
        return message | {"content": word}
    stand = [
        part if chat.is_text(part) else {"type": "text", "text": word + MODALITIES[part["type"]]} for part in parts
    ]
    if form == "string":  # the engine puts placeholders in front of a message's text
        stand.sort(key=lambda part: not (isinstance(part, dict) and str(part.get("text")).startswith(word)))
    return message | {"content": stand}


def _without(request: Request) -> Request:
    """Nothing where the parts are: an empty text, as some templates want a message to have some."""
    messages = [
        message | {"content": [part if chat.is_text(part) else "" for part in _parts(message)]}
        if _parts(message)
        else message
        for message in request.messages
    ]
    return replace(request, messages=messages)


def _as_engine(messages: list[Message], placeholders: Mapping[str, Any]) -> list[Message]:
    """The stand-ins of the real text as the engine gives them to the template."""
    return [message | {"content": _content(message["content"], placeholders)} for message in messages]


def _content(content: Any, placeholders: Mapping[str, Any]) -> Any:
    if isinstance(content, list):
        items = {REAL + item: {"type": item} for item in MODALITIES.values()}
        return [items.get(part["text"], part) for part in content]
    for item, text in placeholders.items():
        content = content.replace(REAL + item, text or "")
    return content


def _same(messages: list[Message]) -> list[Message]:
    return messages
