"""The folder behind the tier in CPU memory: what this engine finds there is reported, and who shares the folder."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from enum import Enum, auto
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from warmfleet_worker.load_meter import LEAST_LOADS, LoadMeter
from warmfleet_worker.tracker import Findings
from warmfleet_worker.vllm_hooks import store_tier
from warmfleet_worker.vllm_hooks.store_tier import MARK, StoreTier, find_store, mark_of

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_BYTES = 25_000_000


class LookupResult(Enum):
    MISS = auto()
    HIT = auto()
    RETRY = auto()


@dataclass
class Job:
    job_id: int
    keys: list[bytes]


class FolderTier:
    """A tier that looks like vLLM's of type ``fs``."""

    def __init__(self, folder: Path) -> None:
        self.file_mapper = SimpleNamespace(base_path=str(folder / "model_abc"), rank=0)
        self.answers: dict[bytes, LookupResult] = {}
        self.ended: list[Any] = []
        self.jobs: list[Job] = []

    def lookup(self, key: bytes, _context: object) -> LookupResult:
        return self.answers[key]

    def submit_store(self, job_metadata: Job) -> None:
        self.jobs.append(job_metadata)

    def submit_load(self, job_metadata: Job) -> None:
        self.jobs.append(job_metadata)

    def get_finished_jobs(self) -> list[Any]:
        ended, self.ended = self.ended, []
        return ended


def key(number: int) -> bytes:
    return number.to_bytes(32, "big") + bytes(4)


def ended(job_id: int, *, success: bool = True, transfer_time: float | None = 0.001) -> Any:
    return SimpleNamespace(job_id=job_id, success=success, transfer_time=transfer_time)


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in place of vLLM's."""
    modules: dict[str, dict[str, Any]] = {
        "vllm.v1.kv_offload.tiering.fs.manager": {"FileSystemTierManager": FolderTier},
        "vllm.v1.kv_offload.base": {"LookupResult": LookupResult},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(store_tier, "missing", lambda _part: "")


def manager_of(*tiers: Any) -> Any:
    memory = memoryview(bytearray(2 * 64)).cast("B", (2, 64))
    view = SimpleNamespace(strides=(BLOCK_BYTES,), raw=memory)
    return SimpleNamespace(secondary_tiers=list(tiers), primary_tier=SimpleNamespace(get_kv_memoryview=lambda: view))


def reported(store: StoreTier) -> list[tuple[str, list[int]]]:
    """What waits to be published: operations and the numbers of their blocks."""
    return [
        (run.operation, [int.from_bytes(run.packed[at : at + 8], "big") for at in range(0, len(run.packed), 8)])
        for run in store.findings.drain(1_000)
    ]


def test_what_is_stored_found_and_missed_is_reported(tmp_path: Path) -> None:
    tier = FolderTier(tmp_path)
    store = find_store(manager_of(tier), 50, {})
    assert store is not None
    assert store.bytes_per_token == BLOCK_BYTES // 50
    tier.submit_store(Job(1, [key(1), key(2)]))
    tier.submit_store(Job(2, [key(3)]))
    tier.submit_load(Job(3, [key(4)]))
    assert [job.job_id for job in tier.jobs] == [1, 2, 3], "vLLM's own function is called"
    assert tier.get_finished_jobs() == []
    assert reported(store) == [], "not before they are written"
    tier.ended = [ended(2, success=False), ended(1), ended(3), ended(99)]
    assert [result.job_id for result in tier.get_finished_jobs()] == [2, 1, 3, 99]
    assert reported(store) == [("stored", [1, 2])]
    tier.answers = {key(5): LookupResult.RETRY, key(6): LookupResult.HIT, key(7): LookupResult.MISS}
    assert [tier.lookup(each, None) for each in tier.answers] == list(tier.answers.values())
    assert reported(store) == [("stored", [6]), ("removed", [7])]


def test_the_time_to_load_a_byte_is_measured(tmp_path: Path) -> None:
    tier = FolderTier(tmp_path)
    store = find_store(manager_of(tier), 50, {})
    assert store is not None
    for number in range(LEAST_LOADS):
        assert store.meter.ps_per_byte == 0
        tier.submit_load(Job(number, [key(1), key(2)]))
        tier.submit_store(Job(1_000 + number, [key(1)]))
        tier.ended = [ended(number, transfer_time=0.01), ended(1_000 + number, transfer_time=9)]
        tier.get_finished_jobs()
    assert store.meter.ps_per_byte == 200
    tier.submit_load(Job(5, [key(1)]))
    tier.ended = [ended(5, transfer_time=None)]
    tier.get_finished_jobs()
    assert store.meter.ps_per_byte == 200


def test_other_tiers_are_not_reported_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert find_store(SimpleNamespace(), 16, {}) is None
    assert find_store(manager_of(), 16, {}) is None
    assert not caplog.text
    peer = SimpleNamespace(tier_type="p2p")
    assert find_store(manager_of(peer), 16, {}) is None
    assert find_store(manager_of(FolderTier(tmp_path), FolderTier(tmp_path)), 16, {}) is None
    assert caplog.text.count("only a single one of type fs is reported") == 2
    assert find_store(manager_of(FolderTier(tmp_path), peer), 16, {}) is not None
    assert "p2p" in caplog.text


def test_a_vllm_that_differs_is_named_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_tier, "missing", lambda _part: "there is no such tier")
    assert find_store(manager_of(FolderTier(tmp_path)), 16, {}) is None
    assert "there is no such tier: the blocks in its tier behind CPU memory are not reported" in caplog.text


def test_a_mark_tells_who_reads_the_same_folder(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.symlink_to(here)  # mounted elsewhere
    other = tmp_path / "other"
    other.mkdir()

    def named(folder: Path, rank: int = 0, scheme_id: int = 7) -> object:
        store = StoreTier(Findings(), LoadMeter(), 100, folder, rank)
        assert store.announced(scheme_id)["bytes_per_token"] == 100
        return store.announced(scheme_id)["store"]

    assert named(here) == named(there) == named(here)
    assert len({named(here), named(other), named(here, rank=1), named(here, scheme_id=8)}) == 4
    missing = tmp_path / "missing"
    assert named(missing) != named(missing), "without a mark each engine has its own store"


def test_engines_that_begin_together_agree_on_the_mark(tmp_path: Path) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(mark_of(tmp_path))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 1
    assert found[0] == (tmp_path / MARK).read_text()


def test_a_mark_that_is_none_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_tier, "MARK_SECONDS", 0.1)
    (tmp_path / MARK).write_text("../../etc")
    assert mark_of(tmp_path) == ""
    (tmp_path / MARK).write_bytes(b"\xff\xfe")
    assert mark_of(tmp_path) == ""
