"""The Dockerfiles are linted; the files that they copy exist, are not ignored, and are enough to build the wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
import yaml
from tests.k8s.render import K8S, ROOT, tool
from tests.tools import require
from tests.wheels import router_files, wheel_of

if TYPE_CHECKING:
    from pathlib import Path

IMAGES = sorted((K8S / "images").glob("*.Dockerfile"))


def copied(dockerfile: Path) -> list[str]:
    """Paths of the build context that a Dockerfile copies."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", dockerfile.read_text(), re.MULTILINE)
    return [source for line in lines for source in line.split()[:-1]]


@pytest.mark.parametrize("dockerfile", IMAGES, ids=lambda path: path.stem)
def test_hadolint(dockerfile: Path) -> None:
    hadolint = require("hadolint", tool("hadolint"))

    result = subprocess.run(
        [hadolint, "--config", str(ROOT / ".hadolint.yaml"), str(dockerfile)],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("dockerfile", IMAGES, ids=lambda path: path.stem)
def test_the_image_runs_as_the_user_of_the_manifests(dockerfile: Path) -> None:
    assert re.findall(r"^USER (.+)$", dockerfile.read_text(), re.MULTILINE)[-1] == "65532:65532"


@pytest.mark.parametrize("dockerfile", IMAGES, ids=lambda path: path.stem)
def test_what_is_copied_exists_and_is_not_ignored(dockerfile: Path) -> None:
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)

    sources = copied(dockerfile)

    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(f"{kept}/".startswith(f"{source}/") or f"{source}/".startswith(f"{kept}/") for kept in allowed), (
            source
        )


def test_images_are_those_that_the_manifests_run() -> None:
    built = {re.search(r"-t (\S+) ", path.read_text()) for path in IMAGES}
    deployments = [K8S / "base/deployment.yaml", K8S / "components/worker/deployment.yaml"]
    run = {
        yaml.safe_load(path.read_text())["spec"]["template"]["spec"]["containers"][0]["image"] for path in deployments
    }

    assert {found.group(1) for found in built if found} == run


def test_the_router_image_has_all_it_installs(tmp_path: Path) -> None:
    context = tmp_path / "src"
    context.mkdir()
    for source in copied(K8S / "images/router.Dockerfile"):
        (context / source).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, context / source, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / source, context / source)

    packed = set(wheel_of(context, tmp_path / "router").namelist())

    assert router_files().keys() <= packed
