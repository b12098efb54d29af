"""Each argument of a script has the effect that its name says. A script refuses packed constants of another version."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.fleet.keyspace import Keyspace
from tests.support.redis.packed_commands import arguments_of

from warmfleet import fleet as fleet_module
from warmfleet.errors import BadArgument
from warmfleet.fleet import (
    SCRIPT_ARGS,
    SCRIPT_KEYS,
    Check,
    ClientLimits,
    Constants,
    Fleet,
    Proof,
    Question,
    QueueLimits,
    Renewal,
    Shortfall,
    Spans,
    Split,
    Weights,
    constants,
)
from warmfleet.fleet.bookings import Outcome
from warmfleet.fleet.client import Scripts, argv
from warmfleet.fleet.codes import Mode
from warmfleet.fleet.script_loader import script_text
from warmfleet.fleet.upkeep import Pace
from warmfleet.prompt.block_hashes import Chain

if TYPE_CHECKING:
    from collections.abc import Sequence

    import redis.asyncio as aioredis

    from warmfleet.fleet.connection.multiplexed import OnAnswer

ANSWERS: dict[str, Any] = {
    "queue": [0, 0, -1, [], [], 0, 1],
    "settle": [b"SETTLED"],
    "renew": [1, 0, 0],
    "client": [1, 0],
    "tick": [1, 0, 0, 0, 0],
    "apply": [0, 0, 2, 0],
    "apply_control": [0, 0, 0],
    "apply_server": [0, 0],
    "prove": b"OK",
    "vouch": b"VOUCHED",
    "eject": b"SAME",
    "register": [7, 0, b"UP"],
    "forget": 1,
    "drain": 1,
    "collect": [0, 0],
    "lag": [1],
    "audit": [0, 0, 0],
}
SPANS = Spans(lease_ms=11, worker_ttl_ms=12, tombstone_ms=13, ticket_ms=14, linger_ms=15)
PACE = Pace(min_gap_ms=21, ttl_ms=22, forget_ms=23, max_streams=24, short_ms=25, max_blocks=26, max_entries=27)


class Recorder(Scripts):
    """Scripts that are not called: ``calls`` gets the named arguments of each call and the list behind them.

    The arguments of a packed call are noted as the bytes that Redis would get.
    """

    calls: list[tuple[str, dict[str, Any], tuple[Any, ...]]]

    def send(self, name: str, command: bytes, limit_s: float, on_answer: OnAnswer, *, patient: bool = False) -> None:
        self._note(name, arguments_of(command))
        on_answer(ANSWERS[name], None)

    async def call(self, name: str, command: bytes, limit_s: float) -> Any:
        self._note(name, arguments_of(command))
        return ANSWERS[name]

    def _note(self, name: str, args: Sequence[Any]) -> None:
        names = SCRIPT_ARGS[name]
        self.calls.append((name, dict(zip(names, args, strict=False)), tuple(args[len(names) :])))

    async def run(self, name: str, *args: bytes | str | int | float, timeout_s: float | None = None) -> Any:
        self._note(name, args)
        return ANSWERS[name]


@pytest.fixture
def recorded(store: aioredis.Redis, model: str, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.setattr(fleet_module, "Scripts", Recorder)
    recorded = Fleet(store, model, constants=Constants(spans=SPANS))
    recorded.upkeep.pace = replace(PACE, share_permille=28, audit_blocks=29, audit_gap_ms=30)
    cast("Recorder", recorded.scripts).calls = []
    return recorded


def test_what_decide_is_asked(fleet: Fleet) -> None:
    chain = Chain(5, 16, b"12345678")
    limits = ClientLimits("team-a", 47, 48)
    place: Any = (b"8 bytes.", -3, 46, ("e",), False, True, b"\3name", ("f", "g"), Split.ALLOWED)
    question = Question("wf-1", (chain,), 41, 42, "chwbl", ("a", "b"), 43, 44, ("c", "d"), 4.5, limits, *place)
    rest: list[int | bytes] = [5, 16, b"12345678"]
    asked: dict[str, Any] = {
        "prefix": fleet.keys.prefix.encode(),
        "id": "wf-1",
        "constants": fleet.constants.packed,
        "policy": "chwbl",
        "prompt_tokens": 41,
        "decode_tokens": 42,
        "mode": 2,
        "exclude": "a,b",
        "seed": "0000000043",
        "prefix_tokens": 44,
        "order": "c,d",
        "objective_s": 4.5,
        "tenant": b"8 bytes.",
        "priority": 5,
        "waited_ms": 46,
        "may_wait": 0,
        "barred": "e",
        "limits": bytes((0, 0, 0, 47, 0, 0, 0, 48)),
        "session": b"\3name",
        "only": "f,g",
        "ending": b"",
        "split": 2,
    }
    assert fleet.bookings.decide_command(question, Mode.EXPLAIN) == sent_by_redis_py(
        fleet, "decide", argv("decide", rest, **asked)
    )


NUMBERS = st.integers(0, 2**32 - 1) | st.integers(0, 40_000)
NAMES = st.lists(st.text(min_size=1), max_size=3).map(tuple)
LAST = st.sampled_from((b"", b"12345678"))
CHAINS = st.lists(st.builds(Chain, NUMBERS, st.integers(16, 256), st.binary(max_size=100), LAST), max_size=4).map(tuple)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    question=st.builds(
        Question,
        *(st.text(min_size=1), CHAINS, NUMBERS, NUMBERS, st.text(), NAMES, NUMBERS, NUMBERS, NAMES, st.floats(0)),
        *(st.none(), st.binary(max_size=8), st.integers(), NUMBERS, NAMES, st.booleans(), st.booleans()),
        st.binary(max_size=14),
        NAMES,
        st.sampled_from(Split),
    ),
    mode=st.sampled_from(Mode),
    in_turn=st.booleans(),
)
def test_a_packed_decision_is_what_redis_py_would_send(
    fleet: Fleet, question: Question, mode: Mode, in_turn: bool
) -> None:
    rest = [part for chain in question.chains for part in (chain.scheme_id, chain.block_tokens, chain.hashes)]
    lasts = [chain.last or bytes(8) for chain in question.chains]
    asked = argv(
        "decide",
        rest,
        prefix=fleet.keys.prefix,
        id=question.reservation,
        constants=fleet.constants.packed,
        policy=question.policy,
        prompt_tokens=question.prompt_tokens,
        decode_tokens=question.decode_tokens,
        mode=int(mode),
        exclude=",".join(question.exclude),
        seed=f"{question.tie_seed:010d}",
        prefix_tokens=question.prefix_tokens,
        order=",".join(question.order),
        objective_s=question.objective_s,
        tenant=question.tenant if in_turn else b"",
        priority=min(max(question.priority, -8), 7) + 8,
        waited_ms=question.waited_ms,
        may_wait=(1 if question.displaces else 2) if question.may_wait else 0,
        barred=",".join(question.barred),
        limits=b"",
        session=question.session,
        only=",".join(question.only),
        ending=b"".join(lasts) if any(chain.last for chain in question.chains) else b"",
        split=int(question.split),
    )
    assert fleet.bookings.decide_command(question, mode, in_turn=in_turn) == sent_by_redis_py(fleet, "decide", asked)


@pytest.mark.parametrize("outcome", get_args(Outcome))
def test_a_packed_outcome_is_what_redis_py_would_send(fleet: Fleet, outcome: Outcome) -> None:
    fleet.use(spans=SPANS)
    told = argv("settle", prefix=fleet.keys.prefix, id="wf-é", outcome=outcome, tombstone_ms=13, linger_ms=15)
    assert fleet.bookings.settle_command("wf-é", outcome) == sent_by_redis_py(fleet, "settle", told)
    assert fleet.bookings.settle_command("wf-é", outcome, 16) == sent_by_redis_py(fleet, "settle", [*told, 16])
    short = Shortfall(17, 0.018)
    assert fleet.bookings.settle_command("wf-é", outcome, 0, short) == sent_by_redis_py(
        fleet, "settle", [*told, "", 17, 18]
    )
    assert fleet.bookings.settle_command("wf-é", outcome, 16, short) == sent_by_redis_py(
        fleet, "settle", [*told, 16, 17, 18]
    )


def sent_by_redis_py(fleet: Fleet, script: str, args: Sequence[Any]) -> bytes:
    """The bytes that redis-py's own client sends for a call of this script."""
    registered = fleet.redis.register_script(script_text(script))
    keys = [getattr(fleet.keys, key) for key in SCRIPT_KEYS[script]]
    connection = cast("Any", fleet.redis.connection_pool).make_connection()
    return b"".join(connection.pack_command("EVALSHA", registered.sha, len(keys), *keys, *args))


