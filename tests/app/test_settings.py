"""Settings are read once from the environment and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from warmfleet import settings
from warmfleet.errors import BadArgument
from warmfleet.fleet import Spans
from warmfleet.main import create_app
from warmfleet.pools.degraded import LAST_KNOWN_S
from warmfleet.pools.pool import UNREAD_S
from warmfleet.pools.stalled_requests import GAP_S
from warmfleet.routing.token_handoff import MAX_VIEW_AGE_S
from warmfleet.settings import PREFIX, Settings, engine_url, unknown_variables
from warmfleet.timing import Timing

if TYPE_CHECKING:
    from pathlib import Path


def test_defaults_and_types() -> None:
    given = {"WARMFLEET_MODELS": "a, b#pool,", "WARMFLEET_PORT": "9", "WARMFLEET_ACCESS_LOG": "yes", "HOME": "/"}
    read = Settings.from_environment(given)
    assert (read.models, read.port, read.access_log) == (("a", "b#pool"), 9, True)
    assert Settings.from_environment({}) == Settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "x"),
        ("PORT", "-1"),
        ("PORT", "65536"),
        ("QUEUE_MAX", "4294967296"),
        ("WORKER_ADDRESSES", "10.0.0.0/33"),
        ("APPROVED_TEMPLATES", "abc"),
        ("QUEUE_TIMEOUT_S", "nan"),
        ("ACCESS_LOG", "maybe"),
        ("POLICY", "best"),
        ("TENANT_HEADER", "bad header"),
    ],
)
def test_a_value_that_cannot_be_read_is_named(name: str, value: str) -> None:
    with pytest.raises(BadArgument, match=PREFIX + name):
        Settings.from_environment({PREFIX + name: value})


SECRETS = {
    "REDIS_URL": "redis://u:hidden1@h:6379/0",
    "WORKER_API_KEY": "hidden2",
    "ADMIN_KEY": "hidden3",
    "TENANT_KEY": "hidden4 with enough",
}


def test_secrets_come_from_files_and_are_shown_nowhere(tmp_path: Path) -> None:
    given = {}
    for name, text in SECRETS.items():
        (tmp_path / name).write_text(f"{text}\n")
        given[f"{PREFIX}{name}_FILE"] = str(tmp_path / name)
    read = Settings.from_environment(given)
    plain = Settings.from_environment({PREFIX + name: text for name, text in SECRETS.items()})
    assert read == plain
    assert (read.redis_url, read.admin_key) == (SECRETS["REDIS_URL"], "hidden3")
    assert "hidden" not in f"{read!r}{read}"
    assert unknown_variables(given) == {}
    assert list(unknown_variables({"WARMFLEET_HOST_FILE": "x"})) == ["WARMFLEET_HOST_FILE"]


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff", b"x" * 65_537, None])
def test_a_file_without_a_secret_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadArgument, match="WARMFLEET_ADMIN_KEY_FILE"):
        Settings.from_environment({"WARMFLEET_ADMIN_KEY_FILE": str(path)})


def test_a_secret_is_given_in_one_way(tmp_path: Path) -> None:
    given = {"WARMFLEET_ADMIN_KEY_FILE": str(tmp_path / "file"), "WARMFLEET_ADMIN_KEY": "hidden"}
    with pytest.raises(BadArgument, match="both set") as refused:
        Settings.from_environment(given)
    assert "hidden" not in refused.value.message


@pytest.mark.parametrize(
    "url", ["redis://u:hidden\u2100@h", "redis://u:hidden#x@h", "redis://u:hidden/x@h", "redis://u:hidden?x@h"]
)
def test_errors_do_not_show_the_password_of_redis(url: str) -> None:
    with pytest.raises(BadArgument) as refused:
        create_app(Settings(models=("m",), redis_url=url))
    causes = [refused.value, refused.value.__cause__]
    assert "hidden" not in str(causes)


def test_typing_errors_are_noticed() -> None:
    given = dict.fromkeys(("WARMFLEET_PROT", "WARMFLEET_PORT", "WARMFLEET_REDIS_PASSWORD"), "1")
    given |= {"WARMFLEET_MODEL": "m"}
    assert unknown_variables(given) == {
        "WARMFLEET_PROT": "no setting has this name; did you mean WARMFLEET_PORT?",
        "WARMFLEET_REDIS_PASSWORD": "no setting has this name",
    }


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"DECIDE_TIMEOUT_S": "0"}, ("DECIDE_TIMEOUT_S=0",)),
        ({"DECIDE_TIMEOUT_S": "30"}, ("DECIDE_TIMEOUT_S=30", "reservation lives 30 s")),
        ({"EPP_PORT": "8080"}, ("EPP_PORT=8080 must differ",)),
        ({"EPP_PORT": "9002", "EPP_HEALTH_PORT": "9002"}, ("EPP_HEALTH_PORT=9002 must differ",)),
        ({"EPP_HEALTH_PORT": "9003"}, ("EPP_HEALTH_PORT needs WARMFLEET_EPP_PORT",)),
        ({"EPP_PORT": "70000"}, ("EPP_PORT=70000: a port is 0 to 65535",)),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, str], names: tuple[str, ...]) -> None:
    with pytest.raises(BadArgument) as refused:
        Settings.from_environment({PREFIX + name: value for name, value in given.items()})
    assert [name for name in names if name not in refused.value.message] == []


def test_the_limits_are_those_of_the_modules_that_they_protect() -> None:
    lease_s = Spans().lease_ms / 1000
    assert min(UNREAD_S, MAX_VIEW_AGE_S, LAST_KNOWN_S, GAP_S) > 2 * Timing.view_interval_s, "a pool may be at rest"
    assert lease_s / 3 >= settings.MAX_DECIDE_TIMEOUT_S
    assert lease_s > Timing.renew_interval_s * 2


def test_without_models_there_is_no_start() -> None:
    with pytest.raises(BadArgument, match="WARMFLEET_MODELS"):
        create_app(Settings())


def test_a_pool_without_a_name_is_refused() -> None:
    """An unset shell variable after the # would make a second name for the pool `demo`."""
    with pytest.raises(BadArgument, match=r"WARMFLEET_MODELS='demo#': .* leave the '#' out, or name one \(demo#1\)"):
        create_app(Settings(models=("demo#",)))


def test_a_model_that_keys_cannot_name_is_refused() -> None:
    with pytest.raises(BadArgument, match=r"WARMFLEET_MODELS='a\{b'"):
        create_app(Settings(models=("a{b",)))


@pytest.mark.parametrize("text", ["http://h:8000/v1/", "http://h:8000", " http://h:8000/v1"])
def test_an_engine_s_url_is_the_part_before_v1(text: str) -> None:
    assert engine_url(text) == "http://h:8000"


@pytest.mark.parametrize("text", ["h:8000", "ftp://h", "http://", "http://h:x", "http://h?a=1", "http://[::1"])
def test_other_urls_of_engines_are_refused(text: str) -> None:
    with pytest.raises(BadArgument, match="is not the URL of an engine"):
        engine_url(text)
    with pytest.raises(BadArgument, match="is not the URL of an engine"):
        Settings.from_environment({"WARMFLEET_STATIC_WORKERS": f"http://a:1,{text}"})


@pytest.mark.parametrize(("name", "kind"), [("WARMFLEET_PORT", "whole number"), ("WARMFLEET_KEEPALIVE_S", "number")])
def test_a_number_that_is_none_is_told_in_words(name: str, kind: str) -> None:
    with pytest.raises(BadArgument, match=f"{name}='abc' is not a {kind}$"):
        Settings.from_environment({name: "abc"})
