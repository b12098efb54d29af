"""Identifiers and lengths of images equal to real vLLM's; what is not surely known is refused with its reason."""

from __future__ import annotations

import base64
import io
import time
from array import array
from typing import Any

import pytest
from PIL import Image
from tests.support.requests.image_rules import fact

from warmfleet.prompt.images import ImageRules, Images, Item
from warmfleet.prompt.messages import NotReproducible

RGB = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
RGBA = "iVBORw0KGgoAAAANSUhEUgAAAAQAAAADCAYAAAC09K7GAAAAFUlEQVR4nGNkZGJmYUACTAxoAEMAAAKsABDp2C6fAAAAAElFTkSuQmCC"
BLACK = {"image": {"rgba_background_color": [0, 0, 0]}}
#: Made by real vLLM 0.28 to 0.33.
GOLDEN = [
    (RGB, {}, "201b9fbe3f0d7a46aba3fc131fdfab23f44f94a9c1bca9e8cd1c038062be6c70"),
    (RGB, {"media_io": BLACK}, "784805c51708c72d3df2c3c61e499534508fe26d7b30871f7eb70c2ab22c9cf2"),
    (RGB, {"plain": True}, "e7e4a48c80dee1c9cc44bb7d315cdc9114db9cb5e0383e4814675bfb56f05235"),
    (RGBA, {}, "ea3a0d86d752988406d6ea1bed93ada628335724b29021a69f7c2d5e70633321"),
    (RGBA, {"plain": True}, "178c71a91bda323e38004cfd419b959e9040001970fbf9f6a6897b72d075df17"),
    (
        RGB,
        {"model_id": "Qwen/Qwen2-VL-2B-Instruct"},
        "109559ba6048a0ad88bc90d9ad76b8bbd0c8c2e70bfc18c362b4b21050e723a8",
    ),
]

#: Each image has line feeds (2) around it; 1 and 2 become 3, 2 and 2 become 4.
GEMMA: dict[str, Any] = {"token_id": 5, "parameters": {"tokens": 7}, "runs": [2, 1, 5, 1, 6, 3, 7, 1, 2, 1]}
JOINS = [[1, 2, 3], [2, 2, 4]]


def rules(model_id: str = "m", **more: Any) -> ImageRules:
    made = ImageRules.of(fact(model_id, **more))
    assert made is not None
    return made


def part(data: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}} | more


@pytest.mark.parametrize(("data", "server", "expected"), GOLDEN)
def test_golden_vectors(data: str, server: dict[str, Any], expected: str) -> None:
    assert rules(**server).item(part(data)) == Item(expected, 16)


def test_a_clients_id_is_the_identifier_unless_the_server_hashes_it_with_its_settings() -> None:
    assert rules().item(part(RGB, uuid="mine")).identifier == "mine"
    assert rules().item(part(RGB, uuid="mine"), lambda own: own + "!").identifier == "mine!"
    hashed = rules(media_io=BLACK).item(part(RGB, uuid="mine")).identifier
    assert len(hashed) == 64
    assert hashed != rules(media_io=BLACK).item(part(RGB)).identifier


def test_both_forms_of_a_part_are_one_image() -> None:
    expected = rules().item(part(RGB))
    for same in (
        {"type": "image_url", "image_url": f"data:image/png;base64,{RGB}"},
        {"type": "input_image", "image_url": f"DATA:;x=y;base64,{RGB}", "detail": "high"},
    ):
        assert rules().item(same) == expected


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (part("")["image_url"] | {"type": "image_url"}, "image_format"),
        (part("A"), "image_format"),
        (part(RGB[:-1] + "\n"), "image_format"),
        (part("QUJD"), "image_format"),
        (part(RGB[:40]), "image_header"),
        (part(RGB, uuid=5), "image_id"),
        (part(RGB, uuid=""), "image_id"),
        (part(RGB, uuid="x" * 257), "image_id"),
        ({"type": "image_url", "image_url": None, "uuid": "mine"}, "image_id"),
        ({"type": "image_url", "image_url": {"url": "http://10.0.0.1/a.png"}}, "image_url"),
        ({"type": "image_url", "image_url": {"url": "data:image/png," + RGB}}, "image_format"),
        ({"type": "image_url", "image_url": {"url": ["data:"]}}, "image_format"),
        ({"type": "image_embeds", "image_embeds": RGB}, "image_format"),
        ({"type": "input_audio", "input_audio": {"data": RGB}}, "audio"),
        ({"type": "video_url", "video_url": {"url": "data:"}}, "video"),
    ],
)
def test_what_is_not_surely_known_is_refused_with_its_reason(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotReproducible) as raised:
        rules().item(wrong)
    assert raised.value.reason == reason


#: Width, height, tokens as transformers 5.19 counts them for Qwen2-VL (4 to 256 tokens) and Qwen3-VL (factor 32).
QWEN = [
    (301, 777, 28, 3_136, 200_704, 225),
    (2_000, 1_500, 28, 3_136, 200_704, 234),
    (1, 150, 28, 3_136, 200_704, 25),
    (56, 56, 28, 3_136, 200_704, 4),
    (30, 20, 28, 3_136, 200_704, 6),
    (640, 480, 32, 65_536, 16_777_216, 300),
]


