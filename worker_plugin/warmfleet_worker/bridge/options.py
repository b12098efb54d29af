"""The command line of the bridge, and the file of engines that it follows."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from warmfleet_worker.protocol import wire
from warmfleet_worker.protocol.labels import read_labels
from warmfleet_worker.protocol.redis_address import parse, with_ca
from warmfleet_worker.server_address import is_loopback, redis_is_local

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HELP = """\
Reports engines that have no plugin: reads the KV events that vLLM and SGLang publish, and writes what they hold into
the fleet's Redis, as the plugin does. One process serves many engines. Start vLLM with

  --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq",
                       "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}'

and SGLang with the same JSON (without enable_kv_cache_events), best with --page-size 16 or more. Always set
replay_endpoint: without it the bridge learns only what an engine stores later, and a lost event costs all that
is known of it.

examples:
  warmfleet bridge --redis redis://redis:6379/0 --engine http://gpu1:8000 --engine http://gpu2:8000
                                        vLLM from 0.31 on, and SGLang, tell where they publish
  warmfleet bridge --engine http://gpu1:8000=tcp://gpu1:5557,replay=tcp://gpu1:5657,ranks=2
                                        earlier vLLM: the addresses of rank 0; each further rank has the next port
  warmfleet bridge --engines /etc/warmfleet/engines.json
                                        [{"url": "http://gpu1:8000", "tokenizer": "/models/qwen3"}, ...]; the file is
                                        read again when it changes

options of one engine, behind its URL or as keys in the file: endpoint, replay, ranks, server_id (its name in the fleet;
default: host and port), model (the fleet to join), tokenizer, chat_template, block_tokens, group, api_key,
labels (zone=eu-1a&hardware=h100; default: WARMFLEET_LABELS).

Routers must reach an engine under the URL given here. Engines that ask for a key get WARMFLEET_WORKER_API_KEY.
When the bridge stops, routers go on using the engines by what they knew last; it can be restarted at any time.
"""
WORDS = {"endpoint", "replay", "server_id", "model", "tokenizer", "chat_template", "api_key", "labels"}
NUMBERS = {"ranks", "block_tokens", "group"}
DIGITS = 5
MAX_PORT = 65_535
_TCP_PORT = re.compile("[1-9][0-9]{0,4}")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options that an operator gives for an engine. The bridge asks the engine for those that are empty or 0.

    endpoint, replay: ZMQ addresses of its first rank's events and replays. block_tokens: tokens in a block of its
    events. group: the KV cache group to follow.
    """

    url: str
    endpoint: str = ""
    replay: str = ""
    server_id: str = ""
    model: str = ""
    ranks: int = 0
    block_tokens: int = 0
    group: int = 0
    tokenizer: str = ""
    chat_template: str = ""
    api_key: str = ""
    labels: str = ""

    @property
    def name(self) -> str:
        return self.server_id or server_id_of(self.url)


class OptionError(ValueError):
    """An option cannot be used; the text is for the person who set it."""


