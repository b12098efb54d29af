"""The ``warmfleet`` command; ``warmfleet --help`` lists its subcommands."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from warmfleet.cli.command_error import CommandError
from warmfleet.cli.parser import build_parser
from warmfleet.errors import WarmfleetError

if TYPE_CHECKING:
    from collections.abc import Sequence

BRIDGE = "warmfleet_worker.bridge"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status. An error that the user can mend is one line on stderr, and 2."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "bridge":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if options.command == "bridge":
            become_bridge(rest)
        # imported here, because `workers` needs neither tokenizers nor a web server
        return int(importlib.import_module(f"warmfleet.cli.{options.command}").run(options))
    except (CommandError, WarmfleetError) as error:
        print(f"warmfleet {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout once more
        return 141


def become_bridge(arguments: Sequence[str]) -> NoReturn:
    """Hand over to the bridge: a program of the worker's package, which this package never imports.

    Raises CommandError if it is not installed.
    """
    try:
        found = importlib.util.find_spec(BRIDGE)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise CommandError(
            "the worker's package is not installed: "
            "pip install './worker_plugin[bridge,hub]' in a checkout of Warmfleet"
        )
    os.execv(sys.executable, [sys.executable, "-m", BRIDGE, *arguments])  # noqa: S606 - no shell is needed


if __name__ == "__main__":
    sys.exit(main())
