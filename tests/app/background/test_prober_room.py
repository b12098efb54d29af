"""The prober keeps room for new workers while other workers let their probes hang."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from warmfleet.background.probe import Result
from warmfleet.background.prober import AT_ONCE, Prober
from warmfleet.fleet import WorkerState
from warmfleet.timing import Timing


class Hanging(Prober):
    """A prober whose probes of ``fake…`` hang until they are released, and whose other probes end at once."""

    def __init__(self, workers: list[Any]) -> None:
        view = SimpleNamespace(workers=workers, identity=None, reference=None)
        pool = SimpleNamespace(tag="m", view=view)
        settings = SimpleNamespace(tokenizer="", prewarm_prefixes=0)
        pools: Any = SimpleNamespace(all=[pool])
        super().__init__(pools, _any(), _any(settings), Timing(), _any())
        self.begun: list[str] = []
        self.released = asyncio.Event()

    async def _result(self, pool: Any, worker: Any) -> Result:
        self.begun.append(worker.worker_id)
        if worker.worker_id.startswith("fake"):
            await self.released.wait()
        return Result("")

    async def _record(self, pool: Any, worker: Any, result: Result) -> None: ...


def _any(given: Any = None) -> Any:
    return given or _Anything()


class _Anything:
    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: object, **__: object) -> Any:
        return self


def joined(name: str, nonce: str = "n") -> Any:
    record = {"nonce": nonce}
    return SimpleNamespace(
        worker_id=name, state=WorkerState.PENDING, server={"url": "x"}, record=record, probed_age_s=None
    )


async def settle(prober: Hanging) -> None:
    await prober.round()
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def fakes() -> list[Any]:
    return [joined(f"fake{number}") for number in range(200)]


async def test_forty_probes_that_hang_delay_no_join(fakes: list[Any]) -> None:
    workers = fakes[:40]
    prober = Hanging(workers)
    await settle(prober)
    workers.append(joined("honest"))
    await settle(prober)
    assert prober.begun[-1] == "honest"
    await prober.close()


async def test_workers_that_join_again_and_again_wait_behind_a_new_one(fakes: list[Any]) -> None:
    """200 fake workers restart all the time: each name is new once, and later they get at most half of the room."""
    workers = list(fakes)
    prober = Hanging(workers)
    for nonce in range(4):  # all fakes have been probed once
        await settle(prober)
        prober.released.set()
        await settle(prober)
        prober.released.clear()
        workers[:] = [joined(worker.worker_id, f"n{nonce}") for worker in workers]
    await settle(prober)
    assert len(set(prober.begun)) == 200
    begun = len(prober.begun)
    workers[:] = [joined(worker.worker_id, "again") for worker in workers]
    await settle(prober)
    assert len(prober.begun) - begun <= AT_ONCE / 2
    workers.append(joined("honest"))
    await settle(prober)
    assert prober.begun[-1] == "honest"
    prober.released.set()
    await prober.close()
