"""Real vLLM servers for tests: started in parallel on free ports, stopped with everything they started."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from tests.vllm.device import DEVICE

from warmfleet.cli.local.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[2]
VENV = Path(os.environ.get("ENGINE_VENV", ROOT / ".venv-vllm"))
MODEL = ROOT / "models" / "tiny"
SERVED_NAME = "tiny"
TRUTH = Path(__file__).parent / "truth"
START_SECONDS = 900.0  # a start takes 30 s, or ten minutes on a busy machine; a server that cannot start ends earlier
BLOCK_TOKENS = 32  # the CPU kernels want a multiple of 32
#: Environment of an engine whose processes do not spin for a second after each step, which takes a whole core.
SLEEPS = {"ENGINE_TRUTH_SLEEPS": "1"}


@dataclass(frozen=True)
class EngineOptions:
    """How to start one server. blocks: size of its KV cache, in blocks of 32 tokens. Without redis_url: stock vLLM.

    start_s: how long it may take to start.
    """

    redis_url: str | None = None
    worker_id: str = "vllm-a"
    model_tag: str = SERVED_NAME
    blocks: int = 256
    max_model_len: int = 4_096
    model: Path = MODEL
    arguments: Sequence[str] = ()
    start_s: float = START_SECONDS
    environment: Mapping[str, str] = field(default_factory=dict)


class VllmEngine:
    """A ``vllm serve`` in a process group of its own. ``worker_id`` is its first (only) engine core's."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.worker_id = f"{options.worker_id}.0"
        self.folder = Path(tempfile.mkdtemp(prefix="wf-vllm-"))
        self.log = self.folder / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and return at once. Call ``wait`` afterwards."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command(),
                env=self._environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.folder,
            )

    def wait(self) -> None:
        """Return when the server answers; raises RuntimeError with the end of its log when it does not."""
        deadline = time.monotonic() + self.options.start_s
        while time.monotonic() < deadline and self.process is not None and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise RuntimeError(f"vLLM did not start:\n{self.log.read_text(errors='replace')[-4_000:]}")

    def stop(self) -> None:
        """Ask the server to end, then end its whole process group."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the process group, so that it says no goodbye."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def remove(self) -> None:
        """Stop the server, and leave no file or process behind."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ------------------------------------------------ requests

    def complete(self, prompt: str | list[int], request_id: str | None = None, **more: Any) -> dict[str, Any]:
        """POST /v1/completions at temperature 0; returns the answer, with ``prompt_token_ids`` in its choice."""
        body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        return self._post("/v1/completions", body | more, request_id)

    def chat(self, messages: list[dict[str, str]], request_id: str | None = None, **more: Any) -> dict[str, Any]:
        """POST /v1/chat/completions at temperature 0; returns the answer."""
        body = {"model": SERVED_NAME, "messages": messages, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        return self._post("/v1/chat/completions", body | more, request_id)

    def reset_prefix_cache(self) -> None:
        """Empty the cache of an idle engine (needs VLLM_SERVER_DEV_MODE, which ``start`` sets)."""
        httpx.post(f"{self.url}/reset_prefix_cache", timeout=30).raise_for_status()

    def _post(self, path: str, body: dict[str, Any], request_id: str | None) -> dict[str, Any]:
        headers = {"x-request-id": request_id} if request_id else {}
        answer = httpx.post(self.url + path, json=body, headers=headers, timeout=120)
        answer.raise_for_status()
        return dict(answer.json())

    # ------------------------------------------------ the truth

    def table(self, rank: int = 0) -> set[bytes]:
        """The full keys (32-byte digest + 4-byte group) in the engine's block table, read without our plugin.

        rank: which of its engine cores, by ``data_parallel_index``.
        """
        return self._told("truth" + (f".{rank}" if rank else ""))

    def _told(self, name: str) -> set[bytes]:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
            client.connect(str(self.folder / name))
            with client.makefile("rb") as stream:
                return {bytes.fromhex(key) for key in json.load(stream)}

    def tier(self) -> set[bytes]:
        """The full keys in the engine's tier in CPU memory, read without our plugin."""
        return self._told("truth.tier")

    def cached_by_source(self) -> Counter[str]:
        """Tokens of prompts that the engine found cached since its start, by its own counters: device, host, disk."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        found = re.findall(r'vllm:prompt_tokens_cached_by_source_total\{[^}]*source="(\w+)"[^}]*\} (\S+)', text)
        return Counter({source: round(float(tokens)) for source, tokens in found})

    def tokenised(self) -> int:
        """The number of prompts that the server has tokenised itself since its start."""
        path = self.folder / "tokenised"
        return path.stat().st_size if path.exists() else 0

    # ------------------------------------------------ how it is started

    def _command(self) -> list[str]:
        options = self.options
        return [
            *(str(VENV / "bin" / "vllm"), "serve", str(options.model)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", SERVED_NAME),
            *("--enforce-eager", "--max-num-seqs", "16", *DEVICE.arguments),
            *("--max-model-len", str(options.max_model_len), "--block-size", str(BLOCK_TOKENS)),
            *("--num-gpu-blocks-override", str(options.blocks)),
            *("--enable-prefix-caching", "--prefix-caching-hash-algo", "sha256_cbor"),
            *("--enable-prompt-tokens-details", *options.arguments),
        ]

    def _environment(self) -> dict[str, str]:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("WARMFLEET_", "VLLM_"))
        }
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",  # several engines share a few cores
            "VLLM_CACHE_ROOT": str(ROOT / ".cache" / "vllm"),  # kept between runs: inspecting a model takes long
            "VLLM_SERVER_DEV_MODE": "1",
            "ENGINE_TRUTH_SOCKET": str(self.folder / "truth"),
            "ENGINE_TRUTH_TOKENISED": str(self.folder / "tokenised"),
            # The entry point of the plugin is that of the installed one; its code is that of this checkout.
            "PYTHONPATH": os.pathsep.join([str(TRUTH), str(ROOT / "worker_plugin")]),
        }
        if self.options.redis_url is not None:
            environment |= {
                "WARMFLEET_REDIS_URL": self.options.redis_url,
                "WARMFLEET_WORKER_ID": self.options.worker_id,
                "WARMFLEET_MODEL": self.options.model_tag,
            }
        return environment | dict(self.options.environment)


@contextmanager
def running(*options: EngineOptions) -> Iterator[list[VllmEngine]]:
    """Start all engines at the same time, wait for all, stop all."""
    engines = [VllmEngine(option) for option in options]
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait()
        yield engines
    finally:
        for engine in engines:
            engine.remove()
