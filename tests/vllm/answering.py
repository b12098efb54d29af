"""Runs functions in vLLM's environment. ``inside.py`` starts it once for all tests: to import vLLM takes 8 s of CPU.

Each line on standard input is a JSON list: module, name of a function, arguments. The line on standard output is the
function's result.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import sys
import warnings


def main() -> None:
    """Answer until standard input ends; vLLM's log goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # vLLM warns once for each odd request
    asyncio.set_event_loop(asyncio.new_event_loop())
    for text in sys.stdin:
        module, function, arguments = json.loads(text)
        print(json.dumps(getattr(importlib.import_module(module), function)(*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
