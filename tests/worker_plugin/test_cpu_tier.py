"""The tier in CPU memory is followed by wrapped functions of vLLM's manager, here of a manager that looks like it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from warmfleet_worker.load_meter import LEAST_LOADS, LoadMeter
from warmfleet_worker.vllm_hooks import cpu_tier
from warmfleet_worker.vllm_hooks.cpu_tier import CpuTiers

if TYPE_CHECKING:
    from collections.abc import Iterable

CONNECTOR = SimpleNamespace(kv_transfer_config=object())


def key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


def hashes(*numbers: int) -> set[bytes]:
    return {number.to_bytes(8, "big") for number in numbers}


@dataclass
class Stored:
    evicted_keys: list[bytes] = field(default_factory=list)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Modules in place of vLLM's."""

    class Manager:
        _num_chunks = 4

        def __init__(self) -> None:
            self.chunks: dict[bytes, bool] = {}

        def prepare_store(self, keys: Iterable[bytes], context: object) -> Stored | None:
            keys = [each for each in keys if each not in self.chunks]
            if len(keys) > self._num_chunks:
                return None
            evicted = list(self.chunks)[: max(0, len(self.chunks) + len(keys) - self._num_chunks)]
            for each in evicted:
                del self.chunks[each]
            self.chunks.update(dict.fromkeys(keys, False))
            return Stored(evicted)

        def complete_store(self, keys: Iterable[bytes], context: object, success: bool = True) -> None:
            for each in keys:
                self.chunks[each] = True
                if not success:
                    del self.chunks[each]

        def reset_cache(self) -> None:
            self.chunks.clear()

    class Stats:
        def increase_counter(self, counter_name: str, counter_increase_value: float = 1) -> None: ...

    offloading = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
    metrics = SimpleNamespace(
        OffloadingConnectorStats=Stats, _TransferMetricName=SimpleNamespace(LOAD_BYTES="bytes", LOAD_TIME="time")
    )
    modules: dict[str, dict[str, Any]] = {
        "vllm.v1.kv_offload.cpu.manager": {"CPUOffloadingManager": Manager},
        offloading: {"metrics": metrics},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(cpu_tier, "missing", lambda _part: "")
    return SimpleNamespace(Manager=Manager, Stats=Stats)


def scheduler_of(manager: Any, *, blocks_per_chunk: int = 1, groups: int = 1, several: bool = False) -> Any:
    half = SimpleNamespace(manager=manager, config=SimpleNamespace(blocks_per_chunk=blocks_per_chunk))
    connector = SimpleNamespace(connector_scheduler=half)
    if several:
        connector = SimpleNamespace(_connectors=[SimpleNamespace(), connector])
    config = SimpleNamespace(
        kv_cache_groups=[None] * groups, kv_cache_tensors=[SimpleNamespace(size=6_400)] * 2, num_blocks=10
    )
    return SimpleNamespace(connector=connector, kv_cache_manager=SimpleNamespace(kv_cache_config=config))


def test_blocks_appear_when_copied_and_disappear_when_evicted_or_reset(vllm: SimpleNamespace) -> None:
    tiers = CpuTiers()
    tiers.hook(CONNECTOR)
    manager = vllm.Manager()
    tier = tiers.find(scheduler_of(manager), 16)
    assert tier is not None
    assert tier.announced() == {"capacity_blocks": 4, "bytes_per_token": 80, "loads_last": 1}

    def table() -> set[bytes]:
        return set(tier.tracker.table)

    def store(*numbers: int, success: bool = True) -> None:
        keys = [key(number) for number in numbers]
        if manager.prepare_store(keys, None):
            before = table()
            assert before.isdisjoint(hashes(*numbers)), "not before the copy is complete"
            manager.complete_store(keys, None, success)

    store(1, 2, 3)
    assert table() == hashes(1, 2, 3)
    store(4, 5)
    assert table() == hashes(2, 3, 4, 5)
    store(6, success=False)
    assert table() == hashes(3, 4, 5)
    store(7, 8, 9, 10, 11)
    assert table() == hashes(3, 4, 5), "nothing is evicted for what does not fit"
    manager.reset_cache()
    assert table() == set()
    store(1)
    assert table() == hashes(1) == {each[-12:-4] for each in manager.chunks}


@pytest.mark.parametrize(("drops", "marked", "dropped"), [(False, False, 0), (True, True, 0), (True, False, 1)])
def test_a_tier_without_marked_draft_layers_loads_the_block_that_the_engine_drops(
    vllm: SimpleNamespace, *, drops: bool, marked: bool, dropped: int
) -> None:
    tiers, scheduler = CpuTiers(), scheduler_of(vllm.Manager())
    tiers.hook(CONNECTOR)
    scheduler.connector.connector_scheduler.config.kv_group_configs = [SimpleNamespace(is_eagle_group=marked)]
    tier = tiers.find(scheduler, 16, drops=drops)
    assert tier is not None
    assert tier.announced().get("loads_dropped", 0) == dropped


@pytest.mark.parametrize(("tensors", "token_bytes"), [([6_400] * 2, 80), ([(6_400, 640)] * 2, 40), ([], 0)])
def test_a_size_that_all_tensors_share_counts_once(
    vllm: SimpleNamespace, tensors: list[int | tuple[int, int]], token_bytes: int
) -> None:
    """Since 0.29 each tensor has a stride, and the size of the memory of all."""
    tiers, scheduler = CpuTiers(), scheduler_of(vllm.Manager())
    tiers.hook(CONNECTOR)
    scheduler.kv_cache_manager.kv_cache_config.kv_cache_tensors = [
        SimpleNamespace(size=size) if isinstance(size, int) else SimpleNamespace(size=size[0], block_stride=size[1])
        for size in tensors
    ]
    tier = tiers.find(scheduler, 16)
    assert tier is not None
    assert tier.bytes_per_token == token_bytes


def test_a_manager_that_keeps_bound_methods_is_followed_in_a_multi_connector(vllm: SimpleNamespace) -> None:
    tiers = CpuTiers()
    tiers.hook(CONNECTOR)

    class Primary(vllm.Manager):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.prepare_write, self.complete_write = self.prepare_store, self.complete_store

    tiered = SimpleNamespace(primary_tier=Primary())
    tier = tiers.find(scheduler_of(tiered, several=True), 16)
    assert tier is not None
    tiered.primary_tier.prepare_write([key(1)], None)
    tiered.primary_tier.complete_write([key(1)], None)
    assert set(tier.tracker.table) == hashes(1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"blocks_per_chunk": 2}, "a chunk has several blocks"),
        ({"groups": 2}, "the model has several KV cache groups"),
        ({"manager": SimpleNamespace()}, "its manager is of another kind, or there are several"),
    ],
    ids=str,
)
def test_a_tier_whose_keys_are_not_blocks_is_not_reported(
    vllm: SimpleNamespace, change: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = CpuTiers()
    tiers.hook(CONNECTOR)
    manager = vllm.Manager()
    assert tiers.find(scheduler_of(**{"manager": manager} | change), 16) is None
    assert f"is not reported, so routers do not expect it: {reason}" in caplog.text
    manager.prepare_store([key(1)], None)
    manager.complete_store([key(1)], None)


def test_an_engine_without_such_a_connector_is_left_alone(vllm: SimpleNamespace) -> None:
    tiers, plain = CpuTiers(), vllm.Manager.reset_cache
    tiers.hook(SimpleNamespace(kv_transfer_config=None))
    assert vllm.Manager.reset_cache is plain
    assert tiers.find(SimpleNamespace(connector=None), 16) is None
    tiers.hook(CONNECTOR)
    assert tiers.find(SimpleNamespace(connector=SimpleNamespace()), 16) is None


def test_a_vllm_that_differs_is_named_in_the_log(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_tier, "missing", lambda _part: "there is no such class")
    tiers = CpuTiers()
    tiers.hook(CONNECTOR)
    assert tiers.find(scheduler_of(vllm.Manager()), 16) is None
    assert "there is no such class: the blocks in its tier in CPU memory are not reported" in caplog.text


def test_the_time_to_load_a_byte_is_measured_by_vllms_counters(vllm: SimpleNamespace) -> None:
    tiers = CpuTiers()
    tiers.hook(CONNECTOR)
    stats = vllm.Stats()
    for number in range(LEAST_LOADS):
        assert tiers.meter.ps_per_byte == 0, number
        stats.increase_counter("bytes", 25_000_000)
        stats.increase_counter(counter_name="time", counter_increase_value=0.001)
        stats.increase_counter("other", 5)
        stats.increase_counter("other")
    assert tiers.meter.ps_per_byte == 40


def test_the_last_loads_count_most() -> None:
    meter = LoadMeter()
    for seconds in [0.001] * 100 + [0.005] * 200:
        meter.loaded(25_000_000)
        meter.took(seconds)
    assert 190 < meter.ps_per_byte <= 200
