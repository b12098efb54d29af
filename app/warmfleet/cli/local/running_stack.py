"""The stack that ``warmfleet up`` runs on this machine, found by the other commands through a file of its user.

The file holds the address of the store, which may have a password, so only its owner may read it. The file is valid for
as long as the process that wrote it lives. Of several running stacks the latest is found.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from warmfleet.cli.command_error import CommandError
from warmfleet.protocol.wire import WireError, model_tag
from warmfleet.settings import ADMIN_PORT

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

FILES = "local-stack-*.json"  # names of the files, with the pid of ``warmfleet up``
MOST_REPLICAS = 64  # most replicas of a machine, as `warmfleet serve --workers` takes them
CONNECT_S = 1.0  # longest wait for a connection on this machine, which only a halted replica (SIGSTOP) delays


@dataclass(frozen=True)
class RunningStack:
    """A stack as its file describes it. address: of all its replicas, for clients. pid: of ``warmfleet up``.

    models: tags, as in WARMFLEET_MODELS. operators: the URL of each replica for its operators.
    """

    address: str
    redis_url: str
    models: tuple[str, ...]
    pid: int
    operators: tuple[str, ...]

    @property
    def operators_url(self) -> str:
        """The operators' URL of the first replica that takes connections; of the first replica if none does."""
        return next(filter(listens, self.operators), self.operators[0])


def found(environment: Mapping[str, str] = os.environ) -> RunningStack | None:
    """Find the stack that runs now, of several the latest; None if no stack runs."""
    try:
        files = sorted(_folder(environment).glob(FILES), key=_written_at, reverse=True)
    except OSError:  # the folder belongs to another user
        return None
    return next(filter(None, map(_read, files)), None)


def _read(file: Path) -> RunningStack | None:
    """Read the stack of this file; None unless the stack runs."""
    try:
        fields = json.loads(file.read_text())
        models, operators = (tuple(map(str, fields[name])) for name in ("models", "operators"))
        stack = RunningStack(str(fields["address"]), str(fields["redis_url"]), models, int(fields["pid"]), operators)
        os.kill(stack.pid, 0)  # raises unless the process lives and is ours
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return stack if stack.operators else None


def replicas_to_ask(named: list[str]) -> list[str]:
    """List URLs of replicas of which any may have served a request: the named ones, else all of ``warmfleet up``, else
    those of this machine, which are at the port for operators and the ports behind it.
    """
    if named:
        return named
    local = found()
    if local is not None:
        return [*local.operators]
    first, *others = (f"http://127.0.0.1:{port}" for port in range(ADMIN_PORT, ADMIN_PORT + MOST_REPLICAS))
    return [first, *takewhile(listens, others)]


def models_of(options: argparse.Namespace) -> list[str]:
    """Return the tags of the models that a command with ``--model`` and ``--redis`` is about: the named, else those of
    the settings. Raises CommandError if there are none, or a name is no tag.
    """
    models: list[str] = options.model or models_of_settings(options)
    if not models:
        raise no_model(found())
    for model in models:
        try:
            model_tag(model)
        except WireError as error:
            raise CommandError(str(error)) from error
    return models


def models_of_settings(options: argparse.Namespace) -> list[str]:
    """Return the tags of WARMFLEET_MODELS, else those of the running stack, if ``--redis`` is its store."""
    models, local = models_of_environment(), found()
    if not models and local is not None and local.redis_url == options.redis:
        models = list(local.models)
    return models


def models_of_environment() -> list[str]:
    """Return the tags of WARMFLEET_MODELS."""
    return [tag.strip() for tag in os.environ.get("WARMFLEET_MODELS", "").split(",") if tag.strip()]


def no_model(local: RunningStack | None) -> CommandError:
    """Make the error of a command that knows no model. local: the running stack."""
    first = "" if local else "no local fleet runs (`warmfleet up` starts one); for another fleet "
    return CommandError(f"{first}name the model with --model, or all of a router in WARMFLEET_MODELS")


@contextmanager
def announced(stack: RunningStack, environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Let other commands find this stack in the ``with`` block. If its file cannot be written, they need --url etc."""
    folder = _folder(environment)
    file = folder / f"local-stack-{stack.pid}.json"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for other in folder.glob(FILES):
            if _is_left(other):
                other.unlink(missing_ok=True)
        new = file.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(json.dumps(asdict(stack)))
        now_ns = time.time_ns()
        os.utime(new, ns=(now_ns, now_ns))  # file times by the kernel are coarse: two stacks could have the same
        new.replace(file)
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def listens(url: str) -> bool:
    """Tell whether a process takes connections at this address."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True


def _is_left(file: Path) -> bool:
    """Tell whether the process that wrote this file is gone; False for unreadable files: they may be another user's."""
    try:
        os.kill(int(json.loads(file.read_text())["pid"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return False


def _written_at(file: Path) -> int:
    """Return the time of the file's last change in nanoseconds; 0 if the file has just been removed."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _folder(environment: Mapping[str, str]) -> Path:
    base = environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "warmfleet"
