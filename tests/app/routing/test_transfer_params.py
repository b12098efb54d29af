"""The parameters that the decode engine gets, by the prefill engine's answer."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from tests.support.fleet.transfers import PREFILL

from warmfleet.pools.outliers import Judged
from warmfleet.protocol.transfer import Transfer
from warmfleet.routing.transfer_params import Handover, PrefillFailed

OURS = Transfer(**asdict(PREFILL))
NIXL = Handover("http://p:8000", OURS, "leg")
MOONCAKE = Handover("http://p:8000", replace(OURS, connector="MooncakeConnector", host="", port=8_998), "leg")
JUDGED = Judged("p0.0")
GOOD: dict[str, Any] = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [[1]]},
    "usage": {"prompt_tokens": 9},
    "choices": [{"finish_reason": "length"}],
}
WRONG: list[bytes] = [
    b"",
    b"[]",
    b"{}",
    json.dumps(GOOD | {"kv_transfer_params": None}).encode(),
    json.dumps(GOOD | {"kv_transfer_params": {"do_remote_prefill": False}}).encode(),
    json.dumps(GOOD | {"usage": {"prompt_tokens": 8}}).encode(),
    json.dumps(GOOD | {"usage": None}).encode(),
    json.dumps(GOOD | {"choices": []}).encode(),
]


def test_only_the_parameters_of_this_prompt_are_used() -> None:
    made = NIXL.second(200, json.dumps(GOOD).encode(), 9, JUDGED)
    assert json.loads(made) == GOOD["kv_transfer_params"]
    for answer in WRONG:
        with pytest.raises(PrefillFailed) as caught:
            NIXL.second(200, answer, 9, JUDGED)
        assert (caught.value.result, caught.value.to_blame) == ("refused", JUDGED)
    dead = b'{"error":{"message":"EngineCore encountered an issue."}}'
    for status, answer, result in ((400, b"", "refused"), (429, b"", "refused"), (500, dead, "failed")):
        with pytest.raises(PrefillFailed) as caught:
            NIXL.second(status, answer, 9, JUDGED)
        assert caught.value.result == result
        assert caught.value.to_blame == (None if status == 400 else JUDGED), "clients have no engine ejected"


@pytest.mark.parametrize("handover", [NIXL, MOONCAKE])
def test_an_engine_that_kept_no_blocks_is_not_to_blame(handover: Handover) -> None:
    """So vLLM answers if the first token ends the answer, but for NIXL's newer versions."""
    ended = GOOD | {"kv_transfer_params": None, "choices": [{"finish_reason": "stop"}]}
    with pytest.raises(PrefillFailed) as caught:
        handover.second(200, json.dumps(ended).encode(), 9, JUDGED)
    assert (caught.value.result, caught.value.to_blame) == ("unfit", None)
    kept = json.dumps(GOOD | {"choices": [{"finish_reason": "stop"}]}).encode()
    assert json.loads(NIXL.second(200, kept, 9, JUDGED)) == GOOD["kv_transfer_params"]


def test_mooncakes_engines_get_the_name_of_the_transfer_and_the_place() -> None:
    """The answer of the prefill engine has no parameters."""
    assert json.loads(NIXL.first()) == {"do_remote_decode": True, "do_remote_prefill": False}
    assert json.loads(MOONCAKE.first()) == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "leg"}
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 5}}
    expected = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": "leg",
        "remote_engine_id": PREFILL.engine_id,
        "remote_bootstrap_addr": "http://p:8998",
    }
    for told, more in ((usage, {"remote_prefill_cached_tokens": 5}), ({"prompt_tokens": 9}, {})):
        answer = GOOD | {"kv_transfer_params": None, "usage": told}
        assert json.loads(MOONCAKE.second(200, json.dumps(answer).encode(), 9, JUDGED)) == expected | more


@pytest.mark.parametrize(
    ("url", "host", "address"),
    [
        ("http://[::1]:8000", "", "http://[::1]:8998"),
        ("http://p:8000", "10.0.0.9", "http://10.0.0.9:8998"),
        ("http://p:8000", "fe80::1", "http://[fe80::1]:8998"),
        ("https://user:word@p", "", "http://p:8998"),
    ],
)
def test_mooncakes_place_is_that_of_the_engine_or_one_of_its_own(url: str, host: str, address: str) -> None:
    handover = MOONCAKE._replace(url=url, transfer=replace(MOONCAKE.transfer, host=host))
    assert json.loads(handover.second(200, json.dumps(GOOD).encode(), 9, JUDGED))["remote_bootstrap_addr"] == address
