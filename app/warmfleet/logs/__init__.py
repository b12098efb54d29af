"""How the log lines of a process reach its standard error: folded where they repeat, and never awaited."""
