"""Serves requests in five steps: parse, identify, decide, forward, settle."""
