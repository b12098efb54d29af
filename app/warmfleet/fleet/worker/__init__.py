"""What Redis says of one worker: its records, checked field by field, and the state that follows from them."""
