"""The router's rooms: the picture in app/README.md, the import contract in pyproject.toml and the folders agree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROUTER = ROOT / "app/warmfleet"
PACKAGES = (ROUTER, ROOT / "worker_plugin/warmfleet_worker", ROOT / "loadtest/warmfleet_loadtest")


def layers() -> list[set[str]]:
    """The rooms that the contract allows to import each other downwards, from the top to the bottom."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (one for one in contracts if one["type"] == "layers" and one["containers"] == ["warmfleet"])
    return [{name.strip() for name in layer.split("|")} for layer in contract["layers"]]


def picture() -> list[str]:
    """The lines of the picture under the heading "Rooms"."""
    section = (ROOT / "app/README.md").read_text().split("\n## Rooms\n")[1].split("\n## ")[0]
    return section.split("```")[1].strip("\n").splitlines()


def drawn(line: str) -> set[str]:
    return set(re.findall(r"\[ ?(\w+) ?\]", line))


def test_the_picture_shows_the_layers_from_top_to_bottom() -> None:
    assert [drawn(line) for line in picture() if drawn(line)] == layers()


def test_every_folder_and_module_of_the_router_has_its_place() -> None:
    on_disk = {path.stem for path in ROUTER.glob("*.py")} | {path.parent.name for path in ROUTER.glob("*/__init__.py")}
    assert set.union(*layers()) == on_disk - {"__init__"}


@pytest.mark.parametrize(
    ("module", "seed", "contract"),
    [
        ("prompt/tokenizer.py", "import warmfleet.pools.pool", "the router's rooms import downwards only"),
        (
            "routing/tenants.py",
            "import warmfleet.background.upkeep",
            "the router's rooms import downwards only",
        ),
        ("fleet/rows.py", "import warmfleet.fleet.reservations", "no modules import each other in a circle"),
        (
            "protocol/cbor.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import warmfleet.errors",
            "the router's rooms import downwards only",
        ),
    ],
    ids=["upwards", "sideways", "in a circle", "upwards for the type checker"],
)
def test_a_forbidden_import_is_found(tmp_path: Path, module: str, seed: str, contract: str) -> None:
    for source, package in zip(("app", "worker_plugin", "loadtest"), PACKAGES, strict=True):
        shutil.copytree(package, tmp_path / source / package.name, ignore=shutil.ignore_patterns("*.json", "*.lua"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "app/warmfleet" / module).open("a") as file:
        file.write(f"\n{seed}\n")
    path = os.pathsep.join(str(tmp_path / source) for source in ("app", "worker_plugin", "loadtest"))
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{contract} BROKEN" in done.stdout
