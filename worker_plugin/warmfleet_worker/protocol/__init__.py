"""The protocol between plugin and router: Redis keys, stream entries, block hashes, artifacts, Redis addresses.

This package needs the standard library only. The router's package has a link to this folder (``warmfleet/protocol``),
so that both wheels contain a copy. Imports within the folder are therefore relative.
"""
