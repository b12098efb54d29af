"""The fact ``images``: how this API server hashes images and how many tokens they have, for routers that do the same.

Nothing is assumed about the version of vLLM. Its own code loads, hashes and places small images, and the bytes hashed
around an image's own are recorded. A model whose images are more than one repeated token, or whose count follows no
known formula, has the family LEARNED if an image's tokens depend on the image alone: routers learn them from reports,
or are told them if all images have the same. A model that puts an image in place of anything but one token, or changes
the text beside it by more than joins, gets no fact: routers then know its prompts up to the first image.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import types
from itertools import groupby
from typing import TYPE_CHECKING, Any

from warmfleet_worker.protocol.image_tokens import FAMILIES, LEARNED, MADE_CHARACTERS, SIZES, join
from warmfleet_worker.protocol.wire import dumps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from warmfleet_worker.protocol.image_tokens import Join

#: Kind of an image, in the words of routers -> modes of small images of that kind.
KINDS = {"rgb": ("RGB",), "clear": ("RGB",), "other": ("RGBA", "L", "P", "LA")}
SIDES = (61, 47)  # of the images that are tried
#: Of images that are tried together, some models tile a large one, and tile less if there are many.
SOME_SIDES = (SIDES, (640, 430), (333, 1_200))
LARGE = (3_024, 2_268)  # of an image that is tried alone: larger than most settings allow, so that these show
#: Texts around images that are tried together: some models join line feeds with those that are part of an image.
AROUND = ("a\n\n", "\n b\n\n\n", "\n", " ")
#: The same for models that join them: vLLM refuses a prompt of Gemma 3 with a line feed behind an image.
AROUND_JOINED = ("a\n", "b\n\n", "", " c")
LINE_FEEDS = tuple("\n" * count for count in range(1, 5))


def images(renderer: Any, model_config: Any) -> dict[str, Any] | None:
    """Return the fact, or None if this server's images are not placed or hashed by a rule that routers know."""
    processor = getattr(renderer, "mm_processor", None)
    config = getattr(model_config, "multimodal_config", None)
    if processor is None or config is None or getattr(config, "enable_tower_connector_lora", False):
        return None
    placed = _placed(processor, model_config)
    rule = _rule(processor, config, *placed) if placed is not None else None
    hashed = _frames(processor, config) if rule is not None else None
    if placed is None or rule is None or hashed is None:
        return None
    (token_id, _), (counted, made) = placed, rule
    text = processor.info.get_tokenizer().convert_ids_to_tokens(token_id)
    told = {"token": text, "token_id": token_id, **counted}
    digest = hashlib.sha256(dumps([told, made]).encode()).hexdigest()[:MADE_CHARACTERS]
    return {**told, "made": digest, **hashed}


def _placed(processor: Any, model_config: Any) -> tuple[int, list[int]] | None:
    """Let vLLM place an image in a prompt; return the token whose place it takes and its tokens, among which that is.

    None if vLLM puts it in place of anything but one token. Raises the last error of vLLM if there is such a text.
    """
    failed: Exception | None = None
    for text in _placeholders(processor, model_config):
        before = processor.info.get_tokenizer().encode(text, add_special_tokens=False)
        try:
            (place,), made = _made(processor, before, [SIDES])
        except Exception as error:  # noqa: BLE001  the text is not the processor's: whatever it raises, the next is tried
            failed = error
            continue
        if place.offset >= len(before):
            continue
        token, ids = before[place.offset], made[place.offset : place.offset + place.length]
        expected = [*before[: place.offset], *ids, *before[place.offset + 1 :]]
        if made == expected and token in ids and before.count(token) == 1:
            return token, ids
    if failed is not None:
        raise failed
    return None


def _placeholders(processor: Any, model_config: Any) -> Iterator[str]:
    """Yield the texts that may stand for an image: the model's own, and that of the processor's dummy prompt."""
    from vllm.model_executor.model_loader import get_model_cls

    with contextlib.suppress(ValueError, NotImplementedError):
        text = get_model_cls(model_config).get_placeholder_str("image", 1)
        if text:
            yield text
    own = getattr(processor, "dummy_inputs", None)
    if own is not None:
        yield str(own.get_dummy_text({"image": 1}))


def _made(processor: Any, prompt: list[int], sizes: Sequence[tuple[int, int]]) -> tuple[list[Any], list[int]]:
    """Let vLLM place images of these sizes in a prompt; return the ranges of the images and the ids of the prompt."""
    from PIL import Image

    items = processor.info.parse_mm_data({"image": [Image.new("RGB", size) for size in sizes]})
    made = processor(list(prompt), items)
    return list(made["mm_placeholders"]["image"]), list(made["prompt_token_ids"])


