"""The programs that tests and checks need from the operating system: finds them, and installs those that are missing.

    python3 tests/os_tools.py      (`make deps` runs this, and so do `make test` and `make check`)

Uses the standard library alone, because it runs before any environment of ours exists.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile

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
LOCAL = "/usr/local/bin"
#: Debian installs haproxy into a folder that is on root's PATH only.
SBIN = "/usr/sbin"


class MissingToolsError(Exception):
    """Some tools are missing and cannot be installed from here. The text says what to install."""


def find(command: str) -> str | None:
    """The path of a command, or None if it is not installed."""
    return shutil.which(command) or shutil.which(command, path=SBIN)


def missing() -> list[str]:
    """The commands of TOOLS and TAKEN_OUT that are not there."""
    return [command for command in (*TOOLS, *TAKEN_OUT) if find(command) is None]


def install_missing() -> None:
    """Install the missing tools with apt-get; do nothing if there are none. Raises MissingToolsError."""
    wanted = missing()
    if not wanted:
        return
    if shutil.which("apt-get") is None:
        raise MissingToolsError(sentence(wanted, "this machine has no apt-get"))
    root = as_root()
    if root is None:
        raise MissingToolsError(sentence(wanted, "apt-get needs root or sudo without a password"))
    print(f"installing {', '.join(wanted)} with apt-get ...", flush=True)
    apt_get = [*root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
    packages = [TOOLS[command] for command in wanted if command in TOOLS]
    steps = [["update"], ["install", "-y", "--no-install-recommends", *packages]]
    for arguments in steps if packages else steps[:1]:
        status = subprocess.run([*apt_get, *arguments], check=False).returncode
        if status != 0:
            raise MissingToolsError(sentence(wanted, f"`apt-get {arguments[0]}` failed with status {status}"))
    for command in TAKEN_OUT.keys() & set(wanted):
        take_out(command, apt_get, root)
    if left := missing():
        raise MissingToolsError(sentence(left, "apt-get installed the packages, but these commands are not on PATH"))


def take_out(command: str, apt_get: list[str], root: list[str]) -> None:
    """Download the package of this command, and copy only the command out of it. Raises MissingToolsError."""
    with tempfile.TemporaryDirectory() as folder:
        steps = [
            [*apt_get, "download", TAKEN_OUT[command]],
            ["sh", "-c", "dpkg-deb -x *.deb ."],
            [*root, "install", "-m", "755", f"usr/bin/{command}", LOCAL],
        ]
        for step in steps:
            if subprocess.run(step, cwd=folder, check=False).returncode != 0:
                raise MissingToolsError(sentence([command], f"`{' '.join(step[-2:])}` failed"))


def as_root() -> list[str] | None:
    """The words to put before a command so that it runs as root, or None if that takes a password."""
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo") is None:
        return None
    asked = subprocess.run(["sudo", "-n", "true"], check=False, capture_output=True)
    return ["sudo", "-n"] if asked.returncode == 0 else None


def sentence(commands: list[str], reason: str) -> str:
    """What is missing, why it was not installed, and what to install."""
    packages = " ".join((TOOLS | TAKEN_OUT)[command] for command in commands)
    return f"missing: {', '.join(commands)} ({reason}). Install them yourself; on Debian: apt-get install {packages}"


def main() -> int:
    """0 once every tool is there, else 1 and a sentence on standard error."""
    try:
        install_missing()
    except MissingToolsError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
