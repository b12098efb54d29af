"""Tenants and the pictures that real vLLM keeps: requests go through a router; vLLM's own caches answer what arrives.

vLLM keeps processed media by the client's ``uuid``, and its caches know no salt.
"""

from __future__ import annotations

import base64
import json
import shutil
import struct
import zlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.engines.scripted import engine
from tests.support.replicas.replica import replica
from tests.vllm.engine import ROOT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.vllm.inside import Inside

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TENANT_KEY = "a secret of the operator"
LIKE = ROOT / "models" / "tiny-llama2"
SIZE = 28
CHAT, RENDER, GENERATE = "/v1/chat/completions", "/v1/chat/completions/render", "/inference/v1/generate"
BATCH, RESPONSES = "/v1/chat/completions/batch", "/v1/responses"
COLOURS = {"red": b"\xff\0\0", "green": b"\0\xff\0", "blue": b"\0\0\xff"}
Ask = tuple[str, bytes]
#: Words by which vLLM's two caches report a missing picture.
NO_PICTURE = ("Cache miss for image at index 0 but data is not provided", "are not in the receiver (P1) cache")
MISSED = "vLLM has no such picture"


def png(colour: str) -> str:
    """A picture of one colour, as a data URL."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + COLOURS[colour] * SIZE) * SIZE
    head = struct.pack(">IIBBBBB", SIZE, SIZE, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def model_with_eyes(folder: Path) -> Path:
    """A model that looks at pictures, without weights: BLIP-2 with a tiny Llama."""
    shutil.copytree(LIKE, folder, ignore=shutil.ignore_patterns("*.safetensors", "generation_config.json"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    picture = len(tokenizer["model"]["vocab"])
    added = tokenizer["added_tokens"]
    added.append(added[-1] | {"id": picture, "content": "<image>"})
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    files: dict[str, Any] = {
        "tokenizer": tokenizer,
        "config": {
            "architectures": ["Blip2ForConditionalGeneration"],
            "model_type": "blip-2",
            "image_token_index": picture,
            "num_query_tokens": 4,
            "text_config": json.loads((LIKE / "config.json").read_text()),
            "vision_config": layers | {"image_size": SIZE, "patch_size": 14},
            "qformer_config": layers | {"encoder_hidden_size": 32},
        },
        "preprocessor_config": {
            "image_processor_type": "BlipImageProcessor",
            "size": {"height": SIZE, "width": SIZE},
        },
        "processor_config": {"processor_class": "Blip2Processor", "num_query_tokens": 4},
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


class Caches:
    """The caches of one real engine."""

    def __init__(self, vllm: Inside, folder: Path) -> None:
        self._vllm = vllm
        self._model = str(model_with_eyes(folder))

    def ask(self, path: str, body: bytes) -> Any:
        """The pictures that an engine would look at for a request that it got, or ``refused``."""
        answer = self._vllm.call("parity.media_cache", "looked_at", self._model, path, body.decode())
        refused = answer.get("refused", "")
        return MISSED if any(word in refused for word in NO_PICTURE) else refused or answer["pictures"]


@pytest.fixture(scope="module")
def caches(vllm: Inside, tmp_path_factory: pytest.TempPathFactory) -> Caches:
    return Caches(vllm, tmp_path_factory.mktemp("caches") / "model")


class Clients:
    """Tenants whose requests go through a router to that engine."""

    def __init__(self, router: Any, upstream: Any, caches: Caches) -> None:
        self._router = router
        self._upstream = upstream
        self._caches = caches

    async def ask(self, tenant: str, path: str, body: bytes) -> Any:
        """The colours of the pictures that vLLM looks at for this tenant's request; or who refused it, and why."""
        count = len(self._upstream.seen)
        status, _, answer = await self._router.post(body, path, **{"X-Tenant": tenant})
        if status != 200:
            return f"refused by the router: {json.loads(answer)['error']['param']}"
        assert len(self._upstream.seen) == count + 1
        return self._caches.ask(path, self._upstream.seen[-1].body)


@asynccontextmanager
async def clients(redis_url: str, model: str, caches: Caches, **settings: Any) -> AsyncIterator[Clients]:
    async with (
        engine(model) as upstream,
        replica(redis_url, model, upstream.url, tenant_header="X-Tenant", **settings) as router,
    ):
        yield Clients(router, upstream, caches)


def chat(part: bytes) -> bytes:
    return b'{"max_tokens": 1, "messages": [{"role": "user", "content": [%b, {"type": "text", "text": "?"}]}]}' % part


def written(path: str, part: bytes) -> Ask:
    """A request to this path with one content part."""
    if path == BATCH:
        return path, b'{"messages": [[{"role": "user", "content": [%b]}]]}' % part
    if path == RESPONSES:
        return path, b'{"input": [{"role": "user", "content": [%b]}], "store": false}' % part.replace(
            b'"image_url",', b'"input_image",', 1
        )
    if path == GENERATE:
        return path, b'{"token_ids": [5, 6], "sampling_params": {}, "content_parts": [%b]}' % part
    return path, chat(part)


