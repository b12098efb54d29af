"""`make test` installs the tools that are missing, or says what to install; and it builds only what the tests need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.run import needed_targets, os_tools, required_tools

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]

#: A program that writes its arguments down; the apt-get of these tests also creates the tool that it should install.
RECORD = '#!/bin/sh\necho "{name} $@" >> {log}\n{more}\n'


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Make PATH a folder with these programs alone: names, or name=shell line. Returns the log of their arguments."""
    folder, log = tmp_path / "bin", tmp_path / "log"
    folder.mkdir()
    log.touch()
    for needed in ("sh", "env", "true", "touch", "chmod", "mkdir"):
        (folder / needed).symlink_to(str(shutil.which(needed)))
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(os_tools, "SBIN", str(tmp_path / "sbin"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    def made(*names: str, **scripts: str) -> Path:
        for name, more in (dict.fromkeys(names, "") | scripts).items():
            path = folder / name.replace("_", "-")
            path.write_text(RECORD.format(name=path.name, log=log, more=more))
            path.chmod(0o755)
        return log

    return made


def installing(tmp_path: Path, *commands: str) -> str:
    """A shell line of an apt-get that brings these commands."""
    paths = " ".join(str(tmp_path / "bin" / command) for command in commands)
    return f'case "$*" in *install*) touch {paths}; chmod +x {paths};; esac'


def test_nothing_is_installed_where_nothing_is_missing(machine: Callable[..., Path]) -> None:
    log = machine(*os_tools.TOOLS, *os_tools.TAKEN_OUT, "apt-get")
    os_tools.install_missing()
    assert log.read_text() == ""


def test_root_installs_what_is_missing_and_only_that(machine: Callable[..., Path], tmp_path: Path) -> None:
    log = machine(
        "openssl", "chromium", "promtool", apt_get=installing(tmp_path, "redis-server", "haproxy", "luacheck")
    )
    os_tools.install_missing()
    assert log.read_text().splitlines() == [
        "apt-get -qq update",
        "apt-get -qq install -y --no-install-recommends redis-server haproxy lua-check",
    ]


def test_only_the_tools_that_are_named_are_installed(machine: Callable[..., Path], tmp_path: Path) -> None:
    log = machine(apt_get=installing(tmp_path, "luacheck"))
    assert os_tools.main(["luacheck"]) == 0
    assert os_tools.main(["luacheck"]) == 0
    assert log.read_text().splitlines() == [
        "apt-get -qq update",
        "apt-get -qq install -y --no-install-recommends lua-check",
    ]


def test_make_check_and_loadtest_install_no_more_than_they_need() -> None:
    makefile = (ROOT / "Makefile").read_text()
    wanted = {name: re.search(rf"^{name}:(.*)\n\t(.*)", makefile, re.MULTILINE) for name in ("check", "loadtest")}
    found = {name: rule.groups() for name, rule in wanted.items() if rule}
    assert found["check"][1].endswith("os_tools.py luacheck")
    assert found["loadtest"][1].endswith("os_tools.py haproxy")
    assert not any("deps" in needed.partition("##")[0].split() for needed, _ in found.values())


@pytest.mark.parametrize("name", ["chromium_browser", "google_chrome"])
def test_a_browser_may_have_another_name(machine: Callable[..., Path], tmp_path: Path, name: str) -> None:
    machine(name)
    assert os_tools.find("chromium") == str(tmp_path / "bin" / name.replace("_", "-"))
    assert os_tools.missing(["chromium"]) == []


def test_a_package_that_apt_does_not_know_keeps_no_other_away(
    machine: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = f'case "$*" in *install*chromium*) exit 100;; esac; {installing(tmp_path, "haproxy", "luacheck")}'
    machine("redis-server", "openssl", "promtool", apt_get=unknown)
    assert os_tools.main() == 1
    assert os_tools.missing() == ["chromium"]
    assert capsys.readouterr().err == (
        "missing: chromium (`apt-get install` failed with status 100). "
        "Install them yourself; on Debian, as root:\n  apt-get install chromium\n"
    )


def test_a_user_with_sudo_without_a_password_installs(
    machine: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    present = [command for command in (*os_tools.TOOLS, *os_tools.TAKEN_OUT) if command != "haproxy"]
    log = machine(*present, apt_get=installing(tmp_path, "haproxy"), sudo='shift; exec "$@"')
    os_tools.install_missing()
    assert [line for line in log.read_text().splitlines() if line.startswith("apt-get")] == [
        "apt-get -qq update",
        "apt-get -qq install -y --no-install-recommends haproxy",
    ]
    assert log.read_text().startswith("sudo -n true\nsudo -n env DEBIAN_FRONTEND=noninteractive apt-get -qq update\n")


def test_a_command_whose_package_would_start_a_service_is_taken_out_of_it(
    machine: Callable[..., Path], tmp_path: Path
) -> None:
    got = tmp_path / "bin/promtool"
    log = machine(
        *os_tools.TOOLS,
        apt_get='case "$*" in *download*) touch prometheus_1_amd64.deb;; esac',
        dpkg_deb='test "$*" = "-x prometheus_1_amd64.deb ." && mkdir -p usr/bin && touch usr/bin/promtool',
        install=f'test -f "$3" && touch {got} && chmod +x {got}',
    )
    os_tools.install_missing()
    assert log.read_text().splitlines() == [
        "apt-get -qq update",
        "apt-get -qq download prometheus",
        "dpkg-deb -x prometheus_1_amd64.deb .",
        f"install -m 755 usr/bin/promtool {os_tools.LOCAL}",
    ]


def test_it_says_which_step_of_that_failed(machine: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    machine(*os_tools.TOOLS, apt_get='case "$*" in *download*) exit 100;; esac')
    assert os_tools.main() == 1
    assert capsys.readouterr().err == (
        "missing: promtool (`download prometheus` failed). Install them yourself; on Debian, as root:\n"
        "  cd $(mktemp -d) && apt-get download prometheus && dpkg-deb -x *.deb . && "
        "install -m 755 usr/bin/promtool /usr/local/bin\n"
    )


@pytest.mark.parametrize(
    ("programs", "user", "reason"),
    [
        ({}, 0, "this machine has no apt-get"),
        ({"apt_get": ""}, 1000, "apt-get needs root or sudo without a password"),
        ({"apt_get": "", "sudo": "exit 1"}, 1000, "apt-get needs root or sudo without a password"),
        (
            {"apt_get": "exit 100"},
            0,
            "`apt-get update` failed with status 100, `apt-get install` failed with status 100",
        ),
        ({"apt_get": 'case "$*" in *install*) exit 9;; esac'}, 0, "`apt-get install` failed with status 9"),
        ({"apt_get": ""}, 0, "apt-get installed the packages, but these commands are not on PATH"),
    ],
)
def test_where_it_cannot_install_it_says_what_to_install(
    machine: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    programs: dict[str, str],
    user: int,
    reason: str,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    machine("openssl", "redis-server", "chromium", "promtool", **programs)
    assert os_tools.main() == 1
    assert capsys.readouterr().err == (
        f"missing: haproxy, luacheck ({reason}). Install them yourself; on Debian, as root:\n"
        "  apt-get install haproxy lua-check\n"
    )


ONE_TEST = """
from tests.support.run.required_tools import require

def test_it() -> None:
    require("redis-server")
"""


def run_without_redis(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """pytest with our conftest on one test that needs redis-server, on a PATH without it."""
    folder = tmp_path / "empty"
    folder.mkdir()
    test = tmp_path / "test_it.py"
    test.write_text(ONE_TEST)
    environment = {name: value for name, value in os.environ.items() if name != required_tools.STRICT}
    environment |= {"PATH": str(folder), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **variables}
    plugins = ["-p", "no:cacheprovider", "-p", "tests.conftest"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "--rootdir", str(tmp_path), "-c", os.devnull, str(test)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def test_a_plain_run_skips_for_a_missing_tool_and_says_so_at_its_end(tmp_path: Path) -> None:
    done = run_without_redis(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 skipped" in done.stdout
    assert "1 tests were skipped because tools are missing: redis-server. `make test` installs them." in done.stdout


def test_under_make_test_a_missing_tool_is_a_failure(tmp_path: Path) -> None:
    done = run_without_redis(tmp_path, **{required_tools.STRICT: "1"})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed" in done.stdout
    assert "redis-server is missing: `make test` installs it" in done.stdout


def test_make_test_and_so_ci_is_strict() -> None:
    recipes = [line for line in (ROOT / "Makefile").read_text().splitlines() if "$(PY) -m pytest" in line]
    assert recipes
    assert all(recipe.startswith(f"\t@{required_tools.STRICT}=1 ") for recipe in recipes)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("", ["vllm", "checkov", "envoy"]),
        ("-q -x", ["vllm", "checkov", "envoy"]),
        ("-m long", ["vllm", "checkov", "envoy"]),
        ("-k tests", ["vllm", "checkov", "envoy"]),
        ("tests", ["vllm", "checkov", "envoy"]),
        ("tests/vllm", ["vllm"]),
        ("-m long tests/vllm/parity -s", ["vllm"]),
        ("tests/vllm/test_lora.py::test_it[a/b]", ["vllm"]),
        ("tests/contract tests/k8s", ["checkov"]),
        ("tests/app/test_stop.py -x", []),
        ("--ignore tests/vllm tests/app", []),
    ],
)
def test_only_what_the_selected_tests_need_is_built(arguments: str, wanted: list[str]) -> None:
    assert needed_targets.targets(arguments.split()) == wanted


def test_a_wrong_name_of_a_bench_is_told_before_anything_is_installed(tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "-f", str(ROOT / "Makefile"), "bench", "NAME=no"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("usage: make -s bench NAME=<name>, one of:")
    assert list(tmp_path.iterdir()) == []


def test_every_target_that_tests_need_is_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert [target for target in needed_targets.TARGETS.values() if f"\n{target}:" not in makefile] == []
