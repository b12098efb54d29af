"""Simulated engines that hand the blocks of a prompt to one another, as vLLM's NIXL connector lets them."""
