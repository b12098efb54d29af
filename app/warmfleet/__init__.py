"""Warmfleet router: exact prefix-aware routing for a fleet of vLLM engines."""
