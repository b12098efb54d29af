"""The router passes a client's hint that its conversation ends to the plugin, inside the request's id."""

from __future__ import annotations

import json

import pytest
from tests.support.engines.scripted import engine
from tests.support.replicas.replica import replica

from warmfleet.api.client_hints import read_hints
from warmfleet.errors import BadRequest
from warmfleet_worker.protocol.wire import conversation_ended, reservation_of

ENDED = {"X-Warmfleet-Conversation": "ended"}
RESERVATION = "wf-" + "a" * 22


async def test_the_engine_is_told_and_no_client_can_say_it_by_its_id(valkey_url: str, model: str) -> None:
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url) as router:
        body = {"model": model, "prompt": "Hello", "max_tokens": 1, "vllm_xargs": {"x-warmfleet-conversation": "ended"}}
        for headers, ended in (
            ({"X-Request-Id": "mine"}, False),
            ({"X-Request-Id": "~mine"}, False),
            ({"X-Request-Id": "mine", **ENDED}, True),
            ({"X-Request-Id": "mine", "X-Warmfleet-Conversation": " ENDED "}, True),
        ):
            upstream.seen.clear()
            status, answered, _ = await router.post(body, **headers)
            assert (status, answered["x-request-id"]) == (200, "mine")
            (seen,) = upstream.seen
            at_engine = "cmpl-" + seen.headers["x-request-id"]
            assert conversation_ended(at_engine) is ended
            found = reservation_of(at_engine)
            assert found is not None
            assert at_engine == f"cmpl-{found[0]}.{'~' * ended}mine"
            assert seen.json["vllm_xargs"] == body["vllm_xargs"], "the hint in the body is the plugin's to read"
            assert "x-warmfleet-conversation" not in seen.headers

        status, _, answer = await router.post(body, **{"X-Warmfleet-Conversation": "over"})
        error = json.loads(answer)["error"]
        assert (status, error["param"]) == (400, "X-Warmfleet-Conversation")

        status, _, answer = await router.post(body, "/route?endpoint=/v1/completions", **{"X-Request-Id": "b", **ENDED})
        placed = json.loads(answer)
        assert (status, placed["headers"]["X-Request-Id"]) == (200, f"{placed['reservation']}.~b")
        status, _, _ = await router.post(body, "/route", **{"X-Warmfleet-Conversation": "over"})
        assert status == 400


@pytest.mark.parametrize("value", [b"no", b"1", b"end ed", b"ended,ended", b"\xff"])
def test_any_other_word_is_refused(value: bytes) -> None:
    with pytest.raises(BadRequest, match="must be ended"):
        read_hints({b"x-warmfleet-conversation": value}, b"", None)


@pytest.mark.parametrize(
    ("request_id", "ended"),
    [
        (f"cmpl-{RESERVATION}.~x-0", True),
        (f"3_chatcmpl-{RESERVATION}.~x-0-1234abcd", True),
        (f"{RESERVATION}{'b' * 11}.~x", True),
        (f"cmpl-{RESERVATION}.x~y", False),
        (f"cmpl-{RESERVATION}~.x", False),
        ("cmpl-~x", False),
        ("~", False),
    ],
)
def test_only_a_routers_mark_counts(request_id: str, *, ended: bool) -> None:
    assert conversation_ended(request_id) is ended
