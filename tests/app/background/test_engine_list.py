"""Engines are listed by the setting, by a file that is followed, and by names whose addresses change."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from warmfleet.background.stock import engine_list
from warmfleet.background.stock.engine_list import EngineList, ListedEngine
from warmfleet.errors import BadArgument
from warmfleet.settings import EngineSource, Settings, engine_source

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("http://h:8000/v1/", EngineSource("url", "http://h:8000")),
        ("https://h#cache_tokens=400000", EngineSource("url", "https://h", 400_000)),
        ("http://h#zone=eu-1a&cache_tokens=9&tier=a", EngineSource("url", "http://h", 9, "zone=eu-1a&tier=a")),
        ("http+dns://h:1#zone=eu-1a", EngineSource("dns", "http://h:1", 0, "zone=eu-1a")),
        ("http+dns://vllm.ns.svc:8000", EngineSource("dns", "http://vllm.ns.svc:8000")),
        ("http+dns://vllm:8000/v1#cache_tokens=1", EngineSource("dns", "http://vllm:8000", 1)),
        ("file:///etc/engines", EngineSource("file", "/etc/engines")),
        ("file:/etc/engines", EngineSource("file", "/etc/engines")),
    ],
)
def test_what_an_entry_names(text: str, source: EngineSource) -> None:
    assert engine_source(text) == source
    assert Settings.from_environment({"WARMFLEET_STATIC_WORKERS": f"http://a:1,{text}"}).static_workers[1] == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://h:8000#", "cache_tokens="),
        ("http://h:8000#cache_tokens=", "cache_tokens="),
        ("http://h:8000#cache_tokens=0", "cache_tokens="),
        ("http://h:8000#cache_tokens=1e6", "cache_tokens="),
        ("http://h:8000#tokens", "cache_tokens="),
        ("http://h:8000#zone=a&cache_tokens=0", "cache_tokens="),
        ("http://h:8000#zone=a b", "cache_tokens="),
        ("http+dns://vllm", "needs a port"),
        ("http+dns://a..b:80", "is not the URL"),
        (f"http://{'a' * 64}.svc:80", "is not the URL"),
        ("https+dns://vllm:1", "is not the URL"),
        ("file:engines", "file of engines"),
        ("file:///etc/engines#cache_tokens=1", "file of engines"),
    ],
)
def test_entries_that_cannot_be_used(text: str, message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        engine_source(text)
    with pytest.raises(BadArgument, match=message):
        Settings.from_environment({"WARMFLEET_STATIC_WORKERS": text})


@pytest.mark.parametrize("secret", ["user:p@ss/word@", "http://user:p@ss/word@", "http+dns://user:p@ss/word@"])
async def test_no_message_quotes_a_password(secret: str, tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "engines"
    path.write_text("http://a:1")
    engines = EngineList([f"file://{path}"])
    for entry in (f"{secret}h:1?x=1", f"{secret}h:1#tokens", f"{secret}h:1#cache_tokens=0"):
        with pytest.raises(BadArgument, match=r"h:1") as caught:
            engine_source(entry)
        assert "word" not in str(caught.value)
        path.write_text(f"# {entry}\n{entry}\n")
        await engines.look()
        assert "line 2" in str(list(engines.problems))
    assert len(caplog.records) == 3
    assert "word" not in caplog.text + str(list(engines.problems))


async def test_a_name_that_is_resolved_again_is_told_without_its_password(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level("INFO")
    names = Names(monkeypatch)
    engines = EngineList(["http+dns://user:password@vllm:80"])
    await engines.look()
    names.of["vllm"] = ["10.0.0.1"]
    await engines.look()
    assert "http://vllm: read again" in caplog.text
    assert "password" not in caplog.text


async def test_a_file_is_followed_and_a_bad_one_changes_nothing(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "engines"
    path.write_text('# ours\n\nhttp://a:1\n{"url": "http://b:2", "cache_tokens": 5000}\n')
    engines = EngineList(["http://a:1#cache_tokens=7", f"file://{path}"])
    assert engines.urls == ["http://a:1", "http://a:1", "http://b:2"]
    first = [ListedEngine("http://a:1", 7), ListedEngine("http://b:2", 5_000)]
    assert await engines.look() == first, "of two entries for one engine the first counts"
    path.write_text("http://c:3\nhttp://c:3?x=1\n")
    for _ in range(3):
        assert await engines.look() == first
    assert [problem for problem in engines.problems if "line 2" in problem and "c:3?x=1" in problem]
    path.unlink()
    assert await engines.look() == first
    path.write_text("http://c:3\n")
    assert await engines.look() == [ListedEngine("http://a:1", 7), ListedEngine("http://c:3")]
    assert not list(engines.problems)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2, "each problem is told once"
    path.write_text("")
    assert await engines.look() == [ListedEngine("http://a:1", 7)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://a:1\nnonsense", "is not the URL"),
        ('{"url": 5}', "url must be"),
        ('{"url": "http://a:1", "cache_tokens": true}', "url must be"),
        ('{"url": "http://a:1", "weight": 2}', "known fields are url and cache_tokens, not 'weight'"),
        ('{"url": "http://a:1", "cache_tokens": -1}', "after # stand the"),
        ("{", ""),
        ("file:///etc/engines", "cannot name another file"),
        ("\xff", ""),
    ],
)
def test_a_file_that_cannot_be_used_refuses_the_start(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "engines"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(BadArgument, match=f"WARMFLEET_STATIC_WORKERS: {path}, line .*{message}"):
        EngineList([f"file://{path}"])
    with pytest.raises(BadArgument, match="cannot be read"):
        EngineList([f"file://{tmp_path}/none"])


class Names:
    """A resolver that answers look-ups of names in place of the system's resolver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: dict[str, list[str]] = {}
        monkeypatch.setattr(socket, "getaddrinfo", self.look_up)

    def look_up(self, host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        if host not in self.of:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in self.of[host]]
        return [
            (family, socket.SOCK_STREAM, 6, "", (address, port))
            for family, address in zip(families, self.of[host], strict=True)
        ]


