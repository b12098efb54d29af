"""A request's way: parse, identify, decide, forward, settle."""
