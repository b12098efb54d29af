"""``warmfleet up`` without its processes: the environment of its replicas, and its questions to them."""

from __future__ import annotations

from contextlib import closing

import pytest
from tests.support.replicas.fixed_answers import replica

from warmfleet.cli import up
from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local import stack as local_stack
from warmfleet.cli.local.children import Children
from warmfleet.cli.local.ports import claim_shared, free_port, listen
from warmfleet.cli.local.stack import Member, Plan, Stack
from warmfleet.cli.parser import build_parser


def test_it_asks_its_replicas_as_their_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMFLEET_ADMIN_KEY", "secret")
    with replica({"/workers": (200, {"models": [{"workers": []}]})}) as (url, requests):
        assert Stack(Plan()).fleet(Member("replica-1", "http://clients", operators=url)) == [{"workers": []}]
    assert requests[0][0]["authorization"] == "Bearer secret"


def test_the_policy_is_the_environments_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(*words: str) -> str:
        return up.plan_of(build_parser().parse_args(["up", *words])).policy

    monkeypatch.delenv("WARMFLEET_POLICY", raising=False)
    assert planned() == "cost"
    monkeypatch.setenv("WARMFLEET_POLICY", "sticky,demo=random")
    assert planned() == "sticky,demo=random"
    assert planned("--policy", "session") == "session"


@pytest.mark.parametrize("words", [("--model", "a#b"), ("--engine", "vllm", "--model", "models/a#b")])
def test_a_model_that_would_be_a_pool_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(CommandError, match=r"'a#b' would be a pool of 'a'.*pools add"):
        up.plan_of(build_parser().parse_args(["up", *words]))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--prefill", "1"), "belong together"),
        (("--prefill", "1", "--decode", "1", "--engines", "2"), "leave out --engines"),
        (("--prefill", "1", "--decode", "1", "--worker", "http://a"), "leave out --engines and --worker"),
        (("--prefill", "1", "--decode", "1", "--engine", "vllm"), "start simulated engines.*plugin.*warmfleet serve"),
    ],
)
def test_roles_that_no_engines_can_have_are_refused(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(CommandError, match=why):
        up.plan_of(build_parser().parse_args(["up", *words]))


@pytest.mark.parametrize(("models", "noted"), [("", False), ("demo", False), ("demo#1,demo#2", True)])
def test_models_of_the_environment_have_no_effect_and_that_is_told(
    models: str, noted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARMFLEET_MODELS", models)
    up.note_other_models(("demo",))
    assert ("they serve demo" in capsys.readouterr().out) == noted


def environments(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> tuple[list[dict[str, str]], list[Member]]:
    """The environments of two replicas of this plan, and how the stack would reach them."""
    started: list[dict[str, str]] = []
    monkeypatch.setattr(Children, "start", lambda _self, _name, _argv, env: started.append(env))
    stack = Stack(plan)
    with Children() as children, closing(claim_shared("127.0.0.1", 0)) as claimed:
        stack._children, stack._claimed = children, claimed
        return started, [stack.add_replica() for _ in range(2)]


def test_each_replica_has_a_port_for_operators_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """So client keys and a tenant key need no operator's key here: what replicas tell operators no client reaches."""
    monkeypatch.setenv("WARMFLEET_ADMIN_PORT", "9")
    started, members = environments(monkeypatch, Plan())
    ports = {environment["WARMFLEET_ADMIN_PORT"] for environment in started}
    assert len(ports - {"0", "9"}) == 2
    assert {f"http://127.0.0.1:{port}" for port in ports} == {member.operators for member in members}
    assert {member.url for member in members}.isdisjoint(member.operators for member in members)


def test_the_first_replica_has_the_usual_port_for_operators_if_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = free_port()
    monkeypatch.setattr(local_stack, "ADMIN_PORT", usual)
    started, _ = environments(monkeypatch, Plan(port=8080))
    assert [environment["WARMFLEET_ADMIN_PORT"] == str(usual) for environment in started] == [True, False]
    with closing(listen("127.0.0.1", usual)) as taken:
        taken.listen()
        started, _ = environments(monkeypatch, Plan(port=8080))
    assert started[0]["WARMFLEET_ADMIN_PORT"] != str(usual)


def test_each_replica_logs_its_decisions_to_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, paths in (("", ["", ""]), ("/log/decisions", ["/log/decisions.replica-1", "/log/decisions.replica-2"])):
        monkeypatch.setenv("WARMFLEET_DECISION_LOG", path)
        started, _ = environments(monkeypatch, Plan())
        assert [environment["WARMFLEET_DECISION_LOG"] for environment in started] == paths


def test_the_status_page_of_each_replica_is_named() -> None:
    one, two = "http://127.0.0.1:9090", "http://127.0.0.1:9091"
    assert f"Live:           {one}/status   (for a browser)\n" in up.usage("http://clients", (one,), "demo")
    both = f"Live:           {one}/status {two}/status   (for a browser; each shows its own requests)\n"
    assert both in up.usage("http://clients", (one, two), "demo")


LISTED = {"data": [{"id": "demo"}, {"id": "demo", "parent": None}, {"id": "adapter", "parent": "demo"}]}


def test_it_waits_for_engines_that_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine opens its port when its weights are loaded; others open it at once, and answer 503 or list nothing."""
    monkeypatch.setattr(local_stack, "LISTED_POLL_SECONDS", 0.01)
    lines: list[str] = []
    shown: list[str] = []
    loading: dict[str, tuple[int, object]] = {"/v1/models": (503, {})}
    with replica(loading) as (slow, _), replica({"/v1/models": (200, LISTED)}) as (ready, requests):

        def busy(_text: str, done: int, of: int, detail: str) -> None:
            shown.append(f"{done} of {of}{detail}")
            if len(shown) == 3:
                loading["/v1/models"] = (200, {"data": []})
            elif len(shown) == 6:
                loading["/v1/models"] = (200, LISTED)

        stack = Stack(Plan(workers=(slow, ready)), lines.append, busy)
        assert stack._listed_names() == [["demo", "demo"]] * 2
    assert lines == [f"engines   waiting for 1 of 2: --worker {slow} answers 503"]
    assert shown[0] == f"1 of 2; --worker {slow} answers 503"
    assert shown[3] == f"1 of 2; --worker {slow} serves no model"
    assert len(requests) == 1, "an engine that has answered is not asked again"


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, {}, "wants an API key: set WARMFLEET_WORKER_API_KEY"),
        (403, {}, "wants an API key"),
        (200, "<html>", "is no OpenAI server"),
        (200, {"data": ["demo"]}, "is no OpenAI server"),
        (404, {}, "is no OpenAI server"),
    ],
)
def test_it_does_not_wait_where_that_would_not_help(status: int, body: object, message: str) -> None:
    with replica({"/v1/models": (status, body)}) as (url, _), pytest.raises(CommandError, match=message):
        Stack(Plan(workers=(url,)))._listed_names()


def test_an_engine_that_never_answers_is_told_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_stack, "LISTED_SECONDS", 0.05)
    monkeypatch.setattr(local_stack, "LISTED_POLL_SECONDS", 0.01)
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(CommandError, match=rf"--worker {url} does not answer: .*refused.* after 0 s"):
        Stack(Plan(workers=(url,)))._listed_names()
