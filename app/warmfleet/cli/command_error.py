"""The error that a command reports: ``__main__`` prints its text and exits with status 2."""

from __future__ import annotations


class CommandError(Exception):
    """The error that a command cannot do its task. The text is a sentence for the person who typed the command."""
