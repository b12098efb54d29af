"""Choosers that look into simulated engines, and the port through which they get requests."""
