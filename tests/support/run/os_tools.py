"""The programs that tests and checks need from the operating system: finds them, and installs those that are missing.

    python3 tests/support/run/os_tools.py                  all of them: `make deps` and `make test`
    python3 tests/support/run/os_tools.py luacheck         only these: `make check`; `make loadtest` wants haproxy

Uses the standard library alone, because it runs before any environment of ours exists.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Command -> the Debian package that brings it.
TOOLS = {
    "redis-server": "redis-server",
    "haproxy": "haproxy",
    "luacheck": "lua-check",
    "openssl": "openssl",
    "chromium": "chromium",
}
#: Command -> the Debian package that it is taken out of. To install that would start a service of which no test has any
#: use: a Prometheus, on the port of our operators, again at every start of the machine.
TAKEN_OUT = {"promtool": "prometheus"}
#: Command -> other names under which it may be there.
ALSO = {"chromium": ("chromium-browser", "google-chrome")}
LOCAL = "/usr/local/bin"
#: Debian installs haproxy into a folder that is on root's PATH only.
SBIN = "/usr/sbin"


class MissingToolsError(Exception):
    """Some tools are missing and cannot be installed from here. The text says what to install."""


def find(command: str) -> str | None:
    """The path of a command, or None if it is not installed under any name."""
    names = (command, *ALSO.get(command, ()))
    return next((path for name in names if (path := shutil.which(name) or shutil.which(name, path=SBIN))), None)


def missing(commands: Iterable[str] = ()) -> list[str]:
    """Return the commands that are not installed; of all known commands, if none is named."""
    return [command for command in commands or (*TOOLS, *TAKEN_OUT) if find(command) is None]


def install_missing(commands: Sequence[str] = ()) -> None:
    """Install what is missing of these tools (of all, if none is named) with apt-get, as far as it can be had.

    Raises MissingToolsError for those that are missing then.
    """
    wanted = missing(commands)
    if not wanted:
        return
    if shutil.which("apt-get") is None:
        raise MissingToolsError(sentence(wanted, "this machine has no apt-get"))
    root = as_root()
    if root is None:
        raise MissingToolsError(sentence(wanted, "apt-get needs root or sudo without a password"))
    print(f"installing {', '.join(wanted)} with apt-get ...", flush=True)
    apt_get = [*root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
    failed = [
        *apt(apt_get, "update"),
        *install([TOOLS[command] for command in wanted if command in TOOLS], apt_get),
        *(problem for command in wanted if command in TAKEN_OUT for problem in take_out(command, apt_get, root)),
    ]
    if left := missing(wanted):
        reason = (
            ", ".join(dict.fromkeys(failed)) or "apt-get installed the packages, but these commands are not on PATH"
        )
        raise MissingToolsError(sentence(left, reason))


def apt(apt_get: list[str], *arguments: str) -> list[str]:
    """Run apt-get. Returns what failed, nothing if it worked."""
    status = subprocess.run([*apt_get, *arguments], check=False).returncode
    return [f"`apt-get {arguments[0]}` failed with status {status}"] if status else []


def install(packages: list[str], apt_get: list[str]) -> list[str]:
    """Install packages at once, or else each by itself: apt-get installs none if it does not know one of them.

    Returns what failed.
    """
    words = ("install", "-y", "--no-install-recommends")
    failed = apt(apt_get, *words, *packages) if packages else []
    if not failed or len(packages) == 1:
        return failed
    return [problem for package in packages for problem in apt(apt_get, *words, package)]


def take_out(command: str, apt_get: list[str], root: list[str]) -> list[str]:
    """Download the package of this command, and copy only the command out of it. Returns what failed."""
    with tempfile.TemporaryDirectory() as folder:
        steps = [
            [*apt_get, "download", TAKEN_OUT[command]],
            ["sh", "-c", "dpkg-deb -x *.deb ."],
            [*root, "install", "-m", "755", f"usr/bin/{command}", LOCAL],
        ]
        for step in steps:
            if subprocess.run(step, cwd=folder, check=False).returncode != 0:
                return [f"`{' '.join(step[-2:])}` failed"]
    return []


def as_root() -> list[str] | None:
    """The words to put before a command so that it runs as root, or None if that takes a password."""
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo") is None:
        return None
    asked = subprocess.run(["sudo", "-n", "true"], check=False, capture_output=True)
    return ["sudo", "-n"] if asked.returncode == 0 else None


def sentence(commands: list[str], reason: str) -> str:
    """A sentence with the missing tools, the reason why they were not installed, and the packages to install."""
    packages = [TOOLS[command] for command in commands if command in TOOLS]
    steps = [f"apt-get install {' '.join(packages)}"] if packages else []
    steps += [
        f"cd $(mktemp -d) && apt-get download {TAKEN_OUT[command]} && dpkg-deb -x *.deb . && "
        f"install -m 755 usr/bin/{command} {LOCAL}"
        for command in commands
        if command in TAKEN_OUT
    ]
    told = "\n  ".join(steps)
    return f"missing: {', '.join(commands)} ({reason}). Install them yourself; on Debian, as root:\n  {told}"


def main(commands: Sequence[str] = ()) -> int:
    """0 once every tool is there, else 1 and a sentence on standard error."""
    try:
        install_missing(commands)
    except MissingToolsError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
