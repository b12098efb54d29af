"""How a replica listens: its sockets (doors), TLS, and the parent that runs several replicas on the same ports."""
