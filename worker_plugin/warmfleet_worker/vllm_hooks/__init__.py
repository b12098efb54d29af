"""Everything that knows vLLM's internals. No other package of this project imports vLLM or reads its objects."""
