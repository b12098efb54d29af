"""Every internal of vLLM that this package uses, listed once, and whether this vLLM has it. Checked before any hook.

A vLLM that this package does not know may have renamed or changed an internal. Then the part of the report that needs
it is left out, a line in the log says so, and the engine serves on: the plugin reports nothing that it cannot vouch
for. Classes of vLLM make most of their attributes in ``__init__``, so the check reads which ones that function sets.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import logging
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from warmfleet_worker.protocol import wire

logger = logging.getLogger("vllm.warmfleet")


class Part(StrEnum):
    """A part of the plugin that does not work if vLLM lacks an internal; the value tells the effect in the log."""

    BLOCKS = "this engine reports nothing"
    LOAD = "this engine does not report its load"
    STEPS = "this engine reports neither finished prefills nor its speed"
    STEP_SIZE = "`warmfleet doctor` does not tell how long a step full of prompts keeps its answers waiting"
    ENDS = "this engine does not report the ends of requests, so routers renew their reservations"
    EVICTION = "ended and paused sessions are not evicted first, and WARMFLEET_TTFT_TARGET_S has no effect"
    GROUPS = "a prefix is promised as far as full attention supports it, whatever other groups do"
    IMAGES = "the tokens of the images that it sees are not reported"
    TIER = "the blocks in its tier in CPU memory are not reported"
    STORE = "the blocks in its tier behind CPU memory are not reported"
    TRANSFER = "its role is not announced, so it is paired with no other engine"
    HANDSHAKE = "it is paired by its settings alone, not by NIXL's own hash"
    SERVER = "this API server is not announced, so it gets no requests from routers"


@dataclass(frozen=True, slots=True)
class Internal:
    """A module or class of vLLM, with the names that it or its objects must have.

    place: ``module`` or ``module:Class``. functions: their parameters as ``self, first, ...``; without the dots there
    may be no further ones.
    """

    part: Part
    place: str
    names: tuple[str, ...] = ()
    functions: tuple[tuple[str, str], ...] = ()


_CORE = "vllm.v1.core"
_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_TIERING = "vllm.v1.kv_offload.tiering"
INTERNALS = (
    Internal(Part.BLOCKS, "vllm.version", ("__version__",)),
    Internal(
        Part.BLOCKS,
        f"{_CORE}.sched.scheduler:Scheduler",
        ("vllm_config", "kv_cache_manager", "hash_block_size", "connector"),
        (
            ("__init__", "self, ..."),
            ("schedule", "self, ..."),
            ("update_from_output", "self, scheduler_output, ..."),
            ("shutdown", "self, ..."),
        ),
    ),
    Internal(
        Part.BLOCKS,
        f"{_CORE}.kv_cache_manager:KVCacheManager",
        ("block_pool", "coordinator", "kv_cache_config"),
    ),
    Internal(Part.BLOCKS, f"{_CORE}.kv_cache_coordinator:KVCacheCoordinator", ("single_type_managers",)),
    Internal(Part.BLOCKS, f"{_CORE}.single_type_kv_cache_manager:SingleTypeKVCacheManager", ("block_size",)),
    Internal(
        Part.BLOCKS,
        f"{_CORE}.block_pool:BlockPool",
        ("cached_block_hash_to_block",),
        (("reset_prefix_cache", "self, ..."),),
    ),
    # Both functions are replaced, so they must be called with these arguments and no others.
    Internal(
        Part.BLOCKS,
        f"{_CORE}.block_pool:BlockHashToBlockMap",
        ("_cache",),
        (("insert", "self, key, block"), ("pop", "self, key, block_id")),
    ),
    Internal(Part.BLOCKS, f"{_CORE}.kv_cache_utils", ("NONE_HASH", "KVCacheBlock", "make_block_hash_with_group_id")),
    Internal(Part.BLOCKS, "vllm.v1.kv_cache_interface", ("FullAttentionSpec",)),
    Internal(Part.BLOCKS, "vllm.v1.kv_cache_interface:KVCacheConfig", ("kv_cache_groups",)),
    Internal(Part.BLOCKS, "vllm.v1.kv_cache_interface:KVCacheGroupSpec", ("kv_cache_spec",)),
    Internal(
        Part.BLOCKS, "vllm.config:CacheConfig", ("enable_prefix_caching", "prefix_caching_hash_algo", "num_gpu_blocks")
    ),
    Internal(
        Part.BLOCKS,
        "vllm.config:ParallelConfig",
        ("data_parallel_index", "data_parallel_rank_local", "data_parallel_external_lb", "local_engines_only"),
    ),
    Internal(Part.BLOCKS, "vllm.config:ModelConfig", ("served_model_name", "max_model_len")),
    Internal(
        Part.LOAD,
        f"{_CORE}.sched.scheduler:Scheduler",
        ("requests", "pause_state"),
        (("get_request_counts", "self"), ("get_num_unfinished_requests", "self")),
    ),
    Internal(
        Part.LOAD,
        "vllm.v1.request:Request",
        ("request_id", "num_computed_tokens", "num_prompt_tokens", "num_tokens"),
    ),
    Internal(
        Part.STEPS,
        f"{_CORE}.sched.output:SchedulerOutput",
        ("total_num_scheduled_tokens", "num_scheduled_tokens", "scheduled_spec_decode_tokens"),
    ),
    Internal(Part.STEPS, "vllm.v1.engine:EngineCoreOutputs", ("outputs",)),
    Internal(Part.STEPS, "vllm.v1.engine:EngineCoreOutput", ("request_id", "prefill_stats")),
    Internal(Part.STEPS, "vllm.v1.metrics.stats:PrefillStats", ("num_cached_tokens", "num_prompt_tokens")),
    Internal(Part.STEP_SIZE, "vllm.config:SchedulerConfig", ("max_num_batched_tokens",)),
    Internal(
        Part.ENDS,
        f"{_CORE}.sched.scheduler:Scheduler",
        ("requests",),
        (("add_request", "self, request, ..."), ("_free_request", "self, request, ...")),
    ),
    Internal(
        Part.ENDS,
        "vllm.v1.request:Request",
        ("request_id", "num_output_tokens", "status"),
        (("is_finished", "self"),),
    ),
    Internal(Part.ENDS, "vllm.v1.request:RequestStatus", (), (("get_finished_reason", "status"),)),
    Internal(Part.SERVER, "vllm.config:ParallelConfig", ("data_parallel_size", "data_parallel_size_local")),
    Internal(
        Part.EVICTION,
        f"{_CORE}.kv_cache_manager:KVCacheManager",
        ("enable_caching",),
        (("free", "self, request"),),
    ),
    Internal(Part.EVICTION, f"{_CORE}.single_type_kv_cache_manager:SingleTypeKVCacheManager", ("req_to_blocks",)),
    Internal(
        Part.EVICTION,
        f"{_CORE}.block_pool:BlockPool",
        ("blocks", "free_block_queue"),
        (("get_new_blocks", "self, num_blocks"),),
    ),
    Internal(
        Part.EVICTION,
        f"{_CORE}.kv_cache_utils:FreeKVCacheBlockQueue",
        ("fake_free_list_head",),
        (("remove", "self, block"), ("prepend_n", "self, blocks")),
    ),
    Internal(
        Part.EVICTION,
        f"{_CORE}.kv_cache_utils:KVCacheBlock",
        ("block_id", "ref_cnt", "block_hash", "prev_free_block", "next_free_block"),
    ),
    Internal(
        Part.EVICTION,
        "vllm.v1.request:Request",
        ("request_id", "num_prompt_tokens", "num_tokens", "sampling_params", "block_hashes"),
        (("is_finished", "self"),),
    ),
    Internal(
        Part.GROUPS,
        f"{_CORE}.kv_cache_coordinator:KVCacheCoordinator",
        ("scheduler_block_size", "enable_partial_hash_hits", "eagle_group_ids", "retention_interval"),
    ),
    Internal(Part.GROUPS, f"{_CORE}.single_type_kv_cache_manager:SingleTypeKVCacheManager", ("kv_cache_spec",)),
    Internal(
        Part.GROUPS,
        f"{_CORE}.block_pool:BlockPool",
        ("hash_block_size",),
        (
            (
                "cache_full_blocks",
                "self, request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, ...",
            ),
        ),
    ),
    Internal(Part.GROUPS, "vllm.v1.request:Request", ("block_hashes",)),
    Internal(Part.GROUPS, "vllm.v1.kv_cache_interface:SlidingWindowSpec", ("sliding_window",)),
    Internal(Part.GROUPS, "vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec", ("attention_chunk_size",)),
    Internal(Part.GROUPS, "vllm.v1.kv_cache_interface", ("FullAttentionSpec", "MambaSpec")),
    Internal(Part.IMAGES, f"{_CORE}.sched.scheduler:Scheduler", (), (("add_request", "self, request"),)),
    Internal(Part.IMAGES, "vllm.v1.request:Request", ("mm_features", "prompt_token_ids")),
    Internal(Part.IMAGES, "vllm.multimodal.inputs:MultiModalFeatureSpec", ("modality", "identifier", "mm_position")),
    Internal(Part.IMAGES, "vllm.multimodal.inputs:PlaceholderRange", ("offset", "length")),
    Internal(
        Part.TIER,
        "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager",
        (),
        (("complete_store", "self, keys, ..."), ("prepare_store", "self, keys, ..."), ("reset_cache", "self")),
    ),
    Internal(Part.TIER, "vllm.v1.kv_offload.base:PrepareStoreOutput", ("evicted_keys",)),
    Internal(Part.TIER, f"{_TIERING}.manager:TieringOffloadingManager", ("primary_tier", "secondary_tiers")),
    Internal(Part.TIER, f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler", ("config", "manager")),
    Internal(Part.TIER, f"{_OFFLOADING}.scheduler:SchedulerOffloadConfig", ("blocks_per_chunk", "kv_group_configs")),
    Internal(Part.TIER, f"{_OFFLOADING}.scheduler:GroupOffloadConfig", ("is_eagle_group",)),
    Internal(
        Part.TIER,
        f"{_OFFLOADING}.metrics:OffloadingConnectorStats",
        (),
        (("increase_counter", "self, counter_name, counter_increase_value, ..."),),
    ),
    Internal(Part.TIER, f"{_OFFLOADING}.metrics:_TransferMetricName", ("LOAD_BYTES", "LOAD_TIME")),
    Internal(Part.TIER, "vllm.v1.kv_cache_interface:KVCacheConfig", ("num_blocks", "kv_cache_tensors")),
    Internal(
        Part.STORE,
        f"{_TIERING}.fs.manager:FileSystemTierManager",
        ("file_mapper",),
        (
            ("lookup", "self, key, ..."),
            ("submit_store", "self, job_metadata"),
            ("submit_load", "self, job_metadata"),
            ("get_finished_jobs", "self"),
        ),
    ),
    Internal(Part.STORE, "vllm.v1.kv_offload.file_mapper:FileMapper", ("base_path", "rank")),
    Internal(Part.STORE, "vllm.v1.kv_offload.base:LookupResult", ("HIT", "MISS")),
    Internal(Part.STORE, f"{_TIERING}.base:TransferJob", ("job_id", "keys")),
    Internal(Part.STORE, f"{_TIERING}.base:JobResult", ("job_id", "success", "transfer_time")),
    Internal(
        Part.STORE,
        f"{_TIERING}.manager:CPUPrimaryTierOffloadingManager",
        (),
        (("get_kv_memoryview", "self"),),
    ),
    Internal(
        Part.TRANSFER,
        "vllm.config:KVTransferConfig",
        ("kv_connector", "kv_role", "engine_id", "kv_connector_extra_config", "kv_load_failure_policy"),
    ),
    Internal(
        Part.TRANSFER,
        "vllm.config:ModelConfig",
        ("model", "revision", "quantization", "hf_overrides", "dtype"),
        (
            ("get_total_num_kv_heads", "self"),
            ("get_head_size", "self"),
            ("get_total_num_hidden_layers", "self"),
        ),
    ),
    Internal(Part.TRANSFER, "vllm.config:CacheConfig", ("cache_dtype",)),
    Internal(Part.TRANSFER, "vllm.config:SchedulerConfig", ("disable_hybrid_kv_cache_manager",)),
    Internal(
        Part.TRANSFER,
        "vllm.envs",
        (
            *("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"),
            *("VLLM_MOONCAKE_BOOTSTRAP_PORT", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"),
        ),
    ),
    Internal(
        Part.HANDSHAKE,
        f"{_NIXL}.base_scheduler:NixlBaseConnectorScheduler",
        (),
        (("set_xfer_handshake_metadata", "self, metadata"),),
    ),
    Internal(Part.HANDSHAKE, f"{_NIXL}.metadata", ("NIXL_CONNECTOR_VERSION",)),
    Internal(Part.HANDSHAKE, f"{_NIXL}.metadata:NixlHandshakePayload", ("compatibility_hash", "agent_metadata_bytes")),
    Internal(Part.HANDSHAKE, f"{_NIXL}.metadata:NixlAgentMetadata", ("attn_backend_name",)),
    Internal(
        Part.SERVER, "vllm.v1.engine.async_llm:AsyncLLM", ("vllm_config", "renderer"), (("shutdown", "self, ..."),)
    ),
    Internal(
        Part.SERVER,
        "vllm.renderers.hf",
        ("HfRenderer",),
        (
            ("resolve_chat_template", "tokenizer, chat_template, tools, model_config"),
            ("resolve_chat_template_content_format", "chat_template, tools, given_format, tokenizer, model_config"),
        ),
    ),
    Internal(
        Part.SERVER,
        "vllm.renderers.online_renderer:OnlineRenderer",
        ("renderer", "chat_template", "default_chat_template_kwargs"),
    ),
    Internal(Part.SERVER, "vllm.entrypoints.openai.completion.protocol", ("CompletionRequest",)),
)
#: Attributes of the API server's state once ``init_app_state`` has filled it.
SERVER_STATE = (
    "args.host",
    "args.port",
    "args.uds",
    "args.ssl_certfile",
    "args.chat_template_content_format",
    "args.exclude_tools_when_tool_choice_none",
    "openai_serving_models.base_model_paths",
    "openai_serving_models.lora_requests",
    "online_renderer",
)


def missing(part: Part) -> str:
    """Name the first internal of this part that this vLLM lacks or that differs; empty if all is as expected."""
    for internal in INTERNALS:
        if internal.part is part:
            found = _missing_of(internal)
            if found:
                return found
    return _block_map_differs() if part is Part.BLOCKS else ""


def missing_state(state: Any) -> str:
    """Name the first path of SERVER_STATE that this API server's state lacks; empty if it has all."""
    for path in SERVER_STATE:
        owner = state
        for name in path.split("."):
            if not hasattr(owner, name):
                return f"the API server's state has no {path}"
            owner = getattr(owner, name)
    return ""


