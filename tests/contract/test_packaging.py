"""What is shipped: two wheels, with everything they need in them and nothing generic, and hashed locks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from email import message_from_string
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.wheels import wheel_of

if TYPE_CHECKING:
    import zipfile

ROOT = Path(__file__).parents[2]
LOCKS = [ROOT / "app/requirements.lock", *sorted(ROOT.glob("tests/**/requirements.lock"))]


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def pins(lock: Path) -> dict[str, set[str]]:
    """Package -> versions; a package may have several, by environment marker."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", lock.read_text(), re.MULTILINE):
        found.setdefault(normal(name), set()).add(version)
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def wheel(source: Path, out: Path) -> zipfile.ZipFile:
    """Built from a copy: setuptools would pack what an earlier build left in ``build/``."""
    copy = out / "source"
    leave = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "models", "tests", "k8s", "out")
    shutil.copytree(source, copy, symlinks=True, ignore=leave)
    return wheel_of(copy, out)


@pytest.fixture(scope="module")
def router_wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return wheel(ROOT, tmp_path_factory.mktemp("router"))


@pytest.fixture(scope="module")
def plugin_wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return wheel(ROOT / "worker_plugin", tmp_path_factory.mktemp("plugin"))


def metadata(archive: zipfile.ZipFile, name: str = "METADATA") -> str:
    [path] = [entry for entry in archive.namelist() if entry.endswith(f".dist-info/{name}")]
    return archive.read(path).decode()


def test_every_package_on_disk_is_declared() -> None:
    on_disk = {
        str(path.parent.relative_to(source)).replace("/", ".")
        for source in (ROOT / "app", ROOT / "loadtest")
        for path in source.rglob("__init__.py")
    }
    assert on_disk == set(project(ROOT)["tool"]["setuptools"]["packages"])


def test_both_distributions_have_one_version() -> None:
    router, plugin = project(ROOT)["project"], project(ROOT / "worker_plugin")["project"]
    assert router["version"] == plugin["version"]
    assert f"warmfleet-worker=={plugin['version']}" in router["dependencies"]


def test_the_router_wheel_has_the_scripts_as_real_files(router_wheel: zipfile.ZipFile) -> None:
    packed = {name: router_wheel.read(name) for name in router_wheel.namelist() if name.endswith(".lua")}
    scripts = {f"warmfleet/{path.relative_to(ROOT)}": path.read_bytes() for path in (ROOT / "lua").rglob("*.lua")}
    assert len(scripts) >= 30
    assert packed == scripts


def test_the_router_wheel_has_the_simulators_data(router_wheel: zipfile.ZipFile) -> None:
    data = {f"warmfleet_loadtest/data/{path.name}" for path in (ROOT / "loadtest/warmfleet_loadtest/data").iterdir()}
    assert data
    assert data <= set(router_wheel.namelist())


def test_no_wheel_installs_a_generic_name(router_wheel: zipfile.ZipFile, plugin_wheel: zipfile.ZipFile) -> None:
    assert top_level(router_wheel) == {"warmfleet", "warmfleet_loadtest"}
    assert top_level(plugin_wheel) == {"warmfleet_worker"}


def top_level(archive: zipfile.ZipFile) -> set[str]:
    return {name.split("/")[0] for name in archive.namelist() if ".dist-info/" not in name}


def test_the_plugin_is_found_by_entry_point_and_asks_for_redis_alone(plugin_wheel: zipfile.ZipFile) -> None:
    assert "[vllm.general_plugins]\nwarmfleet = warmfleet_worker.plugin:register" in metadata(
        plugin_wheel, "entry_points.txt"
    )
    [requirement] = message_from_string(metadata(plugin_wheel)).get_all("Requires-Dist") or []
    assert requirement.startswith("redis>=")


IMPORT_ALL = """
import importlib, json, pkgutil, sys
import warmfleet_worker
modules = [module.name for module in pkgutil.walk_packages(warmfleet_worker.__path__, "warmfleet_worker.")]
for name in modules:
    importlib.import_module(name)
print(json.dumps({"modules": modules, "foreign": sorted(
    name for name, module in sys.modules.items()
    if "." not in name and "site-packages" in (getattr(module, "__file__", None) or "")
)}))
"""


def test_the_plugin_imports_in_an_environment_with_nothing_but_redis(
    plugin_wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """Every module, also those that hook vLLM: they import it only when an engine calls them."""
    venv.create(tmp_path / "clean", with_pip=False)
    python = tmp_path / "clean/bin/python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "clean")}))
    plugin_wheel.extractall(packages)
    (packages / "redis").symlink_to(Path(sysconfig.get_path("purelib")) / "redis")
    done = subprocess.run([python, "-I", "-c", IMPORT_ALL], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert '"warmfleet_worker.plugin"' in done.stdout
    assert '"warmfleet_worker.vllm_hooks.engine_core"' in done.stdout
    assert '"foreign": ["redis", "warmfleet_worker"]' in done.stdout


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_lock_pins_with_hashes_and_names_no_host(lock: Path) -> None:
    text = lock.read_text()
    assert "://" not in text
    blocks = re.split(r"\n(?=[A-Za-z0-9])", re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE).strip())
    assert len(blocks) > 10
    assert [block for block in blocks if "==" not in block or "--hash=sha256:" not in block] == []


def test_the_locks_cover_what_the_project_asks_for() -> None:
    declared = project(ROOT)
    groups = declared["dependency-groups"]
    runtime = (
        declared["project"]["dependencies"] + declared["project"]["optional-dependencies"]["demo"] + groups["build"]
    )
    run, dev = pins(ROOT / "app/requirements.lock"), pins(ROOT / "tests/requirements.lock")
    assert names(runtime) - {"warmfleet-worker"} <= set(run)
    assert names(groups["dev"]) <= set(dev)
    assert run.items() <= dev.items(), "make test would change what make run installed"


def names(requirements: list[str]) -> set[str]:
    return {normal(re.split(r"[\[<>=;~! ]", requirement)[0]) for requirement in requirements}


def test_the_import_rules_hold() -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    path = os.pathsep.join(str(ROOT / source) for source in ("app", "worker_plugin", "loadtest"))
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout
