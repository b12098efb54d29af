"""How a simulated engine hands blocks to others: vLLM's ``--kv-transfer-config``, and the speed of its link."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmfleet_worker.protocol.transfer import HANDS_OVER, KEEPS_ALL, VLLM, Transfer

if TYPE_CHECKING:
    from collections.abc import Mapping

ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
CONNECTORS = ("NixlConnector", "NixlPullConnector", "MooncakeConnector")
POLICIES = ("fail", "recompute")
KNOWN = {"kv_connector", "kv_role", "engine_id", "kv_load_failure_policy", "kv_buffer_device"}
EXTRA = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True)
class Link:
    """The link between engines. bytes_per_s: of each engine, in either direction; setup_s: of each transfer.

    handshake_s: how long a decode engine waits for the side channel of an engine that it does not know yet.
    """

    bytes_per_s: float = 12.5e9  # 100 Gbit/s
    setup_s: float = 0.005
    handshake_s: float = 5.0
    token_bytes: int = 131_072  # of an 8B model


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """The settings. recomputes: ``kv_load_failure_policy``. host, port: the side channel's, as told to others.

    port 0: any free one. engine_id: empty: drawn at the start. version: of vLLM, which partners must have in common.
    """

    role: str
    connector: str = CONNECTORS[0]
    engine_id: str = ""
    recomputes: bool = False
    lease_s: float = 30.0
    host: str = "127.0.0.1"
    port: int = 0
    version: str = "sim"
    link: Link = Link()

    @property
    def names_transfers(self) -> bool:
        """Whether routers name each transfer, and the prefill engine's answer tells nothing: so with Mooncake."""
        return HANDS_OVER[self.connector] == "Mooncake"

    def announced(self, engine_id: str, port: int, same: Mapping[str, str]) -> Transfer:
        """Return what the engine tells the fleet. same: what partners must have in common beside the version."""
        settings = {VLLM: self.version, "connector": HANDS_OVER[self.connector], KEEPS_ALL: "True", **same}
        return Transfer(
            *(ROLES[self.role], self.connector, "", "push" if self.names_transfers else "pull", engine_id),
            *("" if self.names_transfers else self.host, port, max(1, round(self.lease_s))),
            recomputes=self.recomputes,
            same=tuple(sorted(settings.items())),
        )


def config_of_role(role: str, link: Link, version: str) -> TransferConfig:
    """Return the settings of the engines that `warmfleet up` and `make loadtest` start with a role.

    They are those of ``{"kv_connector": "NixlConnector", "kv_role": role, "kv_load_failure_policy": "recompute"}``.
    Without the policy, a lost transfer would fail its request.
    """
    return TransferConfig(role, recomputes=True, version=version, link=link)


def read_config(text: str, link: Link | None = None, version: str = "sim") -> TransferConfig:
    """Read the option's JSON, and the side channel's address from vLLM's variables. Raises ValueError."""
    try:
        told = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--kv-transfer-config is no JSON: {error}") from error
    if not isinstance(told, dict) or not isinstance(told.get(EXTRA, {}), dict):
        raise ValueError("--kv-transfer-config must be a JSON object")  # noqa: TRY004 - an option's value
    if unknown := told.keys() - KNOWN - {EXTRA}:
        raise ValueError(f"--kv-transfer-config: simulated engines have no {min(unknown)}")
    connector, policy = told.get("kv_connector"), told.get("kv_load_failure_policy", POLICIES[0])
    lease_s = told.get(EXTRA, {}).get("kv_lease_duration", 30)
    if connector == "MooncakeConnector":
        lease_s = float(os.environ.get("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "480"))
    for name, value, known in (
        ("kv_connector", connector, CONNECTORS),
        ("kv_role", told.get("kv_role"), tuple(ROLES)),
        ("kv_load_failure_policy", policy, POLICIES),
    ):
        if value not in known:
            raise ValueError(f"--kv-transfer-config: {name} is {value!r}; simulated engines know {', '.join(known)}")
    if not isinstance(lease_s, int | float) or not 0 < lease_s < 2**31:
        raise ValueError("--kv-transfer-config: kv_lease_duration must be seconds")
    return TransferConfig(
        str(told["kv_role"]),
        str(connector),
        str(told.get("engine_id") or ""),
        policy == "recompute",
        lease_s,
        os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost"),
        int(os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")),
        version,
        link or Link(),
    )
