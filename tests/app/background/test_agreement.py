"""A replica warns once if workers of one model differ, and counts these workers for as long as they differ."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from tests.support.fleet.constants_alone import ConstantsAlone
from tests.support.requests.image_rules import fact

from warmfleet.background.view_reader import ViewReader
from warmfleet.fleet import Flag, LoadRow, WorkerState, WorkerView
from warmfleet.fleet.worker.records import Records
from warmfleet.metrics import Metrics
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.pool import Pool
from warmfleet.pools.served_models import Pools
from warmfleet.settings import Settings
from warmfleet.timing import Timing
from warmfleet_worker.protocol.wire import Scheme, default_none_hash

if TYPE_CHECKING:
    import pytest

    from warmfleet.fleet import Fleet
    from warmfleet.pools.identities import Identities


def worker(name: str, tokenizer: str, block_tokens: int = 16, images: dict[str, Any] | None = None) -> WorkerView:
    scheme = Scheme("sha256_cbor", default_none_hash("sha256_cbor"), block_tokens)
    record = {"server_id": name, "scheme": scheme.as_dict()}
    server = {"artifacts": {"tokenizer.json": {"sha256": tokenizer}}, "facts": {"images": images}}
    load = LoadRow(flags=Flag.SERVER, scheme=scheme.scheme_id)
    return WorkerView(f"{name}.0", record, server, load, 1.0, WorkerState.PROVEN, "proven", f"http://{name}", ["m"])


class Fixed(ConstantsAlone):
    """A fleet with the workers in ``now``; every identity is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.now: list[WorkerView] = []
        self.records = Records("m")
        self.workers = self.images = self

    def reading(self) -> asyncio.Future[list[WorkerView]]:
        future: asyncio.Future[list[WorkerView]] = asyncio.get_running_loop().create_future()
        future.set_result(self.now)
        return future

    def begin_anew(self) -> None:
        """Forget which reports of images were read."""

    async def news(self) -> dict[bytes, float]:
        return {}

    async def look(self, reading: list[WorkerView]) -> list[WorkerView]:
        return reading

    def known(self, key: str) -> Any:
        return SimpleNamespace(kind="exact", key=key)

    def keep(self, used: set[str]) -> None:
        assert len(used) == 1


async def test_workers_that_differ_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    fixed, metrics = Fixed(), Metrics()
    pools = Pools([Pool("m", cast("Fleet", fixed), DegradedMode(1.0))])
    reader = ViewReader(pools, cast("Identities", fixed), Settings(models=("m",)), Timing(), metrics)

    async def read(*workers: WorkerView) -> list[str]:
        caplog.clear()
        fixed.now = list(workers)
        await reader.refresh()
        await reader.refresh()
        return [record.message for record in caplog.records if record.levelname == "WARNING"]

    def outvoted(matter: str) -> float:
        value = metrics.registry.get_sample_value("warmfleet_outvoted_workers", {"what": matter})
        assert value is not None
        return value

    same = [worker("a", "aaaaaaaa"), worker("b", "aaaaaaaa")]
    seeing = [worker(name, "aaaaaaaa", images=fact("m")) for name in ("a", "b")]
    assert await read(*same) == []
    assert (outvoted("identity"), outvoted("scheme")) == (0, 0)
    (line,) = await read(worker("0", "bbbbbbbb"), *same)
    assert all(name in line for name in ("0.0", "a.0, b.0", "aaaaaaaa", "bbbbbbbb"))
    assert line.index("aaaaaaaa") < line.index("bbbbbbbb"), "the one in use comes first"
    assert (outvoted("identity"), outvoted("scheme")) == (1, 0)
    assert len(await read(worker("0", "bbbbbbbb"), worker("1", "bbbbbbbb"), *same)) == 1
    (line,) = await read(worker("0", "aaaaaaaa", 32), *same)
    assert "scheme" in line
    assert "32" in line
    assert (outvoted("identity"), outvoted("scheme")) == (0, 1)
    (line,) = await read(worker("0", "aaaaaaaa", images=fact("m", made="0" * 16)), *seeing)
    assert all(name in line for name in ("images", "a.0, b.0", "0.0"))
    assert (outvoted("identity"), outvoted("images")) == (0, 1)
    assert pools.all[0].view.other_images == {"0.0"}
    many = [worker(str(size), "aaaaaaaa", size) for size in (32, 48, 64, 80, 96)]
    (_, line) = await read(*same, *many)
    assert "80.0, 96.0 are not found" in line
    assert (outvoted("scheme"), outvoted("unhashed")) == (5, 2)
    assert len(reader._hashers) == 4
    assert await read(*same) == []
    assert (outvoted("identity"), outvoted("scheme"), outvoted("unhashed"), len(reader._hashers)) == (0, 0, 0, 1)