async def call_the_other_scripts(fleet: Fleet) -> None:
    """Call each script besides decide, with a different number for every argument."""
    await fleet.queue.poll(["w1", "w2"], ["l1"])
    await fleet.bookings.settle("wf-1", "failed")
    await fleet.bookings.renew([Renewal("wf-2", "w.0", 51, 52, started=True)])
    fleet.clients.admit("wf-3", ClientLimits("team-a", 47, 48, admitted=True), 58, lambda *_: None)
    await fleet.clients.keep(["wf-3", "wf-4"])
    fleet.clients.end("wf-3", -59, lambda *_: None)
    await fleet.upkeep.tick(used_permille=31)
    await fleet.upkeep.apply("w.0")
    await fleet.upkeep.apply_server("w")
    await fleet.probes.prove("w.0", "n1", Proof("url", "no answer", "away", 53, "o1"))
    await fleet.probes.warming("w.0", "n2", "o2", 54)
    await fleet.workers.register("plain", {"a": 1}, 55, Check("FAILED", "r1", 5.9, True, 6.1, "away", "so"))
    await fleet.workers.drain("w.0", draining=True)
    await fleet.workers.vouch("w.0", "n3")
    await fleet.workers.eject("w.0", good=True)
    await fleet.upkeep.forget("w.0", 56)
    await fleet.upkeep.collect(57)
    await fleet.index.truth([])
    await fleet.upkeep.audit(5.8)


