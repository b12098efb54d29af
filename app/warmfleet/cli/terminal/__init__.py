"""Tables, progress and completion for a person at a terminal."""
