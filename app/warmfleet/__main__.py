"""The ``warmfleet`` command; ``warmfleet --help`` lists its subcommands."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from warmfleet.cli.command_error import CommandError
from warmfleet.cli.parser import build_parser
from warmfleet.cli.terminal.completion import complete
from warmfleet.errors import FleetUnavailable, WarmfleetError

if TYPE_CHECKING:
    from collections.abc import Sequence

BRIDGE = "warmfleet_worker.bridge"
INSTALL_BRIDGE = "pip install './worker_plugin[bridge,hub]' in a checkout of Warmfleet"
OTHER_REDIS = " (--redis or WARMFLEET_REDIS_URL names another Redis; `warmfleet doctor` says more)"
BRIDGE_HELP = f"""\
usage: warmfleet bridge --redis URL --engine URL [--engine URL ...]

Reports engines that have no plugin, by the KV events that vLLM and SGLang publish (app/docs/bridge.md). It is a program
of the worker's package, which is not installed here: {INSTALL_BRIDGE}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status. An error that the user can mend is a line on stderr; status 2."""
    parser = build_parser()
    complete(parser)
    options, rest = parser.parse_known_args(arguments)
    if options.command == "pools" and not any(word.startswith("-") for word in rest):
        options.tags += rest  # argparse leaves the pools in `rest` if all follow an option: `pools drain --move llama`
        rest = []
    if rest and options.command != "bridge":
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if options.command == "bridge":
            become_bridge(rest)
        # each command is imported only when it runs, so that `workers` loads neither tokenizers nor a web server
        return int(importlib.import_module(f"warmfleet.cli.{options.command}").run(options))
    except (CommandError, WarmfleetError) as error:
        elsewhere = isinstance(error, FleetUnavailable) and "redis" in options
        print(f"warmfleet {options.command}: {error}{OTHER_REDIS if elsewhere else ''}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout once more
        return 141


def become_bridge(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by `warmfleet bridge`, a program of the worker's package, which this package never imports.

    Raises CommandError if that package is not installed, unless the arguments ask for help only.
    """
    try:
        found = importlib.util.find_spec(BRIDGE)
    except ModuleNotFoundError:
        found = None
    if found is None and {"-h", "--help"} & set(arguments):
        print(BRIDGE_HELP)
        sys.exit(0)
    if found is None:
        raise CommandError(f"the worker's package is not installed: {INSTALL_BRIDGE}")
    os.execv(sys.executable, [sys.executable, "-m", BRIDGE, *arguments])  # noqa: S606 - no shell is needed


if __name__ == "__main__":
    sys.exit(main())
