"""Reads Redis' data about a worker: checks its records field by field, and derives its state from them."""