async def test_what_the_other_scripts_are_told(recorded: Fleet) -> None:
    prefix = recorded.keys.prefix.encode()
    await call_the_other_scripts(recorded)
    prove = {"worker_id": "w.0", "reason": "", "cause": "", "probed": ""}
    client = {"prefix": prefix, "lease_ms": b"11"}
    assert cast("Recorder", recorded.scripts).calls == [
        ("queue", {"prefix": prefix, "constants": recorded.constants.packed, "leaving": b"1"}, (b"l1", b"w1", b"w2")),
        (
            "settle",
            {"prefix": prefix, "id": b"wf-1", "outcome": b"failed", "tombstone_ms": b"13", "linger_ms": b"15"},
            (),
        ),
        ("renew", {"prefix": prefix, "lease_ms": 11}, ("wf-2", "w.0", 51, 52, 1)),
        ("client", client | {"verb": b"admit"}, (b"wf-3", struct.pack(">II", 47, 48) + b"+", b"58")),
        ("client", client | {"verb": b"keep"}, (b"wf-3", b"wf-4")),
        ("client", client | {"verb": b"end"}, (b"wf-3", b"-59")),
        (
            "tick",
            {"prefix": prefix, "min_gap_ms": b"21", "ttl_ms": b"22", "forget_ms": b"23", "max_streams": b"24"}
            | {"used_permille": b"31", "short_ms": b"25", "share_permille": b"28"}
            | {"constants": recorded.constants.packed},
            (),
        ),
        ("apply", {"prefix": prefix, "worker_id": "w.0", "max_blocks": 26}, ()),
        ("apply_control", {"prefix": prefix, "worker_id": "w.0", "max_entries": 27, "ttl_ms": 22}, ()),
        ("apply_server", {"prefix": prefix, "server_id": "w", "max_entries": 27, "ttl_ms": 22}, ()),
        (
            "prove",
            {"worker_id": "w.0", "nonce": "n1", "proof": "url", "cause": "away", "reason": "no answer"}
            | {"probed": 53, "owner": "o1", "lease_ms": 0},
            (),
        ),
        ("prove", prove | {"nonce": "n2", "proof": "warming", "owner": "o2", "lease_ms": 54}, ()),
        (
            "register",
            {"worker_id": "plain", "record_json": '{"a":1}', "capacity_blocks": 55, "found": "FAILED"}
            | {"replica": "r1", "since_ms": 5_900, "ttl_ms": 15_000, "paused": 1, "wait_ms": 6_100}
            | {"cause": "away", "reason": "so"},
            (),
        ),
        ("drain", {"worker_id": "w.0", "draining": 1}, ()),
        ("vouch", {"worker_id": "w.0", "nonce": "n3"}, ()),
        ("eject", {"worker_id": "w.0", "good": 1, "first_ms": 5_000, "most_ms": 300_000}, ()),
        ("forget", {"prefix": prefix, "worker_id": "w.0", "silent_ms": 56}, ()),
        ("collect", {"prefix": prefix, "max_blocks": 57}, ()),
        ("lag", {"prefix": prefix, "start": 0, "max_streams": 64}, ()),
        ("audit", {"prefix": prefix, "max_blocks": 29, "period_ms": 5800, "min_gap_ms": 30}, ()),
    ]


def test_a_name_that_a_script_does_not_have_is_refused() -> None:
    assert argv("collect", max_blocks=1, prefix="p") == ["p", 1]
    for wrong in ({"prefix": "p"}, {"prefix": "p", "blocks": 1}, {"prefix": "p", "max_blocks": 1, "more": 2}):
        with pytest.raises(TypeError, match="collect takes prefix, max_blocks"):
            argv("collect", **wrong)


def test_the_constants_are_packed_anew_when_one_of_them_is_replaced(fleet: Fleet) -> None:
    seen = {first := fleet.constants.packed}
    assert fleet.constants.packed is first, "packed once"
    fleet.use(weights=Weights(kappa=9.0))
    seen.add(fleet.constants.packed)
    fleet.use(spans=SPANS)
    seen.add(fleet.constants.packed)
    fleet.use(limits=QueueLimits(9.0))
    seen.add(fleet.constants.packed)
    fleet.use(block_tokens={7: 16})
    seen.add(fleet.constants.packed)
    assert len(seen) == 5


@pytest.mark.parametrize("script", ["decide", "queue", "replay"])
async def test_constants_of_another_version_are_refused(
    store: aioredis.Redis, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    keyspace = Keyspace(store, fleet)
    await keyspace.workers(1)
    before = await keyspace.rows()
    cut_short = Constants().packed[:-1]
    monkeypatch.setattr(constants, "VERSION", constants.VERSION + 1)
    other = Constants().packed
    good: dict[str, Any] = dict.fromkeys(SCRIPT_ARGS[script], "1")
    if script == "decide":
        good |= {"policy": "cost", "tenant": "", "limits": ""}
    for record in (other, cut_short, b""):
        with pytest.raises(BadArgument, match=f"not of version {constants.VERSION - 1}"):
            await fleet.scripts.run(script, *argv(script, **good | {"constants": record}))
    assert await keyspace.rows() == before, "nothing is booked"
