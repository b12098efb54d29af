"""The router's rooms: the picture in app/README.md, the import contract in pyproject.toml and the folders agree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROUTER = ROOT / "app/warmfleet"
PACKAGES = (ROUTER, ROOT / "worker_plugin/warmfleet_worker", ROOT / "loadtest/warmfleet_loadtest")


def layers() -> list[set[str]]:
    """The rooms that the contract allows to import each other downwards, from the top to the bottom."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (
        candidate
        for candidate in contracts
        if candidate["type"] == "layers" and candidate["containers"] == ["warmfleet"]
    )
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


#: Message of the tool -> a module, and an import that it may not have: up, sideways, for types, in a circle.
FORBIDDEN = {
    "warmfleet.prompt.tokenizer -> warmfleet.pools.pool": ("prompt/tokenizer.py", "import warmfleet.pools.pool"),
    "warmfleet.routing.tenants -> warmfleet.background.upkeep": (
        *("routing/tenants.py", "import warmfleet.background.upkeep"),
    ),
    "warmfleet.protocol.cbor -> warmfleet.errors": (
        *("protocol/cbor.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import warmfleet.errors"),
    ),
    ".rows -> .bookings": ("fleet/rows.py", "import warmfleet.fleet.bookings"),
}


def test_forbidden_imports_are_found(tmp_path: Path) -> None:
    for source, package in zip(("app", "worker_plugin", "loadtest"), PACKAGES, strict=True):
        shutil.copytree(package, tmp_path / source / package.name, ignore=shutil.ignore_patterns("*.json", "*.lua"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for module, seed in FORBIDDEN.values():
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
    assert "the router's rooms import downwards only BROKEN" in done.stdout
    assert "no modules import each other in a circle BROKEN" in done.stdout
    assert [said for said in FORBIDDEN if f"- {said} (" not in done.stdout] == []
