"""The command ``warmfleet pools``, and the pools of the models that other commands name."""

from __future__ import annotations

from warmfleet.cli.pools.command import run

__all__ = ["run"]
