"""Spreads the tests of `make test` over several processes (pytest-xdist, ``-n auto``).

The tests of one file run in one process, in their order, because they share fixtures. So do the files of one entry of
``TOGETHER``, which share a fixture that takes long to start. The slowest files come first: whatever runs last should be
short, so that no process is left working alone.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from _pytest.mark.expression import Expression

#: Folders and files whose tests share one process: they share vLLM without an engine or with one, the local stack of
#: engines and replicas, or the tokenizer of a real model, which takes seconds to load. The first entry counts.
TOGETHER = (
    ("tests/vllm/parity", "tests/vllm/test_routes.py", "tests/vllm/test_transfers.py"),
    ("tests/vllm",),
    tuple(f"tests/e2e/test_{name}.py" for name in ("stack", "demo", "engines_by_url", "herd")),
    tuple(
        f"tests/app/prompt/test_{name}.py"
        for name in ("prefix_trie", "image_prompts", "learned_images", "media_prefix", "prompt_identity", "dialects")
    ),
)

#: Files and folders that take longest. Those that compute stand beside those that wait. All other files follow by
#: their names alone: the files of one folder, which are of one kind, do not run at the same time.
FIRST = (
    "tests/vllm",
    "tests/test_ending.py",
    "tests/e2e",
    "tests/app/fleet/test_sentinel.py",
    "tests/app/routing/test_engine_deaths.py",
    "tests/loadtest/test_fleet_bench.py",
    "tests/app/cli/local/test_replicas.py",
    "tests/loadtest/test_locustfile.py",
    "tests/bench/test_proxy.py",
    "tests/app/pools/test_served_names.py",
    "tests/drills",
    "tests/app/routing/test_admission_queue.py",
    "tests/k8s/test_k8s_apply.py",
    "tests/k8s/test_k8s_checkov.py",
    "tests/contract/test_packaging.py",
    "tests/app/prompt/test_prefix_trie.py",
    "tests/app/background/test_readiness.py",
    "tests/app/prompt/test_cut_points.py",
    "tests/lua/test_ten_minutes.py",
    "tests/bench",
)

#: The most processes: several tests measure times, and need cores that no other test uses.
MOST_PROCESSES = 6


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The number of processes for ``-n auto``: two more than there are cores, because tests wait a part of their time.
    More make each other late: the suite computes for as long as two cores take.

    0 means the process of pytest itself. It is enough for a single file, it shows output under ``-s``, and it suits
    long tests: most of them measure, and some take the whole machine.
    """
    one_file = len(config.args) == 1 and ".py" in config.args[0]
    if one_file or config.option.capture == "no" or runs_long_tests(config.option.markexpr):
        return 0
    return min(len(os.sched_getaffinity(0)) + 2, MOST_PROCESSES)


def runs_long_tests(marks: str) -> bool:
    """Whether the expression of ``-m`` lets any test that is marked ``long`` run."""

    def chosen(*names: str) -> bool:
        def has(name: str, /, **_: object) -> bool:
            return name in names

        return Expression.compile(marks or "long").evaluate(has)

    return chosen("long") or chosen("long", "vllm") or chosen("long", "in_turn")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Make a unit of work for each file, or for all files of one entry of ``TOGETHER``, in the order of the tests."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = unit_of
    return scheduler


def unit_of(nodeid: str) -> str:
    """The name of the unit of work that a test belongs to."""
    file = nodeid.partition("::")[0]
    return next((group[0] for group in TOGETHER if file.startswith(group)), file)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the slowest files first, in the order of ``FIRST``. A run in one process keeps the usual order."""

    def place(item: pytest.Item) -> tuple[int, str, str]:
        first = next((at for at, name in enumerate(FIRST) if item.nodeid.startswith(name)), len(FIRST))
        return first, "" if first < len(FIRST) else item.path.name, unit_of(item.nodeid)

    if hasattr(config, "workerinput"):
        items.sort(key=place)
