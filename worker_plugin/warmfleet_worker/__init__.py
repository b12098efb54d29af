"""Warmfleet worker plugin: what a vLLM engine holds, written into Redis streams."""
