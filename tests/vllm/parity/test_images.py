"""Random chats with pictures: the router's ids, images and block hashes against vLLM's own processor and hasher."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from tests.support.requests.pictures import PICTURES, conversations
from tests.vllm.parity.test_parity import report
from tests.vllm.parity.truth import Counts, Model, Truth, compare
from tests.vllm.seeing import JOINED_KIND, KINDS, LEARNED_KINDS, UNSERVED_KIND, vision_model

from warmfleet.metrics import Metrics
from warmfleet.pools.identities import Identities
from warmfleet.prompt.learned_images import LearnedImages
from warmfleet.prompt.prefix_trie import Trie
from warmfleet.untrusted.template_approval import Templates

if TYPE_CHECKING:
    from tests.vllm.inside import Inside

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1_800)]

STRINGS = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
SCHEMES = [("sha256", 32), ("sha256_cbor", 16)]


@pytest.fixture(scope="module")
def seeing(vllm: Inside, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """vLLM with models that see. Two also have a template that does not loop over parts."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "strings.jinja").write_text(STRINGS)
    models = {kind: Model(vision_model(kind)) for kind in (*KINDS, *LEARNED_KINDS, JOINED_KIND, UNSERVED_KIND)}
    strings = ("--chat-template", str(folder / "strings.jinja"))
    models |= {f"{kind} of texts": Model(models[kind].folder, strings) for kind in KINDS}
    settings = ("--media-io-kwargs", '{"image": {"rgba_background_color": [0, 9, 255]}}')
    limits = ("--mm-processor-kwargs", '{"min_pixels": 12544, "max_pixels": 31360}')
    models["settings"] = Model(models["qwen2_vl"].folder, (*settings, *limits))
    smaller = ("--mm-processor-kwargs", '{"size": {"longest_edge": 84}}')
    models["smaller"] = Model(models["idefics3"].folder, smaller)
    return Truth(vllm, models)


async def counted(truth: Truth, model: str, seeds: range, each: int) -> Counts:
    total = Counts()
    with ThreadPoolExecutor(1) as executor:
        templates = Templates(Metrics(), approved="*")
        identity = await truth.identity(Identities(executor, Trie(10**7), templates), model)
        for seed in seeds:
            counts = await compare(truth, identity, conversations(seed, each), SCHEMES, LearnedImages())
            total.equal += counts.equal
            total.blocks += counts.blocks
            total.refused += counts.refused
            total.fallback += counts.fallback
            total.different += counts.different
        await templates.close()
    report(model, total)
    assert not total.different
    assert not total.refused
    return total


@pytest.mark.parametrize("model", [*KINDS, *[f"{kind} of texts" for kind in KINDS], "settings", JOINED_KIND])
async def test_ids_images_and_hashes_equal_vllm(seeing: Truth, model: str) -> None:
    counts = await counted(seeing, model, range(2), 40)
    assert not counts.fallback


@pytest.mark.parametrize("model", [*LEARNED_KINDS, UNSERVED_KIND])
async def test_images_are_known_from_the_second_time_on(seeing: Truth, model: str) -> None:
    """Their tokens have others among them, so routers take them from reports, made here by the plugin's own code."""
    counts = await counted(seeing, model, range(1), 150)
    assert set(counts.fallback) == {"image_new"}
    assert counts.fallback.total() <= 2 * PICTURES  # with a client's id and without
    assert counts.equal > 2 * PICTURES // 3


def test_engines_with_other_settings_of_the_processor_announce_another_rule(seeing: Truth) -> None:
    """They give an image the same identifier and other tokens."""
    told, other = (seeing.models[model]["facts"]["images"] for model in ("idefics3", "smaller"))
    assert told["made"] != other["made"]
    assert told | {"made": ""} == other | {"made": ""}


@pytest.mark.long(
    minutes=1, shows="2,500 random chats with pictures through vLLM's own processor and hasher: the same block hashes"
)
@pytest.mark.parametrize("model", [*KINDS, *LEARNED_KINDS, JOINED_KIND])
async def test_a_thousand_chats_with_pictures_equal_vllm(seeing: Truth, model: str) -> None:
    counts = await counted(seeing, model, range(10, 15), 100)
    assert counts.equal + counts.fallback["image_new"] == 500
    assert counts.equal == 500 or model in LEARNED_KINDS
