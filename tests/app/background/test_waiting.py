"""A replica logs once why each model waits, and once that the wait is over, instead of at every reading."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from warmfleet.background.waiting_models import Waiting

if TYPE_CHECKING:
    import pytest


def pool(*states: str, contacted: bool = True, usable: bool = True, announced: bool = True) -> Any:
    server: dict[str, Any] = {"artifacts": {"tokenizer.json": {}} if announced else {}}
    workers = [
        SimpleNamespace(worker_id=f"w{number}", state=state, routable=state == "proven", server=server)
        for number, state in enumerate(states)
    ]
    return SimpleNamespace(
        tag="demo", name="demo", contacted=contacted, usable=usable, view=SimpleNamespace(workers=workers)
    )


def test_what_a_model_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmfleet")
    pools: Any = SimpleNamespace(all=(), leaving=(), named=lambda _name: pools.all, moved=lambda *_: {})
    waiting = Waiting(pools)
    seen = (
        pool(contacted=False),
        pool(),
        pool("pending", "silent"),
        pool("proven", "silent", usable=False),
        pool("proven", "silent", usable=False, announced=False),
        pool("proven", "silent"),
        pool("proven", "proven"),
        pool("silent", "silent"),
    )
    for shown in seen:
        pools.all = (shown,)
        waiting.look()
        waiting.look()
    pools.leaving = pools.all = (pool(),)  # the pool is removed, so no model waits for it
    waiting.look()
    told = [(record.levelname, record.getMessage().split(":")[0]) for record in caplog.records]
    assert told == [
        ("INFO", "demo waits for its first engine"),
        ("INFO", "demo waits for its engines"),
        ("INFO", "demo waits for the tokenizer of its engines"),
        ("INFO", "demo is served, but texts go by load, as no engine announces a tokenizer"),
        ("INFO", "demo is served"),
        ("INFO", "demo is served"),
        ("WARNING", "demo waits for its engines"),
    ]
    assert "`warmfleet doctor`" in caplog.messages[0]
    assert "none of 2 takes requests yet (w0: pending, w1: silent)" in caplog.messages[1]
    assert "set WARMFLEET_TOKENIZER" in caplog.messages[3]
    assert caplog.messages[5].endswith("2 of 2 engines take requests")


def test_what_a_pool_waits_for_beside_others(caplog: pytest.LogCaptureFixture) -> None:
    """Engines that moved to another pool are not missing, and a new pool needs the same plugin as its siblings."""
    caplog.set_level(logging.INFO, "warmfleet")
    other = pool("proven")
    moved: dict[str, str] = {}
    pools: Any = SimpleNamespace(leaving=(other,), named=lambda _name: pools.all, moved=lambda *_: moved)
    waiting = Waiting(pools)
    for state in (pool(), pool("proven", "proven"), pool("silent", "silent")):
        pools.all = (state, other)
        moved = {worker.worker_id: "demo#1" for worker in state.view.workers}
        waiting.look()
    told = [(record.levelname, record.getMessage().split(":")[0]) for record in caplog.records]
    assert told == [
        ("INFO", "demo has no engine, other pools of its model have"),
        ("INFO", "demo is served"),
        ("INFO", "demo has no engine left"),
    ]
    assert "`warmfleet pools drain POOL --move`" in caplog.messages[0]


def test_engines_that_went_to_another_model_are_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    alone = pool("proven")
    pools: Any = SimpleNamespace(leaving=(), named=lambda _name: (alone,), moved=lambda *_: {"w0": "another"})
    waiting = Waiting(pools)
    for alone in (pool("proven"), pool("silent")):
        pools.all = (alone,)
        waiting.look()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no engine left" in caplog.text