def _rule(processor: Any, config: Any, token_id: int, ids: list[int]) -> tuple[dict[str, Any], Any] | None:
    """Return what tells routers an image's tokens, and the tokens of images that are tried alone.

    ids: of an image of SIDES.
    """
    formula = _formula(processor.info, config) if set(ids) == {token_id} else None
    if formula is not None and FAMILIES[formula[0]][0](*SIDES, *formula[1].values()) == len(ids):
        return {"family": formula[0], "parameters": formula[1]}, []
    alone = [_made(processor, [token_id], [size]) for size in (*SOME_SIDES, LARGE)]
    ids_alone = [made for _, made in alone]
    if not all((place.offset, place.length) == (0, len(made)) for (place,), made in alone):
        return None
    if _is_placed_so(processor, config, token_id, ids_alone):
        return _same(processor.info, ids_alone) or {"family": LEARNED, "parameters": {}}, ids_alone
    told, joins = _same(processor.info, ids_alone), _joins(processor, token_id, ids)
    if not told or not joins or token_id in (ids[0], ids[-1]):
        return None
    return (
        (told | {"joins": joins}, ids_alone) if _is_placed_so(processor, config, token_id, ids_alone, joins) else None
    )


def _same(info: Any, alone: list[list[int]]) -> dict[str, Any] | None:
    """Return family, parameters and runs if all images have the same tokens; None if not. alone: tokens of some."""
    count = _counter(info)
    if (
        count is None
        or len({count(width, height) for width, height in SIZES}) != 1
        or alone.count(alone[0]) < len(alone)
    ):
        return None
    runs = [number for token, run in groupby(alone[0]) for number in (token, len(list(run)))]
    return {"family": "fixed", "parameters": {"tokens": len(alone[0])}, "runs": runs}


def _joins(processor: Any, token_id: int, ids: list[int]) -> list[Join]:
    """Return the joins of line feeds with an image's tokens, and of two images; empty if something else changes."""
    encode = processor.info.get_tokenizer().encode
    feeds = [token for text in LINE_FEEDS for token, *more in [encode(text, add_special_tokens=False)] if not more]
    found: list[Join] = []
    for left, right in [*[([feed], ids) for feed in feeds], (ids, ids), *[(ids, [feed]) for feed in feeds]]:
        prompt = [token_id if piece is ids else piece[0] for piece in (left, right)]
        made = _tried(processor, prompt, [SIDES] * prompt.count(token_id))
        if made is None or made == [*left, *right]:
            continue
        if made[: len(left) - 1] != left[:-1] or made[len(left) :] != right[1:]:
            return []
        found.append((left[-1], right[0], made[len(left) - 1]))
    return list(dict.fromkeys(found))


def _is_placed_so(
    processor: Any, config: Any, token_id: int, alone: list[list[int]], joins: Sequence[Join] = ()
) -> bool:
    """Return whether images have these tokens also beside others and line feeds, and change none of these.

    joins: the only changes that are expected. False if vLLM refuses such a prompt.
    """
    encode = processor.info.get_tokenizer().encode
    sizes = SOME_SIDES[: config.get_limit_per_prompt("image")]
    around = AROUND_JOINED if joins else AROUND
    texts = [encode(text, add_special_tokens=False) for text in around[: len(sizes) + 1]]
    prompt, pieces = list(texts[0]), [list(texts[0])]
    for made, behind in zip(alone, texts[1:], strict=False):
        prompt += [token_id, *behind]
        pieces += [list(made), list(behind)]
    join(pieces, joins)
    return _tried(processor, prompt, sizes) == [token for piece in pieces for token in piece]


def _tried(processor: Any, prompt: list[int], sizes: Sequence[tuple[int, int]]) -> list[int] | None:
    """Return the ids of the prompt with images of these sizes; None if vLLM refuses it."""
    try:
        return _made(processor, prompt, sizes)[1]
    except Exception:  # noqa: BLE001  whatever the processor raises, a request would get
        return None


def _formula(info: Any, config: Any) -> tuple[str, dict[str, int]] | None:
    """Return the family and the parameters of the formula that counts as vLLM does, if there is one."""
    count = _counter(info)
    counted = [count(width, height) for width, height in SIZES] if count is not None else []
    for family, parameters in _candidates(info, config, counted):
        formula, _ = FAMILIES[family]
        if all(formula(*size, **parameters) == tokens for size, tokens in zip(SIZES, counted, strict=True)):
            return family, parameters
    return None


def _counter(info: Any) -> Callable[[int, int], int | None] | None:
    """Return vLLM's own function from width and height to tokens; None for a size that it refuses."""
    own = getattr(info, "get_num_image_tokens", None)
    if own is None:
        return None
    more: dict[str, Any] = {}
    for name in inspect.signature(own).parameters:
        if name == "image_processor":
            more[name] = info.get_image_processor()
        elif name == "processor":
            more[name] = info.get_hf_processor()
        elif name == "mm_kwargs":
            more[name] = {}
        elif name not in ("image_width", "image_height"):
            return None
    return lambda width, height: int(own(image_width=width, image_height=height, **more))


