"""A field of the hashing scheme reaches the router: nothing on its way drops a field that it does not know."""

from __future__ import annotations

import re
from pathlib import Path

from warmfleet.fleet.worker.records import WORKER
from warmfleet.protocol.wire import Scheme, default_none_hash

LUA = Path(__file__).parents[2] / "lua/parts/apply_control/worker_join.lua"
#: With every field: an engine that hashes in smaller steps than its blocks announces one more than others.
ANNOUNCED = set(Scheme("sha256", default_none_hash("sha256"), 16, hash_block_tokens=8).as_dict())


def test_the_join_keeps_every_field_of_a_scheme() -> None:
    text = LUA.read_text()
    kept = re.search(r"local kept = \{ (.*?) \}\n", text)
    names = re.search(r"local kept = .*?ipairs\(\{ (.*?) \}\) do\n", text, re.DOTALL)
    assert kept is not None
    assert names is not None
    assert set(re.findall(r"(\w+) =", kept[1])) | set(re.findall(r'"(\w+)"', names[1])) == ANNOUNCED


def test_a_record_is_checked_for_every_field_of_a_scheme() -> None:
    scheme: dict[str, object] = dict.fromkeys(ANNOUNCED, "x") | {"block_tokens": 16, "hash_block_tokens": 8}
    assert WORKER["scheme"](scheme)
    for name in ANNOUNCED:
        assert not WORKER["scheme"](scheme | {name: []}), name
