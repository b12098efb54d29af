"""The subcommands of ``warmfleet``, one module each, and the local stack that ``up`` and ``demo`` start."""
