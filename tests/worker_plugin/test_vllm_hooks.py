"""vLLM's internals are known in one package only, and an error of ours never reaches vLLM."""

from __future__ import annotations

import ast
import json
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from warmfleet_worker.config import PublisherConfig
from warmfleet_worker.protocol.transfer import Transfer
from warmfleet_worker.protocol.wire import UNMATCHED, Scheme, WireError
from warmfleet_worker.vllm_hooks import engine_core, eviction
from warmfleet_worker.vllm_hooks.compatibility import Part
from warmfleet_worker.vllm_hooks.engine_core import Group, full_attention_group
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


def plain_reporter(monkeypatch: pytest.MonkeyPatch, requests: dict[str, Any], **scheduler: Any) -> Any:
    """A reporter of a scheduler that has only these attributes beside its requests."""
    monkeypatch.setattr(engine_core, "full_attention_group", lambda _scheduler: Group(0, 16, 16, closed=True))
    monkeypatch.setattr(engine_core, "track", lambda *_: None)
    monkeypatch.setattr(engine_core, "missing", lambda _part: "")
    shown: dict[str, Any] = {
        "vllm_config": None,
        "kv_cache_manager": SimpleNamespace(block_pool=SimpleNamespace(cached_block_hash_to_block=None)),
        "get_request_counts": lambda: (1, 0),
        "get_num_unfinished_requests": lambda: 1,
        "requests": requests,
        "pause_state": 0,
    }
    return engine_core.SchedulerReporter(SimpleNamespace(**(shown | scheduler)), "redis://x")


def test_steps_are_counted_while_the_scheduler_has_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A paused engine keeps its requests and makes no step, which is no fault."""
    unfinished = [1]
    reporter = plain_reporter(monkeypatch, {}, get_num_unfinished_requests=lambda: unfinished[0])
    assert (reporter.load().running, reporter.load().steps) == (1, 0)
    reporter.scheduled(object())
    assert reporter.load().steps == 1
    reporter.done(object(), {})
    assert reporter.load().steps == 2
    unfinished[0] = 0
    assert (reporter.load().running, reporter.load().steps) == (1, None)
    assert not reporter.load().paused
    reporter._scheduler.pause_state = 2
    assert reporter.load().paused


def test_requests_of_the_pool_that_an_engine_has_left_are_foreign_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = plain_reporter(monkeypatch, requests := {})
    ours = [f"chatcmpl-wf-{letter * 22}.x" for letter in "ab"]
    sizes = {"num_computed_tokens": 40, "num_prompt_tokens": 100, "num_tokens": 100}
    requests[ours[0]] = SimpleNamespace(request_id=ours[0], **sizes)
    assert reporter.load().foreign_prefill_tokens == 0
    reporter.moved()
    requests[ours[1]] = SimpleNamespace(request_id=ours[1], **sizes)
    assert reporter.load().foreign_prefill_tokens == 60, "the second was sent by the new pool"


def parallel(**fields: Any) -> Any:
    plain: dict[str, Any] = {"data_parallel_size": 1, "data_parallel_size_local": 1, "data_parallel_index": 0}
    plain |= {"data_parallel_rank_local": None, "data_parallel_external_lb": False, "local_engines_only": False}
    return SimpleNamespace(parallel_config=SimpleNamespace(**(plain | fields)))


@pytest.mark.parametrize(
    ("fields", "server", "rank", "ranks"),
    [
        ({}, "w", 0, 1),
        ({"data_parallel_size": 4, "data_parallel_index": 3, "data_parallel_rank_local": 1}, "w", 3, 4),
        (
            {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_index": 3}
            | {"data_parallel_rank_local": 1, "local_engines_only": True},
            *("w", 1, 2),
        ),
        (
            {"data_parallel_size": 2, "data_parallel_index": 1, "data_parallel_rank_local": 0}
            | {"data_parallel_external_lb": True, "local_engines_only": True},
            *("w-1", 0, 1),
        ),
    ],
    ids=["one core", "a server for all nodes", "a server for each node", "a server for each rank"],
)
def test_a_core_is_named_by_its_server_and_the_rank_that_the_server_knows_it_by(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], server: str, rank: int, ranks: int
) -> None:
    monkeypatch.setenv("WARMFLEET_WORKER_ID", "w")
    config = parallel(**fields)
    assert engine_core.server_id_of(config) == server
    assert engine_core.rank_of(config) == rank
    assert engine_core.ranks_of(config) == ranks


def test_a_pool_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unset shell variable behind the # would name the pool without it."""
    monkeypatch.setenv("WARMFLEET_MODEL", "m#")
    config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="m"))
    with pytest.raises(WireError, match=r"set WARMFLEET_MODEL: 'm#' names no pool .* name one \(m#1\)"):
        engine_core.model_tag(config)


