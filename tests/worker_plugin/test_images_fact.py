"""Why no rule for images is announced is told, and other settings of the processor make another fact."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from warmfleet_worker.vllm_hooks import images

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKEN, END = 7, 8


class Joining:
    """Puts line feeds, tokens and an end in place of TOKEN; joins two line feeds. Refuses one behind an image."""

    def __init__(self, tokens: int = 4) -> None:
        tokenizer = SimpleNamespace(encode=self._encode, convert_ids_to_tokens=lambda _: "<image>")
        self.tokens = tokens
        self.info = SimpleNamespace(
            get_tokenizer=lambda: tokenizer,
            parse_mm_data=lambda given: given["image"],
            get_hf_processor=lambda: None,
            get_image_processor=lambda: None,
            get_num_image_tokens=self._count,
        )

    def _count(self, *, image_width: int, image_height: int, processor: Any) -> int:
        assert processor is None
        return self.tokens if image_width and image_height else 0

    def _encode(self, text: str, **_: Any) -> list[int]:
        ids = {"<image>": TOKEN} | {"\n" * count: 10 + count for count in range(1, 5)}
        return [ids.get(piece, 100) for piece in re.findall(r"\n+|<image>|.", text)]

    def __call__(self, prompt: list[int], pictures: Sequence[Any]) -> dict[str, Any]:
        ids, places = list[int](), list[SimpleNamespace]()
        for token in prompt:
            made = [12, TOKEN, *[9] * self.tokens, END, 12] if token == TOKEN else [token]
            if ids and places and ids[-1] == 12 and token in (11, 13):
                raise ValueError("no image is found")
            joined = bool(ids) and (ids[-1], made[0]) in ((11, 12), (12, 12))
            if joined:
                made = [ids.pop() + made[0] - 10, *made[1:]]
            if token == TOKEN:
                places.append(SimpleNamespace(offset=len(ids), length=self.tokens + 4))
            ids += made
        return {"mm_placeholders": {"image": places}, "prompt_token_ids": ids}


class Processor:
    """Puts a row of tokens and an end in place of TOKEN, longer for larger images, up to ``most`` tokens.

    refuses: raise this error.
    """

    def __init__(self, most: int = 100, refuses: Exception | None = None) -> None:
        self.most, self.refuses = most, refuses
        tokenizer = SimpleNamespace(
            encode=lambda text, **_: [TOKEN if word == "<image>" else 1 for word in text.split()],
            convert_ids_to_tokens=lambda _: "<image>",
        )
        self.info = SimpleNamespace(get_tokenizer=lambda: tokenizer, parse_mm_data=lambda given: given["image"])

    def __call__(self, prompt: list[int], pictures: Sequence[Any]) -> dict[str, Any]:
        if self.refuses is not None:
            raise self.refuses
        left, ids, places = list(pictures), list[int](), list[SimpleNamespace]()
        for token in prompt:
            made = [token]
            if token == TOKEN:
                made = [TOKEN] * min(self.most, 1 + left.pop(0).width // 10) + [END]
                places.append(SimpleNamespace(offset=len(ids), length=len(made)))
            ids += made
        return {"mm_placeholders": {"image": places}, "prompt_token_ids": ids}


@pytest.fixture(autouse=True)
def _placeholder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_placeholders", lambda *_: iter(["<image>"]))
    monkeypatch.setattr(images, "_frames", lambda *_: {"frames": {}})


def fact(processor: Processor | Joining) -> dict[str, Any] | None:
    config = SimpleNamespace(get_limit_per_prompt=lambda _: 3)
    model_config = SimpleNamespace(multimodal_config=config)
    return images.images(SimpleNamespace(mm_processor=processor), model_config)


def test_the_reason_why_no_text_places_an_image_is_raised() -> None:
    with pytest.raises(RuntimeError, match="no such size"):
        fact(Processor(refuses=RuntimeError("no such size")))


def test_engines_with_other_settings_announce_another_digest() -> None:
    """Also if the settings show only in images that are larger than most."""
    told = [fact(Processor(most)) for most in (100, 100, 5, 200)]
    assert [each and (each["family"], each["parameters"]) for each in told] == [("learned", {})] * 4
    made = [each["made"] for each in told if each]
    assert made[0] == made[1]
    assert len(set(made)) == 3
    assert all(len(each) == 16 for each in made)


def test_joins_of_line_feeds_are_found_and_told() -> None:
    told = fact(Joining())
    assert told is not None
    assert (told["family"], told["parameters"]) == ("fixed", {"tokens": 8})
    assert told["runs"] == [12, 1, TOKEN, 1, 9, 4, END, 1, 12, 1]
    assert sorted(told["joins"]) == [(11, 12, 13), (12, 12, 14)]
