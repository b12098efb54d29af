"""``warmfleet up`` without its processes: the environment of its replicas, and its questions to them."""

from __future__ import annotations

from contextlib import closing

import pytest
from tests.app.cli.answering import replica

from warmfleet.cli import up
from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local.children import Children
from warmfleet.cli.local.ports import claim_shared
from warmfleet.cli.local.stack import Member, Plan, Stack
from warmfleet.cli.parser import build_parser


def test_it_asks_its_replicas_as_their_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMFLEET_ADMIN_KEY", "secret")
    with replica({"/workers": (200, {"models": [{"workers": []}]})}) as (url, seen):
        assert Stack(Plan()).fleet(Member("replica-1", url)) == [{"workers": []}]
    assert seen[0][0]["authorization"] == "Bearer secret"


def test_the_policy_is_the_environments_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(*words: str) -> str:
        return up.plan_of(build_parser().parse_args(["up", *words])).policy

    monkeypatch.delenv("WARMFLEET_POLICY", raising=False)
    assert planned() == "cost"
    monkeypatch.setenv("WARMFLEET_POLICY", "sticky,demo=random")
    assert planned() == "sticky,demo=random"
    assert planned("--policy", "session") == "session"


@pytest.mark.parametrize("name", ["WARMFLEET_CLIENT_KEYS_FILE", "WARMFLEET_TENANT_KEY", "WARMFLEET_TENANT_KEY_FILE"])
def test_keys_of_clients_need_one_of_the_operator(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It is said before anything is started: an operators' port, which would do for a replica, is not used here."""
    monkeypatch.setenv("WARMFLEET_ADMIN_PORT", "9090")
    monkeypatch.setenv(name, "keys.jsonl")
    with pytest.raises(CommandError) as refused, Stack(Plan()):
        pass
    assert str(refused.value) == (
        f"{name.removesuffix('_FILE') if 'TENANT' in name else name} is set, so set WARMFLEET_ADMIN_KEY, too: "
        "replicas of this command have no port for operators (WARMFLEET_ADMIN_PORT is not used here)"
    )


def test_each_replica_logs_its_decisions_to_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = []
    monkeypatch.setattr(Children, "start", lambda _self, _name, _argv, env: logs.append(env["WARMFLEET_DECISION_LOG"]))
    for given, wanted in (("", ["", ""]), ("/log/decisions", ["/log/decisions.replica-1", "/log/decisions.replica-2"])):
        monkeypatch.setenv("WARMFLEET_DECISION_LOG", given)
        stack = Stack(Plan())
        with Children() as children, closing(claim_shared("127.0.0.1", 0)) as claimed:
            stack._children, stack._claimed = children, claimed
            for _ in range(2):
                stack.add_replica()
        assert logs == wanted
        logs.clear()
