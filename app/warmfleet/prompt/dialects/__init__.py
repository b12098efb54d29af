"""The words of the APIs that clients speak: each body becomes a ``Request``, as a chat where engines make one of it."""
