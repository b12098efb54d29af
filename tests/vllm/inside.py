"""Calls functions that run where vLLM is installed: prompts, routes and caches of vLLM, without an engine."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.vllm.engine import ROOT, VENV

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Switches that give vLLM's server more routes.
SWITCHES = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ENABLE_COHERE_API")


class Inside:
    """A running process of ``answering.py``."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def call(self, module: str, function: str, *arguments: Any) -> Any:
        """Call a function of a module of ``tests/vllm``. Raises RuntimeError if it fails."""
        writer, reader = self._process.stdin, self._process.stdout
        assert writer is not None
        assert reader is not None
        writer.write(json.dumps([f"tests.vllm.{module}", function, arguments]) + "\n")
        writer.flush()
        line = reader.readline()
        if not line:
            raise RuntimeError(f"{module}.{function} failed:\n{self._log.read_text(errors='replace')[-4_000:]}")
        return json.loads(line)


@contextmanager
def inside(folder: Path, packages: str = "") -> Iterator[Inside]:
    """Start the process. packages: a folder with Python packages that the environment of vLLM lacks."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WARMFLEET_", "VLLM_"))}
    environment |= dict.fromkeys(SWITCHES, "1")
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(ROOT / ".cache" / "vllm"),
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "PYTHONHASHSEED": "7",  # so that every xxhash chain has the same root
        "PYTHONPATH": f"{ROOT}:{ROOT / 'worker_plugin'}:{packages}",
    }
    command = [str(VENV / "bin" / "python"), "-m", "tests.vllm.answering"]
    pipe, log = subprocess.PIPE, folder / "inside.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=errors, text=True) as process,
    ):
        try:
            yield Inside(process, log)
        finally:
            process.kill()
