"""`kubectl apply -k k8s/` as a user types it, against a small API server that validates every write."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from tests.k8s.fake_api import FakeApi
from tests.k8s.kubectl import apply, environment, run
from tests.k8s.policies import BROUGHT
from tests.k8s.render import COMBINATIONS, K8S, every_combination, kubectl, parse, render
from tests.k8s.schemas import problem_of

if TYPE_CHECKING:
    from pathlib import Path

README = (K8S / "README.md").read_text()


def test_apply_creates_everything_and_applying_again_changes_nothing(
    api: FakeApi, tmp_path: Path, rendered: dict[str, str]
) -> None:
    wanted = len(parse(rendered["root"]))

    first = apply(api, tmp_path, "-k", str(K8S))
    again = apply(api, tmp_path, "-k", str(K8S))

    assert first.returncode == 0, first.stderr
    assert first.stdout.count(" created\n") == wanted == len(api.store.objects)
    assert again.returncode == 0, again.stderr
    # kubectl sends the two budgets' selectors each time (their patch strategy is "replace") and says "configured", but
    # the server writes nothing.
    others = [line for line in again.stdout.splitlines() if not line.startswith("poddisruptionbudget.policy/")]
    assert len(others) == wanted - 2
    assert all(line.endswith(" unchanged") for line in others), again.stdout
    assert {verb for verb, _, _ in api.store.writes} == {"create"}


@pytest.mark.parametrize("name", [name for name in COMBINATIONS if name != "root"])
def test_every_other_combination_is_accepted(
    rich_api: FakeApi, tmp_path: Path, rendered: dict[str, str], name: str
) -> None:
    assert accepted(rich_api, tmp_path, rendered[name]) == len(parse(rendered[name]))


@pytest.mark.long(
    minutes=4, shows="every combination of components is applied by kubectl to an API with strict schemas"
)
@pytest.mark.timeout(900)
def test_every_combination_is_accepted(tmp_path: Path) -> None:
    for number, parts in enumerate(every_combination().values()):
        scratch = tmp_path / str(number)
        scratch.mkdir()
        text = render(parts, scratch)
        with FakeApi(custom=True) as server:
            assert accepted(server, tmp_path, text) == len(parse(text)), parts


def accepted(api: FakeApi, home: Path, text: str) -> int:
    """The number of objects that were created."""
    (home / "all.yaml").write_text(text)
    result = apply(api, home, "-f", str(home / "all.yaml"))
    assert result.returncode == 0, result.stderr
    return result.stdout.count(" created\n")


def test_the_command_of_the_readme_makes_the_passwords(tmp_path: Path) -> None:
    (command,) = re.findall(r"^    (kubectl -n warmfleet create secret .*?\)$)", README, re.MULTILINE | re.DOTALL)
    dry = f"{command.replace('kubectl', kubectl(), 1)} --dry-run=client -o yaml"

    done = subprocess.run(["bash", "-c", dry], capture_output=True, text=True, timeout=60, env=environment(tmp_path))

    assert done.returncode == 0, done.stderr
    (secret,) = parse(done.stdout)
    given = {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}
    assert problem_of(secret) is None
    assert secret["metadata"]["name"] == "redis-passwords"
    assert given.keys() == BROUGHT["redis-passwords"]
    assert all(re.fullmatch("[0-9a-f]{48}", password) for password in given.values())
    assert len(set(given.values())) == len(given)


def test_monitoring_without_the_operator_is_an_error_that_names_the_kind(
    api: FakeApi, tmp_path: Path, rendered: dict[str, str]
) -> None:
    (tmp_path / "all.yaml").write_text(rendered["tls"])

    result = apply(api, tmp_path, "-f", str(tmp_path / "all.yaml"))

    assert result.returncode != 0
    assert 'no matches for kind "PodMonitor"' in result.stderr


def test_a_changed_setting_rolls_the_routers(api: FakeApi, tmp_path: Path) -> None:
    assert apply(api, tmp_path, "-k", str(K8S)).returncode == 0
    copy = tmp_path / "k8s"
    shutil.copytree(K8S, copy)
    base = copy / "base/kustomization.yaml"
    base.write_text(base.read_text().replace("WARMFLEET_SHUTDOWN_GRACE_S=110", "WARMFLEET_SHUTDOWN_GRACE_S=100"))

    result = apply(api, tmp_path, "-k", str(copy))

    assert result.returncode == 0, result.stderr
    assert "deployment.apps/router configured" in result.stdout
    assert sum("configmap/router-settings-" in line and "created" in line for line in result.stdout.splitlines()) == 1
    assert "statefulset.apps/redis unchanged" in result.stdout


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("minReadySeconds: 5", "minReadySecond: 5", "'minReadySecond' was unexpected"),
        ("minReplicas: 3", "minReplicas: three", "'three' is not of type"),
        ("runAsNonRoot: true", 'runAsNonRoot: "yes"', "'yes' is not of type"),
        ("automountServiceAccountToken: false", "automountServiceAcountToken: false", "was unexpected"),
    ],
)
def test_a_typo_or_a_wrong_type_is_refused_and_named(
    api: FakeApi, tmp_path: Path, rendered: dict[str, str], right: str, wrong: str, message: str
) -> None:
    text = rendered["root"]
    assert right in text
    (tmp_path / "all.yaml").write_text(text.replace(right, wrong))

    result = apply(api, tmp_path, "-f", str(tmp_path / "all.yaml"))

    assert result.returncode != 0
    assert message in result.stderr
    assert "Invalid" in result.stderr or "invalid" in result.stderr


def test_an_object_without_its_namespace_is_refused(api: FakeApi, tmp_path: Path) -> None:
    result = apply(api, tmp_path, "-f", str(K8S / "components/redis/service.yaml"))

    assert result.returncode != 0
    assert 'namespaces "warmfleet" not found' in result.stderr


def test_a_selector_may_not_change(api: FakeApi, tmp_path: Path, rendered: dict[str, str]) -> None:
    assert apply(api, tmp_path, "-k", str(K8S)).returncode == 0
    text = rendered["root"].replace("app.kubernetes.io/name: router", "app.kubernetes.io/name: gateway")
    (tmp_path / "all.yaml").write_text(text)

    result = apply(api, tmp_path, "-f", str(tmp_path / "all.yaml"))

    assert result.returncode != 0
    assert "spec.selector: field is immutable" in result.stderr


def test_from_one_redis_to_three_with_sentinels(rich_api: FakeApi, tmp_path: Path, rendered: dict[str, str]) -> None:
    """As k8s/README.md tells it: two objects must go first, because some of their fields may not change."""
    for name in ("prod", "sentinel"):
        (tmp_path / f"{name}.yaml").write_text(rendered[name])
    (command,) = re.findall(r"^    kubectl (-n warmfleet delete statefulset/redis .*)$", README, re.MULTILINE)
    assert apply(rich_api, tmp_path, "-f", str(tmp_path / "prod.yaml")).returncode == 0

    refused = apply(rich_api, tmp_path, "-f", str(tmp_path / "sentinel.yaml"))
    deleted = run(rich_api, tmp_path, *command.split(), "--wait=false")
    accepted_now = apply(rich_api, tmp_path, "-f", str(tmp_path / "sentinel.yaml"))

    assert "StatefulSet redis: spec.podManagementPolicy: field is immutable" in refused.stderr
    assert "Service redis: spec.clusterIP: field is immutable" in refused.stderr
    assert deleted.returncode == 0, deleted.stderr
    assert accepted_now.returncode == 0, accepted_now.stderr


def test_a_deployment_that_named_its_replicas_keeps_them(
    api: FakeApi, tmp_path: Path, rendered: dict[str, str]
) -> None:
    """An apply takes away what the last one named: k8s/README.md has the line that makes it forget the number."""
    (line,) = re.findall(r"^    (kubectl .* view-last-applied deployment/router.*(?:\\\n.*)+)$", README, re.MULTILINE)
    line = line.replace("-n warmfleet ", "-n warmfleet-dev ").replace("kubectl", f"{kubectl()} --server={api.url}")
    before = rendered["root"].replace("  minReadySeconds: 5\n", "  minReadySeconds: 5\n  replicas: 7\n", 1)
    (tmp_path / "before.yaml").write_text(before)
    assert apply(api, tmp_path, "-f", str(tmp_path / "before.yaml")).returncode == 0

    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=60, env=environment(tmp_path), check=False
    )
    assert apply(api, tmp_path, "-k", str(K8S)).returncode == 0

    assert done.returncode == 0, done.stderr
    (router,) = [
        item for key, item in api.store.objects.items() if (key.kind.kind, key.name) == ("Deployment", "router")
    ]
    assert router["spec"]["replicas"] == 7


def test_get_and_delete_by_short_name(api: FakeApi, tmp_path: Path) -> None:
    assert apply(api, tmp_path, "-k", str(K8S)).returncode == 0

    listed = run(api, tmp_path, "get", "deploy", "-n", "warmfleet-dev", "-o", "name")
    deleted = run(api, tmp_path, "delete", "-k", str(K8S), "--wait=false")

    assert listed.stdout == "deployment.apps/router\ndeployment.apps/worker-demo\n"
    assert deleted.returncode == 0, deleted.stderr
    assert not api.store.objects
