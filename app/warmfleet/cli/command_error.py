"""The error that a command reports: ``__main__`` prints its text and exits with status 2."""

from __future__ import annotations


class CommandError(Exception):
    """A command cannot do what it was asked. The text is a sentence for the person who typed the command."""
