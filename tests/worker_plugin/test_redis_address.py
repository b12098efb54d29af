"""A single URL says where Redis is. A URL that cannot be read is refused, and the error shows no password."""

from __future__ import annotations

import binascii
from typing import Any

import pytest

from warmfleet_worker.protocol.redis_address import MAX_NODES, RedisAddressError, parse, with_ca
from warmfleet_worker.server_address import redis_is_local


@pytest.mark.parametrize(
    "url",
    [
        *("redis://h", "redis://h:1/2", "rediss://u:p@h:6380/0?ssl_check_hostname=False", "redis://:p@[::1]:7/0"),
        *("unix:///run/s", "unix://u:p@/run/s?db=1", "redis://", "redis://:a%40b@h"),
    ],
)
def test_a_single_server_is_left_to_redis_py(url: str) -> None:
    where = parse(url)
    assert (where.kind, where.url) == ("single", url)


def test_sentinels() -> None:
    where = parse("rediss+sentinel://u:p%2F@s1,[::1]:7,s3:8/kv/3?sentinel_password=q&ssl_check_hostname=False")
    assert (where.kind, where.service) == ("sentinel", "kv")
    assert where.nodes == (("s1", 26379), ("::1", 7), ("s3", 8))
    assert where.url == "rediss://u:p%2F@s1:26379/3?ssl_check_hostname=False"
    assert (where.sentinel_username, where.sentinel_password) == (None, "q")
    assert where.question == ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "kv")
    assert where.master_in([b"10.0.0.1", b"6379"], "m", "s1") == ("10.0.0.1", 6379)
    assert where.master_in(None, "m", "s1") is None


def test_cluster() -> None:
    where = parse("redis+cluster://n1,n2:7")
    assert (where.kind, where.nodes, where.url) == ("cluster", (("n1", 6379), ("n2", 7)), "redis://n1:6379/0")
    slot = binascii.crc_hqx(b"m", 0) % 16_384
    rows: list[Any] = [[0, slot - 1, [b"a", 1, b"id"]], [slot, slot, ["b", 2, "id", []], ["c", 3, "id"]]]
    assert where.master_in(rows, "m", "n1") == ("b", 2)
    assert where.master_in([[slot, slot, [b"", 2]]], "m", "n1") == ("n1", 2)
    assert where.master_in([[slot, slot, [None, 0]]], "m", "n1") is None
    assert where.master_in(rows[:1], "m", "n1") is None


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://secret@h", "begins with"),
        ("unix+sentinel://secret@h/kv", "begins with"),
        ("redis://u:secret@h1,h2", "several addresses"),
        ("redis://u:secret/x@h", "not HOST"),
        ("redis://u:secret@h:99999", "not HOST"),
        ("redis+sentinel://u:secret@h", "/SERVICE"),
        ("redis+sentinel://u:secret@h/kv/x", "/SERVICE"),
        ("redis+sentinel://u:secret@,/kv", "not HOST"),
        ("redis+cluster://u:secret@h/1", "database 0"),
        ("redis+cluster://u:secret@" + ",".join(["h"] * (MAX_NODES + 1)), "at most 16"),
        ("redis://u:secret@[h", "cannot be read"),
    ],
)
def test_a_url_that_cannot_be_read_is_refused(url: str, why: str) -> None:
    with pytest.raises(RedisAddressError, match=why) as refused:
        parse(url)
    assert "secret" not in str(refused.value)


def test_an_authority_is_added_to_tls_only() -> None:
    assert with_ca("redis://h", "") == "redis://h"
    assert with_ca("rediss://u:p@h/1", "/a b.pem") == "rediss://u:p@h/1?ssl_ca_certs=%2Fa+b.pem"
    assert with_ca("rediss+sentinel://h,i/kv?ssl_ca_certs=/own", "/b") == (
        "rediss+sentinel://h,i/kv?ssl_ca_certs=%2Fown"
    )
    with pytest.raises(RedisAddressError, match="rediss"):
        with_ca("redis+cluster://h", "/a")


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("redis+sentinel://127.0.0.1:1,localhost/kv", True),
        ("redis+sentinel://127.0.0.1:1,10.0.0.1/kv", False),
        ("redis+cluster://[::1]:7", True),
        ("unix:///s", True),
    ],
)
def test_redis_is_local_only_if_all_its_addresses_are(url: str, local: bool) -> None:
    assert redis_is_local(url) is local
