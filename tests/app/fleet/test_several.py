"""Invariants 3, 4 and 8 over several replicas: after random steps in any order the sum of load is the sum of open
leases, and decisions are those that would have been made one after another. The long run takes more steps:
``python -m pytest -m long tests/app/fleet/test_several.py``.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.support.replicas.several import SeveralReplicas

from warmfleet.fleet import connect
from warmfleet.settings import POLICIES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

REQUESTS = ["decide"] * 6 + ["start"] * 3 + ["end"] * 4
REQUESTS += ["end_cancelled", "renew", "renew_meanwhile", "clear", "arrive", "burst"]
ACTIONS = [*REQUESTS, *["kill", "pass_time", "pass_time", "join", "forget", "collect", "emptied", "save", "failover"]]
STEPS = st.tuples(
    st.sampled_from([*ACTIONS, "rest", "rest"]), st.integers(0, 3), st.integers(0, 99), st.integers(0, 99)
)
REPLICAS = 3
PHASES = (Phase.explicit, Phase.generate)

Script = list[tuple[str, int, int, int]]


@asynccontextmanager
async def several(url: str, policy: str = "cost") -> AsyncIterator[SeveralReplicas]:
    """Several replicas with three joined workers; at the end all requests end."""
    clients = [connect(url, timeout_s=10) for _ in range(REPLICAS)]
    replicas = SeveralReplicas(clients, f"several/{uuid.uuid4().hex}", policy)
    try:
        await replicas.emptied(0, 0, 3)
        await replicas.join(3, 0, 0)
        await replicas.plain.queue.explain(
            replicas._ask(0, 1)
        )  # loads the script, so that each later call is a single command
        yield replicas
        await replicas._over()
    finally:
        await replicas._drop(replicas.keys.prefix)
        for client in clients:
            await client.aclose()


async def play(url: str, policy: str, script: Script) -> None:
    async with several(url, policy) as replicas:
        for action, who, a, b in script:
            await (replicas._rest() if action == "rest" else getattr(replicas, action)(who, a, b))
            await replicas._check()


def explore(url: str, policies: tuple[str, ...], examples: int, length: int) -> None:
    with asyncio.Runner() as runner:

        @settings(
            max_examples=examples,
            phases=PHASES,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(policy=st.sampled_from(policies), script=st.lists(STEPS, min_size=length, max_size=2 * length))
        def every(policy: str, script: Script) -> None:
            runner.run(play(url, policy, script))

        every()


@pytest.mark.in_turn
@pytest.mark.parametrize("which", ["valkey_url", "redis7_url"])
def test_the_sum_of_load_is_the_sum_of_open_leases(request: Any, which: str) -> None:
    explore(request.getfixturevalue(which), POLICIES, 12, 12)


async def test_a_request_cancelled_while_it_settles_settles_all_the_same(valkey_url: str) -> None:
    async with several(valkey_url) as replicas:
        await replicas.decide(0, 2, 1)
        assert replicas.replicas[0].attempts
        await replicas.end_cancelled(0, 0, 0)


async def test_a_request_that_ends_while_it_is_renewed(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the store came back empty, the end arrives before the renewal: renewing books and releases the request."""
    async with several(valkey_url) as replicas:
        await replicas.decide(0, 2, 1)
        [one, *_] = replicas.replicas
        await replicas.emptied(0, 0, 3)
        await replicas.join(3, 0, 0)
        renew = one.fleet.bookings.renew

        async def late(renewals: Any) -> Any:
            await one.end(0, "finished")
            return await renew(renewals)

        monkeypatch.setattr(one.fleet.bookings, "renew", late)
        await one.renew()
        assert await replicas._leases() == []
        monkeypatch.undo()


@pytest.mark.long(
    minutes=15,
    shows=(
        "three replicas take random steps under every policy while commands are lost, repeated and late: "
        "the load is the sum of the open leases, and decisions are as if taken one after another"
    ),
)
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("which", ["valkey_url", "redis7_url"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_sum_of_load_is_the_sum_of_open_leases_for_long(request: Any, which: str, policy: str) -> None:
    explore(request.getfixturevalue(which), (policy,), 100, 30)
