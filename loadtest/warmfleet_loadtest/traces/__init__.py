"""Arrivals of requests: read from a public trace, or generated."""
