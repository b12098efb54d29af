"""The tier in CPU memory of vLLM's OffloadingConnector: which blocks it holds, and how long it takes to load a byte.

vLLM keeps the tier in a ``CPUOffloadingManager`` beside its Scheduler. A block appears when its copy is complete, and
disappears when ``prepare_store`` evicts it or the tier is reset. Its key is the block table's own. The class is hooked,
because a tier with further tiers behind it keeps bound methods of its manager.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from warmfleet_worker.load_meter import LoadMeter
from warmfleet_worker.protocol import wire
from warmfleet_worker.tracker import Tracker
from warmfleet_worker.vllm_hooks.compatibility import Part, missing, refuse
from warmfleet_worker.vllm_hooks.store_tier import StoreTier, find_store
from warmfleet_worker.vllm_hooks.swallow_errors import swallow_errors
from warmfleet_worker.vllm_hooks.wrap import first_time, wrap

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

logger = logging.getLogger("vllm.warmfleet")

_FOLLOWED = "__warmfleet_tracker__"  # attribute of a manager that is followed: its Tracker
_FAILED = "could not follow the tier in CPU memory"


@dataclass(frozen=True, slots=True)
class CpuTier:
    """A tier that is followed. bytes_per_token: in the memory of one GPU, because GPUs load side by side. loads: which
    blocks the engine loads, too, that it would compute if only its GPU held them. store: the folder behind it, if there
    is one.
    """

    tracker: Tracker
    capacity_blocks: int
    bytes_per_token: int
    loads: Mapping[str, int] = field(default_factory=dict)
    store: StoreTier | None = None

    def announced(self) -> dict[str, int]:
        return {"capacity_blocks": self.capacity_blocks, "bytes_per_token": self.bytes_per_token, **self.loads}


class CpuTiers:
    """Follows the tiers of this process's Schedulers. ``hook`` must be called before a Scheduler is made."""

    def __init__(self) -> None:
        self.meter = LoadMeter()
        self._lacks: str | None = None

    def hook(self, vllm_config: Any) -> None:
        """Hook the classes of vLLM once, if this engine has a KV connector at all."""
        if self._lacks is not None or getattr(vllm_config, "kv_transfer_config", None) is None:
            return
        self._lacks = missing(Part.TIER)
        if self._lacks:
            return
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import metrics
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        if first_time(CPUOffloadingManager):
            wrap(CPUOffloadingManager, "complete_store", _complete_store)
            wrap(CPUOffloadingManager, "prepare_store", _prepare_store)
            wrap(CPUOffloadingManager, "reset_cache", _reset_cache)
        if first_time(metrics.OffloadingConnectorStats):
            counts = functools.partial(_increase_counter, self.meter, metrics._TransferMetricName)  # noqa: SLF001 - names
            wrap(metrics.OffloadingConnectorStats, "increase_counter", counts)

    def find(self, scheduler: Any, block_tokens: int, *, drops: bool = False) -> CpuTier | None:
        """Follow this Scheduler's tier from now on; None if it has none, or one whose keys are not its blocks'.

        drops: the engine computes its last cached block once more, for a draft model.
        """
        schedulers = list(_offloading_schedulers(getattr(scheduler, "connector", None)))
        if not schedulers:
            return None
        if self._lacks:
            refuse(Part.TIER, self._lacks)
            return None
        config = scheduler.kv_cache_manager.kv_cache_config
        managers = [(each.manager, primary) for each in schedulers for primary in _primary_tiers(each.manager)]
        unknown = {
            "its manager is of another kind, or there are several": len(managers) != 1,
            "a chunk has several blocks": any(each.config.blocks_per_chunk != 1 for each in schedulers),
            "the model has several KV cache groups": len(config.kv_cache_groups) != 1,
        }
        if any(unknown.values()):
            reasons = "; ".join(reason for reason, is_so in unknown.items() if is_so)
            logger.warning("warmfleet: what the tier holds is not reported, so routers do not expect it: %s", reasons)
            return None
        [(outer, manager)] = managers
        chunks = getattr(manager, "_num_chunks", None) or manager._num_blocks  # noqa: SLF001 - the latter in 0.28, 0.29
        tracker = Tracker()
        setattr(manager, _FOLLOWED, tracker)
        loads, store = _loads(schedulers[0].config, drops=drops), None
        with swallow_errors("could not follow the tier behind CPU memory"):
            store = find_store(outer, block_tokens, loads)
        return CpuTier(tracker, int(chunks), _block_bytes(config) // block_tokens, loads, store)


def _loads(config: Any, *, drops: bool) -> dict[str, int]:
    """Return which blocks this OffloadingConnector of a model with one group of full attention loads besides.

    All versions look for all whole blocks of a prompt. Since 0.30 the cache of a draft model may be no group that vLLM
    marks. Then the connector drops no block for its sake, although the engine's own cache does.
    """
    dropped = drops and not config.kv_group_configs[0].is_eagle_group
    return {"loads_last": 1} | ({"loads_dropped": 1} if dropped else {})


def _block_bytes(config: Any) -> int:
    """Return the bytes of a block in the memory of a GPU, as the OffloadingConnector counts them."""
    sizes = [int(tensor.size) for tensor in config.kv_cache_tensors]
    # Since 0.29, and in 0.28 with packed layers, each tensor names the size of the memory that all of them share.
    share = bool(sizes) and getattr(config.kv_cache_tensors[0], "block_stride", 0) > 0
    return (sizes[0] if share else sum(sizes)) // int(config.num_blocks)


def _offloading_schedulers(connector: Any) -> Iterator[Any]:
    """Yield the scheduler's half of each OffloadingConnector; a MultiConnector has several connectors."""
    for each in (connector, *getattr(connector, "_connectors", ())):
        half = getattr(each, "connector_scheduler", None)
        if hasattr(half, "manager") and hasattr(half, "config"):
            yield half


def _primary_tiers(manager: Any) -> Iterator[Any]:
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    first = getattr(manager, "primary_tier", manager)
    if isinstance(first, CPUOffloadingManager):
        yield first


def _hashes(keys: Iterable[bytes]) -> list[bytes]:
    """Return the block hashes of these keys, which end in the number of the KV cache group in 4 bytes."""
    return [bytes(key[-wire.HASH_BYTES - 4 : -4]) for key in keys]


def _complete_store(original: Any, manager: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(manager, keys, *args, **kwargs)
    tracker = vars(manager).get(_FOLLOWED)
    if tracker is not None and kwargs.get("success", args[1] if len(args) > 1 else True):
        with swallow_errors(_FAILED):
            tracker.stored(_hashes(keys))
    return result


def _prepare_store(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(manager, *args, **kwargs)
    tracker = vars(manager).get(_FOLLOWED)
    if tracker is not None and result is not None and result.evicted_keys:
        with swallow_errors(_FAILED):
            tracker.removed(_hashes(result.evicted_keys))
    return result


def _reset_cache(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(manager, *args, **kwargs)
    tracker = vars(manager).get(_FOLLOWED)
    if tracker is not None:
        tracker.cleared()
    return result


def _increase_counter(meter: LoadMeter, names: Any, original: Any, stats: Any, *args: Any, **kwargs: Any) -> Any:
    with swallow_errors("could not read the time of a load"):
        name, value = [*args, *kwargs.values()][:2] if len(args) + len(kwargs) > 1 else ("", 0)
        if name == names.LOAD_BYTES:
            meter.loaded(float(value))
        elif name == names.LOAD_TIME:
            meter.took(float(value))
    return original(stats, *args, **kwargs)
