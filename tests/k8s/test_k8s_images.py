"""The Containerfiles are linted; the files that they copy exist, are not ignored, and suffice for the wheels.

``test_k8s_containers.py`` builds and runs the images.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.k8s.render import K8S, ROOT, tool
from tests.support.run.required_tools import require
from tests.support.run.wheels import router_files, wheel_of

if TYPE_CHECKING:
    from pathlib import Path

IMAGES = sorted((K8S / "images").glob("*.Containerfile"))
SCRIPT = K8S / "images/build"


def stages(containerfile: Path) -> list[str]:
    """The text of each stage; the stage that builds comes first."""
    return re.split(r"^(?=FROM )", containerfile.read_text(), flags=re.MULTILINE)[1:]


#: A script in place of docker, podman and buildah: it notes its arguments, and has one digest for each image.
FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> "$LOG"
digest=sha256:$(printf %064d 7)
case $* in
  *"$FAILS"*) echo broken >&2; exit 1 ;;
  "image inspect"*) for last; do :; done; echo "mirror.example.com/x@sha256:old"; echo "${last%:*}@$digest" ;;
  "push --digestfile"*) echo "$digest" > "$3" ;;
esac
"""


@dataclass
class Build:
    """k8s/images/build with a stand-in for the tool. calls: the arguments of each call of the tool, a line for each."""

    folder: Path

    def __call__(
        self, *arguments: str, tools: tuple[str, ...] = ("docker",), fails: str = "nothing", **given: str
    ) -> subprocess.CompletedProcess[str]:
        places = self.folder / "bin"
        shutil.rmtree(places, ignore_errors=True)
        places.mkdir()
        for name in ("sh", "sed", "head", "cat", "mktemp", "rm", "dirname", "basename"):
            (places / name).symlink_to(shutil.which(name) or name)
        for name in tools:
            (places / name).write_text(FAKE)
            (places / name).chmod(0o755)
        (self.folder / "log").write_text("")
        environment = {"PATH": str(places), "LOG": str(self.folder / "log"), "FAILS": fails, **given}
        return subprocess.run(
            [str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    @property
    def calls(self) -> list[str]:
        return (self.folder / "log").read_text().replace(str(ROOT), "TOP").splitlines()


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return Build(tmp_path)


def version() -> str:
    return re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]  # type: ignore[index]


def built() -> set[str]:
    """The images that the commands in the heads of the Containerfiles build."""
    named = re.findall(r"k8s/images/build localhost (\w+)", "".join(path.read_text() for path in IMAGES))
    return {f"localhost/warmfleet-{name}:{version()}" for name in named}


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
    told = [found for path in IMAGES for found in re.findall(r'image\.version="(.+?)"', path.read_text())]

    assert len(told) == len(built())
    assert {*told} == {version()}


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


def test_the_script_builds_pushes_and_prints_the_block_of_an_overlay(build: Build) -> None:
    done = build("registry.example.com:5000/team", VLLM="vllm:1")

    assert done.returncode == 0, done.stderr
    name, tag = "registry.example.com:5000/team/warmfleet", version()
    digest = f"sha256:{7:064d}"
    assert yaml.safe_load(done.stdout) == {
        "images": [
            {"name": f"localhost/warmfleet-{image}", "newName": f"{name}-{image}", "digest": digest}
            for image in ("router", "worker")
        ]
    }
    assert [call for call in build.calls if " build " in call] == [
        f"docker build --file TOP/k8s/images/{image}.Containerfile {target}--build-arg VLLM=vllm:1 "
        f"--tag {name}-{image}:{tag} TOP"
        for image, target in (("router", ""), ("worker", "--target worker "))
    ]
    assert [call for call in build.calls if " push " in call] == [
        f"docker push {name}-{image}:{tag}" for image in ("router", "worker")
    ]


@pytest.mark.parametrize("tool_", ["podman", "buildah"])
def test_the_digest_comes_from_the_push_of_other_tools(build: Build, tool_: str) -> None:
    done = build("r.example.com/", "plugin", "dev", tools=(tool_,))

    assert done.returncode == 0, done.stderr
    [plugin, dev] = yaml.safe_load(done.stdout)["images"]
    assert plugin == {
        "name": "localhost/warmfleet-plugin",
        "newName": "r.example.com/warmfleet-plugin",
        "digest": f"sha256:{7:064d}",
    }
    assert dev["newName"] == "r.example.com/warmfleet-dev"
    assert build.calls[0].startswith(f"{tool_} build --file TOP/k8s/images/worker.Containerfile --target plugin --tag ")


def test_every_image_of_the_manifests_is_built_for_this_machine_without_a_push(build: Build) -> None:
    done = build("localhost", "router", "worker", "plugin", "dev", tools=("podman", "docker"), TOOL="podman")

    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert {re.search(r"--tag (\S+)", call)[1] for call in build.calls} == built()  # type: ignore[index]
    assert all(call.startswith("podman build ") for call in build.calls)


@pytest.mark.parametrize(
    ("arguments", "options", "code", "said", "calls"),
    [
        ((), {}, 2, "usage: ", 0),
        (("--push",), {}, 2, "usage: ", 0),
        (("r.example.com", "router", "engine"), {}, 2, "there is no image engine", 0),
        (("r.example.com",), {"tools": ()}, 2, "docker, podman and buildah are missing", 0),
        (("r.example.com",), {"fails": "build --file"}, 1, "broken", 1),
        (("r.example.com",), {"fails": "push r.example.com"}, 1, "broken", 2),
        (("r.example.com",), {"fails": "image inspect"}, 2, "docker tells no digest of r.example.com/warmfleet-r", 3),
        (("r.example.com",), {"fails": "push --digestfile", "tools": ("buildah",)}, 1, "broken", 2),
    ],
)
def test_the_script_prints_no_block_when_something_failed(
    build: Build, arguments: tuple[str, ...], options: dict[str, Any], code: int, said: str, calls: int
) -> None:
    done = build(*arguments, **options)

    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert len(build.calls) == calls


def test_the_script_explains_itself(build: Build) -> None:
    done = build("--help", tools=())

    assert done.returncode == 0
    assert {f"  {word} " in done.stdout for word in ("REGISTRY", "IMAGE", "TOOL", "BASE", "VLLM")} == {True}
