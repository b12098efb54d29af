"""Wheels and source archives of the distributions, built as pip builds them but in a third of pip's time."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "models", "tests", "k8s", "out")


def copy_of(source: Path, folder: Path) -> Path:
    """A copy of a project without what earlier builds left in it: setuptools would pack that, too."""
    shutil.copytree(source, folder, symlinks=True, ignore=LEFT_OUT)
    return folder


def wheel_of(source: Path, out: Path) -> zipfile.ZipFile:
    """The wheel of the project in ``source``, which must be a copy: a build leaves files there."""
    return zipfile.ZipFile(_build("build_wheel", source, out, "*.whl"))


def sdist_of(source: Path, out: Path) -> Path:
    """The path of the source archive of the project in ``source``, which must be a copy."""
    return _build("build_sdist", source, out, "*.tar.gz")


def _build(hook: str, source: Path, out: Path, pattern: str) -> Path:
    out.mkdir(exist_ok=True)
    argv = [sys.executable, "-c", BUILD, hook, str(out)]
    done = subprocess.run(argv, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = out.glob(pattern)
    return built


def files_below(folder: Path, *suffixes: str) -> dict[str, bytes]:
    """Path -> content of the files that a wheel of the package in ``folder`` must hold. Links to folders count."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name != "__pycache__":
            found |= {f"{folder.name}/{name}": content for name, content in files_below(path, *suffixes).items()}
        elif path.suffix in suffixes:
            found[f"{folder.name}/{path.name}"] = path.read_bytes()
    return found


def router_files() -> dict[str, bytes]:
    """Path -> content of everything that the router's wheel must hold."""
    return files_below(ROOT / "app/warmfleet", ".py", ".typed", ".lua", ".html", ".css", ".js")
