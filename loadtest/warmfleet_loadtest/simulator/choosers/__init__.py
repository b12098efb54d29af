"""Choosers of an engine that see the state inside simulated engines, and the port at which they get requests."""
