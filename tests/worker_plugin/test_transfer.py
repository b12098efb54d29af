"""The fact ``transfer``: what a join announces is read again as it was, and nothing that anybody else may write is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmfleet_worker.config import PublisherConfig
from warmfleet_worker.protocol.transfer import MAX_SAME, MAX_TEXT, Transfer, read_transfer, short
from warmfleet_worker.protocol.wire import Scheme, default_none_hash, dumps
from warmfleet_worker.vllm_hooks import kv_transfer

TOLD = Transfer(
    "prefill", "NixlConnector", "OffloadingConnector", "pull", "e", "10.0.0.1", 5600, 30, True, (("a", "b"),)
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=120),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


def test_a_fact_is_read_as_it_was_announced() -> None:
    assert read_transfer(TOLD.as_dict()) == TOLD
    assert 0 <= TOLD.kin < 2**32
    assert replace(TOLD, same=(("a", "c"),)).kin != TOLD.kin == replace(TOLD, host="x", role="decode").kin


@pytest.mark.parametrize(
    "wrong",
    [
        {"role": "boss"},
        {"role": ["prefill"]},
        {"port": 65_536},
        {"port": -1},
        {"port": 1.5},
        {"port": True},
        {"lease_s": None},
        {"lease_s": 2**31},
        {"recomputes": 2},
        {"recomputes": []},
        {"host": "a" * (MAX_TEXT + 1)},
        {"host": "a\nb"},
        {"host": "\x1b[31m"},
        {"host": "münchen"},
        {"engine_id": 7},
        {"same": []},
        {"same": {"a": 1}},
        {"same": {"a": "c"}},
        {"same": {f"{number}": "" for number in range(MAX_SAME + 1)}},
        {"kin": None},
        {"kin": 5},
    ],
)
def test_a_malformed_fact_is_none(wrong: dict[str, Any]) -> None:
    assert read_transfer(TOLD.as_dict() | wrong) is None


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*TOLD.as_dict()]), JSON)
def test_any_value_of_any_field_is_read_or_left_out(name: str, value: Any) -> None:
    found = read_transfer(TOLD.as_dict() | {name: value})
    assert found is None or (read_transfer(found.as_dict()) == found and found.is_local in (True, False))
    assert read_transfer(value) is None
    less = TOLD.as_dict()
    del less[name]
    assert read_transfer(less) is None


@settings(deadline=None)
@given(st.text(max_size=300))
def test_any_text_can_be_announced(text: str) -> None:
    fact = replace(TOLD, host=short(text), same=(("model path", short(text)),))
    assert read_transfer(fact.as_dict()) == fact


def test_long_texts_stay_different() -> None:
    assert short("/m" * 99) != short("/m" * 100)
    assert short("/models/tiny") == "/models/tiny"


def test_the_largest_fact_fits_into_a_join() -> None:
    long, scheme = short("x" * 999), Scheme("sha256_cbor", default_none_hash("sha256_cbor"), 16)
    names = ("model path", "draft model", "vLLM")
    same = tuple(
        sorted([*((name, long) for name in names), *((f"a setting, {number}", "8" * 20) for number in range(13))])
    )
    fact = Transfer("prefill", long, long, "pull", long, long, 65_535, 2**31 - 1, True, same)
    labels = {f"{number}" + "n" * 62: "v" * 63 for number in range(8)}
    sets: Any = {
        kind: {"capacity_blocks": 2**31, "bytes_per_token": 2**31, "store": "f" * 16} for kind in ("cpu", "disk")
    }
    config = PublisherConfig(
        *("redis://x", "m", "w" * 62 + ".0", "w" * 62, 0, scheme, 2**31, 2**31, "vllm-0.32.0+cpu"),
        labels=labels,
        sets=sets,
        transfer=fact,
        step_tokens=2**31,
    )
    assert len(fact.same) == MAX_SAME
    assert len(config.join()) <= 4_096, "lua/apply_control.lua reads no more"
    assert '"transfer"' not in dumps({}) + replace(config, transfer=None).join()


# ---------------------------------------------------------------- engines that may serve nothing alone


def vllm(connector: str | None, role: str, **more: Any) -> Any:
    config = SimpleNamespace(kv_connector=connector, kv_role=role, kv_connector_extra_config=more)
    return SimpleNamespace(kv_transfer_config=config)


@pytest.mark.parametrize(
    ("version", "role", "unfit"),
    [
        ("0.32.0", "kv_consumer", True),
        ("0.28.0", "kv_both", True),
        ("of an unknown version", "kv_consumer", True),
        ("0.32.0", "kv_producer", False),
        ("0.33.0", "kv_consumer", False),
        ("1.0.0", "kv_consumer", False),
    ],
)
def test_moriio_without_partner_would_answer_from_memory_as_it_was(
    monkeypatch: pytest.MonkeyPatch, version: str, role: str, unfit: bool
) -> None:
    monkeypatch.setattr(kv_transfer, "version", lambda: version)
    assert bool(kv_transfer.unfit_alone(vllm("MoRIIOConnector", role))) is unfit
    child = {"kv_connector": "MoRIIOConnector", "kv_role": role}
    assert bool(kv_transfer.unfit_alone(vllm("MultiConnector", "kv_both", connectors=[child]))) is unfit


def test_other_engines_serve_alone() -> None:
    assert kv_transfer.unfit_alone(vllm(None, "kv_both")) == ""
    assert kv_transfer.unfit_alone(SimpleNamespace(kv_transfer_config=None)) == ""
    for name in (
        "NixlConnector",
        "NixlPushConnector",
        "MooncakeConnector",
        "OffloadingConnector",
        "LMCacheConnectorV1",
    ):
        assert kv_transfer.unfit_alone(vllm(name, "kv_consumer")) == ""
