"""Runs kubectl as a user types it, against the small API server."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from tests.k8s.render import kubectl

if TYPE_CHECKING:
    from pathlib import Path

    from tests.k8s.fake_api import FakeApi


def environment(home: Path) -> dict[str, str]:
    """kubectl caches discovery in HOME, and must not find a kubeconfig there."""
    return {**os.environ, "HOME": str(home), "KUBECONFIG": str(home / "none")}


def run(api: FakeApi, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [kubectl(), f"--server={api.url}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(home))


def apply(api: FakeApi, home: Path, *what: str) -> subprocess.CompletedProcess[str]:
    return run(api, home, "apply", "--validate=false", *what)
