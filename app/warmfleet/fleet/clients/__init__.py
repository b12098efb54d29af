"""Clients whose keys have limits: what scripts and clients are told of these, and what counts in several pools."""
