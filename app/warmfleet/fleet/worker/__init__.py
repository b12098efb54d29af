"""Redis' data about one worker: its records, checked field by field, and the state that follows from them."""
