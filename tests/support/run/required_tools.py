"""A test whose tool is not installed fails under `make test`, and is skipped elsewhere."""

from __future__ import annotations

import os

import pytest
from tests.support.run import os_tools

#: `make test` sets this variable: a missing tool is then an error, never a skip.
STRICT = "STRICT_TOOLS"
#: The reason of every skip for a missing tool begins so.
REASON = "missing tool: "


def require(command: str, found: str | None = None) -> str:
    """The path of a command: ``found``, else where the operating system has it.

    If it is not installed, the test fails under `make test` and is skipped in a plain pytest run.
    """
    path = found or os_tools.find(command)
    if path is None:
        if os.environ.get(STRICT):
            pytest.fail(f"{command} is missing: `make test` installs it")
        pytest.skip(REASON + command)
    return path


def skipped_summary(reasons: list[str]) -> str | None:
    """The line about tests that were skipped for a missing tool, or None if there were none."""
    commands = [reason.partition(REASON)[2] for reason in reasons if REASON in reason]
    if not commands:
        return None
    named = ", ".join(sorted(set(commands)))
    return f"{len(commands)} tests were skipped because tools are missing: {named}. `make test` installs them."
