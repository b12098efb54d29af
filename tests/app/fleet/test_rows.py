"""Python and the scripts read the same bytes of packed records."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from warmfleet.fleet import Lease, LoadRow
from warmfleet.fleet.rows import numbers_of

NUMBERS = {
    "I": st.integers(0, 2**32 - 1),
    "i": st.integers(-(2**31), 2**31 - 1),
    "H": st.integers(0, 2**16 - 1),
    "B": st.integers(0, 2**8 - 1),
}
U31 = st.integers(0, 2**31 - 1)  # the highest bit of the matched tokens says whether they were judged
ROW, LEASE = ({name: NUMBERS[letter] for name, letter in numbers_of(kind).items()} for kind in (LoadRow, Lease))


@given(st.builds(LoadRow, **ROW))
def test_a_row_survives_packing(row: LoadRow) -> None:
    packed = row.pack("s.0")
    assert packed.endswith(b"s.0")
    assert LoadRow.unpack(packed) == row


@given(
    st.builds(
        Lease,
        **LEASE | {"matched_tokens": U31},
        worker_id=st.from_regex(r"[A-Za-z0-9._-]{0,70}", fullmatch=True),
        checkpoints=st.lists(st.binary(min_size=8, max_size=8), max_size=30).map(tuple),
        judged=st.booleans(),
    )
)
def test_a_lease_survives_packing(lease: Lease) -> None:
    assert Lease.unpack(lease.pack()) == lease


def test_the_bytes_are_those_of_earlier_releases() -> None:
    row = LoadRow(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
    sizes = (4, 4, 4, 4, 4, 2, 4, 4, 4, 4, 4, 4, 2, 2, 4, 4)
    assert row.pack("").hex() == "".join(f"{n:0{2 * size}x}" for n, size in enumerate(sizes, 1))
    lease = Lease(1, 2, 3, 4, 5, 6, 1, "ab", (b"12345678",))
    assert lease.pack() == bytes.fromhex("".join(f"{n:08x}" for n in range(1, 7))) + b"\x01\x02ab12345678"
