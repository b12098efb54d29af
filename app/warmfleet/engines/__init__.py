"""HTTP out: the calls to engines."""
