"""``warmfleet pools``: the pools of a served model, listed and changed; and the pools that other commands are about."""

from __future__ import annotations

from warmfleet.cli.pools.command import run

__all__ = ["run"]
