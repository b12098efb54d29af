"""The messages of ext_proc by hand, against Google's protobuf."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.gateways.ext_proc import TYPES, Answer, body, headers, request

from warmfleet.picker import calls, messages
from warmfleet.picker.limits import MESSAGE_MARGIN
from warmfleet.picker.messages import Change, MessageError, Modes

ASCII = st.text(st.characters(codec="ascii", exclude_characters="_"), max_size=300)
NAMES = st.text(st.characters(codec="ascii", categories=["Ll"]), min_size=1, max_size=200)


@given(
    fields=st.dictionaries(NAMES, ASCII, max_size=6),
    ends=st.booleans(),
    modes=st.none() | st.tuples(*2 * [st.integers(0, 4)]),
)
def test_headers_are_read(fields: dict[str, str], ends: bool, modes: tuple[int, int] | None) -> None:
    told = messages.read(request(request_headers=headers(ends=ends, **fields), modes=modes))
    assert told.kind == messages.REQUEST_HEADERS
    assert told.modes == (None if modes is None else Modes(*modes))
    found = messages.read_headers(told.content)
    assert found.fields == [(name.encode(), value.encode()) for name, value in fields.items()]
    assert found.ends == ends


@given(piece=st.binary(max_size=400), ends=st.booleans())
def test_pieces_are_read_and_given_back(piece: bytes, ends: bool) -> None:
    data = request(response_body=body(piece, ends=ends))
    assert messages.read_piece(data) == (piece, ends)
    assert messages.read_body(messages.read(data).content) == (piece, ends)
    [made] = messages.response_pieces(piece, ends=ends)
    assert Answer(made).piece == (piece, ends)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_115, 16_127, 16_128, 61_999, 62_000, 62_001, 200_000])
@pytest.mark.parametrize("ends", [False, True])
def test_pieces_of_all_sizes(size: int, ends: bool) -> None:
    pieces = [Answer(made).piece for made in messages.response_pieces(b"x" * size, ends=ends)]
    assert b"".join(piece for piece, _ in pieces) == b"x" * size
    assert max(len(piece) for piece, _ in pieces) <= 62_000
    assert [told for _, told in pieces] == [False] * (len(pieces) - 1) + [ends]


def test_other_messages_are_no_pieces() -> None:
    """They are read by ``read``, also a piece with metadata beside it."""
    assert messages.read_piece(request(request_body=body(b"x"))) is None
    data = request(response_body=body(b"piece", ends=True), metadata={"envoy.lb": {"a": "b"}})
    assert messages.read_piece(data) in (None, (b"piece", True))
    assert messages.read_body(messages.read(data).content) == (b"piece", True)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | ASCII,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@given(values=st.dictionaries(NAMES, JSON, max_size=4))
def test_metadata_and_attributes(values: dict[str, object]) -> None:
    told = messages.read(request(metadata={"one": values}, attributes={"two": values}))
    assert messages.read_metadata(told.metadata) == {"one": values}
    assert messages.read_attributes(told.attributes) == {"two": values}


def test_nesting_has_a_bound() -> None:
    deep: dict[str, object] = {}
    for _ in range(messages.DEPTH + 2):
        deep = {"a": deep}
    with pytest.raises(MessageError):
        messages.read_metadata(messages.read(request(metadata={"one": deep})).metadata)


@given(data=st.binary(max_size=60))
def test_nonsense_is_an_error_of_its_own(data: bytes) -> None:
    """Whatever comes, nothing else is raised."""
    with suppress(MessageError):
        told = messages.read(data)
        messages.read_headers(told.content)
        messages.read_body(told.content)
        calls.subset_of(messages.read_metadata(told.metadata))
    messages.read_piece(data)


@given(cut=st.integers(1, 40))
def test_cut_messages(cut: int) -> None:
    whole = request(request_headers=headers(__path="/v1/completions", a="b"), metadata={"one": {"a": ["b", 1.0]}})
    with suppress(MessageError):
        messages.read_headers(messages.read(whole[:-cut]).content)


@given(
    endpoint=st.sampled_from([b"", b"10.0.0.7:8000"]),
    set_headers=st.dictionaries(NAMES, ASCII, max_size=4),
    removed=st.lists(NAMES, max_size=2),
    changed=st.none() | st.binary(max_size=400),
)
def test_changes(endpoint: bytes, set_headers: dict[str, str], removed: list[str], changed: bytes | None) -> None:
    pairs = tuple((name.encode(), value.encode()) for name, value in set_headers.items())
    change = Change(endpoint, pairs, tuple(name.encode() for name in removed), changed)
    told = Answer(messages.request_body(change))
    assert told.kind == "request_body"
    assert told.endpoints == (endpoint.decode(), endpoint.decode())
    assert told.common.clear_route_cache == bool(endpoint)
    expected = {name: value.encode() for name, value in set_headers.items()}
    assert {name: value for name, value in told.set_headers.items() if "destination" not in name} == expected
    assert [*told.common.header_mutation.remove_headers] == removed
    assert told.common.body_mutation.body == (changed or b"")
    assert told.common.HasField("body_mutation") == (changed is not None)


def test_an_immediate_answer_and_more_time() -> None:
    told = Answer(messages.immediate(429, [(b"retry-after", b"3")], b"full", b"details")).message.immediate_response
    assert (told.status.code, told.body, told.details) == (429, b"full", "details")
    told = TYPES["ProcessingResponse"].FromString(messages.more_time(35.25)).override_message_timeout
    assert (told.seconds, told.nanos) == (35, 250_000_000)


@pytest.mark.parametrize("tag", [messages.REQUEST_HEADERS, messages.METADATA, messages.ATTRIBUTES])
def test_a_long_message_is_a_body(tag: int) -> None:
    """Others would be kept, or take seconds to read, as their fields may be of two bytes."""
    body_of = request(request_body=body(bytes(300_000), ends=True))
    assert len(messages.read_body(messages.read(body_of).content)[0]) == 300_000
    beside = messages._field(tag, bytes(MESSAGE_MARGIN))
    for told in (beside, beside + body_of, body_of + beside):
        with pytest.raises(MessageError, match="too long"):
            messages.read(told)
    with pytest.raises(MessageError, match="too long"):
        messages.read_body(b"\n\0" * MESSAGE_MARGIN)