def refuse(part: Part, reason: str) -> None:
    """Say in one line of the log what this engine does not report, and why."""
    logger.error("warmfleet: vLLM %s differs from what this plugin knows: %s: %s", version(), reason, part.value)


def version() -> str:
    try:
        from vllm.version import __version__
    except ImportError:
        return "of an unknown version"
    return str(__version__)


def parameters_differ(function: Any, expected: str) -> str:
    """Return this function's parameters if they differ from ``expected`` (see ``Internal``); empty if not."""
    try:
        found = list(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:
        return str(error)
    wanted = expected.split(", ")
    more = wanted[-1] == "..."
    wanted = wanted[:-1] if more else wanted
    same = found[: len(wanted)] == wanted and (more or len(found) == len(wanted))
    return "" if same else f"({', '.join(found)})"


def _missing_of(internal: Internal) -> str:
    module_name, _, class_name = internal.place.partition(":")
    shown = internal.place.replace(":", ".")
    try:
        owner: Any = importlib.import_module(module_name)
        owner = getattr(owner, class_name) if class_name else owner
    except (ImportError, AttributeError):
        return f"there is no {shown}"
    names = _names_of(owner)
    for name in internal.names:
        if name not in names:
            return f"there is no {shown}.{name}"
    for name, expected in internal.functions:
        function = getattr(owner, name, None)
        if not callable(function):
            return f"there is no {shown}.{name}"
        differs = parameters_differ(function, expected)
        if differs:
            return f"{shown}.{name} takes {differs}"
    return ""


def _names_of(owner: Any) -> set[str]:
    """Collect the names that a module has or declares, or that a class's objects have as fields or by ``__init__``."""
    names = set(dir(owner))
    for base in getattr(owner, "__mro__", (owner,)):
        names |= _annotated(base)
        init = inspect.unwrap(vars(base).get("__init__", object.__init__))
        if inspect.isfunction(init):
            names |= {step.argval for step in dis.get_instructions(init) if step.opname == "STORE_ATTR"}
    return names


def _annotated(owner: Any) -> set[str]:
    """Collect the names that a class or module declares with a type; Python 3.14 makes them only when it is asked."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return set(annotationlib.get_annotations(owner, format=annotationlib.Format.STRING))
    return set(vars(owner).get("__annotations__", {}))


def _block_map_differs() -> str:
    """Try vLLM's map with two blocks of the same hash, because ``block_table`` relies on how the map keeps them."""
    from vllm.v1.core.block_pool import BlockHashToBlockMap
    from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

    try:
        table, first, second = BlockHashToBlockMap(), KVCacheBlock(block_id=1), KVCacheBlock(block_id=2)
        key = make_block_hash_with_group_id(bytes(range(32)), 3)
        table.insert(key, first)
        keeps = type(table._cache) is dict and table._cache == {key: first}  # noqa: SLF001
        table.insert(key, second)
        copies = table.pop(key, 1) is first and key in table._cache  # noqa: SLF001
        empty = table.pop(key, 2) is second and key not in table._cache  # noqa: SLF001
        vars(table)  # raises TypeError if ``track`` cannot replace the map's functions
        as_known = keeps and copies and empty and bytes(key) == bytes(range(32)) + (3).to_bytes(4, "big")
    except Exception as error:  # noqa: BLE001  whatever it raises, it is not the map that we know
        return f"BlockHashToBlockMap: {type(error).__name__}: {error}"
    return "" if as_known else "BlockHashToBlockMap keeps blocks in another way"


def extra_keys_form(algorithm: str, block_tokens: int, none_hash: bytes, lookahead: int = 0) -> str:
    """Find how this vLLM puts salts and adapters into a hash: the form (``wire.Scheme.extra_keys``) that gives its
    hashes. lookahead: the number of tokens behind a block that it hashes with it.

    ``unknown`` if no form does; then routers send requests by load and match no blocks. NONE_HASH must be set.
    """
    tokens, salt, lora = list(range(2 * block_tokens + lookahead)), "a salt", ("an adapter", "/its/path")
    try:
        own = [bytes(digest) for digest in _own_hashes(algorithm, block_tokens, tokens, salt, lora, lookahead)]
    except Exception as error:  # noqa: BLE001  a changed vLLM may raise anything
        own, reason = [], f"{type(error).__name__}: {error}"
    else:
        reason = "its block hashes are not those that routers compute"
    for form in (f"{wire.LOOKAHEAD}{lookahead}",) if lookahead else ("tagged", "plain"):
        scheme = wire.Scheme(algorithm, none_hash, block_tokens, form)
        if own == wire.chain_hashes(scheme, tokens, salt=salt, lora=lora, new=_hash_of(algorithm)):
            return form
    logger.error("warmfleet: vLLM %s: %s: routers send requests here by load only", version(), reason)
    return "unknown"


def _own_hashes(
    algorithm: str, block_tokens: int, tokens: list[int], salt: str, lora: tuple[str, str], lookahead: int
) -> list[bytes]:
    """Return the block hashes that vLLM computes for a request with this salt and adapter."""
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    more = (lookahead,) if lookahead else ()  # vLLM before 0.33 takes none
    request = Request(
        request_id="warmfleet",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=LoRARequest(lora[0], 1, lora[1]),
        cache_salt=salt,
        block_hasher=get_request_block_hasher(block_tokens, get_hash_fn_by_name(algorithm), *more),
    )
    return list(request.block_hashes)


def _hash_of(algorithm: str) -> Any:
    if algorithm.startswith("xxhash"):
        import xxhash  # vLLM needs it for this algorithm, too

        return xxhash.xxh3_128
    import hashlib

    return hashlib.sha256
