"""Several models in one fleet, added, taken away and upgraded by the commands of k8s/README.md."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
import yaml
from tests.k8s.fleet_policies import CHECKS
from tests.k8s.kubectl import apply, run
from tests.k8s.objects import environment, labels, matches, name_of, of_kind, of_role, pod
from tests.k8s.render import K8S, ROOM, kustomize, parse

if TYPE_CHECKING:
    from pathlib import Path

    from tests.k8s.fake_api import FakeApi
    from tests.k8s.objects import Manifest
    from tests.k8s.policies import Program

README = (K8S / "README.md").read_text()
INSTANCE = "app.kubernetes.io/instance"


def section(heading: str) -> str:
    (found,) = re.findall(rf"^## {heading}\n(.*?)(?=^## )", README, re.MULTILINE | re.DOTALL)
    assert isinstance(found, str)
    return found


def commands(heading: str, starts: str) -> str:
    """The lines of the block of code in the section whose heading begins with the given words."""
    (found,) = re.findall(rf"^    {starts}.*\n(?:    .*\n)*", section(heading), re.MULTILINE)
    assert isinstance(found, str)
    return found


def of_model(objects: list[Manifest], model: str) -> Manifest:
    (found,) = [item for item in of_role(objects, "worker") if labels(item)[INSTANCE] == model]
    return found


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A copy of the manifests in which the commands for a second model were typed."""
    shutil.copytree(K8S, tmp_path / "k8s")
    shutil.copytree(K8S / "overlays/prod", tmp_path / "k8s/overlays/mine")
    typed = commands("A second model", "cd k8s").replace("    kubectl apply -k .\n", "")
    subprocess.run(["bash", "-e", "-c", typed], cwd=tmp_path, check=True, timeout=60)
    whole = tmp_path / "k8s/overlays/mine/kustomization.yaml"
    room = {"patches": [{"target": {"kind": "Deployment", "name": "router"}, "patch": ROOM}]}
    whole.write_text(whole.read_text() + yaml.safe_dump(room))
    return whole.parent


def test_the_commands_of_the_readme_add_a_model(mine: Path, program: Program) -> None:
    before, after = parse(kustomize(K8S / "overlays/prod")), parse(kustomize(mine))

    assert {name: found for name, check in CHECKS.items() if (found := check(after, program))} == {}
    added = {re.sub("-[a-z0-9]{10}$", "", name_of(item)) for item in after} - {
        re.sub("-[a-z0-9]{10}$", "", name_of(item)) for item in before
    }
    assert added == {"Deployment/worker-code", "PodDisruptionBudget/worker-code", "ConfigMap/worker-settings-code"}
    unchanged = [item for item in before if item["metadata"].get("labels", {}).get(INSTANCE) == "chat"]
    assert len(unchanged) == 3
    assert all(item in after for item in unchanged), "the first model's engines do not restart"


def test_the_first_model_is_made_as_the_second(mine: Path) -> None:
    objects = parse(kustomize(mine))
    first, second = (str(of_model(objects, model)) for model in ("chat", "code"))

    # but for the hashes of their settings
    plain = [re.sub("(worker-settings-[a-z]+)-[a-z0-9]{10}", r"\1", text) for text in (first, second)]
    assert plain[0].replace("chat", "code") == plain[1]


@pytest.mark.parametrize("overlay", ["two-models", "mine"])
def test_each_model_has_its_own_of_everything_that_selects_pods(overlay: str, mine: Path) -> None:
    objects = parse(kustomize(mine if overlay == "mine" else K8S / "overlays" / overlay))
    (served,) = {
        environment(objects, pod(item)["containers"][0])["WARMFLEET_MODELS"] for item in of_role(objects, "router")
    }

    workers = of_role(objects, "worker")

    assert len(workers) == 2
    own = {environment(objects, pod(item)["containers"][0])["WARMFLEET_MODEL"] for item in workers}
    assert own == set(served.split(","))
    for item in workers:
        for kind, field in (("PodDisruptionBudget", "selector"), ("Deployment", "selector")):
            mine_ = [policy for policy in of_kind(objects, kind) if matches(policy["spec"][field], labels(item))]
            assert len(mine_) == 1, (kind, name_of(item))
        # All engines share a label, by which one policy lets routers reach them.
        policies = [
            policy
            for policy in of_kind(objects, "NetworkPolicy")
            if matches(policy["spec"]["podSelector"], labels(item))
        ]
        assert {policy["metadata"]["name"] for policy in policies} == {"default-deny", "dns", "worker"}
    for service in of_kind(objects, "Service"):
        assert not any(matches(service["spec"]["selector"], labels(item)) for item in workers)


def test_each_autoscaler_counts_the_queue_of_its_own_model() -> None:
    objects = parse(kustomize(K8S / "overlays/two-models"))
    specs = {item["metadata"]["name"]: item["spec"] for item in of_kind(objects, "HorizontalPodAutoscaler")}

    for name, model in (("worker-chat", "Qwen.Qwen3-8B"), ("worker-code", "Qwen.Qwen2.5-Coder-32B-Instruct")):
        (metric,) = specs[name]["metrics"]
        assert specs[name]["scaleTargetRef"]["name"] == name
        assert metric["external"]["metric"]["selector"]["matchLabels"] == {"model": model}


def test_the_example_reaches_its_registry_and_gpus() -> None:
    objects = parse(kustomize(K8S / "overlays/two-models"))
    chat, code = (pod(of_model(objects, model)) for model in ("chat", "code"))

    for item in (
        of_model(objects, "chat"),
        of_model(objects, "code"),
        *of_role(objects, "router"),
        *of_role(objects, "redis"),
    ):
        assert pod(item)["imagePullSecrets"] == [{"name": "registry"}]
    gpus = {
        name: found["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        for name, found in (("chat", chat), ("code", code))
    }
    assert gpus == {"chat": "1", "code": "2"}
    for found in (chat, code):
        assert found["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
        assert "--prefix-caching-hash-algo=sha256_cbor" in found["containers"][0]["args"], "flags are added to ours"
    assert "--max-model-len=32768" in chat["containers"][0]["args"]
    assert "--tensor-parallel-size=2" in code["containers"][0]["args"]
    assert "tolerations" not in pod(of_role(objects, "router")[0])


def test_a_model_is_taken_away_by_its_label(api: FakeApi, tmp_path: Path, mine: Path) -> None:
    assert apply(api, tmp_path, "-k", str(mine)).returncode == 0
    before = set(api.store.objects)
    line = commands("A second model", "kubectl -n warmfleet delete").replace("\\\n", " ")

    done = run(api, tmp_path, *line.split()[1:], "--wait=false")

    assert done.returncode == 0, done.stderr
    gone = {re.sub("-[a-z0-9]{10}$", "", f"{key.kind.kind}/{key.name}") for key in before - set(api.store.objects)}
    assert gone == {"Deployment/worker-code", "PodDisruptionBudget/worker-code", "ConfigMap/worker-settings-code"}
