"""The ``warmfleet`` command; ``warmfleet --help`` lists its subcommands."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

from warmfleet.cli.command_error import CommandError
from warmfleet.cli.parser import build_parser
from warmfleet.errors import WarmfleetError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status. An error that the user can mend is one line on stderr, and 2."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if options.command == "bridge":
        options.rest = rest  # the bridge is a program of the worker's package, and reads its options itself
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
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


if __name__ == "__main__":
    sys.exit(main())