def parser() -> argparse.ArgumentParser:
    env = os.environ.get
    made = argparse.ArgumentParser(
        prog="warmfleet bridge", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    made.add_argument(
        "--engine",
        metavar="URL[=ENDPOINT][,OPTION=VALUE...]",
        action="append",
        default=[],
        help="an engine; repeatable",
    )
    made.add_argument("--engines", metavar="FILE", type=Path, help="a JSON list of engines, followed when it changes")
    made.add_argument(
        "--redis", metavar="URL", default=env("WARMFLEET_REDIS_URL", ""), help="the fleet's store (WARMFLEET_REDIS_URL)"
    )
    made.add_argument(
        "--redis-ca", metavar="FILE", default=env("WARMFLEET_REDIS_CA", ""),
        help="authority that signed the store's certificate (WARMFLEET_REDIS_CA)",
    )  # fmt: skip
    made.add_argument(
        "--model", metavar="NAME[#POOL]", default=env("WARMFLEET_MODEL", ""),
        help="the fleet that engines join (WARMFLEET_MODEL; default: the first name that each serves)",
    )  # fmt: skip
    made.add_argument(
        "--tokenizer", metavar="PATH", default=env("WARMFLEET_TOKENIZER", ""),
        help="folder or hub name of the engines' tokenizer (WARMFLEET_TOKENIZER; default: the model that each names; "
        "none: the routers' settings name it)",
    )  # fmt: skip
    made.add_argument("--chat-template", metavar="FILE", default="", help="as vLLM's option of that name")
    made.add_argument(
        "--status-port",
        metavar="PORT",
        type=_port,
        default=0,
        help="serve /metrics (counters of all engines) and /health on this port (default: on none)",
    )
    return made


def _port(text: str) -> int:
    if not (_TCP_PORT.fullmatch(text) and int(text) <= MAX_PORT):
        raise argparse.ArgumentTypeError(f"a port is 1 to {MAX_PORT}, not {text!r}")
    return int(text)


def engines_of(args: argparse.Namespace) -> list[EngineOptions]:
    """Read the engines of the command line and of the file. Raises OptionError."""
    found = [parse_engine(text) for text in args.engine]
    if args.engines is not None:
        found += _of_file(args.engines)
    usual = {"model": args.model, "tokenizer": args.tokenizer, "chat_template": args.chat_template}
    usual["api_key"] = os.environ.get("WARMFLEET_WORKER_API_KEY", "")
    usual["labels"] = os.environ.get("WARMFLEET_LABELS", "")
    engines = [
        replace(engine, **{key: value for key, value in usual.items() if not getattr(engine, key)}) for engine in found
    ]
    _check(engines, args.redis)
    return engines


def redis_url(args: argparse.Namespace) -> str:
    """Return the URL of Redis. Raises OptionError."""
    if not args.redis:
        raise OptionError("--redis or WARMFLEET_REDIS_URL must name the fleet's store")
    try:
        parse(args.redis)
        return with_ca(args.redis, args.redis_ca)
    except ValueError as error:
        raise OptionError(str(error)) from error


def parse_engine(text: str) -> EngineOptions:
    """Read an engine as on the command line: ``URL[=ENDPOINT][,OPTION=VALUE...]``. Raises OptionError."""
    head, *rest = text.split(",")
    url, _, endpoint = head.partition("=")
    given = {"url": url} | ({"endpoint": endpoint} if endpoint else {})
    for part in rest:
        name, equals, value = part.partition("=")
        if not equals:
            raise OptionError(f"--engine {text}: {part!r} is no OPTION=VALUE")
        given[name] = value
    return _options(given, f"--engine {text}")


def _of_file(path: Path) -> list[EngineOptions]:
    try:
        listed = json.loads(path.read_text())
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise OptionError(f"{path} is not JSON: {error}") from error
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise OptionError(f'{path} must hold a list of objects such as {{"url": "http://gpu1:8000"}}')
    return [_options(entry, f"{path}: {entry.get('url')}") for entry in listed]


def _options(given: dict[str, Any], where: str) -> EngineOptions:
    unknown = sorted(given.keys() - {field.name for field in fields(EngineOptions)})
    if unknown:
        raise OptionError(f"{where}: no option {unknown[0]!r}; known are {', '.join(sorted(WORDS | NUMBERS))}")
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in NUMBERS:
            if not str(value).isdecimal() or len(str(value)) > DIGITS:
                raise OptionError(f"{where}: {name} must be a number of up to {DIGITS} digits, not {value!r}")
            values[name] = int(value)
        elif not isinstance(value, str):
            raise OptionError(f"{where}: {name} must be a text, not {value!r}")
        else:
            values[name] = value
    if "url" not in values:
        raise OptionError(f"{where}: url is missing")
    return EngineOptions(**values)


def _check(engines: Sequence[EngineOptions], store: str) -> None:
    names: dict[str, str] = {}
    for engine in engines:
        try:
            parts = urlsplit(engine.url)
            port = parts.port  # read for its check only
        except ValueError as error:  # such as a port that is no number
            raise OptionError(f"{engine.url!r} is no URL of an engine: {error}") from error
        if port == 0 or parts.scheme not in ("http", "https") or not parts.hostname:
            raise OptionError(f"{engine.url!r} is no http URL of an engine")
        if is_loopback(parts.hostname) and not redis_is_local(store):
            raise OptionError(f"{engine.url} means this machine only, but Redis is elsewhere: give the host's address")
        for endpoint in (engine.endpoint, engine.replay):
            if endpoint and not endpoint.startswith(("tcp://", "ipc://")):
                raise OptionError(f"{engine.url}: {endpoint!r} is no ZMQ address such as tcp://gpu1:5557")
            port_text = endpoint.rpartition(":")[2]
            if endpoint.startswith("tcp://") and not (_TCP_PORT.fullmatch(port_text) and int(port_text) <= MAX_PORT):
                raise OptionError(f"{engine.url}: {endpoint!r} has no port from 1 to 65535")
        _check_words(engine)
        if engine.name in names:
            raise OptionError(f"{engine.url} and {names[engine.name]} have the same server_id {engine.name}")
        names[engine.name] = engine.url


def _check_words(engine: EngineOptions) -> None:
    checks: tuple[tuple[str, Callable[[str], object], str], ...] = (
        ("model", wire.model_tag, engine.model),
        ("server_id", wire.check_name, f"{engine.name}.0"),
        ("labels", read_labels, engine.labels),
    )
    for option, check, value in checks:
        try:
            if value:
                check(value)
        except wire.WireError as error:
            raise OptionError(f"{engine.url}: {option}: {error}") from error


def server_id_of(url: str) -> str:
    """Make an engine's default name: host and port, with a digest of the URL if it has a path or the name is long."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{parts.hostname or ''}-{port}")
    if len(name) > 48 or parts.path.strip("/"):
        name = f"{name[-48:]}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
    return name
