"""Connections to Redis: opening them, following the master, cancelling calls, and limiting their time."""
