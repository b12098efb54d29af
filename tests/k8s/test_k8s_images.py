"""The Containerfiles are linted; what they copy exists, is not ignored, and is enough to build the wheels.

``test_k8s_containers.py`` builds and runs the images.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from tests.k8s.render import K8S, ROOT, tool
from tests.tools import require
from tests.wheels import router_files, wheel_of

if TYPE_CHECKING:
    from pathlib import Path

IMAGES = sorted((K8S / "images").glob("*.Containerfile"))


def stages(containerfile: Path) -> list[str]:
    """The text of every stage, the one that builds first."""
    return re.split(r"^(?=FROM )", containerfile.read_text(), flags=re.MULTILINE)[1:]


def built() -> set[str]:
    """The images that the commands in the Containerfiles build."""
    return {name for path in IMAGES for name in re.findall(r"-t (\S+) \.", path.read_text())}


def copied(containerfile: Path) -> list[str]:
    """Paths of the build context that a Containerfile copies."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", containerfile.read_text(), re.MULTILINE)
    return [source for line in lines for source in line.split()[:-1]]


@pytest.mark.parametrize("containerfile", IMAGES, ids=lambda path: path.stem)
def test_hadolint(containerfile: Path) -> None:
    hadolint = require("hadolint", tool("hadolint"))

    result = subprocess.run(
        [hadolint, "--config", str(ROOT / ".hadolint.yaml"), str(containerfile)],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("containerfile", IMAGES, ids=lambda path: path.stem)
def test_every_image_runs_as_the_user_of_the_manifests(containerfile: Path) -> None:
    images = stages(containerfile)[1:]  # the first stage builds

    assert images
    assert [re.findall(r"^USER (.+)$", stage, re.MULTILINE) for stage in images] == [["65532:65532"]] * len(images)


@pytest.mark.parametrize("containerfile", IMAGES, ids=lambda path: path.stem)
def test_an_image_installs_what_a_lock_pins_and_nothing_else(containerfile: Path) -> None:
    installs = re.findall(r"bin/pip (?:--python \S+ )?install (.+)", containerfile.read_text())

    assert installs
    for options in installs:
        assert "--require-hashes" in options or {"--no-deps", "--no-index"} <= set(options.split()), options
    for stage in stages(containerfile)[1:]:
        assert "pip install" not in stage


def test_the_python_image_is_pinned_by_one_digest() -> None:
    pinned = {re.search(r"^ARG BASE=(.+)$", path.read_text(), re.MULTILINE)[1] for path in IMAGES}  # type: ignore[index]

    assert len(pinned) == 1, "the images would not share their base"
    assert re.fullmatch(r"docker\.io/library/python:3\.11\S+@sha256:[0-9a-f]{64}", pinned.pop())


def test_the_labels_tell_the_version_of_the_distributions() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]  # type: ignore[index]

    told = [found for path in IMAGES for found in re.findall(r'image\.version="(.+?)"', path.read_text())]
    tags = {image.rpartition(":")[2] for image in built()}

    assert len(told) == len(built())
    assert {*told, *tags} == {version}


@pytest.mark.parametrize("containerfile", IMAGES, ids=lambda path: path.stem)
def test_what_is_copied_exists_and_is_not_ignored(containerfile: Path) -> None:
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)

    sources = copied(containerfile)

    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(f"{kept}/".startswith(f"{source}/") or f"{source}/".startswith(f"{kept}/") for kept in allowed), (
            source
        )


def test_images_that_run_are_those_that_are_built() -> None:
    texts = [path.read_text() for path in K8S.rglob("*.yaml")]
    run = {name for text in texts for name in re.findall(r"^\s*(?:- )?image: (\S*warmfleet-\S+)$", text, re.MULTILINE)}

    assert run
    assert {name.removeprefix("localhost/") for name in run} <= {name.removeprefix("localhost/") for name in built()}


def test_containerfiles_that_are_named_exist() -> None:
    texts = {path: path.read_text() for kind in ("*.md", "*.yaml", "*.Containerfile") for path in K8S.rglob(kind)}
    named = [(path, name) for path, text in texts.items() for name in re.findall(r"k8s/images/[\w.-]+file\b", text)]

    assert named
    assert [(path.name, name) for path, name in named if not (ROOT / name).exists()] == []


def test_the_router_image_has_all_it_installs(tmp_path: Path) -> None:
    context = tmp_path / "src"
    context.mkdir()
    for source in copied(K8S / "images/router.Containerfile"):
        (context / source).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, context / source, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / source, context / source)

    packed = set(wheel_of(context, tmp_path / "router").namelist())

    assert router_files().keys() <= packed
