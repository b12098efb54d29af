"""The ``warmfleet`` command: a local stack, one replica, a demo, and two views into a running fleet."""
