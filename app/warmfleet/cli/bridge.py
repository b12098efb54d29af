"""`warmfleet bridge`: hands over to the program of that name in the worker's package, which this package never imports."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from warmfleet.cli.command_error import CommandError

if TYPE_CHECKING:
    import argparse

MODULE = "warmfleet_worker.bridge"


def run(options: argparse.Namespace) -> NoReturn:
    """Become the bridge, which says itself what it lacks. Raises CommandError if it is not installed."""
    try:
        found = importlib.util.find_spec(MODULE)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise CommandError("the worker's package is not installed: pip install 'warmfleet-worker[bridge]'")
    os.execv(sys.executable, [sys.executable, "-m", MODULE, *options.rest])
