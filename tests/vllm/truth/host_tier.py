"""vLLM's offloading to CPU memory on an engine that has no GPU: only the copy between both memories is of this file.

Named by ``spec_module_path`` and ``spec_name`` of ``--kv-transfer-config``. Block table, manager and events are vLLM's.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies at once, block by block. caches: the engine's KV caches; host: makes its memory for pages of a size."""

    def __init__(self, caches: Any, host: Callable[[int], Any]) -> None:
        pages = [(cache.tensor.view(torch.int8), cache.page_size_bytes) for cache in caches.tensors]
        self._device = [tensor.view(-1, size) for tensor, size in pages]
        self._host = [host(size) for _, size in pages]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copied(job_id, (self._device, src_spec), (self._host, dst_spec))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copied(job_id, (self._host, src_spec), (self._device, dst_spec))

    def _copied(self, job_id: int, source: Any, target: Any) -> bool:
        began, size = time.monotonic(), 0
        numbers = [torch.as_tensor(spec.block_ids, dtype=torch.long) for _, spec in (source, target)]
        for read, written in zip(source[0], target[0], strict=True):
            written[numbers[1]] = read[numbers[0]]
            size += len(numbers[0]) * read.shape[1]
        self._ended.append(TransferResult(job_id, True, size, max(time.monotonic() - began, 1e-6)))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Return at once, because every copy ended before its call returned."""


class HostTier(CPUOffloadingSpec):  # type: ignore[misc]
    def get_worker(self, kv_caches: Any) -> CopyWorker:
        def memory(size: int) -> Any:
            return torch.zeros((self.num_chunks, size), dtype=torch.int8)

        self._worker: CopyWorker | None = self._worker or CopyWorker(kv_caches, memory)
        assert self._worker is not None
        return self._worker


class HostTierBeforeOthers(TieringOffloadingSpec):  # type: ignore[misc]
    """With ``secondary_tiers``, which read and write the host's memory in a file below /dev/shm."""

    def get_worker(self, kv_caches: Any) -> CopyWorker:
        if not self._worker:
            self._region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker: CopyWorker | None = CopyWorker(kv_caches, self._region.create_next_worker_view)
        assert self._worker is not None
        return self._worker
