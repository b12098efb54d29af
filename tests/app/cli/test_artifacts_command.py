"""``warmfleet artifacts``: the list of files, and approval by a digest or its beginning."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.redis.servers import valkey_binary
from tests.support.replicas.doctor import guarded

from warmfleet.__main__ import main
from warmfleet.cli.artifacts import whole
from warmfleet.cli.command_error import CommandError
from warmfleet.cli.terminal.output import printable
from warmfleet.fleet import Fleet, connect
from warmfleet.protocol.pools import served_model
from warmfleet_worker.config import PublisherConfig
from warmfleet_worker.protocol import wire
from warmfleet_worker.server_publisher import ServerConfig, ServerPublisher
from warmfleet_worker.tracker import Tracker
from warmfleet_worker.worker_publisher import WorkerPublisher

if TYPE_CHECKING:
    from collections.abc import Iterator

TEMPLATE = "{{ messages }}\x1b[2J"
DIGEST = hashlib.sha256(TEMPLATE.encode()).hexdigest()
FILES = {"tokenizer.json": b"{}", "chat_template.jinja": TEMPLATE.encode()}
SCHEME = wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor"), 16)


@contextmanager
def joined(url: str, model: str, *names: str) -> Iterator[None]:
    """Workers that have announced FILES, and whose joins are applied."""
    halves: list[Any] = []
    for name in names:
        config = PublisherConfig(url, model, f"{name}.0", name, 0, SCHEME, 100, 4_096, "test")
        halves.append(WorkerPublisher(config, Tracker()))
        halves.append(
            ServerPublisher(ServerConfig(url, model, name, "http://127.0.0.1:9", (served_model(model),), "test", FILES))
        )
    for half in halves:
        half.start()
    try:
        asyncio.run(apply(url, model, len(names)))
        yield
    finally:
        for half in halves:
            half.stop(2)


async def apply(url: str, model: str, count: int) -> None:
    fleet = Fleet(connect(url, wire.model_tag(model), timeout_s=2), model)
    async with asyncio.timeout(10):
        while sum(worker.server is not None for worker in await fleet.workers.read()) < count:
            await fleet.upkeep.step()
            await asyncio.sleep(0.02)
    await fleet.close()


async def approved(url: str, model: str) -> frozenset[str]:
    fleet = Fleet(connect(url, timeout_s=2), model)
    try:
        return await fleet.operator.approved()
    finally:
        await fleet.close()


def test_list_show_approve_revoke(
    valkey_url: str, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMFLEET_REDIS_URL", valkey_url)
    monkeypatch.setenv("WARMFLEET_MODELS", f"{model}, {model}#other")

    def says(*words: str) -> str:
        assert main(["artifacts", *words]) == 0
        return capsys.readouterr().out

    assert says().count("no worker has announced a file") == 2
    with joined(valkey_url, model, "w1", "w2"):
        lines = says("list").splitlines()
        [line] = [line for line in lines if "chat_template" in line]
        assert line.split()[:5] == [DIGEST, "chat_template.jinja", str(len(TEMPLATE)), "w1,", "w2"]
        assert line.endswith("not approved by command")
        assert "WARMFLEET_APPROVED_TEMPLATES" in " ".join(lines), "a footnote"
        with monkeypatch.context() as routers:
            routers.setenv("WARMFLEET_APPROVED_TEMPLATES", f"{'b' * 64}, {DIGEST}")
            listed = says("list")
            assert "approved by WARMFLEET_APPROVED_TEMPLATES" in listed
            assert "not approved" not in listed
            assert "may approve templates" not in listed
        [file] = [row for row in json.loads(says("--json", "--model", model))[model] if row["approved"] is not None]
        of_file = {"sha256": DIGEST, "artifact": "chat_template.jinja", "bytes": len(TEMPLATE)}
        assert file == {**of_file, "servers": ["w1", "w2"], "approved": False}
        assert says("show", DIGEST[:12]) == "{{ messages }}\\x1b[2J\n"
        assert f"{DIGEST} approved" in says("approve", DIGEST[:12].upper())
        assert asyncio.run(approved(valkey_url, model)) == {DIGEST}
        assert asyncio.run(approved(valkey_url, f"{model}#other")) == frozenset()
        [line] = [line for line in says().splitlines() if "chat_template" in line]
        assert line.split()[-2:] == ["w2", "approved"]
        says("revoke", DIGEST[:13])
        assert asyncio.run(approved(valkey_url, model)) == frozenset()
        assert main(["artifacts", "approve", hashlib.sha256(FILES["tokenizer.json"]).hexdigest()[:12]]) == 2
        assert "no chat template begins" in capsys.readouterr().err
    says("approve", "a" * 64)  # before any worker announces it
    assert asyncio.run(approved(valkey_url, f"{model}#other")) == {"a" * 64}
    lines = [line for line in says("list", "--model", model).splitlines() if line.startswith("a" * 64)]
    assert len(lines) == 2, "without a registry the model has the pools of the settings"
    assert lines[0].split() == ["a" * 64, "chat_template.jinja", "-", "-", "approved"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "name the model"),
        ("approve --model m", "at least one"),
        (f"list {'a' * 12} --model m", "takes no SHA256"),
        ("approve xyz --model m", "neither a sha256"),
        (f"show {'a' * 12} --model m --json", "--json is for list"),
        ("show abcdef12345 --model m", "neither a sha256"),
        ("--model a{b", "is not a name"),
        ("--model m --redis nonsense://", "redis"),
        (f"show {'a' * 64} --model nobody", "no worker has announced"),
    ],
)
def test_mistakes_are_explained_in_one_line(
    line: str, why: str, valkey_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMFLEET_REDIS_URL", valkey_url)
    monkeypatch.delenv("WARMFLEET_MODELS", raising=False)
    assert main(["artifacts", *line.split()]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("warmfleet artifacts: ")
    assert why.lower() in printed.lower()


def test_the_router_user_may_list_but_not_approve(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with guarded(model, valkey_binary()) as url_of:
        as_router = ["--model", model, "--redis", url_of("router")]
        assert main(["artifacts", *as_router]) == 0
        assert main(["artifacts", "approve", "a" * 64, *as_router]) == 2
        assert "use an operator" in capsys.readouterr().err
        assert asyncio.run(approved(url_of("admin"), model)) == frozenset()


def test_the_beginning_of_a_digest_must_be_unique() -> None:
    known = {"a" * 20 + "b" * 44, "a" * 20 + "c" * 44}
    assert whole("a" * 20 + "b", known) == "a" * 20 + "b" * 44
    with pytest.raises(CommandError, match="several begin so"):
        whole("a" * 12, known)
    assert printable("tab\tnew\nline \x1b]0;x\x07 é \u202e") == "tab\tnew\nline \\x1b]0;x\\x07 é \\u202e"
