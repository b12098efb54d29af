"""Command lines of the engines that a local stack starts, and the models of engines that already run."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from warmfleet.cli.command_error import CommandError
from warmfleet.protocol.wire import tag_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

VLLM_PYTHON = Path(".venv-vllm/bin/python")
TINY_MODEL = Path("models/tiny")
NO_SIMULATOR = (
    "the simulated engines are not installed: run pip install ./worker_plugin './loadtest[demo]' in a checkout of "
    "Warmfleet, or name engines that you already run with `warmfleet up --worker URL`"
)


@dataclass(frozen=True)
class EngineOptions:
    """The engines to start.

    ``kind`` is ``sim`` or ``vllm``. ``model`` is the served name of simulated engines, or the folder of vLLM's model.
    ``step_time``, for simulated engines, names a preset or is a factor. ``blocks`` is the size of the cache; 0 leaves
    the engine's default. ``flags`` go behind those of this module. The first ``prefill`` engines compute prompts for
    others, the next ``decode`` ones take what those computed; ``count`` engines in all.
    """

    count: int = 4
    kind: str = "sim"
    model: str = ""
    step_time: str = ""
    blocks: int = 0
    vllm_python: str = ""
    flags: tuple[str, ...] = ()
    prefill: int = 0
    decode: int = 0

    def kv_role(self, number: int) -> str:
        """Return vLLM's word for what the engine of this number, from 1 on, does for others; empty: nothing."""
        if number <= self.prefill:
            return "kv_producer"
        return "kv_consumer" if number <= self.prefill + self.decode else ""

    def name(self, number: int) -> str:
        """Name the engine of this number, from 1 on: by its role, if it has one, else by its kind."""
        role = self.kv_role(number)
        if role == "kv_consumer":
            return f"decode-{number - self.prefill}"
        return f"{'prefill' if role else self.kind}-{number}"

    @property
    def served_name(self) -> str:
        """The name by which requests ask for the model."""
        return Path(self.model or TINY_MODEL).name if self.kind == "vllm" else self.model or "demo"


def require_simulator() -> None:
    """Raise CommandError if the simulated engines are not installed: a production install lacks them."""
    if find_spec("warmfleet_loadtest") is None:
        raise CommandError(NO_SIMULATOR)


def engine_command(
    options: EngineOptions, name: str, port: int, redis_url: str, kv_role: str = ""
) -> tuple[list[str], dict[str, str]]:
    """Make the command line of an engine, and its environment's variables. Raises CommandError if vLLM is missing.

    kv_role: of a simulated engine: whether it computes prompts for others, or takes them; empty: neither.
    """
    if options.kind == "vllm":
        return _vllm(options, name, port, redis_url)
    argv = [sys.executable, "-m", "warmfleet_loadtest.engine", "--port", str(port), "--model", options.served_name]
    if options.step_time:
        argv += ["--step-time", options.step_time]
    if options.blocks:
        argv += ["--blocks", str(options.blocks)]
    argv += options.flags
    # The store's URL may hold a password, and process lists show arguments.
    environment = {"WARMFLEET_REDIS_URL": redis_url, "WARMFLEET_WORKER_ID": name}
    if kv_role:
        argv += ["--kv-role", kv_role]
    return argv, environment


def demo_template_sha256() -> str:
    """Return the SHA-256 of the chat template that simulated engines publish."""
    content = resources.files("warmfleet_loadtest").joinpath("data/chat_template.jinja").read_text(encoding="utf-8")
    return hashlib.sha256(content.encode()).hexdigest()


def _vllm(options: EngineOptions, name: str, port: int, redis_url: str) -> tuple[list[str], dict[str, str]]:
    python = Path(options.vllm_python or VLLM_PYTHON)
    model = Path(options.model or TINY_MODEL)
    if not python.exists() or not model.exists():
        missing = python if not python.exists() else model
        raise CommandError(f"{missing} is not there: run `make vllm` once, or give --vllm-python and --model")
    argv = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--served-model-name", options.served_name, "--enforce-eager", "--dtype", "float32"]
    argv += ["--max-model-len", "4096", "--max-num-seqs", "16", "--block-size", "32"]
    argv += ["--num-gpu-blocks-override", str(options.blocks or 1_024), "--enable-prefix-caching"]
    argv += ["--prefix-caching-hash-algo", "sha256_cbor", "--enable-prompt-tokens-details"]
    argv += options.flags  # of a flag given twice vLLM takes the last
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines share the cores
        "OMP_NUM_THREADS": "1",
        "WARMFLEET_REDIS_URL": redis_url,
        "WARMFLEET_REDIS_CA": "",  # the store's URL names the CA already
        "WARMFLEET_MODEL": options.served_name,
        "WARMFLEET_WORKER_ID": name,
        "WARMFLEET_WORKER_URL": f"http://127.0.0.1:{port}",
    }
    return argv, environment


class EngineLoadingError(CommandError):
    """The error of an engine that does not answer yet, perhaps because it loads its model."""


def served_names(url: str, api_key: str) -> list[str]:
    """Ask for the names of the models that an engine serves, without its adapters.

    Raises EngineLoadingError, and CommandError if waiting would not help.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/models", headers=headers, timeout=10)
    except httpx.InvalidURL as error:
        raise CommandError(f"--worker {url} is no URL: {error}") from error
    except httpx.HTTPError as error:
        raise EngineLoadingError(f"--worker {url} does not answer: {str(error) or type(error).__name__}") from error
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise CommandError(f"--worker {url} wants an API key: set WARMFLEET_WORKER_API_KEY")
    if answer.is_server_error:
        raise EngineLoadingError(f"--worker {url} answers {answer.status_code}")
    try:
        models = answer.raise_for_status().json()["data"]
        names = [str(model["id"]) for model in models if not model.get("parent")]  # an adapter names its parent
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(f"--worker {url} is no OpenAI server: {error}") from error
    if not names:
        raise EngineLoadingError(f"--worker {url} serves no model")
    return names


def pools_of(listed: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the model tags of the pools that these engines form. listed: the served names of each engine.

    An engine that serves the name of an earlier engine's pool joins this pool, else its first name begins a pool.
    """
    tags: dict[str, None] = {}
    for names in listed:
        own = [tag_of(name) for name in names]
        if own and tags.keys().isdisjoint(own):
            tags[own[0]] = None
    return tuple(tags)
