"""Prefill and decode engines of a pool: who pairs with whom, and the words for those that do not."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.fleet.transfers import DECODE as D
from tests.support.fleet.transfers import PREFILL as P
from tests.support.fleet.transfers import SAME

from warmfleet.cli.doctor import fleet_checks
from warmfleet.cli.doctor.finding import State
from warmfleet.fleet import LoadRow, WorkerState, WorkerView
from warmfleet.pools.capabilities import TokenCapability
from warmfleet.pools.pairing import (
    BY_POLICY,
    HANDOFF_OFF,
    NO_PAIRS,
    NOT_SPLIT,
    SPLIT,
    WITHOUT_IDS,
    Obstacle,
    pairing,
    pairs_in_words,
    roles_in_words,
    splits_of,
    use_of_pairs,
)
from warmfleet_worker.protocol.transfer import Transfer

if TYPE_CHECKING:
    import random

BOTH = replace(D, role="both")


def worker(name: str, transfer: Transfer | None, host: str = "", state: WorkerState = WorkerState.PROVEN) -> WorkerView:
    record = {"transfer": transfer}
    return WorkerView(name, record, None, LoadRow(), 0.0, state, "proven", f"http://{host or name}:8000", ["m"])


def but(transfer: Transfer, **values: str) -> Transfer:
    """The same fact with other settings."""
    return replace(transfer, same=tuple(sorted((dict(transfer.same) | values).items())))


def reasons(*workers: WorkerView) -> list[Obstacle]:
    """Why the first and the second do not pair."""
    return list(pairing(workers).refused[workers[0].worker_id, workers[1].worker_id])


def test_equals_pair_and_the_others_are_told_why() -> None:
    fleet = [worker("p1", P), worker("p2", but(P, vLLM="0.31.0")), worker("d1", D), worker("plain", None)]
    found = pairing(fleet)
    assert found.pairs == {("p1", "d1")}
    assert pairs_in_words(found) == {"prefill": 2, "decode": 1, "both": 0, "pairs": 1, "told": SPLIT}
    told = roles_in_words(found)
    assert told["p1"] == {"role": "prefill", "partners": 1, "of": 1, "apart": []}
    why = "vLLM: 0.31.0 at the prefill engine, 0.32.0 at the decode engine"
    apart = {"why": why, "remedy": "upgrade one: engines of one version pair"}
    assert told["p2"] == {"role": "prefill", "partners": 0, "of": 1, "apart": [{"from": ["d1"], **apart}]}
    assert told["d1"] == {"role": "decode", "partners": 1, "of": 2, "apart": [{"from": ["p2"], **apart}]}
    assert "plain" not in told


def test_a_fleet_without_roles_has_nothing_to_tell() -> None:
    tier = Transfer("both", "OffloadingConnector", same=(("connector", "OffloadingConnector"),))
    found = pairing([worker("a", None), worker("b", tier), worker("c", tier)])
    assert (found.pairs, found.refused, pairs_in_words(found), roles_in_words(found)) == (frozenset(), {}, None, {})
    assert fleet_checks.pairs([worker("a", None)]) == []


def test_each_reason_has_its_remedy() -> None:
    d, p = worker("d", D), worker("p", P)
    [(why, remedy)] = reasons(p, worker("d", replace(D, recomputes=False)))
    assert "kv_load_failure_policy" in why
    assert '"kv_load_failure_policy": "recompute"' in remedy
    for host in ("localhost", "127.0.0.1", "[::1]", "0.0.0.0"):
        [(why, remedy)] = reasons(worker("p", replace(P, host=host)), d)
        assert f"side channel is at {host}" in why
        assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in remedy
        assert "pod's IP" in remedy
        assert pairing([worker("p", replace(P, host=host), "one"), worker("d", D, "one")]).pairs, "on one machine"
    mooncake = [replace(of, connector="MooncakeConnector", mode="push", host="127.0.0.1", lease_s=480) for of in (P, D)]
    [(why, remedy)] = reasons(worker("p", mooncake[0]), worker("d", mooncake[1]))
    assert "bootstrap server is at 127.0.0.1" in why
    assert remedy.startswith("leave bootstrap_server_address out")
    for one, other, whose in (
        (replace(P, engine_id="mine"), D, "prefill"),
        (P, replace(D, engine_id="mine"), "decode"),
    ):
        [(why, remedy)] = reasons(worker("p", one), worker("d", other))
        assert why.startswith(f"engine_id of the {whose} engine is set")
        assert remedy.startswith("take engine_id out")
    [(why, remedy)] = reasons(p, worker("d", but(D, **{"model path": "/other", "NIXL's hash": "cd"})))
    assert (why, remedy) == (
        "model path: /m at the prefill engine, /other at the decode engine",
        "start both with the same model path",
    )
    [(why, remedy)] = reasons(p, worker("d", but(D, **{"NIXL's hash": "cd"})))
    assert why.startswith("NIXL's hash: ab"), "nothing else explains it"
    assert len(reasons(worker("p", replace(but(P, vLLM="0.31.0"), host="localhost")), d)) == 2, "all are told at once"


def test_a_prefill_engine_keeps_blocks_for_long_enough() -> None:
    [(why, remedy)] = reasons(worker("p", replace(P, lease_s=19)), worker("d", D))
    assert why.startswith("kv_lease_duration of the prefill engine is 19 s")
    assert "20 or more" in remedy
    mooncake = replace(P, connector="MooncakeConnector", mode="push", lease_s=10)
    [(why, remedy)] = reasons(worker("p", mooncake), worker("d", replace(D, connector="MooncakeConnector")))
    assert why.startswith("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT of the prefill engine is 10 s")


def test_requests_are_split_over_engines_that_take_the_same_ids() -> None:
    def able(key: str = "k", *endpoints: str) -> TokenCapability:
        return TokenCapability(key, frozenset(endpoints or ("completions", "chat")), 4_096)

    found = pairing([worker("p", P), worker("d", D), worker("e", D)])
    assert splits_of(found, {}) is None
    assert splits_of(found, {"p": able(), "d": able("other")}) is None
    assert splits_of(found, {"p": able("k", "chat"), "d": able("k", "completions")}) is None
    one, both = {"p": able(), "d": able()}, frozenset({("p", "d"), ("p", "e")})
    assert splits_of(found, one) == (frozenset({("p", "d")}), frozenset({"completions", "chat"}))
    assert splits_of(found, one | {"e": able("k", "completions")}) == (both, frozenset({"completions"}))
    assert use_of_pairs(found) == SPLIT
    assert use_of_pairs(found, able=False) == WITHOUT_IDS
    assert use_of_pairs(found, able=False, handoff=False) == HANDOFF_OFF, "the engines are not to blame"
    for name, version, whole, splits in (
        ("NixlPushConnector", "0.32.0", "True", False),
        ("MooncakeConnector", "0.32.0+cpu", "True", True),
        ("MooncakeConnector", "0.32.0", "False", False),
        ("MooncakeConnector", "0.31.1", "True", False),
        ("MooncakeConnector", "main", "True", True),
    ):
        ours, theirs = (
            but(replace(of, connector=name, mode="push", host=""), **{"full attention": whole, "vLLM": version})
            for of in (P, D)
        )
        told = pairing([worker("p", ours), worker("d", theirs)])
        assert told.pairs == {("p", "d")}
        assert (splits_of(told, one) is not None) is splits
        assert use_of_pairs(told) == (SPLIT if splits else NOT_SPLIT)


def test_an_engine_without_partner_is_told_so() -> None:
    alone = roles_in_words(pairing([worker("d", D), worker("p", P, state=WorkerState.SILENT)]))["d"]
    assert use_of_pairs(pairing([worker("p", P)])) == NO_PAIRS == "each engine serves alone"
    [reason] = alone["apart"]
    assert (reason["from"], reason["why"]) == ([], "no prefill engine of its pool takes requests")
    assert '"kv_role": "kv_producer"' in reason["remedy"]
    assert not pairing([worker("p", P), worker("b", BOTH)]).lonely
    assert not pairing([worker("b", BOTH)]).lonely, "it serves alone as well"
    stranger = replace(P, connector="LMCacheConnectorV1")
    [reason] = roles_in_words(pairing([worker("p", stranger), worker("d", D)]))["p"]["apart"]
    assert reason["why"] == "LMCacheConnectorV1 hands no request from engine to engine"


def test_the_doctor_says_who_pairs_and_each_reason_once() -> None:
    wrong = replace(D, recomputes=False)
    fleet = [worker("p1", P), worker("p2", P), worker("d1", D), worker("d2", wrong), worker("d3", wrong)]
    fine, noted = fleet_checks.pairs(fleet)
    assert (fine.state, fine.detail) == (State.OK, f"p1, p2 can prefill for d1 (2 pairs); {SPLIT}")
    assert noted.state is State.NOTE
    assert noted.detail.startswith("p1, p2 cannot prefill for d2, d3: kv_load_failure_policy")
    assert "recompute" in noted.remedy
    [lonely] = fleet_checks.pairs([worker("d1", D)])
    assert lonely.detail == (
        "d1 could share no request: no prefill engine of its pool takes requests; each request is served by one engine"
        " alone"
    )


def test_a_lease_far_longer_than_routers_count_is_noted() -> None:
    """Mooncake's default is 480 s."""
    [_, noted] = fleet_checks.pairs([worker("p", replace(P, lease_s=61)), worker("d", D)])
    assert noted.state is State.NOTE
    assert noted.detail == "blocks of requests whose clients leave stay with p for more than 60 s"
    assert "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT" in noted.remedy