class FullAttentionSpec: ...


class SlidingWindowSpec: ...


def scheduler_of(specs: list[object], sizes: list[int], hashed_by: int, connector: object = None) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    managers = [SimpleNamespace(block_size=size) for size in sizes]
    manager = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
        coordinator=SimpleNamespace(single_type_managers=managers),
    )
    return SimpleNamespace(kv_cache_manager=manager, hash_block_size=hashed_by, connector=connector)


def test_which_group_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group with full attention is reported; other groups and connectors may keep blocks without predecessors."""
    monkeypatch.setattr(engine_core, "is_full_attention", lambda spec: isinstance(spec, FullAttentionSpec))
    full, windows = FullAttentionSpec(), SlidingWindowSpec()
    assert full_attention_group(scheduler_of([full], [16], 16)) == Group(0, 16, 16, closed=True)
    assert full_attention_group(scheduler_of([full], [16], 16, object())) == Group(0, 16, 16, closed=False)
    assert full_attention_group(scheduler_of([windows, full], [16, 32], 16)) == Group(1, 32, 16, closed=False)
    assert not full_attention_group(scheduler_of([windows], [16], 16)).matched


@pytest.mark.parametrize(
    ("caching", "matched", "algorithm"), [(False, True, "none"), (True, False, "no_prefixes"), (False, False, "none")]
)
def test_an_engine_whose_blocks_cannot_be_matched_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, caching: bool, matched: bool, algorithm: str
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    for name in ("v1", "v1.core", "v1.core.kv_cache_utils"):
        monkeypatch.setitem(sys.modules, f"vllm.{name}", ModuleType(f"vllm.{name}"))
    sys.modules["vllm.v1.core"].kv_cache_utils = sys.modules["vllm.v1.core.kv_cache_utils"]  # type: ignore[attr-defined]
    config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=caching))
    with caplog.at_level(logging.INFO, "vllm.warmfleet"):
        scheme = engine_core.scheme_of(config, Group(0, 16, 16, closed=False, matched=matched))
    assert scheme.algorithm == algorithm
    assert [record.getMessage() for record in caplog.records] == [
        f"warmfleet: this engine is chosen by load only: {UNMATCHED[algorithm]}"
    ]
    with pytest.raises(WireError, match=UNMATCHED[algorithm]):
        Scheme.from_dict(scheme.as_dict())


@pytest.mark.parametrize("target", ["", "1"])
def test_a_worker_with_t_lru_does_not_claim_whole_prefixes(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with T-LRU may evict a block of one conversation while later blocks of another stay."""
    monkeypatch.setenv("WARMFLEET_TTFT_TARGET_S", target)
    monkeypatch.setattr(engine_core, "full_attention_group", lambda _scheduler: Group(0, 16, 16, closed=True))
    monkeypatch.setattr(engine_core, "track", lambda *_: None)
    monkeypatch.setattr(engine_core, "missing", lambda _part: "")
    monkeypatch.setattr(eviction, "missing", lambda _part: "")
    pool = SimpleNamespace(cached_block_hash_to_block=None, blocks=[], get_new_blocks=lambda _count: [])
    single = SimpleNamespace(block_size=16, req_to_blocks={})
    manager = SimpleNamespace(
        block_pool=pool,
        enable_caching=True,
        coordinator=SimpleNamespace(single_type_managers=[single]),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[object()]),
        free=lambda _request: None,
    )
    scheduler = SimpleNamespace(vllm_config=None, kv_cache_manager=manager, connector=None, hash_block_size=16)
    reporter = engine_core.SchedulerReporter(scheduler, "redis://x")
    assert reporter._make_config.args[-1].closed is (target == "")


