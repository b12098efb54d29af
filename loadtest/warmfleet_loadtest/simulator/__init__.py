"""Simulated vLLM engines: vLLM's scheduler, block pool, hashes and API, with modelled step times instead of a model."""
