"""How a replica listens: its doors, TLS, and its place among others on the same ports."""
