"""Wheels of what is shipped, built by the backend that pip asks; pip itself takes three times as long."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def wheel_of(source: Path, out: Path) -> zipfile.ZipFile:
    """The wheel of the project in ``source``, which must be a copy: building leaves things there."""
    out.mkdir(exist_ok=True)
    argv = [sys.executable, "-c", BUILD, str(out)]
    done = subprocess.run(argv, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = out.glob("*.whl")
    return zipfile.ZipFile(built)