@pytest.mark.parametrize(("width", "height", "factor", "least", "most", "tokens"), QWEN)
def test_the_tokens_of_a_family_follow_from_width_and_height(
    width: int, height: int, factor: int, least: int, most: int, tokens: int
) -> None:
    out = io.BytesIO()
    Image.new("L", (width, height)).save(out, "PNG")
    given = rules(family="grid", parameters={"factor": factor, "least": least, "most": most})
    assert given.item(part(base64.b64encode(out.getvalue()).decode())).tokens == tokens


@pytest.mark.parametrize(
    "wrong",
    [
        {"family": "spiral"},
        {"parameters": {}},
        {"parameters": {"tokens": 0}},
        {"parameters": {"tokens": "x"}},
        {"algorithm": "md5"},
        {"algorithm": []},
        {"token": ""},
        {"token_id": -1},
        {"frames": {"rgb": ["", ""]}},
        {"frames": {"rgb": ["zz", ""], "clear": ["", ""], "other": ["", ""]}},
        {"frames": {kind: ["00" * 20_000, ""] for kind in ("rgb", "clear", "other")}},
        {"frames": 3},
        GEMMA | {"runs": [2, 1, 5, 1]},
        GEMMA | {"runs": ["2", 1, 5, 6]},
        GEMMA | {"token_id": 9},
        GEMMA | {"token_id": 2, "joins": JOINS},
        GEMMA | {"joins": [[1, 2]]},
        GEMMA | {"joins": [[1, 2, 2**32]]},
        GEMMA | {"joins": [[1, 2, 3]] * 17},
        {"joins": JOINS},
    ],
)
def test_rules_that_are_not_understood_are_none(wrong: dict[str, Any]) -> None:
    assert ImageRules.of(fact("m") | wrong) is None
    assert ImageRules.of(None) is None


def test_line_feeds_around_an_image_join_those_beside_it() -> None:
    """Also those of two images side by side, which share a token then."""
    given = rules(**GEMMA, joins=JOINS)
    first, second = given.item(part(RGB)), given.item(part(RGBA))
    texts: dict[str, list[int]] = {"a": [9, 1, 5, 5, 8, 5, 2, 9]}
    images = Images(given, [first, second, first], lambda _: array("I", texts["a"]))
    text, rest = images.marked("a\n<img><img>b<img>c", 3)
    ids = images.ids(text)
    own = [5, 6, 6, 6, 7]
    assert ids.tolist() == [9, 3, *own, 4, *own, 2, 8, 2, *own, 4, 9]
    assert rest == ""
    places = [(1, 7, first.identifier), (7, 7, second.identifier), (15, 7, first.identifier)]
    assert images.places([ids]) == places
    assert images.places([ids[:15], ids[15:]]) == places
    with pytest.raises(NotReproducible, match="image_place"):
        images.places([ids[:3] + array("I", [8]) + ids[4:]])


def test_an_image_with_a_clients_id_alone_has_the_tokens_that_all_have() -> None:
    """In a report, they may be joined with those beside."""
    item = rules(**GEMMA, joins=JOINS).item({"type": "image_url", "uuid": "x"}, None, lambda _: (3, 1, 5, 1, 6, 3))
    assert item == Item("x", 7, tuple(GEMMA["runs"]))


def test_a_lie_about_the_size_costs_no_memory() -> None:
    out = io.BytesIO()
    Image.new("1", (1, 1)).save(out, "PNG")
    data = bytearray(out.getvalue())
    data[16:24] = (2**31 - 1).to_bytes(4, "big") * 2
    huge = rules(family="grid", parameters={"factor": 1, "least": 1, "most": 2**60})
    with pytest.raises(NotReproducible, match="image_size"):
        huge.item(part(base64.b64encode(data).decode()))


def test_an_image_of_2_mb_costs_a_quarter_of_the_standard_library() -> None:
    """The standard library's base64 and the hash took 15 + 1.6 ms where this was written."""
    raw = base64.b64decode(RGB)[:33] + (2_000_000).to_bytes(4, "big") + b"IDAT" + bytes(2_000_004)
    sent = part(base64.b64encode(raw + base64.b64decode(RGB)[-12:]).decode())
    ours, theirs, made = [], [], rules()
    for _ in range(7):
        began = time.thread_time()
        base64.b64decode(sent["image_url"]["url"].partition(",")[2], validate=True)
        theirs.append(time.thread_time() - began)
        began = time.thread_time()
        made.item(sent)
        ours.append(time.thread_time() - began)
    print(f"2 MB: {1000 * min(ours):.2f} ms, base64 of the standard library {1000 * min(theirs):.2f} ms")
    assert min(ours) < (min(theirs) + 0.0016) / 4
