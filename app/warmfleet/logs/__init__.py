"""Writes log lines to standard error from a thread, so that no request waits; repeated lines are folded."""
