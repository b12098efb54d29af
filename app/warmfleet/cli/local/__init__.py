"""A fleet on this machine: a store, engines and replicas as child processes. Used by ``up`` and ``demo``."""