async def test_every_address_behind_a_name_is_an_engine(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    names = Names(monkeypatch)
    names.of["vllm"] = ["10.0.0.2", "10.0.0.1", "fd00::1", "fd00::2"]
    engines = EngineList(["http+dns://vllm:8000#cache_tokens=9"])
    both = [ListedEngine("http://10.0.0.1:8000", 9), ListedEngine("http://10.0.0.2:8000", 9)]
    assert await engines.look() == both, "an engine with an address of each version is one engine"
    assert engines.urls == [], "the name itself is no engine"
    names.of["vllm"] = ["10.0.0.2", "10.0.0.3"]
    assert [engine.url for engine in await engines.look()] == ["http://10.0.0.2:8000", "http://10.0.0.3:8000"]
    del names.of["vllm"]
    assert len(await engines.look()) == 2, "DNS that is away takes no engine"
    assert list(engines.problems)
    assert sum("vllm cannot be resolved" in record.getMessage() for record in caplog.records) == 1

    def refuse(*_: Any, **__: Any) -> Any:
        raise UnicodeError("label too long")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert len(await engines.look()) == 2, "nor does a name that the resolver refuses"
    monkeypatch.setattr(socket, "getaddrinfo", names.look_up)
    names.of["vllm"] = ["fd00::1"]
    assert await engines.look() == [ListedEngine("http://[fd00::1]:8000", 9)]


async def test_a_name_makes_no_engine_of_a_service_that_tells_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch)
    names.of["vllm"] = ["10.0.0.1", "169.254.169.254"]
    names.of["six"] = ["fd00:ec2::254", "::ffff:169.254.169.254"]
    engines = EngineList(["http+dns://vllm:80", "http+dns://six:80"])
    assert [engine.url for engine in await engines.look()] == ["http://10.0.0.1"]
    assert sum("tell a machine's credentials" in problem for problem in engines.problems) == 2


async def test_no_list_is_endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_list, "MAX_ENGINES", 3)
    monkeypatch.setattr(engine_list, "MAX_FILE_BYTES", 100)
    path = tmp_path / "engines"
    path.write_text("\n".join(f"http://h{number}:1" for number in range(5)))
    engines = EngineList([f"file://{path}"])
    assert [engine.url for engine in await engines.look()] == ["http://h0:1", "http://h1:1", "http://h2:1"]
    assert list(engines.problems) == ["only the first 3 engines are used"]
    path.write_text("#" * 101)
    assert len(await engines.look()) == 3
    assert any("more than 100 bytes" in problem for problem in engines.problems)
