"""The bodies of the APIs that clients use. Each becomes a ``Request``, and a chat if engines make a chat of it."""
