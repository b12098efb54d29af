"""What the doctor asks of Redis itself: facts of the server, and the rights of its users."""
