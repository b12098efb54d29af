"""The fact ``transfer`` by vLLM's own configuration and NIXL's own hash, without an engine. Runs beside vLLM."""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import Any

BACKEND = "CPU_ATTN"


def announced(vllm_config: Any, *, windows: bool = False) -> dict[str, Any]:
    """Return the fact, as a join tells it, of an engine whose NIXL workers have told their handshake; and its hash.

    windows: the engine has sliding windows beside full attention.
    """
    import msgspec
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NixlHandshakePayload,
        compute_nixl_compatibility_hash,
    )

    from warmfleet_worker.vllm_hooks import kv_transfer

    mode = "push" if vllm_config.kv_transfer_config.kv_connector == "NixlPushConnector" else "pull"
    own = compute_nixl_compatibility_hash(vllm_config, BACKEND, mode)
    half, kept = SimpleNamespace(), []
    payload = NixlHandshakePayload(own, msgspec.msgpack.encode({"attn_backend_name": BACKEND}))
    kv_transfer._noted(lambda *arguments: kept.append(arguments), half, {(0, 0): payload})
    assert kept == [(half, {(0, 0): payload})], "vLLM gets what it was given"
    connectors = SimpleNamespace(connector_scheduler=None, _connectors=[SimpleNamespace(connector_scheduler=half)])
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in _specs(windows)])
    manager = SimpleNamespace(kv_cache_config=groups)
    scheduler = SimpleNamespace(vllm_config=vllm_config, connector=connectors, kv_cache_manager=manager)
    found = kv_transfer.transfer_of(scheduler, vllm_config.cache_config.block_size)
    return {"transfer": found and found.as_dict(), "hash": own, "unfit": kv_transfer.unfit_alone(vllm_config)}


def _specs(windows: bool) -> list[Any]:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    shape = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    return [FullAttentionSpec(**shape), *([SlidingWindowSpec(**shape, sliding_window=64)] if windows else [])]


@functools.cache
def _config(model: str, revision: str | None) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    common: dict[str, Any] = {"block_size": 32, "max_model_len": 512, "dtype": "float32"}
    return EngineArgs(model=model, revision=revision, **common).create_engine_config()


def told(
    model: str,
    config: dict[str, Any],
    variables: dict[str, str],
    rank: int = 0,
    windows: bool = False,
    revision: str | None = None,
) -> dict[str, Any]:
    """Return what an engine with this ``--kv-transfer-config`` and these variables announces. rank: data-parallel."""
    from vllm.config import KVTransferConfig

    vllm_config = _config(model, revision)
    vllm_config.kv_transfer_config = KVTransferConfig(**config)
    vllm_config.parallel_config.data_parallel_index = rank
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        return announced(vllm_config, windows=windows)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
