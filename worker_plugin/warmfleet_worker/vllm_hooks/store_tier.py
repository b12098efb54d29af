"""The folder behind vLLM's tier in CPU memory (its tier of type ``fs``), which several engines may read.

vLLM asks the folder for each block that it needs, and deletes nothing there; whoever owns the folder may. So this
engine knows only a part of what is there, and reports that: the blocks that it has stored or found, and the first block
that a request missed, with which the rest of the prompt is useless.

Engines read the same folder if they see the same mark in it, wherever each has mounted it: a file with a random name,
which the first of them writes.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmfleet_worker.load_meter import LoadMeter
from warmfleet_worker.tracker import Findings
from warmfleet_worker.vllm_hooks.block_table import hash_of_key
from warmfleet_worker.vllm_hooks.compatibility import Part, missing, refuse
from warmfleet_worker.vllm_hooks.swallow_errors import swallow_errors
from warmfleet_worker.vllm_hooks.wrap import wrap

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger("vllm.warmfleet")

MARK = "warmfleet-store"  # name of the file with the mark
_MARK_FORM = re.compile(r"[0-9a-f]{32}")
MARK_SECONDS = 2.0  # longest time until the engine that makes the file has written the mark into it


@dataclass(frozen=True, slots=True)
class StoreTier:
    """A folder that is followed. folder: where the mark is. rank: the number at the end of the folder of its blocks.
    loads: as in ``CpuTier``.
    """

    findings: Findings
    meter: LoadMeter
    bytes_per_token: int
    folder: Path
    rank: int
    loads: Mapping[str, int] = field(default_factory=dict)

    def announced(self, scheme_id: int) -> Mapping[str, int | str]:
        """Return the announcement. Not for the engine's thread, because the folder may be slow."""
        mark = mark_of(self.folder)
        if not mark:
            logger.warning("warmfleet: %s has no mark: routers take it for this engine's own", self.folder)
        name = f"{mark or secrets.token_hex(16)} {self.rank} {scheme_id}"
        store = hashlib.sha256(name.encode()).hexdigest()[:16]
        return {"bytes_per_token": self.bytes_per_token, "store": store, **self.loads}


def mark_of(folder: Path) -> str:
    """Return the folder's mark, which is made if there is none; empty if the folder can be neither read nor written."""
    path = folder / MARK
    with suppress(OSError), path.open("x") as file:
        file.write(secrets.token_hex(16))
    deadline = time.monotonic() + MARK_SECONDS
    while True:
        with suppress(OSError, ValueError):
            found = path.read_text()
            if _MARK_FORM.fullmatch(found):
                return found
        if time.monotonic() > deadline:
            return ""
        time.sleep(0.05)


def find_store(manager: Any, block_tokens: int, loads: Mapping[str, int]) -> StoreTier | None:
    """Follow the folder behind this manager's tier in CPU memory from now on; None if there is none, or several."""
    tiers = getattr(manager, "secondary_tiers", ())
    if not tiers:
        return None
    lacks = missing(Part.STORE)
    if lacks:
        refuse(Part.STORE, lacks)
        return None
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

    folders = [tier for tier in tiers if isinstance(tier, FileSystemTierManager)]
    if len(folders) != len(tiers) or len(tiers) > 1:
        kinds = ", ".join(str(getattr(tier, "tier_type", type(tier).__name__)) for tier in tiers)
        logger.warning("warmfleet: tiers behind the CPU memory: %s: only a single one of type fs is reported", kinds)
    if len(folders) != 1:
        return None
    [tier] = folders
    block_bytes = int(manager.primary_tier.get_kv_memoryview().strides[0])
    mapper = tier.file_mapper
    store = StoreTier(
        Findings(hash_of_key(0)),
        LoadMeter(),
        block_bytes // block_tokens,
        Path(mapper.base_path),
        int(mapper.rank),
        loads,
    )
    _follow(tier, store, block_bytes)
    return store


def _follow(tier: Any, store: StoreTier, block_bytes: int) -> None:
    from vllm.v1.kv_offload.base import LookupResult

    hit, miss, findings, meter = LookupResult.HIT, LookupResult.MISS, store.findings, store.meter
    stores, loads = dict[int, tuple[bytes, ...]](), dict[int, tuple[bytes, ...]]()  # keys by job under way

    def lookup(original: Any, key: bytes, *args: Any, **kwargs: Any) -> Any:
        result = original(key, *args, **kwargs)
        if result is hit:
            findings.found((key,))
        elif result is miss:
            findings.missed(key)
        return result

    def submit(jobs: dict[int, tuple[bytes, ...]], original: Any, job: Any, *args: Any, **kwargs: Any) -> Any:
        jobs[job.job_id] = tuple(job.keys)
        return original(job, *args, **kwargs)

    def get_finished_jobs(original: Any) -> Any:
        results = list(original())
        with swallow_errors("could not follow the tier behind CPU memory"):
            for result in results:
                stored, loaded = stores.pop(result.job_id, ()), loads.pop(result.job_id, ())
                if result.success:
                    findings.found(stored)
                if result.success and loaded and result.transfer_time is not None:
                    meter.loaded(len(loaded) * block_bytes)
                    meter.took(float(result.transfer_time))
        return results

    wrap(tier, "lookup", lookup)
    wrap(tier, "submit_store", functools.partial(submit, stores))
    wrap(tier, "submit_load", functools.partial(submit, loads))
    wrap(tier, "get_finished_jobs", get_finished_jobs)
