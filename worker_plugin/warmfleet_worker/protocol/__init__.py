"""The words that plugin and router share: keys, encodings, hashes, addresses. Standard library only.

The router's package links to this folder (``warmfleet/protocol``), so each wheel carries its own copy.
"""