def shown(name: str, colour: str, path: str = CHAT) -> Ask:
    """A request that shows a picture and names it."""
    url = png(colour)
    given: Any = {"url": url} if path in (CHAT, RENDER, BATCH) else url
    field = "url" if path == GENERATE else "image_url"
    return written(path, json.dumps({"type": "image_url", field: given, "uuid": name}).encode())


def hashes(name: str) -> Ask:
    """A request by token ids that names a picture that the engine has."""
    features = {"mm_hashes": {"image": [name]}, "mm_placeholders": {"image": [{"offset": 0, "length": 4}]}}
    ids = [8_192] * 4 + [5, 6]
    return GENERATE, json.dumps({"token_ids": ids, "sampling_params": {}, "features": features}).encode()


PICTURE = b'{"type": "image_url", "image_url": null, "uuid": "77"}'
OUTPUT = PICTURE.replace(b'"image_url", "image_url": null', b'"input_image", "image_url": null, "detail": "auto"')
TOOL = b'{"role": "tool", "tool_call_id": "t", "content": [%b]}' % PICTURE
CALL = b'{"type": "function_call_output", "call_id": "c", "output": [%b]}' % OUTPUT
USER = b'{"role": "user", "content": "?"}'
#: How a request may ask for picture 77, and the path on which it was shown before.
ASKS: dict[str, tuple[Ask, str]] = {
    "uuid of a chat": (written(CHAT, PICTURE), CHAT),
    "part without a type": (written(CHAT, b'{"uuid": "77", "image_url": null}'), CHAT),
    "key with an escape": (written(CHAT, PICTURE.replace(b"uuid", rb"uu\u0069d")), CHAT),
    "key twice": (written(CHAT, PICTURE.replace(b'{"', b'{"uuid": "78", "')), CHAT),
    "value with escapes": (written(CHAT, PICTURE.replace(b"77", rb"\u00377")), CHAT),
    "number": (written(CHAT, PICTURE.replace(b"null", b'{"url": ""}').replace(b'"77"', b"77")), CHAT),
    "empty URL": (written(CHAT, PICTURE.replace(b"null", b'{"url": ""}')), CHAT),
    "input_image": (written(CHAT, PICTURE.replace(b'"image_url",', b'"input_image",')), CHAT),
    "message of a tool": ((CHAT, b'{"messages": [%b, %b]}' % (USER, TOOL)), CHAT),
    "messages twice": ((CHAT, b'{"messages": [%b], "messages": [%b, %b]}' % (USER, USER, TOOL)), CHAT),
    "batch": (written(BATCH, PICTURE), CHAT),
    "responses": (written(RESPONSES, PICTURE), CHAT),
    "output of a function": ((RESPONSES, b'{"store": false, "input": [%b, %b]}' % (USER, CALL)), CHAT),
    "content_parts": (written(GENERATE, b'{"type": "image_url", "uuid": "77"}'), CHAT),
    "mm_hashes": (hashes("77"), GENERATE),
    "pixels of a render": (written(RENDER, PICTURE), RENDER),
}


def cases(begin: int) -> Iterator[tuple[str, str, str, Ask]]:
    """Each case with a name for its picture, the path that shows it, and the request that asks for it."""
    for number, (case, ((path, body), where)) in enumerate(ASKS.items(), begin):
        name = f"7{number}"
        yield case, name, where, (path, body.replace(b"77", name.encode()).replace(rb"\u00377", rb"\u0037%d" % number))


async def test_a_tenant_sees_no_picture_of_another(valkey_url: str, model: str, caches: Caches) -> None:
    seen = {}
    async with clients(valkey_url, model, caches, tenant_key=TENANT_KEY) as tenants:
        for case, name, where, mine in cases(100):
            seen[case] = [await tenants.ask("a", *shown(name, "red", where))]
            seen[case] += [await tenants.ask(tenant, *mine) for tenant in ("b", "a")]
    assert seen == {case: [["red"], MISSED, ["red"]] for case in ASKS}


async def test_a_tenant_puts_no_picture_in_anothers_place(valkey_url: str, model: str, caches: Caches) -> None:
    seen = {}
    async with clients(valkey_url, model, caches, tenant_key=TENANT_KEY) as tenants:
        for case, name, where, mine in cases(200):
            seen[case] = [await tenants.ask("b", *shown(name, "blue", where)), await tenants.ask("a", *mine)]
            seen[case] += [await tenants.ask("a", *shown(name, "red", where))]
            seen[case] += [await tenants.ask(tenant, *mine) for tenant in ("a", "b")]
    assert seen == {case: [["blue"], MISSED, ["red"], ["red"], ["blue"]] for case in ASKS}
