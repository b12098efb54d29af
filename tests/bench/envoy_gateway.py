"""Starts a real Envoy as a process of a bench: a gateway that asks pickers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.envoy.gateway_config import MODES, Mode, binary, config
from tests.support.run.required_tools import require

from warmfleet_loadtest.stacks.processes import get_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet_loadtest.stacks.processes import Processes

DUPLEX = MODES[0]


def started(
    processes: Processes, pickers: Sequence[int], engines: Sequence[int], modes: Sequence[Mode], name: str = "envoy"
) -> dict[str, int]:
    """Start Envoy with the ports of its pickers and of the engines; return the ports of its listeners by mode."""
    folder = processes.folder / f"{name}-files"
    folder.mkdir()
    places, members = ([f"127.0.0.1:{port}" for port in ports] for ports in (pickers, engines))
    (folder / "envoy.json").write_text(json.dumps(config(places, members, modes, ejects=True)))
    options = ["--concurrency", "1", "--use-dynamic-base-id", "-l", "error"]
    options += ["--admin-address-path", str(folder / "admin")]
    processes.spawn("envoy", name, [require("envoy", binary()), "-c", str(folder / "envoy.json"), *options])
    ports: dict[str, int] = {}

    def listening() -> bool:
        admin = folder / "admin"
        told = get_json(f"http://{admin.read_text()}/listeners?format=json") if admin.exists() else None
        for each in (told or {}).get("listener_statuses", []):
            ports[each["name"]] = each["local_address"]["socket_address"]["port_value"]
        return len(ports) == len(modes) + 1

    processes.wait(name, listening)
    return ports


def door(processes: Processes, pickers: Sequence[int], engines: Sequence[int]) -> int:
    """Start Envoy in the protocol's own mode; return the port for clients."""
    return started(processes, pickers, engines, [DUPLEX])[DUPLEX.name]
