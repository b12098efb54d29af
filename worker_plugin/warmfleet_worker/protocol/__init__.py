"""The protocol between plugin and router: Redis keys, stream entries, block hashes, artifacts, Redis addresses.

It needs the standard library only. The router's package has a link to this folder (``warmfleet/protocol``), so that
each wheel carries a copy of its own. Inside, imports are therefore relative.
"""
