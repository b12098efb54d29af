"""Models that see images, and the packages that vLLM needs to serve them, made or downloaded at their first use."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from tests.vllm import trees
from tests.vllm.engine import ROOT, TRUTH, VENV

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ("llava", "qwen2_vl")
#: A model all of whose images have the same tokens, which join line feeds beside them; it has sliding windows, too.
JOINED_KIND = "gemma3"
#: Models that put other tokens among those of an image, so that routers learn them from reports.
LEARNED_KINDS = ("pixtral", "idefics3")
#: Such a model whose processor alone is tried.
UNSERVED_KIND = "internvl"
#: What vLLM imports for models that see, with what these need: torchvision for Qwen2-VL, mistral-common for LLaVA.
VISION: tuple[str, ...] = (
    "torchvision==0.28.0",
    "mistral-common==1.13.1",
    "jsonschema",
    "referencing",
    "rpds-py",
    "attrs",
)
VISION += ("jsonschema-specifications", "pydantic-extra-types", "pycountry", "tiktoken", "regex")
VISION += ("requests", "charset-normalizer", "urllib3", "idna", "certifi")
#: Declares the two operators that torchvision's Python code names, because its compiled code needs CUDA.
OPERATORS = """
if not _has_ops():
    import torch as _torch

    _library = _torch.library.Library("torchvision", "DEF")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def vision() -> Path:
    """The folder with what vLLM imports for models that see (40 MB)."""
    return trees.installed("vllm-vision", *VISION, mend=_declare_operators)


def _declare_operators(folder: Path) -> None:
    extension = folder / "torchvision" / "extension.py"
    extension.write_text(extension.read_text() + OPERATORS)


def vision_model(kind: str) -> Path:
    """The folder of a tiny model of this kind."""
    models = ROOT / "models"
    if not (models / f"tiny-{kind}" / "processor_config.json").exists():
        script, environment = ROOT / "tests" / "vllm" / "vision_model.py", {"PYTHONPATH": str(vision())}
        subprocess.run([VENV / "bin" / "python", script, models], check=True, env=environment)
    return models / f"tiny-{kind}"


def environment(version: str = "") -> dict[str, str]:
    """Environment of an engine that serves such a model. version: of vLLM; empty: the installed one."""
    of_version = trees.environment(trees.tree(version)) if version else {}
    kept = ("VLLM_CACHE_ROOT", "VLLM_TARGET_DEVICE", "VLLM_CPU_KVCACHE_SPACE")
    path = of_version.get("PYTHONPATH", str(ROOT / "worker_plugin"))
    return {name: of_version[name] for name in kept if version} | {
        "PYTHONPATH": os.pathsep.join([str(TRUTH), path, str(vision())])
    }
