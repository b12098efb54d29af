"""Everything that knows vLLM's internals. No other package of this project touches an object of vLLM."""
