"""The plugin reads vLLM's own configuration objects: role, place, lease and what partners must have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm.engine import MODEL

from warmfleet.protocol.transfer import Transfer, read_transfer

if TYPE_CHECKING:
    from tests.vllm.inside import Inside

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}


def fact(vllm: Inside, config: dict[str, Any], rank: int = 0, model: str = str(MODEL), **variables: str) -> Transfer:
    told = vllm.call("transfers", "told", model, config, variables, rank)
    found = read_transfer(told["transfer"])
    assert found is not None, told
    assert told["unfit"] == ""
    assert dict(found.same).get("NIXL's hash") in (None, told["hash"])
    return found


def test_a_nixl_engine_tells_role_place_lease_and_nixls_own_hash(vllm: Inside) -> None:
    found = fact(vllm, NIXL)
    assert (found.role, found.connector, found.beside, found.mode) == ("prefill", "NixlConnector", "", "pull")
    assert (found.host, found.port, found.lease_s, found.recomputes) == ("localhost", 5_600, 30, False)
    assert not found.has_fixed_id
    same = dict(found.same)
    assert len(same.pop("NIXL's hash")) == 64
    assert same.pop("vLLM").startswith("0.32.0")
    assert same == {
        "connector": "NIXL",
        "transfer mode": "pull",
        "NIXL connector": "14",
        "attention backend": "CPU_ATTN",
        "model path": str(MODEL),
        "revision, quantization, HF overrides": "-, -, -",
        "dtype": "float32",
        "KV heads": "2",
        "head size": "32",
        "layers": "2",
        "cache dtype": "auto",
        "block size": "32",
        "hybrid KV cache manager": "True",
        "draft model": "none",
    }
    more = {"kv_lease_duration": 6, "num_threads": 0}
    config = NIXL | {"kv_role": "kv_consumer", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": more}
    place = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.1.2.3", "VLLM_NIXL_SIDE_CHANNEL_PORT": "7000"}
    partner = fact(vllm, config | {"engine_id": "mine"}, 3, **place)
    assert (partner.role, partner.host, partner.port, partner.lease_s) == ("decode", "10.1.2.3", 7_003, 6)
    assert (partner.recomputes, partner.engine_id, partner.has_fixed_id) == (True, "mine", True)
    assert (partner.same, partner.kin) == (found.same, found.kin), "they pair"


def test_what_differs_for_nixl_differs_here(vllm: Inside) -> None:
    plain = fact(vllm, NIXL)
    assert fact(vllm, NIXL | {"kv_connector": "NixlPullConnector"}).same == plain.same, "another name of the same"
    push = dict(fact(vllm, NIXL | {"kv_connector": "NixlPushConnector"}).same)
    assert {name for name, value in plain.same if push[name] != value} == {"transfer mode", "NIXL's hash"}
    other = dict(fact(vllm, NIXL, model=str(MODEL.with_name("small"))).same)
    differing = {name for name, value in plain.same if other[name] != value}
    assert differing >= {"model path", "layers", "NIXL's hash"}
    assert "vLLM" not in differing
    weights = read_transfer(vllm.call("transfers", "told", str(MODEL), NIXL, {}, 0, False, "v2")["transfer"])
    assert weights is not None
    assert set(plain.same) - set(weights.same) == {("revision, quantization, HF overrides", "-, -, -")}


def test_of_several_connectors_the_one_that_hands_over_counts(vllm: Inside) -> None:
    nixl = NIXL | {"kv_connector_extra_config": {"kv_lease_duration": 9}}
    tier = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    more = {"connectors": [tier, nixl]}
    config = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": more}
    found = fact(vllm, config | {"kv_load_failure_policy": "recompute"})
    assert (found.role, found.connector, found.beside) == ("prefill", "NixlConnector", "OffloadingConnector")
    assert (found.lease_s, found.recomputes) == (9, True)
    assert found.same == fact(vllm, NIXL).same


def test_other_connectors(vllm: Inside) -> None:
    mooncake = {"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer", "engine_id": "engine-d"}
    found = fact(vllm, mooncake | {"kv_connector_extra_config": {"mooncake_protocol": "tcp"}})
    assert (found.role, found.mode, found.host, found.port, found.lease_s) == ("decode", "push", "", 8_998, 480)
    same = dict(found.same)
    assert (same["connector"], same["mooncake_protocol"], same["KV heads"]) == ("Mooncake", "tcp", "2")
    there = fact(vllm, mooncake | {"kv_connector_extra_config": {"bootstrap_server_address": "10.0.0.9:81"}})
    assert (there.host, there.port) == ("10.0.0.9", 81)
    windows = read_transfer(vllm.call("transfers", "told", str(MODEL), mooncake, {}, 0, True)["transfer"])
    assert windows is not None
    assert (found.splits, windows.splits) == (True, False)
    tier = fact(vllm, {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"})
    assert (tier.library, tier.prefills, tier.decodes, tier.same) == (
        *("", False, False),
        (("connector", "OffloadingConnector"),),
    )
    moriio = {"kv_connector": "MoRIIOConnector", "kv_role": "kv_consumer"}
    assert "would answer" in vllm.call("transfers", "told", str(MODEL), moriio, {})["unfit"]
