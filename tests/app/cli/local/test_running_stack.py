"""Other commands find the stack of ``warmfleet up``, for as long as it runs."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest

from warmfleet.cli import client
from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local.ports import free_port, listen
from warmfleet.cli.local.running_stack import RunningStack, announced, found, models_of
from warmfleet.cli.parser import build_parser

if TYPE_CHECKING:
    from pathlib import Path

STACK = RunningStack(
    "http://127.0.0.1:18080", "unix:///run/store.sock", ("demo",), os.getpid(), ("http://127.0.0.1:9",)
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WARMFLEET_REDIS_URL", "WARMFLEET_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def test_it_is_found_while_it_runs(home: Path) -> None:
    assert found() is None
    with announced(STACK):
        assert found() == STACK
        [file] = home.rglob("*.json")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, "the store's URL may hold a password"
    assert found() is None
    assert not list(home.rglob("*.json*"))


def test_the_later_of_two_is_found_and_then_the_one_that_is_left() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        later = RunningStack("http://127.0.0.1:2", "redis://b", ("b",), other.pid, ("http://127.0.0.1:3",))
        for first, last in ((STACK, later), (later, STACK)):
            ends = {stack: ExitStack() for stack in (STACK, later)}
            for stack, end in ends.items():
                end.enter_context(announced(stack))
            assert found() == later
            ends[first].close()
            assert found() == last
            ends[last].close()
            assert found() is None
        other.kill()


def test_a_dead_process_and_a_torn_file_count_for_nothing(home: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    with announced(RunningStack("http://127.0.0.1:2", "redis://b", ("b",), dead.pid, ("http://127.0.0.1:3",))):
        assert found() is None
        with announced(STACK):
            [file] = home.rglob("*.json")
            assert file.stem == f"local-stack-{STACK.pid}", "the dead one's has gone"
    folder = home / "warmfleet"
    torn = {"address": "x", "redis_url": "x", "models": ["m"], "pid": os.getpid()}
    texts = ("{", "[]", '{"address": "x"}', json.dumps(torn), json.dumps(torn | {"operators": []}))
    for text in (*texts, json.dumps(torn | {"pid": "x", "operators": ["x"]})):
        (folder / "local-stack-1.json").write_text(text)
        assert found() is None


def test_operators_reach_a_replica_that_lives() -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    with socket.create_server(("127.0.0.1", 0)) as alive:
        living = f"http://127.0.0.1:{alive.getsockname()[1]}"
        assert replace(STACK, operators=(dead, living)).operators_url == living
    assert replace(STACK, operators=(dead, living)).operators_url == dead


def test_a_folder_that_cannot_be_written_stops_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "file"))
    with announced(STACK):
        assert found() is None


def test_a_folder_that_cannot_be_looked_into_has_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """The home of another user, where ``sudo`` keeps HOME; here one whose name is too long, which root cannot read."""
    monkeypatch.setenv("XDG_STATE_HOME", "/" + 300 * "x")
    assert found() is None
    assert build_parser().parse_args(["workers"])


def test_commands_take_address_store_and_models_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with announced(STACK):
        parser = build_parser()
        assert parser.parse_args(["workers"]).url == STACK.operators[0]
        assert parser.parse_args(["workers", "--url", "http://b"]).url == "http://b"
        policy = parser.parse_args(["policy"])
        assert policy.redis == STACK.redis_url
        assert models_of(policy) == ["demo"]
        assert models_of(parser.parse_args(["policy", "--model", "b"])) == ["b"]
        elsewhere = parser.parse_args(["drain", "gpu1", "--redis", "redis://elsewhere"])
        with pytest.raises(CommandError, match="--model"):
            models_of(elsewhere)
        monkeypatch.setenv("WARMFLEET_REDIS_URL", "redis://c")
        monkeypatch.setenv("WARMFLEET_MODELS", "c, d")
        policy = build_parser().parse_args(["policy"])
        assert (policy.redis, models_of(policy)) == ("redis://c", ["c", "d"])


def test_without_a_stack_the_first_advice_is_to_start_one() -> None:
    policy = build_parser().parse_args(["policy"])
    with pytest.raises(CommandError, match=r"^no local fleet runs .*warmfleet up.*--model"):
        models_of(policy)


def test_an_address_of_another_machine_is_blamed_on_the_host() -> None:
    with pytest.raises(CommandError, match="choose another with --host"):
        listen("192.0.2.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(CommandError, match="another with --port"):
        listen("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["workers", "--watch", "abc"], "'abc' is not a number"),
        (["serve", "--port", "abc"], "'abc' is not a whole number"),
    ],
)
def test_numbers_that_are_none(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("code", "hinted"), [("model_not_found", False), ("not_found", True)])
def test_only_an_unknown_path_is_blamed_on_the_port(code: str, hinted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = httpx.Response(404, json={"error": {"message": "no", "code": code}})
    monkeypatch.setattr(httpx, "request", lambda *_, **__: answer)
    with pytest.raises(CommandError, match="answered 404: no") as caught:
        client.ask("GET", "http://h", "/x")
    assert ("--url" in str(caught.value)) == hinted
