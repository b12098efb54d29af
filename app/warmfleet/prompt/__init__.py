"""A request's bytes become messages, text, token ids and block hashes. Pure: no Redis, no HTTP."""
