"""vLLM's internals are known in one package only, and an error of ours never reaches vLLM."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from warmfleet_worker.vllm_hooks import engine_core
from warmfleet_worker.vllm_hooks.swallow_errors import swallow_errors
from warmfleet_worker.vllm_hooks.wrap import first_time, wrap

PACKAGE = Path(__file__).parents[2] / "worker_plugin/warmfleet_worker"


def imports_vllm(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        if any(name.split(".")[0] == "vllm" for name in names):
            return True
    return False


def test_only_the_hooks_import_vllm() -> None:
    found = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py") if imports_vllm(path)}
    assert found == {"vllm_hooks"}


def test_an_error_of_ours_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "vllm.warmfleet"), swallow_errors("could not read"):
        raise AttributeError("renamed")
    assert [record.getMessage() for record in caplog.records] == [
        "warmfleet: could not read: this engine is not, or not fully, reported"
    ]


def test_an_exception_that_ends_the_process_is_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt), swallow_errors("could not read"):
        raise KeyboardInterrupt


def test_a_function_is_replaced_once_and_still_called() -> None:
    owner = SimpleNamespace(double=lambda number: 2 * number)
    assert first_time(owner)
    assert not first_time(owner)
    wrap(owner, "double", lambda original, number: original(number) + 1)
    assert owner.double(4) == 9


def test_steps_are_counted_while_the_scheduler_has_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A paused engine keeps its requests and makes no step: nothing is wrong with it."""
    monkeypatch.setattr(engine_core, "full_attention_group", lambda _scheduler: (0, 16, True))
    monkeypatch.setattr(engine_core, "track", lambda *_: None)
    monkeypatch.setattr(engine_core, "missing", lambda _part: "")
    unfinished = [1]
    scheduler = SimpleNamespace(
        vllm_config=None,
        kv_cache_manager=SimpleNamespace(block_pool=SimpleNamespace(cached_block_hash_to_block=None)),
        get_request_counts=lambda: (1, 0),
        get_num_unfinished_requests=lambda: unfinished[0],
        requests={},
    )
    reporter = engine_core.SchedulerReporter(scheduler, "redis://x")
    assert (reporter.load().running, reporter.load().steps) == (1, 0)
    reporter.scheduled(object())
    assert reporter.load().steps == 1
    reporter.done(object(), {})
    assert reporter.load().steps == 2
    unfinished[0] = 0
    assert (reporter.load().running, reporter.load().steps) == (1, None)
