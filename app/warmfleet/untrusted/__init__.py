"""Runs the code and tables that workers bring, in processes of their own until an operator trusts them."""