def started(monkeypatch: pytest.MonkeyPatch, none_hash: bytes | None, **scheduler: Any) -> list[PublisherConfig]:
    """Start the publisher of such a scheduler's engine; return what it announces."""
    utils, announced = ModuleType("vllm.v1.core.kv_cache_utils"), []
    vars(utils).update({} if none_hash is None else {"NONE_HASH": none_hash})
    core = ModuleType("vllm.v1.core")
    vars(core).update(kv_cache_utils=utils)
    for module in (ModuleType("vllm"), ModuleType("vllm.v1"), core, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def publisher(config: PublisherConfig, *_: Any) -> Any:
        announced.append(config)
        return SimpleNamespace(start=lambda: None)

    monkeypatch.setattr(engine_core, "WorkerPublisher", publisher)
    monkeypatch.setattr(engine_core, "core_assignment", lambda _config: None)
    cache = SimpleNamespace(enable_prefix_caching=False)
    vllm_config = SimpleNamespace(cache_config=cache, kv_transfer_config=None)
    reporter = plain_reporter(monkeypatch, {}, **{"vllm_config": vllm_config, "connector": None} | scheduler)
    reporter._make_config = lambda: CONFIG
    reporter._stopping.set()  # so that a wait ends at once, without a publisher
    reporter._start_publisher()
    return announced


SCHEME = Scheme("sha256", bytes(32), 16)
CONFIG = PublisherConfig("redis://x", "m", "w.0", "w", 0, SCHEME, 9, 99, "vllm-0.32.0")
FACT = Transfer("decode", "NixlConnector", same=(("a", "b"),))


@pytest.mark.parametrize("lacks", [False, True])
def test_an_engine_announces_the_most_tokens_of_a_step(monkeypatch: pytest.MonkeyPatch, lacks: bool) -> None:
    monkeypatch.setenv("WARMFLEET_WORKER_ID", "w")
    monkeypatch.setattr(engine_core, "scheme_of", lambda *_: SCHEME)
    monkeypatch.setattr(engine_core, "_lacks", lambda part: lacks and part is Part.STEP_SIZE)
    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks=9),
        model_config=SimpleNamespace(served_model_name="m", max_model_len=99),
        parallel_config=SimpleNamespace(
            data_parallel_external_lb=False, local_engines_only=False, data_parallel_index=0
        ),
        scheduler_config=SimpleNamespace() if lacks else SimpleNamespace(max_num_batched_tokens=8_192),
    )
    config = engine_core.publisher_config(vllm_config, "redis://x", Group(0, 16, 16, closed=True))
    assert json.loads(config.join())["step_tokens"] == (0 if lacks else 8_192)


def test_an_engine_announces_how_it_hands_over_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_core, "transfer_of", lambda _scheduler, tokens: FACT if tokens == 16 else None)
    assert [config.transfer for config in started(monkeypatch, b"h", connector=object())] == [FACT]
    assert started(monkeypatch, None, connector=object()) == [], "its connector's handshake comes before NONE_HASH"
    assert [config.transfer for config in started(monkeypatch, None)] == [FACT], "without a connector nothing comes"


def test_a_connector_that_cannot_be_read_costs_its_announcement_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def renamed(*_: object) -> None:
        raise AttributeError("renamed")

    monkeypatch.setattr(engine_core, "transfer_of", renamed)
    assert [config.transfer for config in started(monkeypatch, b"h")] == [None]
    assert "could not read its KV connector: its role is not announced" in caplog.text


def test_an_engine_that_may_serve_nothing_alone_is_not_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_core, "unfit_alone", lambda _config: "it would answer wrongly")
    assert started(monkeypatch, b"h") == []
    line = "warmfleet: it would answer wrongly: this engine reports nothing, so it gets no requests from routers"
    assert caplog.messages[-1] == line
