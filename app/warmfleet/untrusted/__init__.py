"""Runs workers' chat templates and tokenizers, in processes of their own until an operator trusts them."""