def test_few_decode_engines_are_noted_where_prefill_engines_serve_nothing_alone() -> None:
    prefill, decode = [worker(f"p{n}", P) for n in range(3)], [worker(f"d{n}", D) for n in range(3)]
    _, noted = fleet_checks.pairs([*prefill, *decode[:2]])
    assert noted.state is State.NOTE
    assert noted.detail.startswith("decode engines are fewer (2) than prefill engines (3), which serve nothing alone")
    assert noted.remedy == (
        'give prefill engines "kv_role": "kv_both" in --kv-transfer-config, or start decode engines'
    )
    push = {"connector": "NixlPushConnector", "mode": "push"}
    for fleet in (
        [*prefill, *decode],
        [*prefill, *decode[:2], worker("b", BOTH)],  # an engine of both roles decodes, too
        [worker(one.worker_id, BOTH) for one in prefill],
        [worker(one, replace(P, **push)) for one in "abc"] + [worker("d", replace(D, **push))],  # type: ignore[arg-type]
    ):
        assert [found.state for found in fleet_checks.pairs(fleet)] == [State.OK]


def test_the_doctor_knows_when_no_request_is_split() -> None:
    fleet = [worker("p", replace(P, lease_s=61)), worker("q", P), worker("d", D)]
    assert len(fleet_checks.pairs(fleet)) == 3, "few decode engines, and a long lease"
    for use in (WITHOUT_IDS, HANDOFF_OFF):
        [fine] = fleet_checks.pairs(fleet, use)
        assert (fine.state, fine.detail) == (State.OK, f"p, q can prefill for d (2 pairs); {use}")
    fine, idle = fleet_checks.pairs(fleet, BY_POLICY)
    assert fine.detail.endswith(BY_POLICY)
    assert (idle.state, idle.detail) == (State.NOTE, "no request goes to p, q: only the policy cost splits requests")
    assert "WARMFLEET_POLICY=cost" in idle.remedy
    either = [worker("b", BOTH), worker("d", D)]
    assert len(fleet_checks.pairs(either, BY_POLICY)) == 1, "an engine of both roles serves alone"


