"""Runs the pods of rendered manifests as processes of this machine, so that what the manifests say is tried.

A container becomes a process with its command, its variables and its files. Three things cannot be as in a cluster, and
are replaced wherever they stand: the name of a Service or of its pod by an address of this machine, a port of a
container by a free one, and the path of a mount by a folder. Images, limits, users, network policies and most probes
have no part in it.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.k8s.objects import VARIABLE, Manifest, data_of, labels, matches, name_of, of_kind, pod, workloads
from tests.k8s.render import ROOT

from warmfleet_loadtest.stacks.processes import Processes, free_ports

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

#: What a container without a command runs, by the end of its image's name.
ENTRY_POINTS = {"warmfleet-router": ["warmfleet"]}
INIT_S = 60.0


@dataclass
class RunningPod:
    """A pod. ports: port of a container -> port on this machine. mounts: path -> folder.

    names: what stands for the cluster's names in this pod's files, variables and arguments only.
    """

    name: str
    spec: Manifest
    folder: Path
    ports: dict[int, int]
    names: dict[str, str]
    mounts: dict[str, Path] = field(default_factory=dict)

    def url(self, port: int) -> str:
        return f"http://127.0.0.1:{self.ports[port]}"


class Pods:
    """The pods of a render.

    programs: name -> the command line that stands for it on this machine. secrets: those that an operator brings.
    """

    def __init__(
        self,
        objects: list[Manifest],
        processes: Processes,
        folder: Path,
        programs: Mapping[str, list[str]],
        secrets: Mapping[str, dict[str, str]] | None = None,
    ) -> None:
        self._objects = objects
        self._secrets = secrets or {}
        self._processes = processes
        self._folder = folder
        self._services: dict[str, str] = {}
        self._ports: dict[str, dict[int, int]] = {}
        self._bin = folder / "bin"
        self._bin.mkdir()
        ours = {"warmfleet": [sys.executable, "-m", "warmfleet"], "python": [sys.executable]}
        for name, command in {**ours, **programs}.items():
            script = self._bin / name
            script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
            script.chmod(0o755)

    def start(self, name: str, number: int = 0, again: RunningPod | None = None) -> RunningPod:
        """Run the init containers of a pod of this workload to their ends, then start its containers.

        number: which of its pods. again: the pod that ended and is started anew, with the same addresses.
        """
        (workload,) = [item for item in workloads(self._objects) if name_of(item) == name]
        label = name.partition("/")[2]
        made = self._placed(workload, f"{label}-{number}", number, again)
        made.folder.mkdir()
        spec = made.spec
        for part in [*spec.get("initContainers", []), *spec["containers"]]:
            made.mounts |= {mount["mountPath"]: made.folder / mount["name"] for mount in part.get("volumeMounts", [])}
        for volume in spec.get("volumes", []):
            self._fill(made, volume)
        for part in spec.get("initContainers", []):
            self.run(made, part, [*part["command"], *part.get("args", [])])
        for part in spec["containers"]:
            image = part["image"].rpartition("/")[2].partition(":")[0]
            words = [*part.get("command", ENTRY_POINTS.get(image, [])), *part.get("args", [])]
            variables = self._variables(made, part)
            command = [self._here(made, _expanded(word, variables)) for word in words]
            self._processes.spawn(
                "pod", f"{made.name}.{part['name']}", self._program(command), self._environment(variables)
            )
        return made

    def _placed(self, workload: Manifest, name: str, number: int, again: RunningPod | None) -> RunningPod:
        """The pod with its ports and names. Pods of a headless Service have one port, and an address each."""
        spec, label = pod(workload), workload["metadata"]["name"]
        numbers = [port["containerPort"] for part in spec["containers"] for port in part.get("ports", [])]
        ports = self._ports.get(label) or dict(zip(numbers, free_ports(len(numbers)), strict=True))
        folder = self._folder / (f"{name}-again" if again else name)
        names: dict[str, str] = {}
        for service in of_kind(self._objects, "Service"):
            if not matches(service["spec"]["selector"], labels(workload)):
                continue
            title = service["metadata"]["name"]
            declared = {port["name"]: port["containerPort"] for part in spec["containers"] for port in part["ports"]}
            for port in service["spec"]["ports"]:
                here = ports[declared[port["targetPort"]]]
                self._services[f"{title}:{port['port']}"] = f"127.0.0.1:{here}"
                for each in range(workload["spec"].get("replicas", 1)):
                    self._services[f"{label}-{each}.{title}"] = f"127.0.1.{each + 1}"
                    self._services[f"{label}-{each}.{title}:{port['port']}"] = f"127.0.1.{each + 1}:{here}"
            if service["spec"].get("clusterIP") == "None":
                self._ports[label] = ports
                own = f"127.0.1.{number + 1}"
                pattern = f"{label}-[012].{title}"
                names = {"bind * -::*": f"bind {own}", f"$POD_NAME.{title}": own, pattern: "127.0.1.[123]"}
        return RunningPod(name, spec, folder, ports, names)

    def run(self, made: RunningPod, part: Manifest, words: list[str]) -> None:
        """Run a command in a container, as an init container or a probe, to its end; it must succeed."""
        variables = self._variables(made, part)
        command = self._program([self._here(made, _expanded(word, variables)) for word in words])
        environment = os.environ | self._environment(variables)
        done = subprocess.run(command, capture_output=True, text=True, timeout=INIT_S, env=environment)
        assert done.returncode == 0, f"{made.name}/{part['name']}: {done.stdout}{done.stderr}"

    def _program(self, command: list[str]) -> list[str]:
        own = self._bin / command[0]
        return [str(own), *command[1:]] if own.exists() else command

    def _environment(self, variables: dict[str, str]) -> dict[str, str]:
        sources = os.pathsep.join(str(ROOT / name) for name in ("app", "worker_plugin", "loadtest"))
        return {**variables, "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": sources}

    def _variables(self, made: RunningPod, part: Manifest) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in part.get("envFrom", []):
            settings = data_of(self._objects, "ConfigMap", source["configMapRef"]["name"]) or {}
            found |= {name: self._here(made, value) for name, value in settings.items()}
        for entry in part.get("env", []):
            source = entry.get("valueFrom", {})
            if "secretKeyRef" in source:
                secret = source["secretKeyRef"]
                if (data := self._secret(secret["name"])) or not secret.get("optional"):
                    found[entry["name"]] = data[secret["key"]]
            elif "fieldRef" in source:
                known = {"status.podIP": "127.0.0.1", "metadata.name": made.name, "spec.nodeName": "node"}
                found[entry["name"]] = known[source["fieldRef"]["fieldPath"]]
            else:
                found[entry["name"]] = self._here(made, _expanded(entry["value"], found))
        return found

    def _fill(self, made: RunningPod, volume: Manifest) -> None:
        folder = made.folder / volume["name"]
        folder.mkdir()
        if "configMap" in volume:
            data = data_of(self._objects, "ConfigMap", volume["configMap"]["name"]) or {}
            files = {name: self._here(made, text) for name, text in data.items()}
        elif "secret" in volume:
            files = self._secret(volume["secret"]["secretName"])
        else:
            files = {}
        for name, text in files.items():
            (folder / name).write_text(text)

    def _secret(self, name: str) -> dict[str, str]:
        if name in self._secrets:
            return self._secrets[name]
        found = data_of(self._objects, "Secret", name) or {}
        return {key: base64.b64decode(value).decode() for key, value in found.items()}

    def _here(self, made: RunningPod, text: str) -> str:
        """``text`` with the names, ports and paths that stand for the cluster's on this machine; in one pass."""
        replaced = {
            **self._services,
            **made.names,
            **{path: str(folder) for path, folder in made.mounts.items()},
            **{str(port): str(here) for port, here in made.ports.items()},
        }
        longest_first = "|".join(re.escape(key) for key in sorted(replaced, key=len, reverse=True))
        return re.sub(rf"(?<![\w.-])({longest_first})(?![\w.-])", lambda found: replaced[found[1]], text)


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    return VARIABLE.sub(lambda found: variables.get(found[1], found[0]), text)
