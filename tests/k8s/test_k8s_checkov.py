"""checkov runs once over the shipped manifests and over seeded mistakes: a second opinion, with more rules."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.k8s.objects import Manifest, name_of
from tests.k8s.render import ROOT, parse, tool
from tests.support.run.required_tools import require

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MISTAKES: dict[str, tuple[str, Callable[[Manifest], object]]] = {
    "privileged": ("CKV_K8S_16", lambda pod: pod["containers"][0]["securityContext"].update(privileged=True)),
    "root": ("CKV_K8S_40", lambda pod: pod["securityContext"].update(runAsUser=0, runAsNonRoot=False)),
    "no-limit": ("CKV_K8S_13", lambda pod: pod["containers"][0]["resources"].pop("limits")),
    "no-liveness": ("CKV_K8S_8", lambda pod: pod["containers"][0].pop("livenessProbe")),
    "host-network": ("CKV_K8S_19", lambda pod: pod.update(hostNetwork=True)),
}


@pytest.fixture(scope="module")
def failed(rendered: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """File name -> ids of the checks that failed for it."""
    folder = tmp_path_factory.mktemp("checkov")
    for name, text in rendered.items():
        (folder / f"good-{name}.yaml").write_text(text)
    for name, (_, mutate) in MISTAKES.items():
        objects = parse(rendered["prod"])
        (router,) = [item for item in objects if name_of(item) == "Deployment/router"]
        mutate(router["spec"]["template"]["spec"])
        (folder / f"bad-{name}.yaml").write_text(yaml.safe_dump_all([router]))
    return _run(folder)


def _run(folder: Path) -> dict[str, set[str]]:
    checkov = require("checkov", tool("checkov"))
    command = [checkov, "-d", str(folder), "--config-file", str(ROOT / ".checkov.yaml"), "-o", "json"]
    # The variables keep checkov from asking for an account or the network.
    environment = {**os.environ, "BC_SKIP_MAPPING": "TRUE", "CHECKOV_RUN_SCA_PACKAGE_SCAN_V2": "false"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 1, result.stdout + result.stderr  # because of the seeded mistakes
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["summary"]["parsing_errors"] == 0
    failures: dict[str, set[str]] = {path.name: set() for path in folder.iterdir()}
    for entry in found["results"]["failed_checks"]:
        failures[entry["file_path"].lstrip("/")].add(entry["check_id"])
    return failures


def test_what_we_ship_passes(failed: dict[str, set[str]]) -> None:
    good = {name: checks for name, checks in failed.items() if name.startswith("good-")}

    assert len(good) == 9
    assert not any(good.values()), good


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(failed: dict[str, set[str]], mistake: str) -> None:
    assert MISTAKES[mistake][0] in failed[f"bad-{mistake}.yaml"]
