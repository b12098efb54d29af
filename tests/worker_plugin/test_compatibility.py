"""Parts that this vLLM lacks are found before anything is hooked, and logged in one line."""

from __future__ import annotations

import ast
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from warmfleet_worker.vllm_hooks import api_server, compatibility, engine_core
from warmfleet_worker.vllm_hooks.compatibility import (
    INTERNALS,
    Internal,
    Part,
    missing,
    missing_state,
    parameters_differ,
)

HOOKS = Path(compatibility.__file__).parent
#: Imported for a few models only, or inside a ``try``.
ASKED_FOR_WHEN_NEEDED = {"get_model_cls", "AnthropicServingMessages", "PRIORITY_HEADER", "connector", "inputs"}


@dataclass
class Output:
    tokens: int


class Table:
    kind = "map"

    def __init__(self) -> None:
        self._cache: dict[bytes, int] = {}

    def insert(self, key: bytes, block: int) -> None: ...

    def reset(self, hard: bool = False) -> None: ...


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module in place of one of vLLM's, and the names in it that are in use."""
    module = ModuleType("of_vllm")
    vars(module).update(Table=Table, Output=Output, __annotations__={"LATER": bytes})
    monkeypatch.setitem(sys.modules, "of_vllm", module)
    functions = (("insert", "self, key, block"), ("reset", "self, ..."))
    table = Internal(Part.LOAD, "of_vllm:Table", ("_cache", "kind"), functions)
    rows = (Internal(Part.LOAD, "of_vllm", ("LATER",)), table, Internal(Part.STEPS, "of_vllm:Output", ("tokens",)))
    monkeypatch.setattr(compatibility, "INTERNALS", rows)
    return module


def test_nothing_is_missing_where_all_is_as_known(known: ModuleType) -> None:
    assert (missing(Part.LOAD), missing(Part.STEPS)) == ("", "")


def test_a_renamed_module_or_class_is_named(known: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(known, "Output")
    assert missing(Part.STEPS) == "there is no of_vllm.Output"
    assert missing(Part.LOAD) == "", "each part stands for itself"
    monkeypatch.setitem(sys.modules, "of_vllm", None)
    assert missing(Part.LOAD) == "there is no of_vllm"


def test_an_attribute_that_init_no_longer_sets_is_named(known: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Renamed(Table):
        def __init__(self) -> None:
            self.other = self.kind

    monkeypatch.setattr(known, "Table", type("Table", (), dict(vars(Renamed)) | {"kind": "map"}))
    assert missing(Part.LOAD) == "there is no of_vllm.Table._cache"
    monkeypatch.setattr(known, "Table", Renamed)
    assert missing(Part.LOAD) == "", "a base class sets it"


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda self, key, block, copy=1: (self, key, block, copy), "(self, key, block, copy)"),
        (lambda self, block, key: (self, block, key), "(self, block, key)"),
        (lambda self, key: (self, key), "(self, key)"),
    ],
)
def test_other_parameters_are_named(
    known: ModuleType, monkeypatch: pytest.MonkeyPatch, function: object, says: str
) -> None:
    monkeypatch.setattr(Table, "insert", function)
    assert missing(Part.LOAD) == f"of_vllm.Table.insert takes {says}"


def test_further_parameters_are_allowed_where_the_row_says_so() -> None:
    assert (
        parameters_differ(lambda engine_client, state, args: (engine_client, state, args), "engine_client, state, ...")
        == ""
    )
    assert parameters_differ(lambda state, engine_client: (state, engine_client), "engine_client, state, ...")


def test_a_servers_state_is_looked_at_before_it_is_used() -> None:
    args = SimpleNamespace(
        host=None,
        port=1,
        uds=None,
        ssl_certfile=None,
        chat_template_content_format="auto",
        exclude_tools_when_tool_choice_none=False,
    )
    models = SimpleNamespace(base_model_paths=[], lora_requests={})
    state = SimpleNamespace(args=args, openai_serving_models=models, online_renderer=object())
    assert missing_state(state) == ""
    del models.lora_requests
    assert missing_state(state) == "the API server's state has no openai_serving_models.lora_requests"


def test_every_import_of_vllm_is_in_the_list() -> None:
    listed = {(internal.place.partition(":")[0], internal.place.partition(":")[2]) for internal in INTERNALS}
    names = {
        (internal.place, name)
        for internal in INTERNALS
        for name in (*internal.names, *[name for name, _ in internal.functions])
    }
    modules = {module for module, _ in listed}
    for path in HOOKS.glob("*.py"):
        if path.name == "compatibility.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    known = (node.module, alias.name) in names | listed or f"{node.module}.{alias.name}" in modules
                    assert known or alias.name in ASKED_FOR_WHEN_NEEDED, f"{path.name}: {node.module}.{alias.name}"


def test_a_vllm_that_differs_is_not_hooked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A different vLLM's Scheduler still works; the log has a line per engine core: version, internal, consequence."""

    class Scheduler:
        made = 0

        def __init__(self) -> None:
            Scheduler.made += 1

        def schedule(self) -> str:
            return "scheduled"

    module = ModuleType("vllm.v1.core.sched.scheduler")
    vars(module).update(Scheduler=Scheduler)
    packages = ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched")
    for name, made in {**{name: ModuleType(name) for name in packages}, module.__name__: module}.items():
        monkeypatch.setitem(sys.modules, name, made)
    schedule = Scheduler.schedule
    monkeypatch.setattr(engine_core, "missing", lambda part: "there is no x.Y" if part is Part.BLOCKS else "")
    monkeypatch.setattr(api_server, "missing", lambda _part: "there is no x.Y")
    monkeypatch.setattr(compatibility, "version", lambda: "0.40.0")
    with caplog.at_level(logging.INFO, "vllm.warmfleet"):
        engine_core.hook_scheduler("redis://x")
        api_server.hook_api_server("redis://x")
        assert caplog.messages == [], "processes that are no engine core say nothing"
        Scheduler()
    assert (Scheduler.made, Scheduler.schedule) == (1, schedule)
    line = "warmfleet: vLLM 0.40.0 differs from what this plugin knows: there is no x.Y: this engine reports nothing"
    assert caplog.messages == [line]


def test_the_goodbye_comes_before_the_engine_core_is_ended() -> None:
    told: list[str] = []
    client = SimpleNamespace(shutdown=lambda timeout: told.append(f"core, within {timeout} s"))
    publisher = SimpleNamespace(stop=lambda: told.append("goodbye"))
    api_server.leave_first(client, publisher)  # type: ignore[arg-type]
    client.shutdown(timeout=3)
    assert told == ["goodbye", "core, within 3 s"]
    publisher.stop = lambda: told.remove("nothing such")
    client.shutdown(timeout=0)
    assert told[-1] == "core, within 0 s", "an error of ours does not keep vLLM from ending"
