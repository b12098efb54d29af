"""The way of log lines to a process' standard error: lines that repeat are folded, and nobody waits for any."""
