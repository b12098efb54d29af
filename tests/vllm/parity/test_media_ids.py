"""Tenants and the pictures that real vLLM keeps: requests go through a router; vLLM's own caches answer what arrives.

vLLM keeps processed media by the client's ``uuid``, and its caches know no salt.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import struct
import subprocess
import zlib
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from tests.app.engine import engine
from tests.app.replica import replica
from tests.vllm.engine import ROOT, VENV

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TENANT_KEY = "a secret of the operator"
LIKE = ROOT / "models" / "tiny-llama2"
SIZE = 28
CHAT, RENDER, GENERATE = "/v1/chat/completions", "/v1/chat/completions/render", "/inference/v1/generate"
BATCH, RESPONSES = "/v1/chat/completions/batch", "/v1/responses"
COLOURS = {"red": b"\xff\0\0", "green": b"\0\xff\0", "blue": b"\0\0\xff"}
Ask = tuple[str, bytes]
#: How vLLM's two caches say so.
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


def model(folder: Path) -> Path:
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
    """The caches of one real engine, in a process of their own."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def ask(self, path: str, body: bytes) -> Any:
        """The pictures that an engine would look at for a request that it got, or ``refused``."""
        writer, reader = self._process.stdin, self._process.stdout
        assert writer is not None
        assert reader is not None
        writer.write(json.dumps({"path": path, "body": body.decode()}) + "\n")
        writer.flush()
        line = reader.readline()
        assert line, f"the process ended:\n{self._log.read_text(errors='replace')[-4_000:]}"
        answer = json.loads(line)
        refused = answer.get("refused", "")
        return MISSED if any(word in refused for word in NO_PICTURE) else refused or answer["pictures"]


@contextmanager
def started(folder: Path) -> Iterator[Caches]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WARMFLEET_", "VLLM_"))}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(ROOT / ".cache" / "vllm"),
        "PYTHONPATH": str(ROOT),
    }
    command = [str(VENV / "bin" / "python"), "-m", "tests.vllm.parity.media_cache", str(model(folder / "model"))]
    pipe, log = subprocess.PIPE, folder / "caches.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=errors, text=True) as process,
    ):
        try:
            yield Caches(process, log)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caches]:
    if not (VENV / "bin" / "vllm").exists():
        pytest.fail("real vLLM is not installed here: run `make vllm`")
    with started(tmp_path_factory.mktemp("caches")) as found:
        yield found


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
async def clients(redis_url: str, caches: Caches, **settings: Any) -> AsyncIterator[Clients]:
    async with (
        engine("m") as upstream,
        replica(redis_url, "m", upstream.url, tenant_header="X-Tenant", **settings) as router,
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


#: How a request may ask for the picture ``ID``, which another request showed on the path before.
ASKS: dict[str, tuple[str, Ask]] = {
    "uuid of a chat": (CHAT, (CHAT, chat(b'{"type": "image_url", "image_url": null, "uuid": "ID"}'))),
    "without type": (CHAT, (CHAT, chat(b'{"uuid": "ID", "image_url": null}'))),
    "key with an escape": (CHAT, (CHAT, chat(rb'{"type": "image_url", "image_url": null, "uu\u0069d": "ID"}'))),
    "key twice": (CHAT, (CHAT, chat(b'{"uuid": "other", "type": "image_url", "image_url": null, "uuid" : "ID"}'))),
    "value with an escape": (CHAT, (CHAT, chat(rb'{"type": "image_url", "image_url": null, "uuid": "\u0049D"}'))),
    "empty URL": (CHAT, (CHAT, chat(b'{"type": "image_url", "image_url": {"url": ""}, "uuid": "ID"}'))),
    "input_image": (CHAT, (CHAT, chat(b'{"type": "input_image", "image_url": null, "uuid": "ID"}'))),
    "message of a tool": (
        CHAT,
        (
            CHAT,
            b'{"messages": [{"role": "user", "content": "?"}, {"role": "tool", "tool_call_id": "t", "content": '
            b'[{"type": "image_url", "image_url": null, "uuid": "ID"}]}]}',
        ),
    ),
    "messages twice": (
        CHAT,
        (
            CHAT,
            b'{"messages": [{"role": "user", "content": []}], "messages": [{"role": "user", "content": '
            b'[{"type": "image_url", "image_url": null, "uuid": "ID"}]}]}',
        ),
    ),
    "batch": (CHAT, written(BATCH, b'{"type": "image_url", "image_url": null, "uuid": "ID"}')),
    "responses": (CHAT, written(RESPONSES, b'{"type": "image_url", "image_url": null, "uuid": "ID"}')),
    "output of a function": (
        CHAT,
        (
            RESPONSES,
            b'{"store": false, "input": [{"role": "user", "content": "?"}, {"type": "function_call_output", '
            b'"call_id": "c", "output": [{"type": "input_image", "image_url": null, "detail": "auto", "uuid": "ID"}]}]}',
        ),
    ),
    "content_parts": (CHAT, written(GENERATE, b'{"type": "image_url", "uuid": "ID"}')),
    "mm_hashes": (GENERATE, hashes("ID")),
    "pixels of a render": (RENDER, (RENDER, chat(b'{"type": "image_url", "image_url": null, "uuid": "ID"}'))),
}


def named(ask: Ask, name: str) -> Ask:
    return ask[0], ask[1].replace(b'"ID"', b'"%b"' % name.encode()).replace(
        b"\\u0049D", b"\\u%04x%b" % (ord(name[0]), name[1:].encode())
    )


async def test_a_tenant_sees_no_picture_of_another(valkey_url: str, caches: Caches) -> None:
    seen = {}
    async with clients(valkey_url, caches, tenant_key=TENANT_KEY) as tenants:
        for case, (where, ask) in ASKS.items():
            mine = named(ask, case)
            seen[case] = [await tenants.ask("a", *shown(case, "red", where))]
            seen[case] += [await tenants.ask(tenant, *mine) for tenant in ("b", "a")]
    assert seen == {case: [["red"], MISSED, ["red"]] for case in ASKS}


async def test_a_tenant_puts_no_picture_in_anothers_place(valkey_url: str, caches: Caches) -> None:
    seen = {}
    async with clients(valkey_url, caches, tenant_key=TENANT_KEY) as tenants:
        for case, (where, ask) in ASKS.items():
            name = f"forged: {case}"
            mine = named(ask, name)
            seen[case] = [await tenants.ask("b", *shown(name, "blue", where)), await tenants.ask("a", *mine)]
            seen[case] += [await tenants.ask("a", *shown(name, "red", where))]
            seen[case] += [await tenants.ask(tenant, *mine) for tenant in ("a", "b")]
    assert seen == {case: [["blue"], MISSED, ["red"], ["red"], ["blue"]] for case in ASKS}
