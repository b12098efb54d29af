"""Engines of `warmfleet up`: those that already run, and the command lines that start others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.replicas.fixed_answers import replica

from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local.engines import EngineOptions, engine_command, pools_of, served_names
from warmfleet_loadtest import engine

if TYPE_CHECKING:
    from pathlib import Path


class TestOwnEngines:
    def test_models_are_found_without_their_adapters(self) -> None:
        models = {"data": [{"id": "/models/Qwen 3"}, {"id": "lora", "parent": "/models/Qwen 3"}]}
        with replica({"/v1/models": (200, models)}) as (url, requests):
            assert served_names(url, "secret") == ["/models/Qwen 3"]
        assert requests[0][0]["authorization"] == "Bearer secret"

    def test_an_engine_of_several_names_belongs_to_one_pool(self) -> None:
        """A pool for each of its names would have no engine, but for the first."""
        assert pools_of([["/models/Qwen 3"], ["alias", "models/Qwen 3"], ["b", "c"], ["c"]]) == (
            "models/Qwen-3",
            "b",
            "c",
        )


class TestEngineCommands:
    def test_a_store_url_is_in_no_argument(self) -> None:
        argv, environment = engine_command(EngineOptions(step_time="2", blocks=64), "sim-1", 9, "redis://:pw@h/0")
        assert "pw" not in " ".join(argv)
        assert environment["WARMFLEET_REDIS_URL"] == "redis://:pw@h/0"
        read = engine.parser().parse_args(argv[3:])  # the engine's own parser accepts it
        assert (read.step_time, read.blocks, read.port) == ("2", 64, 9)

    def test_engines_have_the_roles_that_are_wanted(self) -> None:
        options = EngineOptions(count=3, prefill=1, decode=2)
        assert [options.kv_role(number) for number in (1, 2, 3)] == ["kv_producer", "kv_consumer", "kv_consumer"]
        assert [options.name(number) for number in (1, 2, 3)] == ["prefill-1", "decode-1", "decode-2"]
        argv, _environment = engine_command(options, "prefill-1", 9, "redis://h", options.kv_role(1))
        found = engine.transfer_config(engine.parser().parse_args(argv[3:]))
        assert found is not None
        assert (found.role, found.recomputes) == ("kv_producer", True)
        argv, _environment = engine_command(EngineOptions(), "sim-1", 9, "redis://h", EngineOptions().kv_role(1))
        assert engine.transfer_config(engine.parser().parse_args(argv[3:])) is None

    def test_missing_vllm_is_said_with_the_way_to_get_it(self) -> None:
        with pytest.raises(CommandError, match="make vllm"):
            engine_command(EngineOptions(kind="vllm", vllm_python="/nonexistent"), "vllm-1", 9, "")

    def test_vllm_is_told_where_the_fleet_meets(self, tmp_path: Path) -> None:
        options = EngineOptions(kind="vllm", model=str(tmp_path), vllm_python=str(tmp_path))
        argv, environment = engine_command(options, "vllm-1", 9, "unix:///s")
        assert argv[argv.index("--served-model-name") + 1] == tmp_path.name == environment["WARMFLEET_MODEL"]
        assert environment["WARMFLEET_WORKER_URL"] == "http://127.0.0.1:9"