def test_the_gap_that_a_step_full_of_prompts_makes_is_told() -> None:
    def of(name: str, step_tokens: int | None, speed_tps: int, transfer: Transfer | None = None) -> WorkerView:
        made = worker(name, transfer)
        told = {} if step_tokens is None else {"step_tokens": step_tokens}
        return replace(made, record=made.record | told, load=LoadRow(speed_tps=speed_tps))

    slow, fast = fleet_checks.full_steps([of("a", 8_192, 40_000), of("c", 2_048, 20_480), of("b", 8_192, 20_000)])
    assert (slow.state, slow.detail) == (
        State.NOTE,
        "a, b: a step with 8,192 tokens of prompts takes about 410 ms, in which no running answer goes on",
    )
    assert slow.remedy.startswith("a smaller --max-num-batched-tokens shortens this gap")
    assert (fast.state, fast.remedy) == (State.OK, "")
    assert "c: a step with 2,048 tokens of prompts takes about 100 ms" in fast.detail
    assert fleet_checks.full_steps([of("old", None, 9_000), of("new", 8_192, 0), of("odd", 0, 9_000)]) == []
    pair = [of("p", 8_192, 9_000, P), of("d", 8_192, 9_000, D)]
    assert fleet_checks.full_steps(pair) == [], "they share requests"
    assert len(fleet_checks.full_steps(pair, HANDOFF_OFF)) == 1, "each serves alone"
    assert len(fleet_checks.full_steps(pair[1:])) == 1, "a decode engine without partner serves alone"


