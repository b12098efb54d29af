"""Connections to Redis: how they are opened, follow the master, are cancelled, and limited in time."""
