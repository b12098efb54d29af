"""Prints the output of a bench: progress on standard error, and one JSON object as the last line of standard output."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from tests.bench.proxy_client import AnswerError

from warmfleet_loadtest.stacks.processes import StackError, end_on_signals

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable


def say(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


def report(measured: Callable[[argparse.Namespace], dict[str, Any]], options: argparse.Namespace) -> int:
    """Print what is measured, or why it is not. Returns the exit code: 0 measured, 1 a process or an answer failed."""
    end_on_signals()
    try:
        found = measured(options)
    except (StackError, AnswerError) as error:
        say(f"error: {error}")
        return 1
    print(json.dumps(found), flush=True)
    return 0
