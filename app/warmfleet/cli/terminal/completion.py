"""Completion in a shell: the words of the parser, models, workers. Needs argcomplete (extra ``cli``)."""

from __future__ import annotations

import json
import os
import urllib.request
from typing import TYPE_CHECKING, Any

from warmfleet.cli.local import running_stack
from warmfleet.errors import WarmfleetError
from warmfleet.settings import secret

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable

VARIABLE = "_ARGCOMPLETE"  # set by the shell while it asks for completions
ASK_S = 0.5  # longest wait for a replica, because a person waits at the prompt


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks for completions, and end the process. Returns at once if no shell asks."""
    if VARIABLE not in os.environ:
        return
    try:
        import argcomplete
    except ModuleNotFoundError:
        return
    argcomplete.autocomplete(parser)


def completed(argument: argparse.Action, words: Callable[..., Iterable[str]]) -> None:
    """Let argcomplete ask ``words`` for the values of this argument."""
    argument.completer = words  # type: ignore[attr-defined]  # where argcomplete looks


def models(**_: Any) -> list[str]:
    """List the models of WARMFLEET_MODELS and of the running stack."""
    local = running_stack.found()
    return sorted({*running_stack.models_of_environment(), *(local.models if local else ())})


def workers(**_: Any) -> list[str]:
    """List the workers of the running stack and the names of their servers; none if there is no such stack."""
    local = running_stack.found()
    if local is None:
        return []
    try:
        request = urllib.request.Request(f"{local.operators_url}/workers", headers=_admin_headers())  # noqa: S310  our own
        with urllib.request.urlopen(request, timeout=ASK_S) as answer:  # noqa: S310
            names = [worker["worker_id"] for model in json.load(answer)["models"] for worker in model["workers"]]
    except (OSError, ValueError, KeyError, TypeError, WarmfleetError):
        return []
    return sorted({*names, *(name.rpartition(".")[0] for name in names)})


def _admin_headers() -> dict[str, str]:
    """Make the headers of ``client.admin_headers`` without loading its HTTP client, which takes time at a prompt."""
    key = secret("WARMFLEET_ADMIN_KEY", os.environ)
    return {"Authorization": f"Bearer {key}"} if key else {}
