"""The certain beginning of a chat's prompt, if the chat has images, audio or parts of unknown types. Pure.

In place of such a part, the engine puts a placeholder of the model and replaces it by tokens that only the engine can
compute. The router therefore renders the prompt three times: as the engine does, and with two different words in place
of the part. The token ids with which all three begin belong to the text before the first part. If the beginning depends
on later messages (a template may count them), the three texts differ early. If the template drops the part, its place
is not known, and NotReproducible is raised.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from warmfleet.prompt.messages import NotReproducible, is_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from warmfleet.prompt.messages import Format, Message
    from warmfleet.prompt.request import Request

    Change = Callable[[list[Message]], list[Message]]

Line = TypeVar("Line", str, list[int])

#: Type of a part → its modality, as templates name it.
MODALITIES = {
    kind: kind.removeprefix("input_").partition("_")[0]
    for kind in (
        *("image_url", "input_image", "image_embeds"),
        *("audio_url", "input_audio", "audio_embeds"),
        *("video_url", "video_embeds"),
    )
}
#: Words put in place of an image or other part. Each begins with another character, which no placeholder begins with.
REAL, FIRST, SECOND = "\ue0a1", "\ue0b2", "\ue0c3"
UNSAFE_TOKENS = 8  # number of ids before a part that are left out, as an engine's processor may change nearby text


def variants(request: Request, form: Format, placeholders: Mapping[str, Any]) -> list[tuple[Request, Change]]:
    """Return the requests to render for ``agreed``, each with a change to make to the messages that the template gets.

    placeholders: the model's own text for each modality, for templates that take text only. Raises NotReproducible if
    the place of the parts cannot be known.
    """
    if all(is_text(part) for message in request.messages for part in _parts(message)):
        raise NotReproducible("parts")
    if any(REAL in text for message in request.messages for text in _texts(message)):
        raise NotReproducible("parts")  # the client's messages contain one of the stand-in words
    items = [MODALITIES[part["type"]] for message in request.messages for part in _parts(message) if _is_item(part)]
    if form == "string" and not all(placeholders.get(item) for item in items):
        raise NotReproducible("parts")  # without a placeholder the tokens may go anywhere, mostly to the front
    changes: list[tuple[str, Change]] = [
        (REAL, lambda messages: _as_engine(messages, placeholders)), (FIRST, _same), (SECOND, _same),
    ]  # fmt: skip
    made = [
        (replace(request, messages=[_with(message, word, form) for message in request.messages]), change)
        for word, change in changes
    ]
    return [*made, (_without(request), _same)] if items and form == "openai" else made


def as_engine(request: Request, form: Format, placeholders: Mapping[str, Any]) -> tuple[Request, Change, list[Any]]:
    """Return the request to render as the engine does, the change to make, and the parts that are not text, in order.

    Raises NotReproducible if a part is of an unknown type, or not in a message of the user.
    """
    items = [part for message in request.messages for part in _parts(message) if not is_text(part)]
    users = [part for message in request.messages if message["role"] == "user" for part in _parts(message)]
    if not all(map(_is_item, items)) or len(items) != sum(not is_text(part) for part in users):
        raise NotReproducible("parts")
    real, change = variants(request, form, placeholders)[0]
    return real, change, items


def agreed(texts: list[str], encode: Callable[[str], list[int]]) -> tuple[list[int], int]:
    """Return the ids that the prompt certainly begins with, and about how many it has. texts: the rendered variants.

    Raises NotReproducible if the template drops the parts.
    """
    real, first, second, *without = texts
    if real in without:
        raise NotReproducible("parts")
    certain, whole = encode(common(first, second)), encode(real)
    return common(certain, whole)[:-UNSAFE_TOKENS], len(whole)


def common(left: Line, right: Line) -> Line:
    """Return the longest common beginning, found by bisection, because slices are compared fast."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return left[:low]


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
    """Put ``word`` and the modality for each media part, or ``word`` alone for a content with unknown parts."""
    parts = _parts(message)
    if all(map(is_text, parts)):
        return message
    if message["role"] != "user" or not all(is_text(part) or _is_item(part) for part in parts):
        return message | {"content": word}
    replaced = [part if is_text(part) else {"type": "text", "text": word + MODALITIES[part["type"]]} for part in parts]
    if form == "string":  # the engine puts placeholders in front of a message's text
        replaced.sort(key=lambda part: not (isinstance(part, dict) and str(part.get("text")).startswith(word)))
    return message | {"content": replaced}


def _without(request: Request) -> Request:
    """Make each media part of the request an empty text, because some templates want a message to have text."""
    messages = [
        message | {"content": [part if is_text(part) else "" for part in _parts(message)]}
        if _parts(message)
        else message
        for message in request.messages
    ]
    return replace(request, messages=messages)


def _as_engine(messages: list[Message], placeholders: Mapping[str, Any]) -> list[Message]:
    """Return the messages with each stand-in replaced as the engine replaces the part."""
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
