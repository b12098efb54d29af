"""How full Redis is, and what takes memory there that nobody reads."""
