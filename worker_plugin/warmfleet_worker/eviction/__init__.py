"""T-LRU: which cached blocks an engine gives up first, so that long conversations stay fast (see ``tail_eviction``).

Nothing here knows vLLM: the simulator evicts by the same code.
"""