def _candidates(info: Any, config: Any, counted: list[Any]) -> Iterator[tuple[str, dict[str, int]]]:
    if len(set(counted)) == 1:
        yield "fixed", {"tokens": counted[0]}
    image_processor = info.get_image_processor()
    given = dict(getattr(config, "mm_processor_kwargs", None) or {})
    given |= given.get("images_kwargs") or {}
    size = dict(getattr(image_processor, "size", None) or {}) | dict(given.get("size") or {})
    least = given.get("min_pixels") or size.get("shortest_edge")
    most = given.get("max_pixels") or size.get("longest_edge")
    patch, merge = getattr(image_processor, "patch_size", None), getattr(image_processor, "merge_size", None)
    if counted and all(isinstance(number, int) for number in (least, most, patch, merge)):
        yield "grid", {"factor": int(patch or 0) * int(merge or 0), "least": int(least or 0), "most": int(most or 0)}


def _frames(processor: Any, config: Any) -> dict[str, Any] | None:
    """Return algorithm and frames of the hash, or None if images of one kind are not all hashed alike."""
    algorithm = config.mm_hasher_algorithm
    if algorithm not in ("blake3", "sha256", "sha512"):
        return None
    framed, frames = set[bool](), dict[str, list[str]]()
    for kind, modes in KINDS.items():
        found = [_frame(processor, config, _image(mode, clear=kind == "clear"), None) for mode in modes]
        if any(each is None or each != found[0] for each in found):
            return None
        counted, before, behind = found[0] or (False, b"", b"")
        framed.add(counted)
        frames[kind] = [before.hex(), behind.hex()]
    own = "a client's own id"
    around = _frame(processor, config, _image("RGB", clear=False), own)
    if around is not None:
        framed.add(around[0])
        frames["uuid"] = [around[1].hex(), around[2].hex()]
    if len(framed) != 1:
        return None
    return {"algorithm": algorithm, "framed": framed.pop(), "frames": frames}


def _image(mode: str, *, clear: bool) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new(mode, SIDES).save(out, "PNG", **({"transparency": (1, 2, 3)} if clear else {}))
    return out.getvalue()


def _frame(processor: Any, config: Any, data: bytes, uuid: str | None) -> tuple[bool, bytes, bytes] | None:
    """Return the bytes that vLLM hashes before and behind an image's, and whether the length of these comes between.

    uuid: a client's id, hashed in place of the image; the result is then None if the id is the identifier itself.
    """
    from vllm.multimodal.media import connector
    from vllm.multimodal.processing import inputs

    recorded: list[bytes] = []

    class Recorder(inputs.MultiModalHasher):  # type: ignore[misc]
        @classmethod
        def hash_kwargs(cls, _algorithm: str, /, **factors: object) -> str:
            made = (cls.iter_item_to_bytes(name, value) for name, value in sorted(factors.items()))
            recorded.append(b"".join(bytes(chunk) for chunks in made for chunk in chunks))
            return ""

    io_kwargs = dict(getattr(config, "media_io_kwargs", None) or {})
    loaded = connector.ImageMediaIO(**io_kwargs.get("image", {})).load_bytes(data)
    items = processor.info.parse_mm_data({"image": [loaded]})
    more = (
        {"media_io_kwargs": io_kwargs}
        if "media_io_kwargs" in inspect.signature(inputs.ProcessorInputs).parameters
        else {}
    )
    given = inputs.ProcessorInputs([], items, {"image": [uuid]} if uuid else None, **more)
    own = getattr(processor, "_get_mm_hashes", None)
    real = own(given) if own else given.get_mm_hashes(processor.info.model_id, config.mm_hasher_algorithm)
    if uuid and real == {"image": [uuid]}:
        return None
    # The same function of vLLM with the recorder in place of its hasher: nothing of vLLM is changed.
    method = inputs.ProcessorInputs.get_mm_hashes
    copy = types.FunctionType(method.__code__, vars(inputs) | {"MultiModalHasher": Recorder})
    copy(given, processor.info.model_id, config.mm_hasher_algorithm)
    (whole,) = recorded
    if real != {"image": [_digest(config.mm_hasher_algorithm, whole)]}:
        return None
    raw = uuid.encode() if uuid else data
    before, found, behind = whole.partition(raw)
    length = len(raw).to_bytes(8, "little")
    if not found or raw in behind:
        return None
    return (True, before[:-8], behind) if before.endswith(length) else (False, before, behind)


def _digest(algorithm: str, data: bytes) -> str:
    if algorithm == "blake3":
        from blake3 import blake3

        return str(blake3(data).hexdigest())
    return hashlib.new(algorithm, data).hexdigest()
