"""The bridge as a process: its list of engines, its counters, and its message when it cannot start."""

from __future__ import annotations

import os
import socket
import sys
import threading
import urllib.request
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from warmfleet_worker.bridge import __main__, bridge, status, tokenizer_files
from warmfleet_worker.bridge.bridge import Bridge
from warmfleet_worker.bridge.options import EngineOptions, server_id_of
from warmfleet_worker.bridge.rank import RankCounts
from warmfleet_worker.bridge.tokenizer_files import TokenizerError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the commands for engines in place of running them."""
    done: list[str] = []

    def engine(options: EngineOptions, *_: Any) -> Any:
        return SimpleNamespace(
            options=options,
            ended=True,
            join=lambda _within_s: None,
            start=lambda: done.append(f"start {options.name}"),
            stop=lambda leave=False: done.append(f"stop {options.name}, leaves: {leave}"),
        )

    monkeypatch.setattr(bridge, "BridgedEngine", engine)
    monkeypatch.setattr(bridge, "APART_SECONDS", 0.0)
    return done


def test_engines_come_and_go_with_the_list(told: list[str]) -> None:
    one, two = EngineOptions("http://a:1"), EngineOptions("http://b:2")
    followed = Bridge("redis://store:6379")
    followed.follow([one, two])
    followed.follow([one, two])
    followed.follow([two])
    followed.stop()
    assert told == ["start a-1", "start b-2", "stop a-1, leaves: True", "stop b-2, leaves: False"]


def test_a_bridge_that_is_told_to_stop_starts_no_further_engine(told: list[str]) -> None:
    stopping = threading.Event()
    followed = Bridge("redis://store:6379", stopping)
    stopping.set()
    followed.follow([EngineOptions("http://a:1"), EngineOptions("http://b:2")])
    followed.stop()
    assert not told


def test_an_engine_that_is_busy_while_it_leaves_holds_up_no_other(told: list[str]) -> None:
    """A tokenizer may take minutes to load. Until the engine has said goodbye, no successor reports under its name."""
    busy, other = EngineOptions("http://a:1"), EngineOptions("http://b:2")
    followed = Bridge("redis://store:6379")
    followed.follow([busy])
    engine = cast("Any", followed.engines[busy])
    engine.ended = False
    again = EngineOptions("http://a:1", tokenizer="another")
    followed.follow([again, other])
    assert told == ["start a-1", "stop a-1, leaves: True", "start b-2"]
    followed.follow([again, other])
    engine.ended = True
    followed.follow([again, other])
    assert told[3:] == ["start a-1"]
    followed.stop()


def test_a_tokenizer_that_hangs_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, loaded = threading.Event(), list[str]()

    def load(name: str, _template: str) -> tuple[dict[str, bytes], dict[str, Any]]:
        if name == "slow":
            assert hangs.wait(30)
        loaded.append(name)
        return {}, {}

    monkeypatch.setattr(tokenizer_files, "load", load)
    made = Bridge("redis://store:6379")
    threads = [threading.Thread(target=made._load_tokenizer, args=("slow", "")) for _ in range(2)]
    for thread in threads:
        thread.start()
    made._load_tokenizer("quick", "")
    hangs.set()
    for thread in threads:
        thread.join(30)
    assert loaded == ["quick", "slow"]  # a tokenizer that several engines want is loaded once
    made.stop()


@pytest.fixture
def counting() -> Iterator[Bridge]:
    """A bridge with one engine of one rank."""
    made = Bridge("redis://store:6379")
    counts = RankCounts(7, 30, 1, 2, 0, complete=False, unproved={"parent": 4})
    rank = SimpleNamespace(config=SimpleNamespace(worker_id="a-1.0"), counts=counts)
    options = EngineOptions("http://a:1")
    made.engines[options] = cast("Any", SimpleNamespace(options=options, state="reported", ranks=[rank]))
    yield made
    made._context.destroy()


def test_counters_are_served(counting: Bridge) -> None:
    server = status.serve(counting, 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_address[1]}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    server.shutdown()
    server.server_close()
    assert {
        'warmfleet_bridge_engine_up{engine="a-1"} 1',
        'warmfleet_bridge_blocks{worker="a-1.0"} 7',
        'warmfleet_bridge_complete{worker="a-1.0"} 0',
        'warmfleet_bridge_lost_total{worker="a-1.0"} 2',
        'warmfleet_bridge_unproved_total{worker="a-1.0",reason="parent"} 4',
    } <= set(lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--redis or WARMFLEET_REDIS_URL must name the fleet's store"),
        (["--redis", "redis://store:6379"], "no engine is given"),
        (["--redis", "store:6379", "--engine", "http://a:1"], "not with 'store'"),
    ],
)
def test_wrong_usage_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WARMFLEET_REDIS_URL", raising=False)
    assert __main__.main(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warmfleet bridge: ")
    assert said in line


def test_a_port_that_is_none_is_told_with_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for port in ("80000", "0", "http"):
        with pytest.raises(SystemExit) as ended:
            __main__.main(["--redis", "redis://store:6379", "--engine", "http://a:1", "--status-port", port])
        assert ended.value.code == 2
        assert f"--status-port: a port is 1 to 65535, not '{port}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [("HF_ENDPOINT", "", "cannot be reached"), ("HF_HUB_OFFLINE", "1", ""), ("HTTPS_PROXY", "http://proxy:3128", "")],
)
def test_a_hub_that_cannot_be_reached_is_not_waited_for(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a proxy, or in offline mode, only the hub's own client knows whether the hub can be reached."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith(("HF_", "TRANSFORMERS_")):
            monkeypatch.delenv(name)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        hub = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", hub)
        assert not tokenizer_files.hub_away()
    monkeypatch.setenv(variable, value or hub)
    assert said in tokenizer_files.hub_away()
    asked: list[bool] = []

    def from_pretrained(_name: str, *, local_files_only: bool) -> None:
        asked.append(local_files_only)
        raise OSError("not here")

    fake = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setitem(sys.modules, "transformers", cast("Any", fake))
    with pytest.raises(TokenizerError) as error:
        tokenizer_files.load("no/such-model")
    assert (asked, error.value.later) == ([bool(said)], bool(said))
    assert said in str(error.value)


def test_names_of_engines() -> None:
    assert server_id_of("https://gpu1.example.org") == "gpu1.example.org-443"
    assert server_id_of("http://[fd00::1]:8000") == "fd00--1-8000"
    assert server_id_of("http://gateway/engines/a") != server_id_of("http://gateway/engines/b")
