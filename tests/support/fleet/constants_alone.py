"""A fleet without Redis, for tests of code that sends Redis no command."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from warmfleet.fleet import Constants


class ConstantsAlone:
    """A fleet with constants only; any use of its other parts fails."""

    def __init__(self, **constants: Any) -> None:
        self.keys, self.constants = SimpleNamespace(tag="m"), Constants(**constants)

    def use(self, **changes: Any) -> None:
        self.constants = replace(self.constants, **changes)
