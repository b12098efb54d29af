"""Which cached blocks an engine gives up first: see ``eviction``.

Nothing here knows vLLM: the simulator evicts by the same code.
"""
