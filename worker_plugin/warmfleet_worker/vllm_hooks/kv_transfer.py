"""The fact ``transfer``: how this engine hands blocks of prompts to other engines, by its ``--kv-transfer-config``.

NIXL's workers compute a hash of all that two engines must have in common. They give it to the connector's half beside
the Scheduler, which answers handshakes by it. There it is noted, so that routers pair engines whose handshake succeeds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warmfleet_worker.protocol.transfer import (
    HANDS_OVER,
    KEEPS_ALL,
    NIXL_CONNECTOR,
    NIXL_HASH,
    VLLM,
    Transfer,
    release,
    short,
)
from warmfleet_worker.vllm_hooks.compatibility import Part, missing, refuse, version
from warmfleet_worker.vllm_hooks.groups import is_full_attention
from warmfleet_worker.vllm_hooks.swallow_errors import swallow_errors
from warmfleet_worker.vllm_hooks.wrap import first_time, wrap

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_NOTED = "__warmfleet_handshake__"  # attribute of a connector's half that has told its handshake
_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
_LEASE_S = 30  # NIXL's own default
#: First version whose MoRIIOConnector takes blocks only for requests that name an engine to take them from.
_MORIIO_SINCE = (0, 33)


def hook_handshake(vllm_config: Any) -> None:
    """Note NIXL's handshakes from now on, if this engine has NIXL. Must be called before a Scheduler is made."""
    config = getattr(vllm_config, "kv_transfer_config", None)
    if config is None or all(HANDS_OVER.get(name) != "NIXL" for name, *_ in _parts(config)) or missing(Part.HANDSHAKE):
        return
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler

    if first_time(NixlBaseConnectorScheduler):
        wrap(NixlBaseConnectorScheduler, "set_xfer_handshake_metadata", _noted)


def transfer_of(scheduler: Any, block_tokens: int) -> Transfer | None:
    """Return the fact; None if this engine has no KV connector, or a vLLM that is not known."""
    vllm_config = scheduler.vllm_config
    config = vllm_config.kv_transfer_config
    if config is None or not config.kv_connector:
        return None
    if reason := missing(Part.TRANSFER):
        refuse(Part.TRANSFER, reason)
        return None
    parts = list(_parts(config))
    name, role, more = next((part for part in parts if part[0] in HANDS_OVER), parts[0])
    library = HANDS_OVER.get(name)
    same: dict[str, object] = {"connector": library or name}
    if library:
        same |= {"transfer mode": _mode(name)} | _settings(vllm_config, block_tokens)
    if library == "NIXL":
        same |= _nixl_settings(scheduler)
    if library == "Mooncake":
        same["mooncake_protocol"] = more.get("mooncake_protocol", "rdma")
        groups = scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
        same[KEEPS_ALL] = all(is_full_attention(group.kv_cache_spec) for group in groups)
    host, port, lease_s = _place(library, vllm_config.parallel_config, more)
    return Transfer(
        role=_ROLES[role],
        connector=short(name),
        beside=short(",".join(other for other, *_ in parts if other != name)),
        mode=_mode(name) if library else "",
        engine_id=short(str(config.engine_id)),
        host=short(host),
        port=port,
        lease_s=lease_s,
        recomputes=config.kv_load_failure_policy == "recompute",
        same=tuple(sorted((name, short(str(value))) for name, value in same.items())),
    )


def unfit_alone(vllm_config: Any) -> str:
    """Say why no request may reach this engine unless a router splits it; empty if the engine may serve requests alone.

    Before vLLM 0.33, MoRIIO counts the tokens of each prompt as taken from another engine, unless the engine only
    prefills. Of a request that names no such engine nothing is taken, and its answer is made of memory as it was.
    """
    config = getattr(vllm_config, "kv_transfer_config", None)
    if config is None or not config.kv_connector:
        return ""
    roles = [role for name, role, _ in _parts(config) if name == "MoRIIOConnector"]
    if not roles or roles == ["kv_producer"] or release(version()) >= _MORIIO_SINCE:
        return ""
    return f"MoRIIOConnector of vLLM {version()} would answer requests that no prefill engine has computed wrongly"


def _parts(config: Any) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield name, role and further settings of each connector; a MultiConnector has several."""
    children = config.kv_connector_extra_config.get("connectors") if config.kv_connector == "MultiConnector" else None
    if not children:
        yield config.kv_connector, config.kv_role, config.kv_connector_extra_config
    for child in children or ():
        yield child["kv_connector"], child["kv_role"], child.get("kv_connector_extra_config", {})


def _mode(connector: str) -> str:
    return "push" if connector in ("NixlPushConnector", "MooncakeConnector") else "pull"


def _settings(vllm_config: Any, block_tokens: int) -> dict[str, object]:
    """Return what NIXL compares of the settings, what makes other weights of the path, and the size of a block."""
    model, draft = vllm_config.model_config, vllm_config.speculative_config
    drafts = "none" if draft is None or not draft.use_eagle() else f"{draft.method} {draft.draft_model_config.model}"
    weights = (model.revision, model.quantization, model.hf_overrides)
    return {
        VLLM: version(),
        "model path": model.model,
        # In one setting, as routers of older versions read no more settings.
        "revision, quantization, HF overrides": ", ".join(str(each or "-") for each in weights),
        "dtype": str(model.dtype).removeprefix("torch."),
        "KV heads": model.get_total_num_kv_heads(),
        "head size": model.get_head_size(),
        "layers": model.get_total_num_hidden_layers(),
        "cache dtype": vllm_config.cache_config.cache_dtype,
        "block size": block_tokens,
        "hybrid KV cache manager": not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager,
        "draft model": drafts,
    }


def _nixl_settings(scheduler: Any) -> dict[str, object]:
    """Return the version of vLLM's part of NIXL, the attention backend and NIXL's own hash, as far as known."""
    if reason := missing(Part.HANDSHAKE):
        refuse(Part.HANDSHAKE, reason)
        return {}
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NIXL_CONNECTOR_VERSION

    found: dict[str, object] = {NIXL_CONNECTOR: NIXL_CONNECTOR_VERSION}
    connector = scheduler.connector
    for each in (connector, *getattr(connector, "_connectors", ())):
        found |= getattr(getattr(each, "connector_scheduler", None), _NOTED, {})
    return found


def _place(library: str | None, parallel: Any, more: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return host and port where partners ask for this engine's memory, and the seconds for which it keeps blocks."""
    from vllm import envs

    if library == "NIXL":
        port = envs.VLLM_NIXL_SIDE_CHANNEL_PORT + int(parallel.data_parallel_index)
        return envs.VLLM_NIXL_SIDE_CHANNEL_HOST, port, int(more.get("kv_lease_duration", _LEASE_S))
    if library == "Mooncake":
        host, _, port = str(more.get("bootstrap_server_address", "")).rpartition(":")
        lease_s = int(envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT)
        return (host, int(port), lease_s) if host else ("", envs.VLLM_MOONCAKE_BOOTSTRAP_PORT, lease_s)
    return "", 0, 0


def _noted(original: Any, half: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
    with swallow_errors("could not read NIXL's handshake", Part.HANDSHAKE.value):
        import msgspec

        payload = next(iter(metadata.values()))  # all ranks have the same hash
        agent = msgspec.msgpack.decode(payload.agent_metadata_bytes)
        told = {"attention backend": agent["attn_backend_name"], NIXL_HASH: payload.compatibility_hash}
        setattr(half, _NOTED, told)
    return original(half, metadata, *args, **kwargs)