# ---------------------------------------------------------------- any fleet

LIBRARIES = ("NixlConnector", "NixlPushConnector", "MooncakeConnector", "OffloadingConnector")
#: Values of which most are good, so that many engines pair but for one of their settings.
FACTS = st.builds(
    Transfer,
    role=st.sampled_from(["prefill", "decode", "both"]),
    connector=st.sampled_from([*["NixlConnector"] * 6, *LIBRARIES]),
    engine_id=st.sampled_from([P.engine_id, D.engine_id, D.engine_id, "mine"]),
    host=st.sampled_from(["10.0.0.1", "10.0.0.1", "localhost", ""]),
    lease_s=st.sampled_from([30, 30, 30, 10]),
    recomputes=st.sampled_from([True, True, False]),
    same=st.sampled_from([SAME, SAME, but(P, vLLM="0.31.0").same, but(P, **{"NIXL's hash": "cd"}).same, ()]),
)
STATES = st.sampled_from([*[WorkerState.PROVEN] * 6, WorkerState.LOAD_ONLY, WorkerState.SILENT, WorkerState.DRAINING])
MEMBERS = st.tuples(st.none() | FACTS, st.sampled_from(["a", "b"]), STATES)


@settings(max_examples=200, deadline=None)
@given(st.lists(MEMBERS, max_size=7), st.randoms(use_true_random=False))
def test_any_two_engines_pair_or_do_not_by_themselves(told: list, shuffled: random.Random) -> None:  # type: ignore[type-arg]
    fleet = [worker(f"w{at}", fact, host, state) for at, (fact, host, state) in enumerate(told)]
    found = pairing(fleet)
    ready = [(member.worker_id, fact) for member in fleet if member.routable and (fact := member.transfer)]
    possible = {
        (one, other)
        for (one, ours), (other, theirs) in product(ready, ready)
        if one != other and ours.prefills and theirs.decodes
    }
    assert found.pairs | found.refused.keys() == possible
    assert not found.pairs & found.refused.keys()
    assert all(found.refused.values()), "each refusal has a reason"
    facts = dict(ready)
    for one, other in found.pairs:
        ours, theirs = facts[one], facts[other]
        assert ours.same == theirs.same
        assert ours.kin == theirs.kin
        assert theirs.recomputes
    for one, other in possible:
        two = pairing([member for member in fleet if member.worker_id in (one, other)])
        assert ((one, other) in two.pairs) == ((one, other) in found.pairs), "others change nothing"
    mixed = list(fleet)
    shuffled.shuffle(mixed)
    assert (pairing(mixed).pairs, pairing(mixed).refused) == (found.pairs, found.refused)
    words = roles_in_words(found)
    assert words.keys() == found.roles.keys() | found.unable.keys()
    assert all(told["partners"] <= told["of"] for told in words.values())
    fleet_checks.pairs(fleet)
