"""Questions of ``warmfleet doctor`` to Redis itself: facts of the server, and the rights of its users."""
