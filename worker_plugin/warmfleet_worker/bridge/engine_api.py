"""Asks an engine's own HTTP API for its names, sizes, adapters, event sources, health and load."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT_SECONDS = 5.0
MAX_ANSWER_BYTES = 16 * 1024 * 1024
DEFAULT_PAGE_TOKENS = 16
NO_SUCH_PATH = (404, 405, 501)
_SAMPLE = re.compile(r"^([a-z_:]+)(?:\{([^}]*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'([a-z_]+)="([^"]*)"')


class EngineDown(Exception):  # noqa: N818 - not an error of ours: the engine does not answer as a healthy one does
    """The engine gives no good answer. gone: nothing listens at its address, or it says that it is dead.

    unresolved: no address was found for its host name. status: HTTP status of the answer; 0 without an answer.
    """

    def __init__(self, text: str, *, gone: bool = False, unresolved: bool = False, status: int = 0) -> None:
        super().__init__(text)
        self.gone, self.unresolved, self.status = gone, unresolved, status


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine as it describes itself.

    root: the model's folder or hub name, from which its tokenizer can be loaded. page_tokens: tokens in a block of its
    events. adapters: path by name. ranks: how many engine cores it has, as far as it says.
    """

    kind: str  # "vllm" or "sglang"
    version: str
    models: tuple[str, ...]
    root: str
    adapters: Mapping[str, str]
    max_model_len: int
    page_tokens: int
    capacity_blocks: int
    ranks: int = 1
    prefix_caching: bool = True

    @property
    def sglang(self) -> bool:
        return self.kind == "sglang"


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where one engine core publishes its events, and where it replays them (None: nowhere)."""

    endpoint: str
    replay: str | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """The load at a moment. running, waiting: number of requests, by rank. work: a counter that grows with every step.

    started: when the server's process began, seconds since 1970; 0 if the server does not say. asleep: the ranks that
    somebody has put to sleep (vLLM's /sleep). loads: the loads from tiers since the server's start.
    """

    running: Mapping[int, int] = field(default_factory=dict)
    waiting: Mapping[int, int] = field(default_factory=dict)
    work: int = 0
    started: float = 0.0
    asleep: frozenset[int] = frozenset()
    loads: Loads = field(default_factory=lambda: Loads())


@dataclass(frozen=True, slots=True)
class Loads:
    """Tokens that were found in the host's memory and on its disk, and the seconds that loading took: from the disk
    into the host's memory (read_s), and from there (load_s). vLLM tells the tokens by source since 0.32; before, what
    its tiers have loaded cannot be told from what other connectors have.
    """

    host_tokens: float = 0.0
    disk_tokens: float = 0.0
    load_s: float = 0.0
    read_s: float = 0.0


class EngineApi:
    """Asks one engine. Any thread may ask; each question has a connection of its own. All methods raise EngineDown."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        self._parts = urlsplit(self.url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    @property
    def host(self) -> str:
        return self._parts.hostname or ""

    def facts(self) -> EngineFacts:
        """Ask the engine to describe itself."""
        served = self._models()
        if not served:
            raise EngineDown("/v1/models lists no model")
        base = [entry for entry in served if not entry.get("parent")]
        info = self._find("/server_info")  # SGLang; vLLM has such a path in its developer mode only
        sglang = info is not None and "tokenizer_path" in info
        described = self._sglang(info or {}) if sglang else self._vllm()
        return EngineFacts(
            kind="sglang" if sglang else "vllm",
            models=tuple(str(entry["id"]) for entry in base),
            adapters=_adapters(served),
            max_model_len=int(base[0].get("max_model_len") or 0),
            **{"root": str(base[0].get("root") or base[0]["id"]), **described},
        )

    def _vllm(self) -> dict[str, Any]:
        samples = _samples(self._found("/metrics"), "vllm:cache_config_info")
        cache = next((labels for _, labels, _ in samples), {})
        return {
            "version": f"vllm-{(self._find('/version') or {}).get('version', 'unknown')}",
            "page_tokens": int(_number(cache.get("block_size")) or DEFAULT_PAGE_TOKENS),
            "capacity_blocks": int(_number(cache.get("num_gpu_blocks"))),
            "prefix_caching": cache.get("enable_prefix_caching", "True") == "True",
        }

    @staticmethod
    def _sglang(info: Mapping[str, Any]) -> dict[str, Any]:
        page = int(info.get("page_size") or 1)
        tokens = int(info.get("max_total_num_tokens") or 0)
        return {
            "version": f"sglang-{info.get('version', 'unknown')}",
            "root": str(info.get("tokenizer_path") or info.get("model_path") or ""),
            "page_tokens": page,
            "capacity_blocks": tokens // page,
            "ranks": int(info.get("dp_size") or 1),
            "prefix_caching": not info.get("disable_radix_cache"),
        }

    def sources(self) -> dict[int, EventSource]:
        """Ask where each rank publishes its events; empty if the engine does not say, such as vLLM before 0.31."""
        found = self._find("/kv_event_sources")
        if found:
            return {int(rank): self._source(config, 0) for rank, config in found.items() if isinstance(config, dict)}
        info = self._find("/server_info") or {}
        try:
            config = json.loads(info.get("kv_events_config") or "{}")
            ranks = range(int(info.get("dp_size") or 1))
        except (ValueError, TypeError):
            return {}
        return {rank: self._source(config, rank) for rank in ranks} if config.get("endpoint") else {}

    def _source(self, config: Mapping[str, Any], rank: int) -> EventSource:
        replay = config.get("replay_endpoint")
        endpoint = reachable(str(config["endpoint"]), self.host)
        return EventSource(
            at_rank(endpoint, rank), at_rank(reachable(str(replay), self.host), rank) if replay else None
        )

    def names(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """Ask for the names that the engine serves now, and the paths of loaded LoRA adapters by name."""
        served = self._models()
        return tuple(str(entry["id"]) for entry in served if not entry.get("parent")), _adapters(served)

    def healthy(self) -> None:
        """Return if the engine says that it is healthy."""
        self._get("/health")

    def reading(self) -> Reading:
        """Read the load from the engine's own metrics."""
        samples = _samples(self._get("/metrics").decode(errors="replace"))
        running, waiting = dict[int, int](), dict[int, int]()
        work, started, asleep, loads = 0, 0.0, set[int](), dict.fromkeys(LOADS.values(), 0.0)
        for name, labels, value in samples:
            rank = int(_number(labels.get("engine") or labels.get("dp_rank")))
            if name in ("vllm:num_requests_running", "sglang:num_running_reqs"):
                running[rank] = running.get(rank, 0) + int(value)
            elif name in ("vllm:num_requests_waiting", "sglang:num_queue_reqs"):
                waiting[rank] = waiting.get(rank, 0) + int(value)
            elif name.partition(":")[2] in WORK:
                work += int(value)
            elif (name, labels.get("source")) in LOADS:
                loads[LOADS[name, labels.get("source")]] += value
            elif name == "process_start_time_seconds":
                started = value
            elif name == "vllm:engine_sleep_state" and labels.get("sleep_state") == "awake" and value == 0:
                asleep.add(rank)
        return Reading(running, waiting, work, started, frozenset(asleep), Loads(**loads))

    # ------------------------------------------------

    def _models(self) -> list[dict[str, Any]]:
        try:
            return [dict(entry) for entry in json.loads(self._get("/v1/models"))["data"]]
        except (ValueError, LookupError, TypeError) as error:
            raise EngineDown(f"/v1/models is not as expected: {error}") from error

    def _find(self, path: str) -> dict[str, Any] | None:
        """Get the JSON object at this path; None if the engine has no such path."""
        try:
            value = json.loads(self._found(path) or "null")
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    def _found(self, path: str) -> str:
        """Get the text at this path; empty if the engine has no such path."""
        try:
            return self._get(path).decode(errors="replace")
        except EngineDown as error:
            if error.status in NO_SUCH_PATH:
                return ""
            raise  # an engine that cannot answer now may have the path

    def _get(self, path: str) -> bytes:
        parts = self._parts
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.host, parts.port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request("GET", parts.path.rstrip("/") + path, headers=self._headers)
            answer = connection.getresponse()
            body = answer.read(MAX_ANSWER_BYTES)
        except ConnectionRefusedError as error:
            raise EngineDown(f"nothing answers at {self.url}: {error}", gone=True) from error
        except socket.gaierror as error:
            raise EngineDown(f"no address is found for {self.host}: {error}", unresolved=True) from error
        except (OSError, http.client.HTTPException, ssl.SSLError) as error:
            raise EngineDown(f"{path}: {type(error).__name__} {error}") from error
        finally:
            connection.close()
        if answer.status != 200:
            gone = path == "/health" and answer.status == 503
            raise EngineDown(f"{path} answered {answer.status}", gone=gone, status=answer.status)
        return body


#: Names (without ``vllm:`` or ``sglang:``) of counters, of which at least one grows with every step of an engine.
WORK = frozenset({"iteration_tokens_total_count", "generation_tokens_total", "prompt_tokens_total"})
#: Fields of ``Loads`` by a counter's name and its label `source`.
LOADS = {
    ("vllm:prompt_tokens_cached_by_source_total", "host"): "host_tokens",
    ("vllm:prompt_tokens_cached_by_source_total", "disk"): "disk_tokens",
    ("vllm:kv_offload_load_time_total", None): "load_s",
    ("vllm:kv_offload_tiering_read_time_total", None): "read_s",
}


def reachable(endpoint: str, host: str) -> str:
    """Make the address under which a publisher's own endpoint, such as ``tcp://*:5557``, is reached from elsewhere."""
    scheme, _, rest = endpoint.partition("://")
    bound, _, port = rest.rpartition(":")
    if scheme != "tcp" or bound not in ("*", "0.0.0.0", "[::]", "::", ""):  # noqa: S104 - an address to replace
        return endpoint
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def at_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of this rank, whose port is that of rank 0 plus the rank."""
    head, _, port = endpoint.rpartition(":")
    return f"{head}:{int(port) + rank}" if rank and endpoint.startswith("tcp://") else endpoint


def _adapters(served: list[dict[str, Any]]) -> dict[str, str]:
    return {str(entry["id"]): str(entry.get("root") or "") for entry in served if entry.get("parent")}


def _samples(text: str, only: str = "") -> list[tuple[str, dict[str, str], float]]:
    """Read (name, labels, value) of the samples in an exposition."""
    return [
        (name, dict(_LABEL.findall(labels)), _number(value))
        for name, labels, value in _SAMPLE.findall(text)
        if not only or name == only
    ]


def _number(text: str | None) -> float:
    """Read a number; 0 for anything but a finite one."""
    try:
        value = float(text or 0)
    except ValueError:
        return 0.0
    return value if abs(value) < 2**53 else 0.0
