"""``warmfleet acl``: rules on standard output, passwords on standard error, and refusals."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from warmfleet.__main__ import main

if TYPE_CHECKING:
    from pathlib import Path


def test_rules_on_one_stream_and_passwords_on_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["acl", "m", "--worker", "w1"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["user", name] for name in ("default", "admin", "router", "worker-w1")
    ]
    assert lines[0] == "user default reset off"
    passwords = dict(line.split() for line in printed.err.splitlines() if line.startswith("  "))
    assert list(passwords) == ["admin", "router", "worker-w1"]
    for line, (name, password) in zip(lines[1:], passwords.items(), strict=True):
        assert f"{name} reset on #{hashlib.sha256(password.encode()).hexdigest()} " in line
        assert password not in printed.out


def test_two_runs_have_different_passwords(capsys: pytest.CaptureFixture[str]) -> None:
    passwords = []
    for _ in range(2):
        main(["acl", "m"])
        passwords.append(capsys.readouterr().err)
    assert passwords[0] != passwords[1]


def test_one_more_worker_as_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["acl", "a/b", "--worker", "w", "--no-router", "--commands", "--ranks", "2"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("ACL SETUSER worker-w reset on #")
    assert line.endswith(
        " resetkeys resetchannels -@all +ping +select +time +multi +exec +unwatch"
        " (%W~wf:{a~b}:events:w.0 %W~wf:{a~b}:events:w.1 %W~wf:{a~b}:server:w %W~wf:{a~b}:hello"
        " %W~wf:{a~b#*}:events:w.0 %W~wf:{a~b#*}:events:w.1 %W~wf:{a~b#*}:server:w %W~wf:{a~b#*}:hello +xadd)"
        " (%R~wf:{a~b}:command:w.0 %R~wf:{a~b}:command:w.1"
        " %R~wf:{a~b#*}:command:w.0 %R~wf:{a~b#*}:command:w.1 +get)"
        " (%RW~wf:{a~b}:yields:w.0 %RW~wf:{a~b}:yields:w.1"
        " %RW~wf:{a~b#*}:yields:w.0 %RW~wf:{a~b#*}:yields:w.1 +lpop)"
        " (%W~wf:{a~b}:artifact:w:* %W~wf:{a~b#*}:artifact:w:* +setnx +expire)"
        " (%R~wf:{a~b}:pools %R~wf:{a~b}:placement +hgetall +hget +watch)"
        " (%W~wf:{a~b}:placement +hset +hdel)"
    )


def test_sentinel_and_cluster_add_what_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["acl", "m", "--worker", "w", "--sentinel", "--cluster"]) == 0
    names = {line.split()[1]: line for line in capsys.readouterr().out.splitlines()}
    assert list(names) == ["default", "admin", "replica", "sentinel", "router", "worker-w"]
    assert names["replica"].endswith(" +psync +replconf +ping")
    assert " ~" not in names["sentinel"]
    assert " +cluster|slots" in names["router"]
    assert " +cluster|slots" in names["worker-w"]


def test_own_passwords(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "passwords"
    file.write_text("router a b c\nadmin x\nsomebody else\n\n")
    assert main(["acl", "m", "n#pool", "--password-file", str(file)]) == 0
    printed = capsys.readouterr()
    assert hashlib.sha256(b"a b c").hexdigest() in printed.out
    assert " ~wf:{m}:[^o]* ~wf:{m#*}:[^o]* ~wf:{n#pool}:[^o]* ~wf:{n}:pools " in printed.out
    for name, command in (("operator_approved", "smembers"), ("operator_policy", "get")):
        keys = " ".join(f"%R~wf:{{{tag}}}:{name}" for tag in ("m", "m#*", "n#pool"))
        assert f" ({keys} +{command})" in printed.out
    assert "password" not in printed.err


def test_one_user_for_workers_whose_names_nobody_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMFLEET_MODELS", "a/b, c#pool")
    for name in ("admin", "router", "worker"):
        (tmp_path / name).write_text(f"secret-{name}\n")

    assert main(["acl", "--shared-worker", "--password-file", str(tmp_path)]) == 0

    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert [line.split()[1] for line in lines] == ["default", "admin", "router", "worker"]
    assert lines[3] == (
        f"user worker reset on #{hashlib.sha256(b'secret-worker').hexdigest()}"
        " resetkeys resetchannels -@all +ping +select +time +multi +exec +unwatch"
        " (%W~wf:{a~b}:events:* %W~wf:{a~b}:server:* %W~wf:{a~b}:hello"
        " %W~wf:{a~b#*}:events:* %W~wf:{a~b#*}:server:* %W~wf:{a~b#*}:hello"
        " %W~wf:{c#pool}:events:* %W~wf:{c#pool}:server:* %W~wf:{c#pool}:hello +xadd)"
        " (%R~wf:{a~b}:command:* %R~wf:{a~b#*}:command:* %R~wf:{c#pool}:command:* +get)"
        " (%RW~wf:{a~b}:yields:* %RW~wf:{a~b#*}:yields:* %RW~wf:{c#pool}:yields:* +lpop)"
        " (%W~wf:{a~b}:artifact:*:* %W~wf:{a~b#*}:artifact:*:* %W~wf:{c#pool}:artifact:*:* +setnx +expire)"
        " (%R~wf:{a~b}:pools %R~wf:{c}:pools %R~wf:{a~b}:placement %R~wf:{c}:placement +hgetall +hget +watch)"
        " (%W~wf:{a~b}:placement %W~wf:{c}:placement +hset +hdel)"
    )
    assert " ~wf:{a~b}:[^o]* ~wf:{a~b#*}:[^o]* ~wf:{c#pool}:[^o]* ~wf:{c}:pools " in lines[2]
    assert printed.err == ""


@pytest.mark.parametrize("folder", [True, False])
def test_an_old_password_opens_a_user_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: bool) -> None:
    passwords = {"admin": "a", "router": "new", "router.old": "before", "worker": "w"}
    if folder:
        for name, password in {**passwords, "worker.old": ""}.items():
            (tmp_path / name).write_text(password)
    else:
        (tmp_path / "file").write_text("".join(f"{name} {password}\n" for name, password in passwords.items()))

    place = tmp_path if folder else tmp_path / "file"
    assert main(["acl", "m", "--shared-worker", "--password-file", str(place)]) == 0

    admin, router, worker = (line.split() for line in capsys.readouterr().out.splitlines()[1:])
    new, before = (f"#{hashlib.sha256(password).hexdigest()}" for password in (b"new", b"before"))
    assert router[:6] == ["user", "router", "reset", "on", new, before]
    assert [word for word in (*admin, *worker) if word.startswith("#")] == [
        f"#{hashlib.sha256(password).hexdigest()}" for password in (b"a", b"w")
    ]


def test_an_old_password_alone_is_not_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("admin a\nrouter.old before\n")
    assert main(["acl", "m", "--password-file", str(tmp_path / "file")]) == 2
    assert "for router" in capsys.readouterr().err


def test_a_folder_lacks_a_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "admin").write_text("x")
    (tmp_path / "router").write_text("\n")
    assert main(["acl", "m", "--shared-worker", "--password-file", str(tmp_path)]) == 2
    assert "no file with a password for router, worker" in capsys.readouterr().err


def test_no_model_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARMFLEET_MODELS", raising=False)
    assert main(["acl"]) == 2
    assert "name a MODEL, or set WARMFLEET_MODELS" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("m n --worker w", "one model"),
        ("m --no-router", "leaves no user"),
        ("m --worker a:b", "not a name"),
        ("m --worker *", "not a name"),
        ("m* ", "not a name"),
        ("m --password-file /nowhere", "/nowhere"),
        ("m --password-file /dev/null", "for admin, router"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(line: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["acl", *line.split()]) == 2
    printed = capsys.readouterr()
    assert (printed.out, why in printed.err, len(printed.err.splitlines())) == ("", True, 1)
